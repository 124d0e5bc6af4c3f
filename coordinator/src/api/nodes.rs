//! `POST /admin/nodes/{name}/...`: orders of an operator to one node.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::json;
use serving_core::cluster::{LastDecodeNode, NodeHealth};
use serving_core::ids::NodeName;
use serving_core::node::AssignedRole;

use super::AppState;
use super::admin::{BadQuery, bad_query};
use super::error::{ApiError, draining};
use crate::cluster_metrics::NodeSnapshot;
use crate::control_handle::{ControlHandle, NodeOrder, OrderRefused};

/// `?force=true`: do it also when no node that decodes is left.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Force {
    force: bool,
}

type AskedForce = Result<Query<Force>, BadQuery>;

fn is_forced(asked: AskedForce) -> Result<bool, ApiError> {
    asked.map(|Query(asked)| asked.force).map_err(|bad| bad_query(&bad))
}

/// Takes the node out of service: nothing new goes there, what runs there ends, then its process exits with 0. The answer
/// comes at once; `/admin/cluster` shows the progress. Asking again changes nothing.
pub async fn drain(State(state): State<Arc<AppState>>, Path(name): Path<String>, force: AskedForce) -> Response {
    let drained = async {
        let is_forced = is_forced(force)?;
        let (node, control) = find(&state, &name)?;
        let order = NodeOrder {
            name: NodeName::new(&name),
            next_role: None,
            is_forced,
        };
        give(&control, order).await?;
        Ok::<_, ApiError>(accepted(
            json!({ "node": name, "epoch": epoch(&node), "state": "draining" }),
        ))
    };
    drained.await.unwrap_or_else(IntoResponse::into_response)
}

/// Hands the order to the control loop, which refuses it or sends it on to the node.
async fn give(control: &ControlHandle, order: NodeOrder) -> Result<(), ApiError> {
    let (name, next_role) = (order.name.clone(), order.next_role);
    tracing::info!(
        node = %name,
        next_role = next_role.map(AssignedRole::name),
        is_forced = order.is_forced,
        "somebody asks for a drain"
    );
    match control.drain_node(order).await {
        Ok(()) => Ok(()),
        Err(OrderRefused::Stopping) => Err(draining()),
        Err(OrderRefused::LastDecodeNode(LastDecodeNode { requests })) => {
            let verb = if next_role.is_some() { "role" } else { "drain" };
            let message = format!(
                "`{name}` is the only node that decodes. Without it no request is answered: its {requests} running requests \
                 fail unless they end during its drain, and new ones get 503 until a decode node is ready again. Start \
                 another decode node first (or `baton role` makes one), or say that it is meant: `baton {verb} --force`, \
                 ?force=true."
            );
            Err(conflict("last_decode_node", message))
        }
    }
}

/// Drains the node as [`drain`] does. Then its process joins again under the same name as `role`, with the weights that it
/// has. The answer comes at once; the new life has another epoch. A node that has the role already gets 200 and no drain.
pub async fn change_role(
    State(state): State<Arc<AppState>>,
    Path((name, role)): Path<(String, String)>,
    force: AskedForce,
) -> Response {
    let changed = async {
        let is_forced = is_forced(force)?;
        let (node, role, control) = role_to_take(&state, (&name, &role))?;
        if node.assigned_role == role {
            let answer =
                json!({ "node": name, "epoch": epoch(&node), "state": node.health.name(), "role": role.name() });
            return Ok(Json(answer).into_response());
        }
        let order = NodeOrder {
            name: NodeName::new(&name),
            next_role: Some(role),
            is_forced,
        };
        give(&control, order).await?;
        let (from, to) = (node.assigned_role.name(), role.name());
        Ok::<_, ApiError>(accepted(
            json!({ "node": name, "epoch": epoch(&node), "state": "draining", "role": from, "next_role": to }),
        ))
    };
    changed.await.unwrap_or_else(IntoResponse::into_response)
}

fn role_to_take(
    state: &AppState,
    (name, role): (&str, &str),
) -> Result<(NodeSnapshot, AssignedRole, ControlHandle), ApiError> {
    // The command line spells it `colocated`.
    let role = if role == "colocated" { "co-located" } else { role };
    let Some(role) = AssignedRole::by_name(role) else {
        let names = AssignedRole::ALL.map(AssignedRole::name).join(", ");
        let message = format!("`{}` is no role; there are {names}.", super::forms::short(role));
        return Err(ApiError::bad_request(message));
    };
    let (node, control) = find(state, name)?;
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
    Ok((node, role, control))
}

/// The node of that name while it lives, and the handle that gives it orders.
fn find(state: &AppState, name: &str) -> Result<(NodeSnapshot, ControlHandle), ApiError> {
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
    Ok((node, control.clone()))
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
    let message = format!("No node is called `{}`. {known}", super::forms::short(name));
    ApiError {
        code: Some("node_not_found"),
        ..ApiError::new(StatusCode::NOT_FOUND, "not_found_error", message)
    }
}
