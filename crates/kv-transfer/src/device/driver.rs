//! What the transports use of the `cuda` crate's driver half, in one place: the types, and the few calls whose form is that
//! crate's choice. It decides nothing.

pub(crate) use cuda::{CudaError, Device, DeviceMemory, DevicePtr, Event, EventUse, ImportedMemory, Libraries, Stream};
use cuda::{IpcHandle, PinnedMemory as Pinned};

use crate::span::DeviceAddress;

/// Bytes of a handle by which another process opens an allocation (`CUipcMemHandle`, 64 bytes in the driver's header).
pub(crate) const IPC_HANDLE_BYTES: usize = 64;

pub(crate) fn pointer(address: DeviceAddress) -> DevicePtr {
    DevicePtr(address.0)
}

/// For the order between streams. It takes no time.
pub(crate) fn event(device: &Device) -> Result<Event, CudaError> {
    device.event(EventUse::Order)
}

pub(crate) fn export(memory: &DeviceMemory) -> Result<[u8; IPC_HANDLE_BYTES], CudaError> {
    Ok(memory.ipc_handle()?.0)
}

/// A handle of this process's own memory is refused by the driver.
pub(crate) fn import(device: &Device, handle: [u8; IPC_HANDLE_BYTES]) -> Result<ImportedMemory, CudaError> {
    device.open_ipc(&IpcHandle(handle))
}

/// Memory of the host that the device reads and writes while the host goes on.
pub(super) struct PinnedMemory(Pinned);

impl PinnedMemory {
    pub fn new(device: &Device, bytes: usize) -> Result<Self, CudaError> {
        Ok(Self(device.allocate_pinned(bytes)?))
    }

    /// No copy of it is under way.
    pub fn fill(&mut self, bytes: &[u8]) -> Result<(), CudaError> {
        self.0.write(0, bytes)
    }

    /// Shows the first bytes. The copy that brought them has completed.
    pub fn show<R>(&self, bytes: usize, take: impl FnOnce(&[u8]) -> R) -> Result<R, CudaError> {
        Ok(take(&self.0.read()?[..bytes]))
    }

    /// Launches the copy of the first bytes.
    pub fn send(&self, stream: &Stream, to: DeviceAddress, bytes: usize) -> Result<(), CudaError> {
        stream.copy_to_device(pointer(to), &self.0, 0..bytes)
    }

    /// Launches a copy to the first bytes.
    pub fn receive(&self, stream: &Stream, from: DeviceAddress, bytes: usize) -> Result<(), CudaError> {
        stream.copy_to_host(&self.0, 0, pointer(from), bytes)
    }
}
