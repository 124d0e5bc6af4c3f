//! Every way a request can end badly, as the OpenAI error body: the one table from reasons to HTTP status.

use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use grammar::GrammarError;
use serde_json::{Value, json};
use serving_core::cluster::Reach;
use serving_core::node::NodeRole;
use serving_core::request::{QueueLimit, RejectReason, RequestError};
use serving_core::stage::Stage;

use crate::request_handle::{Readiness, Rejected};

pub(super) const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");
/// OpenAI's SDKs read this header. It overrides their own rule, which retries 408, 409, 429 and 5xx.
pub(super) const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
/// What a client is told when the policy gave no time. A membership lease is a few seconds, so 1 s sees a returning node
/// soon.
const RETRY_AFTER_DEFAULT: Duration = Duration::from_secs(1);

const SEND_AGAIN: &str = "Send the request again.";

/// An answer other than success. `outcome` is its label in `baton_requests_total` and the access log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    pub status: StatusCode,
    pub kind: &'static str,
    pub code: Option<&'static str>,
    pub param: Option<String>,
    pub message: String,
    pub retry: Retry,
    pub outcome: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// The same request fails in the same way.
    Never,
    /// Another attempt may succeed, but nobody knows when.
    Maybe,
    After(Duration),
}

impl ApiError {
    /// The error's kind follows from its status.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let kind = match status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            409 => "conflict_error",
            429 => "rate_limit_error",
            ..500 => "invalid_request_error",
            503 => "service_unavailable",
            504 => "timeout",
            _ => "server_error",
        };
        Self {
            status,
            kind,
            code: None,
            param: None,
            message: message.into(),
            retry: Retry::Never,
            outcome: "invalid_request",
        }
    }

    pub fn with_code(self, code: &'static str) -> Self {
        Self {
            code: Some(code),
            ..self
        }
    }

    /// The client's request is wrong as a whole.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// The client's request is wrong in one named field.
    pub fn invalid(param: &str, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.to_owned()),
            ..Self::bad_request(message)
        }
    }

    pub fn unsupported(param: &str) -> Self {
        Self::invalid(param, format!("`{param}` {UNSUPPORTED}.")).with_code("unsupported_parameter")
    }

    pub fn too_long(param: &str, message: String) -> Self {
        Self::invalid(param, message).with_code("context_length_exceeded")
    }

    pub fn not_found(code: &'static str, message: String) -> Self {
        Self::new(StatusCode::NOT_FOUND, message).with_code(code)
    }

    pub fn unknown_model(asked: &str, served: &[String]) -> Self {
        let (asked, served) = (short(asked), served.join(", "));
        let message = format!("The model `{asked}` does not exist. This server serves: {served}.");
        Self {
            param: Some("model".to_owned()),
            ..Self::not_found("model_not_found", message)
        }
    }

    pub fn body_too_large(limit: usize) -> Self {
        let message = format!(
            "The request body is larger than the limit of {limit} bytes. Send a shorter prompt, or start the \
             coordinator with a larger --body-bytes-max."
        );
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, message).with_code("request_too_large")
    }

    /// Something is full or missing now, and will not be for long.
    fn unavailable((code, outcome): (&'static str, &'static str), message: impl Into<String>) -> Self {
        Self {
            retry: Retry::After(RETRY_AFTER_DEFAULT),
            outcome,
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code(code)
        }
    }

    /// Plain HTTP came to a port that has a certificate.
    pub fn https_only() -> Self {
        let message = "This port speaks HTTPS. Write https:// in place of http:// in the address.";
        Self::bad_request(message).with_code("https_only")
    }

    /// The connection has one of the places that are kept for probes.
    pub fn no_connection_left() -> Self {
        Self::unavailable(
            ("too_many_connections", RejectReason::QueueFull.name()),
            "All connections of this server, or three quarters of them from this address, are in use. Close idle ones, try \
             again after the time in Retry-After, or raise --connections-max of the coordinator.",
        )
    }

    /// All large bodies together hold as much memory as they may.
    pub fn busy_with_bodies() -> Self {
        Self::unavailable(
            ("request_memory_full", RejectReason::QueueFull.name()),
            "Too many large request bodies are being read at this moment. Send the request again after the time in \
             Retry-After, or raise --request-bytes-in-flight-max of the coordinator.",
        )
    }

    /// The system starts no thread that could compile a grammar.
    pub fn no_compiler(error: &GrammarError) -> Self {
        let message = format!(
            "The grammar could not be compiled at this moment: {error}. Send the request again after the time in Retry-After. The operator may \
             allow the coordinator more threads, or more memory."
        );
        Self::unavailable(("no_compiler", "internal"), message)
    }

    /// Nodes come and go by themselves, so "not ready" is never permanent.
    fn not_ready(missing: &str) -> Self {
        let name = RejectReason::NotReady.name();
        Self::unavailable((name, name), format!("The cluster is not ready: {missing}."))
    }

    pub fn draining() -> Self {
        let name = RejectReason::Draining.name();
        Self::unavailable(
            (name, name),
            "This coordinator is shutting down and takes no new requests. Send the request to another one.",
        )
    }

    /// The time of a request was over before it could be given to anybody.
    pub fn out_of_time(stage: Stage, waited: Duration) -> Self {
        let error = RequestError::DeadlineExceeded {
            stage: stage.name().to_owned(),
            waited_ms: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX),
        };
        error.into()
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self {
            retry: Retry::Maybe,
            outcome: "internal",
            ..Self::new(StatusCode::INTERNAL_SERVER_ERROR, message).with_code("internal_error")
        }
    }

    /// The error without the names of nodes and addresses, for callers who must not know them.
    #[must_use]
    pub fn without_names(self) -> Self {
        let what = match self.code {
            Some("node_failed") => "A node failed",
            Some("kv_transfer_failed") => "The KV transfer between two nodes failed",
            Some("engine_failed") => "A node could not run the model step",
            Some("internal_error") => "The server made a mistake",
            Some("not_ready") => "The cluster is not ready",
            _ => return self,
        };
        Self {
            message: format!("{what}. {SEND_AGAIN}"),
            ..self
        }
    }

    /// The `{"error": ...}` object: a response body, or an event of a stream that has begun.
    pub fn body(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.body())).into_response();
        let headers = response.headers_mut();
        let should_retry = if self.retry == Retry::Never { "false" } else { "true" };
        if self.status.as_u16() >= 429 {
            headers.insert(SHOULD_RETRY, HeaderValue::from_static(should_retry));
        }
        if let Retry::After(wait) = self.retry {
            // Rounded up: who comes back a part of a millisecond too early is refused again.
            let ms = u64::try_from(wait.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
            headers.insert(RETRY_AFTER_MS, HeaderValue::from(ms));
            // Whole seconds: the header has no fractions.
            headers.insert(header::RETRY_AFTER, HeaderValue::from(ms.div_ceil(1000).max(1)));
        }
        response
    }
}

