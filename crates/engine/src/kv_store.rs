//! Where the bytes of a KV memory are: on the host, which computes in them, or on a device, whose memory the host cannot address.

use std::any::Any;
use std::fmt::{self, Debug};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use thiserror::Error;

use crate::KvAccessError;
use crate::memory::HugeMemory;

/// A device could not copy.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the device failed: {0}; restart the node")]
pub struct DeviceError(pub String);

/// Memory of a device. Every call has completed when it returns, and it comes after the steps that were submitted before it.
/// The caller holds claims on the blocks in the range, so no step uses these bytes meanwhile.
pub trait DeviceMemory: Debug + Send + Sync {
    /// # Errors
    /// The device is lost.
    fn read(&self, from: usize, out: &mut [u8]) -> Result<(), DeviceError>;

    /// # Errors
    /// The device is lost.
    fn write(&self, to: usize, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies within the device.
    ///
    /// # Errors
    /// The device is lost.
    fn copy(&self, from: Range<usize>, to: usize) -> Result<(), DeviceError>;

    /// For transports that address this memory themselves. `None`: only this engine can.
    fn pool(&self) -> Option<DevicePool> {
        None
    }
}

/// A pool in the memory of a device, for code of this process that speaks to the same driver. This crate does not know the
/// driver's types: they stand behind `Any`. Code that does not know them either moves the bytes by way of the host.
#[derive(Clone)]
pub struct DevicePool {
    /// What was found when the engine looked for libraries. CUDA: `cuda::Libraries`.
    pub libraries: Arc<dyn Any + Send + Sync>,
    /// CUDA: `cuda::Device`.
    pub device: Arc<dyn Any + Send + Sync>,
    /// The one allocation of all blocks. CUDA: `cuda::DeviceMemory`.
    pub memory: Arc<dyn Any + Send + Sync>,
    /// The event of the last step that has completed, `None` before the first. The engine puts it here before `complete`
    /// returns, and records it again only after it has put another event in its place. CUDA: `Mutex<Option<cuda::Event>>`.
    pub completed: Arc<dyn Any + Send + Sync>,
    /// The first byte of the pool, as the driver addresses it.
    pub address: u64,
}

impl Debug for DevicePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DevicePool").finish_non_exhaustive()
    }
}

pub(crate) enum KvStore {
    Host(HugeMemory),
    Device(Box<dyn DeviceMemory>),
}

impl KvStore {
    /// For shareable host memory.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            KvStore::Host(memory) => memory.descriptor(),
            KvStore::Device(_) => None,
        }
    }

    /// For transports that address a device's memory themselves.
    pub(crate) fn device_pool(&self) -> Option<DevicePool> {
        match self {
            KvStore::Host(_) => None,
            KvStore::Device(memory) => memory.pool(),
        }
    }

    /// For kernels of the host.
    pub(crate) fn host_start(&self) -> Option<*mut u8> {
        match self {
            KvStore::Host(memory) => Some(memory.start()),
            KvStore::Device(_) => None,
        }
    }

    /// Shows the bytes of a range: in place, or a copy of a device's.
    ///
    /// # Safety
    /// The range lies within the memory, and nobody writes to it meanwhile.
    pub(crate) unsafe fn read<R>(
        &self,
        range: Range<usize>,
        read: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, KvAccessError> {
        match self {
            // SAFETY: the caller's promise.
            KvStore::Host(memory) => Ok(read(unsafe { bytes(memory, range) })),
            KvStore::Device(memory) => {
                let mut staged = vec![0; range.len()];
                memory.read(range.start, &mut staged)?;
                Ok(read(&staged))
            }
        }
    }

    /// Copies a range out.
    ///
    /// # Safety
    /// As [`read`](Self::read).
    pub(crate) unsafe fn export(&self, range: Range<usize>, out: &mut [u8]) -> Result<(), KvAccessError> {
        match self {
            // SAFETY: the caller's promise.
            KvStore::Host(memory) => out.copy_from_slice(unsafe { bytes(memory, range) }),
            KvStore::Device(memory) => memory.read(range.start, out)?,
        }
        Ok(())
    }

    /// Lets `write` change the bytes of a range: in place, or in a copy that goes back to the device.
    ///
    /// # Safety
    /// The range lies within the memory, and nobody else uses it meanwhile.
    pub(crate) unsafe fn write<R>(
        &self,
        range: Range<usize>,
        write: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, KvAccessError> {
        match self {
            // SAFETY: the caller's promise.
            KvStore::Host(memory) => Ok(write(unsafe { bytes_mut(memory, range) })),
            KvStore::Device(memory) => {
                let mut staged = vec![0; range.len()];
                memory.read(range.start, &mut staged)?;
                let written = write(&mut staged);
                memory.write(range.start, &staged)?;
                Ok(written)
            }
        }
    }

    /// Overwrites a range.
    ///
    /// # Safety
    /// As [`write`](Self::write).
    pub(crate) unsafe fn import(&self, range: Range<usize>, bytes: &[u8]) -> Result<(), KvAccessError> {
        match self {
            // SAFETY: the caller's promise.
            KvStore::Host(memory) => unsafe { bytes_mut(memory, range) }.copy_from_slice(bytes),
            KvStore::Device(memory) => memory.write(range.start, bytes)?,
        }
        Ok(())
    }

    /// Copies a range onto another one.
    ///
    /// # Safety
    /// Both ranges lie within the memory and do not overlap. Nobody writes to the first or uses the second meanwhile.
    pub(crate) unsafe fn copy(&self, from: Range<usize>, to: Range<usize>) -> Result<(), KvAccessError> {
        match self {
            KvStore::Host(memory) => {
                // SAFETY: the caller's promise.
                let (from, to) = unsafe { (bytes(memory, from), bytes_mut(memory, to)) };
                to.copy_from_slice(from);
            }
            KvStore::Device(memory) => memory.copy(from, to.start)?,
        }
        Ok(())
    }
}

/// # Safety
/// The range lies within the memory, and nobody writes to it while the result lives.
unsafe fn bytes(memory: &HugeMemory, range: Range<usize>) -> &[u8] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(memory.start().add(range.start), range.len()) }
}

/// # Safety
/// The range lies within the memory, and nobody else uses it while the result lives.
#[expect(clippy::mut_from_ref, reason = "claims order the accesses, not borrows")]
unsafe fn bytes_mut(memory: &HugeMemory, range: Range<usize>) -> &mut [u8] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(memory.start().add(range.start), range.len()) }
}
