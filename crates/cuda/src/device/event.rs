//! Points in the work of a stream.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys;

use super::Device;
use super::context::Context;
use super::handle::{EventUse, Raw, RawEvent};
use super::ipc::{IpcEventHandle, from_c, to_c};
use crate::calls;
use crate::error::{CudaError, check};

/// An event that was never recorded is done.
pub struct Event {
    context: Arc<Context>,
    raw: RawEvent,
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Event").field(&self.raw.0).finish()
    }
}

impl Event {
    pub(super) fn new(context: &Arc<Context>, event_use: EventUse) -> Result<Self, CudaError> {
        context.enter()?;
        let raw = RawEvent::new(event_use)?;
        let context = context.clone();
        Ok(Self { context, raw })
    }

    /// Opens an event of another process. It can be waited for and recorded, and is closed when it is dropped.
    ///
    /// # Errors
    /// The other process is gone, or the handle is of this process.
    pub fn open(device: &Device, handle: &IpcEventHandle) -> Result<Self, CudaError> {
        let context = device.context().clone();
        context.enter()?;
        let handle = sys::CUipcEventHandle {
            reserved: to_c(handle.0),
        };
        let mut event: sys::CUevent = std::ptr::null_mut();
        // SAFETY: the driver checks the handle, and writes one handle.
        let opened = unsafe { calls::cuIpcOpenEventHandle(&raw mut event, handle) };
        check("cuIpcOpenEventHandle", opened, || {
            format!("on {}", context.facts().name)
        })?;
        let raw = RawEvent(Raw(event));
        Ok(Self { context, raw })
    }

    /// For another process of this host.
    ///
    /// # Errors
    /// The event was not made for it ([`EventUse::Interprocess`]).
    pub fn ipc_handle(&self) -> Result<IpcEventHandle, CudaError> {
        self.context.enter()?;
        let mut handle = sys::CUipcEventHandle { reserved: [0; 64] };
        // SAFETY: the event is alive, and the driver writes one handle.
        let made = unsafe { calls::cuIpcGetEventHandle(&raw mut handle, self.raw.0.0) };
        check("cuIpcGetEventHandle", made, String::new)?;
        Ok(IpcEventHandle(from_c(handle.reserved)))
    }

    /// Whether everything before the last record has ended. It does not wait.
    ///
    /// # Errors
    /// The device has failed, perhaps in that work.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.context.enter_outside_capture("cuEventQuery")?;
        self.raw.is_done()
    }

    /// Waits without a deadline. Work that waits for another process or another machine is polled instead.
    ///
    /// # Errors
    /// The device has failed, perhaps in that work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.context.enter_outside_capture("cuEventSynchronize")?;
        // SAFETY: the event is alive.
        check(
            "cuEventSynchronize",
            unsafe { calls::cuEventSynchronize(self.raw.0.0) },
            String::new,
        )
    }

    /// The time between two events that are done, to about half a microsecond.
    ///
    /// # Errors
    /// One of them is not done, or was not made for it ([`EventUse::Timing`]).
    pub fn ms_since(&self, earlier: &Event) -> Result<f32, CudaError> {
        self.context.enter()?;
        let mut elapsed_ms: f32 = 0.0;
        // SAFETY: both events are alive, and the driver writes one number.
        let answered = unsafe { calls::cuEventElapsedTime(&raw mut elapsed_ms, earlier.raw.0.0, self.raw.0.0) };
        check("cuEventElapsedTime", answered, String::new)?;
        Ok(elapsed_ms)
    }

    pub(super) fn raw(&self) -> &RawEvent {
        &self.raw
    }

    pub(super) fn handle(&self) -> sys::CUevent {
        self.raw.0.0
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            self.raw.destroy();
        }
    }
}
