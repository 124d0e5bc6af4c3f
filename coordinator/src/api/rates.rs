//! `/admin/rates`: the rates of the last hour. `docs/reference/records.md` is the reference.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::State;

use super::AppState;
use crate::records::rates::RatesPage;

pub async fn rates(State(state): State<Arc<AppState>>) -> Json<RatesPage> {
    let records = &state.insight.records;
    records.closing.settled().await;
    Json(records.rates.page(Instant::now()))
}
