//! The place of a frame's bytes at the sender: a slot of the pair's ring, or the block's own place in the decode node's
//! pool.

use std::ops::Range;
use std::sync::Arc;

use serving_core::ids::BlockId;
use thiserror::Error;

use super::credits::Credit;
use super::pool::SendPool;
use super::ring::SendRing;

/// Why bytes have no place. The transfer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum NoPlace {
    #[error("the pair has ended: its pool is mapped no more")]
    Unmapped,
    #[error("the place is not inside the decode node's pool")]
    Outside,
    #[error("another transfer of this node writes the same block")]
    Taken,
}

/// Room for one frame. Its index is free again when it is dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    credit: Credit,
    place: Place,
}

#[derive(Debug)]
enum Place {
    Ring(Arc<SendRing>),
    Pool {
        pool: Arc<SendPool>,
        block: BlockId,
        layers: Range<u32>,
    },
}

impl Slot {
    pub(super) fn in_ring(credit: Credit, ring: &Arc<SendRing>) -> Self {
        let place = Place::Ring(ring.clone());
        Self { credit, place }
    }

    pub(super) fn in_pool(credit: Credit, pool: &Arc<SendPool>, (block, layers): (BlockId, Range<u32>)) -> Self {
        let pool = pool.clone();
        let place = Place::Pool { pool, block, layers };
        Self { credit, place }
    }

    pub fn index(&self) -> u32 {
        self.credit.index()
    }

    /// Gives `write` the first `bytes` of the place, or as many as there are.
    pub fn fill<R>(&mut self, bytes: usize, write: impl FnOnce(&mut [u8]) -> R) -> Result<R, NoPlace> {
        match &self.place {
            Place::Ring(ring) => Ok(write(ring.slot_of(&mut self.credit, bytes))),
            Place::Pool { pool, block, layers } => pool.write((*block, layers), |place| {
                let end = bytes.min(place.len());
                write(&mut place[..end])
            }),
        }
    }

    /// More room for the same place, for a tap that makes two frames of one.
    pub fn another(&self) -> Option<Self> {
        Some(match &self.place {
            Place::Ring(ring) => ring.try_slot()?,
            Place::Pool { pool, block, layers } => pool.try_place((*block, layers.clone()))?,
        })
    }
}
