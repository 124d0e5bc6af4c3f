//! What programs of other servers ask this one: `/load` in vLLM's shape, `/server_info` with what SGLang's benchmark reads.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use super::AppState;
use super::admin::cluster_page;
use super::limits::{
    CHOICES_MAX, GRAMMAR_BYTES_MAX, LOGIT_BIAS_ENTRIES_MAX, LOGPROBS_MAX, PROMPTS_MAX, REQUEST_TIMEOUT_MAX, TOOLS_MAX,
};
use crate::records::pages::NodePage;
use crate::text::STOP_STRINGS_MAX;

/// Generation requests whose answers have not ended, and how many of their prompts wait for a place.
pub async fn load(State(state): State<Arc<AppState>>) -> Json<Value> {
    let snapshot = state.insight.cluster.as_ref().map(|view| view.snapshot());
    let snapshot = snapshot.unwrap_or_default();
    Json(json!({
        "server_load": state.insight.records.unanswered(),
        "waiting": {"interactive": snapshot.waiting_interactive, "batch": snapshot.waiting_batch},
    }))
}

/// No path of a machine, no address and no secret is in it. SGLang's benchmark looks into the first of `internal_states` for what
/// speculative decoding did there.
pub async fn server_info(State(state): State<Arc<AppState>>) -> Json<Value> {
    let page = cluster_page(&state);
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "git": crate::BUILD_COMMIT.unwrap_or("unknown"),
        "coordinator": page.coordinator.name,
        "uptime_s": page.coordinator.uptime_s,
        "readiness": page.coordinator.readiness,
        "model": state.text.name,
        "served_model_names": state.served_models,
        "max_model_len": state.text.max_model_tokens,
        "vocab_size": state.text.codec().vocab_size(),
        "limits": limits(&state),
        "nodes": page.nodes.iter().map(node).collect::<Vec<_>>(),
        "internal_states": [{}],
    }))
}

fn limits(state: &AppState) -> Value {
    let ms = |time: std::time::Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    json!({
        "body_bytes_max": state.limits.body_bytes_max,
        "request_bytes_in_flight_max": state.limits.request_bytes_in_flight_max,
        "request_time_limit_ms": ms(state.limits.request_time_limit),
        "request_time_limit_ms_max": ms(REQUEST_TIMEOUT_MAX),
        "prompts_max": PROMPTS_MAX,
        "choices_max": CHOICES_MAX,
        "logprobs_max": LOGPROBS_MAX,
        "logit_bias_entries_max": LOGIT_BIAS_ENTRIES_MAX,
        "stop_strings_max": STOP_STRINGS_MAX,
        "grammar_bytes_max": GRAMMAR_BYTES_MAX,
        "tools_max": TOOLS_MAX,
    })
}

fn node(node: &NodePage) -> Value {
    json!({
        "name": node.name,
        "role": node.role,
        "state": node.state,
        "version": node.version,
        "transports": node.transports,
        "running": node.running,
        "waiting": node.waiting,
        "kv_blocks": node.kv_blocks,
        "block_tokens": node.block_tokens,
    })
}
