//! Every way a request can end badly, as the OpenAI error body: the one table from reasons to HTTP status.

use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use serving_core::node::NodeRole;
use serving_core::request::{QueueLimit, RejectReason, RequestError};

use super::forms::short;
use crate::request_handle::{Readiness, Rejected};
use serving_core::cluster::Reach;

const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");
/// OpenAI's SDKs read this header. It overrides their own rule, which retries 408, 409, 429 and 5xx.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
/// What a client is told when the policy gave no time. A membership lease is a few seconds, so 1 s sees a returning node
/// soon.
const RETRY_AFTER_DEFAULT: Duration = Duration::from_secs(1);

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
    /// The client's request is wrong in one named field.
    pub fn invalid(param: &str, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.to_owned()),
            ..Self::bad_request(message)
        }
    }

    /// The client's request is wrong as a whole.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    pub fn unsupported(param: &str) -> Self {
        let message = format!("`{param}` is not supported by this server; leave it out or set it to null.");
        Self {
            code: Some("unsupported_parameter"),
            ..Self::invalid(param, message)
        }
    }

    pub fn too_long(param: &str, message: String) -> Self {
        Self {
            code: Some("context_length_exceeded"),
            ..Self::invalid(param, message)
        }
    }

    pub fn unknown_model(asked: &str, served: &[String]) -> Self {
        let message = format!(
            "The model `{}` does not exist. This server serves: {}.",
            short(asked),
            served.join(", ")
        );
        Self {
            param: Some("model".to_owned()),
            code: Some("model_not_found"),
            ..Self::new(StatusCode::NOT_FOUND, "not_found_error", message)
        }
    }

    pub fn body_too_large(limit: usize) -> Self {
        let message = format!(
            "The request body is larger than the limit of {limit} bytes. Send a shorter prompt, or start the \
             coordinator with a larger --body-bytes-max."
        );
        Self {
            code: Some("request_too_large"),
            ..Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
        }
    }

    /// The connection has one of the places that are kept for probes.
    pub fn no_connection_left() -> Self {
        Self {
            code: Some("too_many_connections"),
            retry: Retry::After(RETRY_AFTER_DEFAULT),
            outcome: RejectReason::QueueFull.name(),
            ..Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "service_unavailable",
                "All connections of this server, or three quarters of them from this address, are in use. Close idle ones, try \
                 again after the time in Retry-After, or raise --connections-max of the coordinator.",
            )
        }
    }

    /// All large bodies together hold as much memory as they may.
    pub fn busy_with_bodies() -> Self {
        Self {
            code: Some("request_memory_full"),
            retry: Retry::After(RETRY_AFTER_DEFAULT),
            outcome: RejectReason::QueueFull.name(),
            ..Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "service_unavailable",
                "Too many large request bodies are being read at this moment. Send the request again after the time in \
                 Retry-After, or raise --request-bytes-in-flight-max of the coordinator.",
            )
        }
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self {
            retry: Retry::Maybe,
            outcome: "internal",
            code: Some("internal_error"),
            ..Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
        }
    }

    pub fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self {
            status,
            kind,
            code: None,
            param: None,
            message,
            retry: Retry::Never,
            outcome: "invalid_request",
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
            let ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
            headers.insert(RETRY_AFTER_MS, HeaderValue::from(ms));
            // Whole seconds, rounded up: the header has no fractions.
            headers.insert(header::RETRY_AFTER, HeaderValue::from(ms.div_ceil(1000).max(1)));
        }
        response
    }
}

