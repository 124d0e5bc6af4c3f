//! Memory of the device that communicators read and write: no block of the pool, so a communicator that ends late harms nobody.
//! A ring that comes free is used again. None is freed while a communicator of this process may run: freeing waits for the
//! device, and the device for the communicator's peer.

use std::fmt::{self, Debug};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::worker::may_run;
use crate::device::{DeviceFault, DeviceKv, DeviceMemory};
use crate::span::DeviceAddress;

/// The rings of a node: as many as it ever had communicators at the same time.
pub(super) struct Rings {
    kv: Arc<DeviceKv>,
    free: Mutex<Vec<DeviceMemory>>,
}

impl Debug for Rings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rings").finish_non_exhaustive()
    }
}

impl Rings {
    pub fn new(kv: Arc<DeviceKv>) -> Arc<Self> {
        let free = Mutex::default();
        Arc::new(Self { kv, free })
    }

    pub fn kv(&self) -> &Arc<DeviceKv> {
        &self.kv
    }

    /// For a blocking thread.
    ///
    /// # Errors
    /// The device has no such memory.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Result<Arc<RingMemory>, DeviceFault> {
        let kept = {
            let mut free = self.free();
            let fits = free.iter().position(|memory| memory.bytes() >= bytes);
            fits.map(|at| free.swap_remove(at))
        };
        let memory = match kept {
            Some(memory) => memory,
            None => self.kv.allocate(bytes)?,
        };
        Ok(Arc::new(RingMemory {
            rings: self.clone(),
            at: DeviceAddress(memory.ptr().0),
            memory: Some(memory),
            is_stuck: AtomicBool::new(false),
        }))
    }

    fn free(&self) -> MutexGuard<'_, Vec<DeviceMemory>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        if may_run() {
            for memory in self.free().drain(..) {
                std::mem::forget(memory);
                self.kv.keep("a ring of a communicator");
            }
        }
    }
}

/// One ring. It comes free with the last user: the communicator, the copies into it, and the frames that wait in it.
pub(super) struct RingMemory {
    rings: Arc<Rings>,
    at: DeviceAddress,
    /// Always there until the drop.
    memory: Option<DeviceMemory>,
    /// A copy did not end in time and may still write into it or read from it.
    is_stuck: AtomicBool,
}

impl RingMemory {
    /// Its first byte.
    pub fn at(&self) -> DeviceAddress {
        self.at
    }

    pub fn kv(&self) -> &Arc<DeviceKv> {
        &self.rings.kv
    }

    /// It is never used again.
    pub fn note_stuck(&self) {
        self.is_stuck.store(true, Ordering::SeqCst);
    }
}

impl Debug for RingMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingMemory").finish_non_exhaustive()
    }
}

impl Drop for RingMemory {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        if self.is_stuck.load(Ordering::SeqCst) {
            std::mem::forget(memory);
            self.rings.kv.keep("a ring of a communicator");
        } else {
            self.rings.free().push(memory);
        }
    }
}
