//! Owns the result codes (`ncclResult_t`).

use std::ffi::CStr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// The driver is missing or refused the work.
    UnhandledCudaError = 1,
    SystemError = 2,
    InternalError = 3,
    InvalidArgument = 4,
    InvalidUsage = 5,
    /// The peer is gone.
    RemoteError = 6,
    InProgress = 7,
}

pub(crate) type Answer = Result<(), Status>;

pub(crate) fn number_of(answer: Answer) -> i32 {
    answer.err().map_or(0, |status| status as i32)
}

pub(crate) fn text_of(number: i32) -> &'static CStr {
    match number {
        0 => c"no error",
        1 => c"the CUDA driver is missing or has refused",
        2 => c"a call of the system failed",
        3 => c"the two ranks do not agree",
        4 => c"an argument is out of its range",
        5 => c"the call does not fit the state of the communicator",
        6 => c"the other rank is gone",
        7 => c"the operation is in progress",
        _ => c"a result that the double does not know",
    }
}
