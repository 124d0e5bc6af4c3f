//! Slots that the decode node has. A frame's bytes have moved when its slot comes back.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::link::queue::{Pace, QueuedKv};

/// Slots that the receiver has: at most every slot of the ring. The bytes in a slot have moved when it is given back.
#[derive(Debug, Default)]
pub(super) struct LentSlots(Mutex<Lent>);

#[derive(Debug, Default)]
struct Lent {
    slots: BTreeMap<u32, (QueuedKv, Instant)>,
    pace: Pace,
}

impl LentSlots {
    fn lock(&self) -> MutexGuard<'_, Lent> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn lend(&self, kv: QueuedKv) -> u32 {
        let index = kv.place.index();
        self.lock().slots.insert(index, (kv, Instant::now()));
        index
    }

    /// False when the slot was not lent.
    pub fn take_back(&self, slot: u32) -> bool {
        let Lent { slots, pace } = &mut *self.lock();
        let Some((kv, lent_at)) = slots.remove(&slot) else {
            return false;
        };
        kv.moved(pace, lent_at);
        true
    }
}
