//! The fields of a request body: which are built, which are refused by name, and what happens to all others.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use super::error::ApiError;
use super::json::{Fields, whole};
use super::limits::IGNORED_NAMES_LOGGED_MAX;

/// Names that both endpoints take. `include_metrics` and `return_kv_hashes` are baton's own; see `shapes`.
const COMMON: &[&str] = &[
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stop",
    "seed",
    "stream",
    "stream_options",
    "logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "user",
    "ignore_eos",
    "min_tokens",
    "stop_token_ids",
    "return_token_ids",
    "include_metrics",
    "return_kv_hashes",
    "best_of",
];
const COMPLETIONS_ONLY: &[&str] = &["prompt", "echo"];
const CHAT_ONLY: &[&str] = &["messages", "max_completion_tokens", "top_logprobs"];

/// Fields that OpenAI or vLLM have and baton has not. A client that sends one gets an error: it would otherwise believe
/// that the field had an effect.
const UNSUPPORTED: &[&str] = &[
    "include_stop_str_in_output",
    "skip_special_tokens",
    "priority",
    "request_id",
    "cache_salt",
    "truncate_prompt_tokens",
    "add_special_tokens",
    "response_format",
    "tools",
    "tool_choice",
    "prompt_logprobs",
    "stream_interval",
    "session_id",
    "json_schema",
    "suffix",
];

/// SDKs and frameworks send these fields with values that ask for the default behaviour.
fn asks_for_nothing(name: &str, value: Option<&Value>) -> bool {
    match (name, value) {
        (_, Some(Value::Null)) => true,
        ("tools", Some(Value::Array(tools))) => tools.is_empty(),
        ("tool_choice", Some(Value::String(choice))) => choice == "none",
        ("response_format", Some(Value::Object(format))) => format.get("type").and_then(Value::as_str) == Some("text"),
        _ => false,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Completions,
    Chat,
}

impl Endpoint {
    /// The OpenTelemetry `gen_ai.operation.name`.
    pub fn operation(self) -> &'static str {
        match self {
            Endpoint::Completions => "text_completion",
            Endpoint::Chat => "chat",
        }
    }
}

/// Remembers which ignored names were logged: each name once, and a limited number of names.
#[derive(Debug, Default)]
pub struct IgnoredNames(Mutex<BTreeSet<String>>);

impl IgnoredNames {
    fn note(&self, name: &str) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.len() < IGNORED_NAMES_LOGGED_MAX && name.len() <= 64 && seen.insert(name.to_owned()) {
            tracing::info!(
                field = name,
                "ignoring a request field this server does not know (logged once per name)"
            );
        }
    }
}

/// Refuses fields that are known and not built, and notes fields that are unknown.
pub fn check_names(fields: &Fields<'_>, endpoint: Endpoint, ignored: &IgnoredNames) -> Result<(), ApiError> {
    let (own, other, other_path) = match endpoint {
        Endpoint::Completions => (COMPLETIONS_ONLY, CHAT_ONLY, "/v1/chat/completions"),
        Endpoint::Chat => (CHAT_ONLY, COMPLETIONS_ONLY, "/v1/completions"),
    };
    for name in fields.names() {
        if UNSUPPORTED.contains(&name) {
            if asks_for_nothing(name, fields.get(name)) {
                continue;
            }
            return Err(ApiError::unsupported(name));
        }
        if other.contains(&name) {
            // SDKs send `echo: false` along. Only a value that asks for something is an error.
            if fields.get(name).and_then(Value::as_bool) == Some(false) {
                continue;
            }
            let message = format!("`{name}` is a field of {other_path}; this endpoint does not have it.");
            return Err(ApiError::invalid(name, message));
        }
        if name == "best_of" {
            if fields.get(name).and_then(whole) != Some(1) {
                let message = "`best_of` is not supported; leave it out or set it to 1.";
                return Err(ApiError {
                    code: Some("unsupported_parameter"),
                    ..ApiError::invalid(name, message)
                });
            }
        } else if !COMMON.contains(&name) && !own.contains(&name) {
            ignored.note(name);
        }
    }
    Ok(())
}
