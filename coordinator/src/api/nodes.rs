//! `POST /admin/nodes/{name}/...`: orders of an operator to one node.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::json;
use serving_core::cluster::{LastDecodeNode, NodeHealth};
use serving_core::ids::NodeName;
use serving_core::node::AssignedRole;

use super::AppState;
use super::admin::Asked;
use super::error::{ApiError, short};
use crate::cluster_metrics::NodeSnapshot;
use crate::control_handle::{ControlHandle, NodeOrder, OrderRefused};

/// `?force=true`: do it also when no node that decodes is left.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Force {
    force: bool,
}

/// Takes the node out of service: nothing new goes there, what runs there ends, then its process exits with 0. The answer
/// comes at once; `/admin/cluster` shows the progress. Asking again changes nothing.
pub async fn drain(
    State(state): State<Arc<AppState>>,
    Path(name): Path<String>,
    Asked(asked): Asked<Force>,
) -> Result<Response, ApiError> {
    let (node, control) = find(&state, &name)?;
    give(&control, order(&name, None, &asked)).await?;
    let answer = json!({ "node": name, "epoch": node.epoch_hex(), "state": "draining" });
    Ok((StatusCode::ACCEPTED, Json(answer)).into_response())
}

fn order(name: &str, next_role: Option<AssignedRole>, asked: &Force) -> NodeOrder {
    NodeOrder {
        name: NodeName::new(name),
        next_role,
        is_forced: asked.force,
    }
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
    control.drain_node(order).await.map_err(|refused| match refused {
        OrderRefused::Stopping => ApiError::draining(),
        OrderRefused::LastDecodeNode(LastDecodeNode { requests }) => {
            let verb = if next_role.is_some() { "role" } else { "drain" };
            let message = format!(
                "`{name}` is the only node that decodes. Without it no request is answered: its {requests} running requests \
                 fail unless they end during its drain, and new ones get 503 until a decode node is ready again. Start \
                 another decode node first (or `baton role` makes one), or say that it is meant: `baton {verb} --force`, \
                 ?force=true."
            );
            conflict("last_decode_node", message)
        }
    })
}

/// Drains the node as [`drain`] does. Then its process joins again under the same name as the role, with the weights that it
/// has. The answer comes at once; the new life has another epoch. A node that has the role already gets 200 and no drain.
pub async fn change_role(
    State(state): State<Arc<AppState>>,
    Path((name, role)): Path<(String, String)>,
    Asked(asked): Asked<Force>,
) -> Result<Response, ApiError> {
    // The command line spells it `colocated`.
    let role = if role == "colocated" { "co-located" } else { &role };
    let Some(wanted) = AssignedRole::by_name(role) else {
        let (role, names) = (short(role), AssignedRole::ALL.map(AssignedRole::name).join(", "));
        return Err(ApiError::bad_request(format!(
            "`{role}` is no role; there are {names}."
        )));
    };
    let (node, control) = find(&state, &name)?;
    if node.health == NodeHealth::Draining {
        let message = format!("`{name}` is draining already: ask again when it is back, or gone.");
        return Err(conflict("draining", message));
    }
    let (now, epoch) = (node.record.assigned_role(), node.epoch_hex());
    if now == wanted {
        let answer = json!({ "node": name, "epoch": epoch, "state": node.health.name(), "role": now.name() });
        return Ok(Json(answer).into_response());
    }
    let (from, to) = (now.name(), wanted.name());
    if !node.record.roles.contains(&wanted) {
        let message = format!(
            "The process of `{name}` can be a {from} node only, not {to}: its certificate does not name the other role \
             (`baton certs issue DIR prefill,decode/{name}`), or it was not started by `baton` (baton serve-prefill, \
             serve-decode or up). Give it such a certificate and start it again, or drain it and start another."
        );
        return Err(conflict("role_not_available", message));
    }
    give(&control, order(&name, Some(wanted), &asked)).await?;
    let answer = json!({ "node": name, "epoch": epoch, "state": "draining", "role": from, "next_role": to });
    Ok((StatusCode::ACCEPTED, Json(answer)).into_response())
}

/// The node of that name while it lives, and the handle that gives it orders.
fn find(state: &AppState, name: &str) -> Result<(NodeSnapshot, ControlHandle), ApiError> {
    let insight = &state.insight;
    let nodes = insight
        .cluster
        .as_ref()
        .map_or(Vec::new(), |view| view.snapshot().nodes);
    let found = nodes.iter().find(|node| node.name() == name);
    let (Some(node), Some(control)) = (found, &insight.nodes) else {
        let names: Vec<&str> = nodes.iter().map(NodeSnapshot::name).collect();
        let known = match names.as_slice() {
            [] => "No node has joined.".to_owned(),
            names => format!("There are {}.", names.join(", ")),
        };
        let message = format!("No node is called `{}`. {known}", short(name));
        return Err(ApiError::not_found("node_not_found", message));
    };
    if node.health.is_over() {
        let state = node.health.name();
        let message = format!(
            "There is nobody to ask: node `{name}` is gone ({state}). It is shown for ten minutes after its end."
        );
        return Err(conflict("node_lost", message));
    }
    Ok((node.clone(), control.clone()))
}

fn conflict(code: &'static str, message: String) -> ApiError {
    ApiError::new(StatusCode::CONFLICT, message).with_code(code)
}