impl From<Rejected> for ApiError {
    fn from(rejected: Rejected) -> Self {
        let retry = rejected.retry_after.map_or(Retry::Never, Retry::After);
        let outcome = rejected.reason.name();
        let base = |status, kind, message: &str| Self {
            retry,
            outcome,
            ..Self::new(status, kind, message)
        };
        match rejected.reason {
            RejectReason::NotReady => Self {
                code: Some("not_ready"),
                ..not_ready(
                    "no node can take this request now; GET /ready says what is missing",
                    retry,
                )
            },
            RejectReason::Draining => Self {
                retry,
                outcome,
                ..draining()
            },
            RejectReason::QueueFull => Self {
                code: Some("queue_full"),
                ..base(
                    StatusCode::TOO_MANY_REQUESTS,
                    "rate_limit_error",
                    "The waiting queue is full. Try again after the time in Retry-After, or add nodes.",
                )
            },
            RejectReason::QueueTimeout { limit, waited_ms } => Self {
                code: Some("queue_timeout"),
                ..base(
                    StatusCode::TOO_MANY_REQUESTS,
                    "rate_limit_error",
                    &waited_words(limit, waited_ms),
                )
            },
            RejectReason::NodeAway => Self {
                code: Some("node_away"),
                ..base(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "service_unavailable",
                    "No node that is here can ever hold the prompt and max_tokens, and the one that can is away. Try again after \
                     the time in Retry-After, or lower max_tokens.",
                )
            },
            RejectReason::TooLargeForPool {
                role,
                needed_blocks,
                pool_blocks,
            } => Self {
                retry: Retry::Never,
                code: Some("context_length_exceeded"),
                ..base(
                    StatusCode::BAD_REQUEST,
                    "invalid_request_error",
                    &too_large_words(role, (needed_blocks, pool_blocks)),
                )
            },
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
        let outcome = error.name();
        let (status, kind, code, retry) = match &error {
            // No retry: the work of a request whose deadline has passed is lost, and to repeat it under load makes more
            // load.
            RequestError::DeadlineExceeded { .. } => (StatusCode::GATEWAY_TIMEOUT, "timeout", "timeout", Retry::Never),
            RequestError::NoPlaceAgain { .. } => {
                (StatusCode::GATEWAY_TIMEOUT, "timeout", "no_place_again", Retry::Maybe)
            }
            RequestError::TransferFailed { .. } => (
                StatusCode::BAD_GATEWAY,
                "server_error",
                "kv_transfer_failed",
                Retry::Maybe,
            ),
            RequestError::PrefillNodeFailed { .. } | RequestError::DecodeNodeFailed { .. } => {
                (StatusCode::BAD_GATEWAY, "server_error", "node_failed", Retry::Maybe)
            }
            RequestError::EngineFailed { .. } => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "server_error",
                "engine_failed",
                Retry::Maybe,
            ),
            RequestError::SlowReader { .. } => (StatusCode::REQUEST_TIMEOUT, "timeout", "slow_reader", Retry::Never),
            RequestError::Internal(_) => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "server_error",
                "internal_error",
                Retry::Maybe,
            ),
        };
        let advice = match &error {
            RequestError::DeadlineExceeded { .. } => " Raise x-request-timeout-ms or ask for fewer tokens.",
            RequestError::NoPlaceAgain { .. } => {
                " Send the request again later, add nodes, or raise --queue-wait-ms-max of the coordinator."
            }
            RequestError::SlowReader { .. } => " Read the stream faster or ask for fewer tokens.",
            _ if retry == Retry::Maybe => " Send the request again.",
            _ => "",
        };
        Self {
            code: Some(code),
            retry,
            outcome,
            ..Self::new(status, kind, format!("{error}.{advice}"))
        }
    }
}

/// The answer of `/ready`: what can be used, or what is missing.
pub fn reach_of(readiness: Readiness) -> Result<Reach, ApiError> {
    match readiness {
        Readiness::Ready(reach) => Ok(reach),
        Readiness::NotReady(missing) => Err(not_ready(&missing, Retry::After(RETRY_AFTER_DEFAULT))),
        Readiness::Draining => Err(draining()),
    }
}

fn not_ready(missing: &str, retry: Retry) -> ApiError {
    // Nodes come and go by themselves, so "not ready" is never permanent.
    let retry = if retry == Retry::Never {
        Retry::After(RETRY_AFTER_DEFAULT)
    } else {
        retry
    };
    ApiError {
        code: Some("not_ready"),
        retry,
        outcome: RejectReason::NotReady.name(),
        ..ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "service_unavailable",
            format!("The cluster is not ready: {missing}."),
        )
    }
}

pub fn draining() -> ApiError {
    ApiError {
        code: Some("draining"),
        retry: Retry::After(RETRY_AFTER_DEFAULT),
        outcome: RejectReason::Draining.name(),
        ..ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "service_unavailable",
            "This coordinator is shutting down and takes no new requests. Send the request to another one.",
        )
    }
}
