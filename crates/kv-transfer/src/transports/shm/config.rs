//! What a decode node gives to shared memory, and the budget of its rings.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::ring::RingShape;
use crate::trust::DirectOffer;

/// What a decode node gives to shared memory.
#[derive(Clone, Debug)]
pub(super) struct ShmConfig {
    /// KV bytes in flight per pair. Memory that is never used is never taken from the system.
    pub ring_bytes: u64,
    /// The rings of all pairs together. A new pair gets at most half of what is left; when that is less than two slots, it gets
    /// no ring and uses gRPC.
    pub rings_bytes_max: u64,
    /// Largest run of KV bytes in one frame.
    pub slot_bytes: u32,
    /// Senders at the same time. Further senders are refused and use gRPC.
    pub pairs_max: usize,
    /// A sender that has its ring must say hello within this time, or the ring is taken away.
    pub hello_wait: Duration,
    /// This process as its peers see it.
    pub uid: u32,
    /// Where the direct mode is offered too.
    pub direct: Option<DirectOffer>,
}

impl ShmConfig {
    /// For a node whose (block, layer) has `layer_bytes`. A slot has 512 KiB: a block of a small model in one piece, and
    /// two slots fit a core's second-level cache. A ring has 32 MiB, as much as gRPC has in flight.
    pub fn new(layer_bytes: usize) -> Self {
        const SLOT_BYTES: u32 = 512 << 10;
        Self {
            ring_bytes: 32 << 20,
            rings_bytes_max: 128 << 20,
            slot_bytes: u32::try_from(layer_bytes).unwrap_or(u32::MAX).max(SLOT_BYTES),
            pairs_max: 64,
            hello_wait: Duration::from_secs(5),
            uid: rustix::process::geteuid().as_raw(),
            direct: None,
        }
    }

    pub(super) fn shape(&self) -> RingShape {
        let slots = self.ring_bytes / u64::from(self.slot_bytes.max(1));
        RingShape {
            // At least two: one is filled while the other is copied out.
            slots: u32::try_from(slots).unwrap_or(u32::MAX).max(2),
            slot_bytes: self.slot_bytes,
        }
    }
}

/// The slots of all rings of a node.
#[derive(Debug)]
pub(super) struct RingBudget(Arc<Semaphore>);

/// At least two slots: one is filled while the other is copied out.
const RING_SLOTS_MIN: usize = 2;

impl RingBudget {
    pub fn of(config: &ShmConfig) -> Self {
        let slots = config.rings_bytes_max / u64::from(config.slot_bytes.max(1));
        let slots = usize::try_from(slots).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Self(Arc::new(Semaphore::new(slots)))
    }

    /// The shape of one more ring, and its part of the budget. `None` when too little is left.
    pub fn take(&self, wanted: RingShape) -> Option<(RingShape, OwnedSemaphorePermit)> {
        let left = self.0.available_permits();
        let slots = (left / 2).max(RING_SLOTS_MIN).min(wanted.slots as usize);
        let slots = u32::try_from(slots).unwrap_or(u32::MAX);
        let permit = self.0.clone().try_acquire_many_owned(slots).ok()?;
        Some((RingShape { slots, ..wanted }, permit))
    }
}
