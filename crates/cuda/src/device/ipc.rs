//! Memory and events of other processes of this host (CUDA IPC).

use std::ffi::{c_char, c_uint};
use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUipcMem_flags};

use super::context::{Context, Garbage};
use super::memory::{DeviceMemory, DevicePtr};
use crate::calls;
use crate::error::{CudaError, check};

/// `CU_IPC_HANDLE_SIZE` (cuda.h).
const HANDLE_BYTES: usize = 64;

/// By it another process opens an allocation. Its bytes mean something to the driver only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpcHandle(pub [u8; HANDLE_BYTES]);

/// By it another process opens an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpcEventHandle(pub [u8; HANDLE_BYTES]);

#[allow(clippy::unnecessary_cast, reason = "it is a cast where C's `char` has a sign")]
pub(super) fn to_c(bytes: [u8; HANDLE_BYTES]) -> [c_char; HANDLE_BYTES] {
    bytes.map(|byte| byte as c_char)
}

#[allow(clippy::unnecessary_cast, reason = "it is a cast where C's `char` has a sign")]
pub(super) fn from_c(bytes: [c_char; HANDLE_BYTES]) -> [u8; HANDLE_BYTES] {
    bytes.map(|byte| byte as u8)
}

impl DeviceMemory {
    /// For another process of this host. It opens the whole allocation.
    ///
    /// # Errors
    /// The system or the container does not allow it.
    pub fn ipc_handle(&self) -> Result<IpcHandle, CudaError> {
        self.context().enter()?;
        let mut handle = sys::CUipcMemHandle {
            reserved: [0; HANDLE_BYTES],
        };
        // SAFETY: the memory is alive and comes from `cuMemAlloc`; the driver writes one handle.
        let made = unsafe { calls::cuIpcGetMemHandle(&raw mut handle, self.ptr().0) };
        check("cuIpcGetMemHandle", made, || format!("{} bytes", self.bytes()))?;
        Ok(IpcHandle(from_c(handle.reserved)))
    }
}

/// Memory of another process, as this one addresses it. Dropping it closes it: no copy may run then. An owner that does not
/// know whether a copy runs keeps it ([`ImportedMemory::leak`]).
#[derive(Debug)]
pub struct ImportedMemory {
    context: Arc<Context>,
    at: u64,
}

impl ImportedMemory {
    pub(super) fn open(context: &Arc<Context>, handle: &IpcHandle) -> Result<Self, CudaError> {
        context.enter_outside_capture("cuIpcOpenMemHandle")?;
        let handle = sys::CUipcMemHandle {
            reserved: to_c(handle.0),
        };
        let flags = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint;
        let mut at: sys::CUdeviceptr = 0;
        // SAFETY: the driver checks the handle, and writes one address.
        let opened = unsafe { calls::cuIpcOpenMemHandle_v2(&raw mut at, handle, flags) };
        check("cuIpcOpenMemHandle", opened, || format!("on {}", context.facts().name))?;
        let context = context.clone();
        Ok(Self { context, at })
    }

    pub fn ptr(&self) -> DevicePtr {
        DevicePtr(self.at)
    }

    /// Keeps the mapping for the rest of the process.
    pub fn leak(self) -> DevicePtr {
        ManuallyDrop::new(self).ptr()
    }
}

impl Drop for ImportedMemory {
    fn drop(&mut self) {
        self.context.discard(Garbage::Imported { at: self.at });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_a_handle_survive_the_way_through_c() {
        let bytes: [u8; HANDLE_BYTES] = std::array::from_fn(|at| (at as u8).wrapping_mul(5));
        assert_eq!(from_c(to_c(bytes)), bytes);
    }
}
