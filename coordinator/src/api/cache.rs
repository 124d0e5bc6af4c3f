//! `POST /admin/reset_prefix_cache`, also under vLLM's and SGLang's names: every node drops the prefix blocks that nothing uses.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::AppState;
use crate::cache_reset::{NodeReset, reset_prefix_caches};

/// The status is 502 when a node did not do it. The body names each node in both cases.
pub async fn reset(State(state): State<Arc<AppState>>) -> Response {
    tracing::info!("somebody asks for empty prefix caches");
    let answers = reset_prefix_caches(&state.insight).await;
    let dropped = answers.iter().filter_map(|answer| answer.reset.as_ref().ok());
    let dropped: u64 = dropped.map(|reset| u64::from(reset.dropped_blocks)).sum();
    let status = match answers.iter().all(|answer| answer.reset.is_ok()) {
        true => StatusCode::OK,
        false => StatusCode::BAD_GATEWAY,
    };
    let nodes: Vec<Value> = answers.iter().map(shown).collect();
    (status, Json(json!({"dropped_blocks": dropped, "nodes": nodes}))).into_response()
}

fn shown(answer: &NodeReset) -> Value {
    let reset = answer.reset.as_ref();
    json!({
        "node": answer.node,
        "dropped_blocks": reset.ok().map(|reset| reset.dropped_blocks),
        "kept_blocks": reset.ok().map(|reset| reset.kept_blocks),
        "error": reset.err(),
    })
}
