//! `/admin/blocks` of a node: which request or transfer holds which KV blocks. The node's loop answers between two steps.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use opentelemetry::trace::TraceId;
use serde_json::json;
use serving_core::ids::NodeEpoch;
use serving_core::scheduler::BlockReport;
use tokio::sync::oneshot;

use crate::spans;

/// The node's loop answers between two steps. This is longer than any step of a model that is fit to serve.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// A node's loop as the endpoint sees it.
pub trait BlockLedger: Debug + Send + Sync {
    /// Asks for a report. The receiver ends without one when the thread is gone or too many have asked already.
    fn ask(&self) -> oneshot::Receiver<BlockReport>;
}

pub(crate) fn router(ledger: Arc<dyn BlockLedger>) -> axum::Router {
    axum::Router::new()
        .route("/admin/blocks", get(blocks))
        .with_state(ledger)
}

/// The spans of one trace that ended in this process, as OTLP JSON. `?export=true` also hands them to the collector,
/// sampled or not: a coordinator asks for it when a request went wrong. `?clock=EPOCH` puts them on the wall clock of the
/// coordinator of this epoch.
pub(crate) async fn spans(Path(trace_id): Path<String>, Query(wish): Query<SpanWish>) -> Response {
    let Ok(trace) = TraceId::from_hex(&trace_id) else {
        let error = json!({ "error": "a trace id is 32 hexadecimal digits" });
        return (StatusCode::BAD_REQUEST, axum::Json(error)).into_response();
    };
    if wish.export {
        spans::export_anyway(trace).await;
    }
    let reader = wish.clock.and_then(|epoch| u64::from_str_radix(&epoch, 16).ok());
    axum::Json(spans::of_trace(trace, reader.map(NodeEpoch)).await).into_response()
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(default)]
pub(crate) struct SpanWish {
    export: bool,
    /// 16 hexadecimal digits.
    clock: Option<String>,
}

async fn blocks(State(ledger): State<Arc<dyn BlockLedger>>) -> Response {
    let unavailable =
        |why: &str| (StatusCode::SERVICE_UNAVAILABLE, axum::Json(json!({ "error": why }))).into_response();
    match tokio::time::timeout(ANSWER_WITHIN, ledger.ask()).await {
        Ok(Ok(report)) => axum::Json(report).into_response(),
        Ok(Err(_)) => unavailable("the node's loop takes no question now: it has ended, or too many wait; ask again"),
        Err(_) => unavailable("the node's loop has been inside one step for 10 s; ask again, and see the node's log"),
    }
}
