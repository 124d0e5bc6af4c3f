//! `POST /admin/nodes/{name}/...`: what an operator asks of one node.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use serving_core::cluster::NodeHealth;
use serving_core::ids::NodeName;

use super::AppState;
use super::error::ApiError;

/// Takes the node out of service: nothing new goes there, what runs there ends, then its process exits with 0. Answers at
/// once; `/admin/cluster` shows how far it is. Asking again changes nothing.
pub async fn drain(State(state): State<Arc<AppState>>, Path(name): Path<String>) -> Response {
    let insight = &state.insight;
    let (Some(view), Some(control)) = (&insight.cluster, &insight.nodes) else {
        return unknown_node(&name, &[]).into_response();
    };
    let nodes = view.snapshot().nodes;
    let Some(node) = nodes.iter().find(|node| node.name == name) else {
        let names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
        return unknown_node(&name, &names).into_response();
    };
    if node.health == NodeHealth::Lost {
        let message =
            format!("Node `{name}` is lost: there is nothing to drain. It is shown for ten minutes after its end.");
        return ApiError {
            code: Some("node_lost"),
            ..ApiError::new(StatusCode::CONFLICT, "conflict_error", message)
        }
        .into_response();
    }
    tracing::info!(node = %name, "somebody asks for a drain");
    control.drain_node(NodeName::new(&name)).await;
    let answer = json!({ "node": name, "epoch": format!("{:016x}", node.epoch.0), "state": "draining" });
    (StatusCode::ACCEPTED, Json(answer)).into_response()
}

fn unknown_node(name: &str, names: &[&str]) -> ApiError {
    let known = match names {
        [] => "No node has joined.".to_owned(),
        names => format!("There are {}.", names.join(", ")),
    };
    let message = format!("No node is called `{}`. {known}", super::json::short(name));
    ApiError {
        code: Some("node_not_found"),
        ..ApiError::new(StatusCode::NOT_FOUND, "not_found_error", message)
    }
}
