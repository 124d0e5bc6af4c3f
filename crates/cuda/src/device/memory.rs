//! Memory of a device.

use std::sync::Arc;

use cudarc::driver::sys;

use super::context::{Context, Garbage};
use crate::calls;
use crate::error::{CudaError, check};

/// An address in the memory of a device. It keeps nothing alive, and the host must not follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// Wraps around at the end of all addresses, where no memory is.
    #[must_use]
    pub fn offset(self, bytes: usize) -> Self {
        Self(self.0.wrapping_add(bytes as u64))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Of the whole device, whoever uses the rest.
    pub free_bytes: u64,
    pub total_bytes: u64,
}

impl MemoryInfo {
    pub(super) fn of(context: &Context) -> Result<Self, CudaError> {
        context.enter()?;
        let (mut free, mut total): (usize, usize) = (0, 0);
        // SAFETY: the driver writes two sizes.
        let answered = unsafe { calls::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
        check("cuMemGetInfo", answered, String::new)?;
        Ok(Self {
            free_bytes: free as u64,
            total_bytes: total as u64,
        })
    }
}

/// Owns memory of a device. When it is dropped, the driver waits for all work on it: abort every communicator that may use it
/// first, because that work may never end.
#[derive(Debug)]
pub struct DeviceMemory {
    context: Arc<Context>,
    at: u64,
    bytes: usize,
}

impl DeviceMemory {
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        if bytes == 0 {
            return Err(CudaError::misuse("cuMemAlloc", "no bytes were asked for", ""));
        }
        context.enter_outside_capture("cuMemAlloc")?;
        let mut at: sys::CUdeviceptr = 0;
        // SAFETY: the driver writes one address.
        let allocated = unsafe { calls::cuMemAlloc_v2(&raw mut at, bytes) };
        check("cuMemAlloc", allocated, || {
            format!("{bytes} bytes on {}", context.facts().name)
        })?;
        let context = context.clone();
        Ok(Self { context, at, bytes })
    }

    pub fn ptr(&self) -> DevicePtr {
        DevicePtr(self.at)
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.context.discard(Garbage::Memory { at: self.at });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offset_is_counted_in_bytes() {
        assert_eq!(DevicePtr(0x7000).offset(16), DevicePtr(0x7010));
        assert_eq!(DevicePtr(u64::MAX).offset(1), DevicePtr(0));
    }
}
