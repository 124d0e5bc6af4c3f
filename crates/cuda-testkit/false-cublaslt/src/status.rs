//! Owns the status codes (`cublas_api.h`).

use std::ffi::CStr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// Also: no driver.
    NotInitialized = 1,
    InvalidValue = 7,
    ExecutionFailed = 13,
    NotSupported = 15,
}

pub(crate) type Answer = Result<(), Status>;

pub(crate) fn number_of(answer: Answer) -> i32 {
    answer.err().map_or(0, |status| status as i32)
}

pub(crate) fn name_of(number: i32) -> &'static CStr {
    match number {
        0 => c"CUBLAS_STATUS_SUCCESS",
        1 => c"CUBLAS_STATUS_NOT_INITIALIZED",
        7 => c"CUBLAS_STATUS_INVALID_VALUE",
        13 => c"CUBLAS_STATUS_EXECUTION_FAILED",
        15 => c"CUBLAS_STATUS_NOT_SUPPORTED",
        _ => c"a status that the double does not know",
    }
}
