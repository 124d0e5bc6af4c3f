//! Slots that the decode node has. A frame's bytes have moved when its slot comes back.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::place::Slot;
use crate::pairs::queue::{Gauge, Pace, Room};

/// Slots that the receiver has: at most every slot of the ring.
#[derive(Debug)]
pub(super) struct LentSlots {
    slots: Mutex<(BTreeMap<u32, Lent>, Pace)>,
    gauge: Arc<Gauge>,
}

/// Values that wait until their slot is given back. Only then their bytes have moved.
#[derive(Debug)]
struct Lent {
    _slot: Slot,
    room: Option<Room>,
    moving: Option<Arc<AtomicU64>>,
    lent_at: Instant,
}

impl LentSlots {
    pub fn new(gauge: Arc<Gauge>) -> Arc<Self> {
        let slots = Mutex::default();
        Arc::new(Self { slots, gauge })
    }

    fn lock(&self) -> MutexGuard<'_, (BTreeMap<u32, Lent>, Pace)> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn lend(&self, slot: Slot, lent: (Option<Room>, Option<Arc<AtomicU64>>)) -> u32 {
        let index = slot.index();
        let lent = Lent {
            _slot: slot,
            room: lent.0,
            moving: lent.1,
            lent_at: Instant::now(),
        };
        self.lock().0.insert(index, lent);
        index
    }

    /// False when the slot was not lent.
    pub fn take_back(&self, slot: u32, now: Instant) -> bool {
        let (slots, pace) = &mut *self.lock();
        let Some(lent) = slots.remove(&slot) else {
            return false;
        };
        if let Some(room) = &lent.room {
            self.gauge.taken_bytes.fetch_add(room.bytes, Ordering::Relaxed);
        }
        if let Some(moving) = &lent.moving {
            pace.moved(moving, lent.lent_at, now);
        }
        true
    }
}