impl From<Rejected> for ApiError {
    fn from(rejected: Rejected) -> Self {
        let outcome = rejected.reason.name();
        let error = match rejected.reason {
            RejectReason::NotReady => {
                let missing = rejected.missing.as_deref();
                let missing = missing.unwrap_or("no node can take this request now; GET /ready says what is missing");
                let wait = rejected.retry_after.unwrap_or(RETRY_AFTER_DEFAULT);
                return Self {
                    retry: Retry::After(wait),
                    ..Self::not_ready(missing)
                };
            }
            RejectReason::Draining => Self::draining(),
            RejectReason::QueueFull => {
                let message = "The waiting queue is full. Try again after the time in Retry-After, or add nodes.";
                Self::new(StatusCode::TOO_MANY_REQUESTS, message)
            }
            RejectReason::QueueTimeout { limit, waited_ms } => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, waited_words(limit, waited_ms))
            }
            RejectReason::NodeAway => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "No node that is here can ever hold the prompt and max_tokens, and the one that can is away. Try again after \
                 the time in Retry-After, or lower max_tokens.",
            ),
            RejectReason::TooLargeForPool {
                role,
                needed_blocks,
                pool_blocks,
            } => {
                let message = too_large_words(role, (needed_blocks, pool_blocks));
                return Self {
                    outcome,
                    ..Self::bad_request(message).with_code("context_length_exceeded")
                };
            }
            RejectReason::PromptTooLong {
                role,
                prompt_tokens,
                longest_tokens,
            } => {
                let message = format!(
                    "The prompt has {prompt_tokens} tokens, and no {} node takes more than {longest_tokens} (max_model_len of \
                     the nodes). Shorten the prompt.",
                    role.name()
                );
                return Self {
                    outcome,
                    ..Self::bad_request(message).with_code("context_length_exceeded")
                };
            }
            RejectReason::TooManyChoices { choices, most } => {
                let message = format!(
                    "The request asks for {choices} choices, and no decode node computes more than {most} at a time \
                     (max_num_seqs). Lower n to {most}, or send several requests."
                );
                return Self {
                    outcome,
                    ..Self::invalid("n", message).with_code("too_many_choices")
                };
            }
        };
        Self {
            retry: rejected.retry_after.map_or(Retry::Never, Retry::After),
            outcome,
            ..error.with_code(outcome)
        }
    }
}

