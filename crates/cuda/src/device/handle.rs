//! Handles of the driver as they come, and the events of owners that are no [`Event`](super::Event).

use std::ffi::c_uint;
use std::fmt;

use cudarc::driver::sys::{self, CUevent_flags};

use crate::calls;
use crate::error::{CudaError, check};

/// A handle of the driver.
pub(crate) struct Raw<T>(pub *mut T);

impl<T> Clone for Raw<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Raw<T> {}

// SAFETY: this process never follows a handle; the driver does, and it may be called from any thread (CUDA programming guide,
// driver API).
unsafe impl<T> Send for Raw<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Raw<T> {}

impl<T> fmt::Debug for Raw<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// What an event is for. The driver makes those that tell no time cheaper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventUse {
    /// The order between streams and the host.
    Order,
    /// Also the time between two of them.
    Timing,
    /// Also the order between streams of two processes.
    Interprocess,
}

impl EventUse {
    fn flags(self) -> c_uint {
        let without_time = CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        match self {
            EventUse::Order => without_time,
            EventUse::Timing => CUevent_flags::CU_EVENT_DEFAULT as c_uint,
            // An event of two processes must not tell the time (cuIpcGetEventHandle).
            EventUse::Interprocess => without_time | CUevent_flags::CU_EVENT_INTERPROCESS as c_uint,
        }
    }
}

/// An event that its owner destroys. The context is current in each call.
pub(super) struct RawEvent(pub Raw<sys::CUevent_st>);

impl RawEvent {
    pub fn new(event_use: EventUse) -> Result<Self, CudaError> {
        let mut event: sys::CUevent = std::ptr::null_mut();
        // SAFETY: the driver writes one handle.
        let made = unsafe { calls::cuEventCreate(&raw mut event, event_use.flags()) };
        check("cuEventCreate", made, || format!("{event_use:?}"))?;
        Ok(Self(Raw(event)))
    }

    pub fn record(&self, stream: Raw<sys::CUstream_st>) -> Result<(), CudaError> {
        // SAFETY: both handles are alive.
        let recorded = unsafe { calls::cuEventRecord(self.0.0, stream.0) };
        check("cuEventRecord", recorded, String::new)
    }

    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the handle is alive.
        match unsafe { calls::cuEventQuery(self.0.0) } {
            calls::NOT_READY => Ok(false),
            answer => check("cuEventQuery", answer, String::new).map(|()| true),
        }
    }

    /// A device whose context is lost runs nothing any more. After any other error nobody knows.
    pub fn may_run(&self) -> bool {
        match self.is_done() {
            Ok(is_done) => !is_done,
            Err(error) => !error.is_sticky(),
        }
    }

    /// Only once. An error is that of a lost context, which has no events any more.
    pub fn destroy(&self) {
        // SAFETY: the owner calls this at its end. The driver keeps what a stream still needs of it.
        let _ = unsafe { calls::cuEventDestroy_v2(self.0.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_of_two_processes_tells_no_time() {
        assert_eq!(EventUse::Timing.flags(), 0);
        assert_eq!(EventUse::Order.flags(), 2);
        assert_eq!(EventUse::Interprocess.flags(), 2 | 4);
    }
}
