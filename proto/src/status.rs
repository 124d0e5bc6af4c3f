//! How a refusal or a failure looks to callers: one table from core values to gRPC codes and HTTP statuses.

use std::error::Error;

use serving_core::request::{RejectReason, RequestError};
use tonic::{Code, Status};

use crate::convert::ConvertError;

/// An HTTP status and the `type` and `code` of the OpenAI error body (API.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HttpError {
    pub status: u16,
    pub kind: &'static str,
    pub code: &'static str,
    /// The answer carries `Retry-After`.
    pub retry: bool,
}

/// Policy said no.
pub fn reject_http(reason: &RejectReason) -> HttpError {
    match reason {
        RejectReason::QueueFull => http(429, "rate_limit_error", "queue_full", true),
        RejectReason::QueueTimeout => http(429, "rate_limit_error", "queue_timeout", true),
        RejectReason::NotReady => http(503, "service_unavailable", "not_ready", true),
        RejectReason::Draining => http(503, "service_unavailable", "draining", true),
        RejectReason::TooLargeForPool { .. } => http(400, "invalid_request_error", "context_length_exceeded", false),
    }
}

/// An accepted request broke before its first byte; after it the same body travels as an error event.
pub fn error_http(error: &RequestError) -> HttpError {
    match error {
        RequestError::DeadlineExceeded { .. } => http(504, "timeout", "timeout", false),
        RequestError::TransferFailed { .. } => http(502, "server_error", "kv_transfer_failed", true),
        RequestError::PrefillNodeFailed { .. } => http(502, "server_error", "prefill_node_failed", true),
        RequestError::DecodeNodeFailed { .. } => http(502, "server_error", "decode_node_failed", true),
        RequestError::EngineFailed { .. } => http(500, "server_error", "engine_failed", false),
        RequestError::SlowReader { .. } => http(499, "client_closed_request", "slow_reader", false),
        RequestError::Internal(_) => http(500, "server_error", "internal_error", false),
    }
}

const fn http(status: u16, kind: &'static str, code: &'static str, retry: bool) -> HttpError {
    HttpError {
        status,
        kind,
        code,
        retry,
    }
}

/// A message that breaks the contract; the same message will not pass later.
pub fn convert_status(error: &ConvertError) -> Status {
    Status::invalid_argument(error.to_string())
}

pub fn reject_status(reason: &RejectReason) -> Status {
    let code = match reason {
        RejectReason::QueueFull | RejectReason::QueueTimeout => Code::ResourceExhausted,
        RejectReason::NotReady | RejectReason::Draining => Code::Unavailable,
        RejectReason::TooLargeForPool { .. } => Code::InvalidArgument,
    };
    Status::new(code, reason.name())
}

pub fn error_status(error: &RequestError) -> Status {
    let code = match error {
        RequestError::DeadlineExceeded { .. } => Code::DeadlineExceeded,
        RequestError::TransferFailed { .. }
        | RequestError::PrefillNodeFailed { .. }
        | RequestError::DecodeNodeFailed { .. } => Code::Unavailable,
        RequestError::EngineFailed { .. } | RequestError::Internal(_) => Code::Internal,
        RequestError::SlowReader { .. } => Code::Cancelled,
    };
    Status::new(code, error.to_string())
}

/// What a failed call to a node means for placing the request again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFailure {
    /// The node or the way to it is gone: another node may do.
    Unreachable,
    /// The node says the message is wrong; no node will take it.
    BadRequest,
    /// We, or the deadline, ended it.
    Cancelled,
    /// The node broke.
    Broken,
}

pub fn call_failure(status: &Status) -> CallFailure {
    match status.code() {
        Code::Unavailable | Code::ResourceExhausted | Code::Aborted | Code::Unknown | Code::Unimplemented => {
            CallFailure::Unreachable
        }
        Code::InvalidArgument
        | Code::OutOfRange
        | Code::FailedPrecondition
        | Code::AlreadyExists
        | Code::NotFound
        | Code::PermissionDenied
        | Code::Unauthenticated => CallFailure::BadRequest,
        Code::Cancelled | Code::DeadlineExceeded => CallFailure::Cancelled,
        Code::Ok | Code::Internal | Code::DataLoss => CallFailure::Broken,
    }
}

/// A status in words a person reads, its innermost cause: "broken pipe" rather than `h2 protocol error: .. source: hyper::Error(Body, Error { kind: Io(Custom {`.
pub fn words(status: &Status) -> String {
    let mut cause = status.source();
    while let Some(deeper) = cause.and_then(Error::source) {
        cause = Some(deeper);
    }
    match cause {
        Some(cause) => cause.to_string(),
        None if status.message().is_empty() => status.code().description().to_owned(),
        None => status.message().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deadline() -> RequestError {
        RequestError::DeadlineExceeded {
            stage: "queue".to_owned(),
            waited_ms: 5,
        }
    }

    #[test]
    fn overload_is_429_absence_is_503_and_both_say_when_to_retry() {
        for reason in [RejectReason::QueueFull, RejectReason::QueueTimeout] {
            let answer = reject_http(&reason);
            assert!(answer.status == 429 && answer.retry);
            assert_eq!(reject_status(&reason).code(), Code::ResourceExhausted);
        }
        for reason in [RejectReason::NotReady, RejectReason::Draining] {
            let answer = reject_http(&reason);
            assert!(answer.status == 503 && answer.retry);
        }
        let never = RejectReason::TooLargeForPool {
            needed_blocks: 9,
            pool_blocks: 8,
        };
        assert!(reject_http(&never).status == 400 && !reject_http(&never).retry);
    }

    #[test]
    fn a_deadline_is_504_and_never_asks_for_a_retry() {
        assert_eq!(error_http(&deadline()).status, 504);
        assert!(!error_http(&deadline()).retry);
        assert_eq!(error_status(&deadline()).code(), Code::DeadlineExceeded);
    }

    #[test]
    fn a_contract_error_is_never_worth_another_node() {
        let status = convert_status(&ConvertError::Missing { field: "request" });
        assert!(status.message().contains("request"));
        assert_eq!(call_failure(&status), CallFailure::BadRequest);
        assert_eq!(call_failure(&Status::unavailable("gone")), CallFailure::Unreachable);
    }

    #[test]
    fn the_innermost_cause_is_told_else_the_message_else_the_code() {
        let io = std::io::Error::new(std::io::ErrorKind::BrokenPipe, "broken pipe");
        assert_eq!(words(&Status::from_error(Box::new(io))), "broken pipe");
        assert_eq!(words(&Status::unavailable("going away")), "going away");
        assert!(words(&Status::unavailable("")).contains("unavailable"));
    }
}
