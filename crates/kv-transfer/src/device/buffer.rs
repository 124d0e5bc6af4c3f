//! One pinned buffer with the event of the copy that uses it.

use super::driver::{self, CudaError, Device, Event, PinnedMemory};
use super::fault::DeviceFault;

/// A frame of gRPC (120 KiB) and a slot of shared memory (512 KiB) fit in one.
pub(super) const BUFFER_BYTES: usize = 512 << 10;

pub(super) struct Buffer {
    pub pinned: PinnedMemory,
    pub done: Event,
}

impl Buffer {
    pub fn several(device: &Device, count: usize) -> Result<Vec<Self>, DeviceFault> {
        let one = |_| -> Result<Self, CudaError> {
            Ok(Self {
                pinned: PinnedMemory::new(device, BUFFER_BYTES)?,
                done: driver::event(device)?,
            })
        };
        let made: Result<Vec<Self>, _> = (0..count).map(one).collect();
        made.map_err(DeviceFault::Refused)
    }
}
