//! Streams: work that runs in the order in which it was given, beside the work of other streams.
//!
//! No call but [`Stream::synchronize`] waits for the device. The addresses that a call names must belong to memory that lives
//! until the work is over: the driver does not check them, and a wrong one ends the process's use of the device.

use std::ffi::c_uint;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{self, CUstream_flags};

use super::args::{Args, Geometry};
use super::capturing;
use super::context::Context;
use super::event::Event;
use super::handle::Raw;
use super::memory::DevicePtr;
use super::module::Function;
use crate::calls;
use crate::error::{CudaError, check};

/// The driver uses the address of a stream again; this number never comes twice.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(0);

pub struct Stream {
    context: Arc<Context>,
    raw: Raw<sys::CUstream_st>,
    number: u64,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Stream").field(&self.number).finish()
    }
}

impl Stream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.enter()?;
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        let mut stream: sys::CUstream = std::ptr::null_mut();
        // SAFETY: the driver writes one handle.
        let made = unsafe { calls::cuStreamCreate(&raw mut stream, flags) };
        check("cuStreamCreate", made, || context.facts().name.clone())?;
        Ok(Self {
            context: context.clone(),
            raw: Raw(stream),
            number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// Launches a kernel.
    ///
    /// # Errors
    /// The geometry is not one of the function, or there are more than [`ARGS_MAX`](super::ARGS_MAX) arguments. An error of
    /// work before it may come here, too.
    pub fn launch(&self, function: &Function, geometry: Geometry, args: &Args) -> Result<(), CudaError> {
        const CALL: &str = "cuLaunchKernel";
        let what = || format!("{} with {geometry:?}", function.name());
        if args.has_too_many() {
            return Err(CudaError::misuse(CALL, "more than 32 arguments", what()));
        }
        self.context.enter()?;
        capturing::keep(function.loaded().clone());
        let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) = (geometry.grid, geometry.block);
        let mut addresses = args.addresses();
        let (params, extra) = (addresses.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: the handles are alive, and the driver copies the arguments before it returns. The caller answers for the
        // arguments' types and for the memory that they name.
        let launched = unsafe {
            calls::cuLaunchKernel(
                function.handle(),
                grid_x,
                grid_y,
                grid_z,
                block_x,
                block_y,
                block_z,
                geometry.shared_bytes,
                self.raw.0,
                params,
                extra,
            )
        };
        check(CALL, launched, what)
    }

    /// Copies between two places of devices. The places must not overlap.
    ///
    /// # Errors
    /// The device has failed, or an address is of no device.
    pub fn copy_on_device(&self, to: DevicePtr, from: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.context.enter()?;
        // SAFETY: the caller answers for both places.
        let copied = unsafe { calls::cuMemcpyDtoDAsync_v2(to.0, from.0, bytes, self.raw.0) };
        check("cuMemcpyDtoDAsync", copied, || format!("{bytes} bytes"))
    }

    /// Sets every byte of a place.
    ///
    /// # Errors
    /// The device has failed, or the address is of no device.
    pub fn fill(&self, to: DevicePtr, byte: u8, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.context.enter()?;
        // SAFETY: the caller answers for the place.
        let filled = unsafe { calls::cuMemsetD8Async(to.0, byte, bytes, self.raw.0) };
        check("cuMemsetD8Async", filled, || format!("{bytes} bytes"))
    }

    /// The event is done when everything that was given to this stream before is over.
    ///
    /// # Errors
    /// The device has failed.
    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        self.context.enter()?;
        event.raw().record(self.raw)
    }

    /// What is given to this stream afterwards begins when the event's last record is done. The host does not wait.
    ///
    /// # Errors
    /// The device has failed.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: both handles are alive. There are no flags.
        let waits = unsafe { calls::cuStreamWaitEvent(self.raw.0, event.handle(), 0) };
        check("cuStreamWaitEvent", waits, String::new)
    }

    /// Waits for all work of this stream, without a deadline. Work that waits for another process or another machine is
    /// polled by an [`Event`] instead.
    ///
    /// # Errors
    /// The device has failed, perhaps in that work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.context.enter_outside_capture("cuStreamSynchronize")?;
        // SAFETY: the stream is alive.
        check(
            "cuStreamSynchronize",
            unsafe { calls::cuStreamSynchronize(self.raw.0) },
            String::new,
        )
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn raw(&self) -> Raw<sys::CUstream_st> {
        self.raw
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

/// The driver ends the work first, and does not let this call wait for it.
impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: this value owns the stream. An error is that of a lost context, which has no streams any more.
            let _ = unsafe { calls::cuStreamDestroy_v2(self.raw.0) };
        }
    }
}
