//! `POST /admin/nodes/{name}/...`: what an operator asks of one node.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use serving_core::cluster::NodeHealth;
use serving_core::ids::NodeName;
use serving_core::node::AssignedRole;

use super::AppState;
use super::error::ApiError;
use crate::cluster_metrics::NodeSnapshot;
use crate::control_handle::ControlHandle;

/// Takes the node out of service: nothing new goes there, what runs there ends, then its process exits with 0. Answers at
/// once; `/admin/cluster` shows how far it is. Asking again changes nothing.
pub async fn drain(State(state): State<Arc<AppState>>, Path(name): Path<String>) -> Response {
    let (node, _, control) = match find(&state, &name) {
        Ok(found) => found,
        Err(error) => return error.into_response(),
    };
    tracing::info!(node = %name, "somebody asks for a drain");
    control.drain_node(NodeName::new(&name), None).await;
    accepted(json!({ "node": name, "epoch": epoch(&node), "state": "draining" }))
}

/// Drains the node as [`drain`] does; then its process joins again under the same name as `role`, with the weights it has.
/// Answers at once: the new life has another epoch. 200 and no drain when it has that role already.
pub async fn change_role(State(state): State<Arc<AppState>>, Path((name, role)): Path<(String, String)>) -> Response {
    match role_to_take(&state, (&name, &role)) {
        Err(error) => error.into_response(),
        Ok((node, role, _)) if node.assigned_role == role => {
            let answer =
                json!({ "node": name, "epoch": epoch(&node), "state": node.health.name(), "role": role.name() });
            Json(answer).into_response()
        }
        Ok((node, role, control)) => {
            tracing::info!(node = %name, role = role.name(), "somebody asks for a change of role");
            control.drain_node(NodeName::new(&name), Some(role)).await;
            let (from, to) = (node.assigned_role.name(), role.name());
            accepted(json!({ "node": name, "epoch": epoch(&node), "state": "draining", "role": from, "next_role": to }))
        }
    }
}

fn role_to_take(
    state: &AppState,
    (name, role): (&str, &str),
) -> Result<(NodeSnapshot, AssignedRole, ControlHandle), ApiError> {
    // The command line's spelling, too.
    let role = if role == "colocated" { "co-located" } else { role };
    let Some(role) = AssignedRole::by_name(role) else {
        let names = AssignedRole::ALL.map(AssignedRole::name).join(", ");
        let message = format!("`{}` is no role; there are {names}.", super::json::short(role));
        return Err(ApiError::bad_request(message));
    };
    let (node, others, control) = find(state, name)?;
    if node.health == NodeHealth::Draining {
        let message = format!("`{name}` is draining already: ask again when it is back, or gone.");
        return Err(conflict("draining", message));
    }
    if node.assigned_role == role {
        return Ok((node, role, control));
    }
    if !node.roles.contains(&role) {
        let (now, wanted) = (node.assigned_role.name(), role.name());
        let message = format!(
            "The process of `{name}` can be a {now} node only, not {wanted}: it was not started by `baton` \
             (baton serve-prefill, serve-decode or up). Drain it and start one that was."
        );
        return Err(conflict("role_not_available", message));
    }
    let serves = |other: &NodeSnapshot| other.is_live && !other.is_suspected;
    let is_last = !others
        .iter()
        .any(|other| serves(other) && other.assigned_role.decodes());
    if node.assigned_role.decodes() && is_last {
        let message = format!(
            "`{name}` is the only node that decodes: while it drains nobody would answer. Make another one a decode node \
             first."
        );
        return Err(conflict("last_decode_node", message));
    }
    Ok((node, role, control))
}

/// The node of that name while it lives, the others, and whom to ask.
fn find(state: &AppState, name: &str) -> Result<(NodeSnapshot, Vec<NodeSnapshot>, ControlHandle), ApiError> {
    let insight = &state.insight;
    let (Some(view), Some(control)) = (&insight.cluster, &insight.nodes) else {
        return Err(unknown_node(name, &[]));
    };
    let mut nodes = view.snapshot().nodes;
    let Some(at) = nodes.iter().position(|node| node.name == name) else {
        let names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
        return Err(unknown_node(name, &names));
    };
    let node = nodes.remove(at);
    if node.health.is_over() {
        let state = node.health.name();
        let message = format!(
            "There is nobody to ask: node `{name}` is gone ({state}). It is shown for ten minutes after its end."
        );
        return Err(conflict("node_lost", message));
    }
    Ok((node, nodes, control.clone()))
}

fn epoch(node: &NodeSnapshot) -> String {
    format!("{:016x}", node.epoch.0)
}

fn accepted(answer: serde_json::Value) -> Response {
    (StatusCode::ACCEPTED, Json(answer)).into_response()
}

fn conflict(code: &'static str, message: String) -> ApiError {
    ApiError {
        code: Some(code),
        ..ApiError::new(StatusCode::CONFLICT, "conflict_error", message)
    }
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
