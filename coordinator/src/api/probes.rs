//! Endpoints for machines that watch this one: health, readiness, version, metrics.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::AppState;
use super::error::reach_of;

/// The paths that monitoring asks for. They are answered also where all other requests are refused.
pub fn is_probe(path: &str) -> bool {
    matches!(path, "/health" | "/ready" | "/ping" | "/metrics")
}

/// This process lives and answers. The answer says nothing about nodes.
pub async fn health() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// A request that is sent now has a way through the cluster (PROTOCOL rule 15).
pub async fn ready(State(state): State<Arc<AppState>>) -> Response {
    // Everybody may ask. Where clients have keys, they are not told the names of nodes.
    let may_name = state.keys.is_none();
    match reach_of(state.submit.readiness()) {
        Ok(reach) => {
            let names = may_name.then_some(&reach.suspected);
            Json(json!({
                "status": "ready",
                "prefill_nodes": reach.prefill_nodes,
                "decode_nodes": reach.decode_nodes,
                "usable_pairs": reach.usable_pairs,
                "unsplit_because": reach.unsplit.filter(|_| may_name).map(|why| why.to_string()),
                "suspected_nodes": names.map(|names| names.iter().map(|name| name.as_str()).collect::<Vec<_>>()),
            }))
            .into_response()
        }
        Err(error) if may_name => error.into_response(),
        Err(error) => error.without_names().into_response(),
    }
}

pub async fn version() -> Json<Value> {
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "git": crate::BUILD_COMMIT.unwrap_or("unknown"),
        "profile": crate::BUILD_PROFILE,
        "target": format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
        "features": Vec::<&str>::new(),
    }))
}

pub async fn metrics(State(state): State<Arc<AppState>>) -> Response {
    state.insight.records.closing.settled().await;
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, content_type)], state.metrics.render()).into_response()
}
