//! `/admin/blocks` of a node: who holds which KV blocks, asked of the step thread between two steps.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::json;
use serving_core::batching::BlockReport;
use tokio::sync::oneshot;

/// The step thread answers between two steps: longer than any step of a model that is meant to serve.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// A node's step thread as the endpoint sees it.
pub trait BlockLedger: Debug + Send + Sync {
    /// Asks for a report. The receiver ends without one when the thread is gone or too many have asked already.
    fn ask(&self) -> oneshot::Receiver<BlockReport>;
}

pub(crate) fn router(ledger: Arc<dyn BlockLedger>) -> axum::Router {
    axum::Router::new()
        .route("/admin/blocks", get(blocks))
        .with_state(ledger)
}

async fn blocks(State(ledger): State<Arc<dyn BlockLedger>>) -> Response {
    let unavailable =
        |why: &str| (StatusCode::SERVICE_UNAVAILABLE, axum::Json(json!({ "error": why }))).into_response();
    match tokio::time::timeout(ANSWER_WITHIN, ledger.ask()).await {
        Ok(Ok(report)) => axum::Json(report).into_response(),
        Ok(Err(_)) => unavailable("the step thread takes no question now: it has ended, or too many wait; ask again"),
        Err(_) => unavailable("the step thread has been inside one step for 10 s; ask again, and see the node's log"),
    }
}
