//! `/v1/models`: what this server serves.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::AppState;
use super::error::ApiError;

pub async fn list(State(state): State<Arc<AppState>>) -> Json<Value> {
    let data: Vec<Value> = state.served_models.iter().map(|id| describe(&state, id)).collect();
    Json(json!({"object": "list", "data": data}))
}

pub async fn one(State(state): State<Arc<AppState>>, Path(id): Path<String>) -> Response {
    match state.served_models.iter().find(|served| **served == id) {
        Some(served) => Json(describe(&state, served)).into_response(),
        None => ApiError::unknown_model(&id, &state.served_models).into_response(),
    }
}

fn describe(state: &AppState, id: &str) -> Value {
    json!({
        "id": id,
        "object": "model",
        "created": state.started_at_unix_s,
        "owned_by": "baton",
        "root": state.text.name,
        "parent": null,
        "max_model_len": state.text.max_model_tokens,
        "parameter_count": state.text.parameter_count,
    })
}
