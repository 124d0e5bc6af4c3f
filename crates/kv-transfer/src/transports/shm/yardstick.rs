//! The cost of one copy between two processes: the yardstick of `baton bench transfer`.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use serving_core::ids::BlockId;

use super::fault::ShmFault;
use super::pool::{PoolTerms, SendPool};
use crate::link::NoPlace;
use crate::receiver::PoolShape;

/// Another process's pool, only for copying blocks into it: no frames, no checks, no sums.
#[derive(Debug)]
pub struct Yardstick(Arc<SendPool>);

impl Yardstick {
    /// Maps a pool.
    ///
    /// # Errors
    /// Memory that is not what the shape says, or can change its size.
    pub fn map(memory: &OwnedFd, shape: PoolShape) -> Result<Self, ShmFault> {
        let terms = PoolTerms {
            shape,
            frames_in_flight: 1,
            frame_bytes_max: 1,
            has_checksums: false,
        };
        SendPool::map(memory, terms).map(Self)
    }

    /// Copies a whole block. Bytes beyond a block are left out. `None` when the pool has no such block.
    pub fn copy(&self, block: BlockId, bytes: &[u8]) -> Option<()> {
        let layers: Range<u32> = 0..self.0.layers();
        let copied = self.0.write((block, &layers), |place| {
            let length = place.len().min(bytes.len());
            place[..length].copy_from_slice(&bytes[..length]);
        });
        copied
            .map_err(|fault: NoPlace| tracing::debug!(%fault, "not copied"))
            .ok()
    }
}