fn waited_words(limit: QueueLimit, waited_ms: u64) -> String {
    let limit = match limit {
        QueueLimit::RequestTime => "all of its own time limit (x-request-timeout-ms)",
        QueueLimit::QueueWait => "the longest wait that the coordinator allows (--queue-wait-ms-max)",
    };
    format!(
        "The request waited {waited_ms} ms for a place, {limit}, and no node became free. Try again after the time in \
         Retry-After, or add nodes."
    )
}

fn too_large_words(role: NodeRole, (needed_blocks, pool_blocks): (u32, u32)) -> String {
    let what = match role {
        NodeRole::Decode => "The prompt and max_tokens need",
        NodeRole::Prefill => "Local prefill is not allowed, and the prompt needs",
    };
    format!(
        "{what} {needed_blocks} KV blocks, and the largest {} node has {pool_blocks}. Lower max_tokens, shorten the prompt, or \
         give the nodes more --kv-cache-memory.",
        role.name()
    )
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let (status, code) = match &error {
            RequestError::DeadlineExceeded { .. } => (StatusCode::GATEWAY_TIMEOUT, "timeout"),
            RequestError::NoPlaceAgain { .. } => (StatusCode::GATEWAY_TIMEOUT, "no_place_again"),
            RequestError::NoRoom { .. } => (StatusCode::TOO_MANY_REQUESTS, "no_room"),
            RequestError::TransferFailed { .. } => (StatusCode::BAD_GATEWAY, "kv_transfer_failed"),
            RequestError::PrefillNodeFailed { .. } | RequestError::DecodeNodeFailed { .. } => {
                (StatusCode::BAD_GATEWAY, "node_failed")
            }
            RequestError::EngineFailed { .. } => (StatusCode::INTERNAL_SERVER_ERROR, "engine_failed"),
            RequestError::RuledOut => (StatusCode::BAD_REQUEST, "every_token_ruled_out"),
            RequestError::SlowReader { .. } => (StatusCode::REQUEST_TIMEOUT, "slow_reader"),
            RequestError::Internal(_) => (StatusCode::INTERNAL_SERVER_ERROR, "internal_error"),
        };
        let (retry, advice) = match &error {
            // No retry: the work of a request whose deadline has passed is lost, and to repeat it under load makes more
            // load.
            RequestError::DeadlineExceeded { .. } => {
                (Retry::Never, "Raise x-request-timeout-ms or ask for fewer tokens.")
            }
            RequestError::SlowReader { .. } => (Retry::Never, "Read the stream faster or ask for fewer tokens."),
            RequestError::RuledOut => (Retry::Never, "Leave one of them out, or write a simpler grammar."),
            RequestError::NoPlaceAgain { .. } => (
                Retry::Maybe,
                "Send the request again later, add nodes, or raise --queue-wait-ms-max of the coordinator.",
            ),
            RequestError::NoRoom { .. } => (
                Retry::After(RETRY_AFTER_DEFAULT),
                "Try again after the time in Retry-After, or add nodes.",
            ),
            _ => (Retry::Maybe, SEND_AGAIN),
        };
        let all = Self::new(status, format!("{error}. {advice}")).with_code(code);
        Self {
            kind: if code == "slow_reader" { "timeout" } else { all.kind },
            retry,
            outcome: error.name(),
            ..all
        }
    }
}

/// The answer of `/ready`: what can be used, or what is missing.
pub fn reach_of(readiness: Readiness) -> Result<Reach, ApiError> {
    match readiness {
        Readiness::Ready(reach) => Ok(reach),
        Readiness::NotReady(missing) => Err(ApiError::not_ready(&missing)),
        Readiness::Draining => Err(ApiError::draining()),
    }
}

/// The message of a field that OpenAI or vLLM have and baton has not. A client that sends one gets an error: it would
/// otherwise believe that the field had an effect.
pub const UNSUPPORTED: &str = "is not supported by this server; leave it out or set it to null";

/// Text of a client, cut to a length that a message may repeat.
pub fn short(text: &str) -> String {
    const CHARS_MAX: usize = 80;
    match text.char_indices().nth(CHARS_MAX) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_told_to_come_back_too_early() {
        for (wait_us, ms, s) in [(400, "1", "1"), (1_666_600, "1667", "2"), (2_000_000, "2000", "2")] {
            let error = ApiError {
                retry: Retry::After(Duration::from_micros(wait_us)),
                ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, "wait")
            };
            let response = error.into_response();
            let told = |name: HeaderName| response.headers().get(name).cloned();
            assert_eq!(told(RETRY_AFTER_MS), Some(HeaderValue::from_static(ms)));
            assert_eq!(told(header::RETRY_AFTER), Some(HeaderValue::from_static(s)));
        }
    }
}
