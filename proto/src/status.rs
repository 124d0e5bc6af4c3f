//! What a gRPC status means, and which one a broken contract becomes.

use std::error::Error;

use tonic::{Code, Status};

use crate::convert::ConvertError;

/// A message that breaks the contract; the same message will not pass later.
pub fn convert_status(error: &ConvertError) -> Status {
    Status::invalid_argument(error.to_string())
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
