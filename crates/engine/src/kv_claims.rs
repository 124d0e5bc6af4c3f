//! Who may use which KV block: any number of readers or one writer, by one word for each block.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use serving_core::ids::BlockId;

use crate::{KvAccessError, KvGeometry, KvMemory, SequenceRows};

/// Claim word of a block with a writer; any other value counts readers.
const WRITER: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

#[derive(Debug)]
pub(crate) struct Claims(Box<[AtomicU32]>);

impl Claims {
    pub(crate) fn new(block_count: u32) -> Self {
        Self((0..block_count).map(|_| AtomicU32::new(0)).collect())
    }

    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }

    /// Holds a block until the result is dropped.
    pub(crate) fn hold(&self, block: BlockId, access: Access) -> Result<BlockClaim<'_>, KvAccessError> {
        self.take(block, access)?;
        let claims = self;
        Ok(BlockClaim { claims, block, access })
    }

    fn take(&self, block: BlockId, access: Access) -> Result<(), KvAccessError> {
        let word = self.0.get(block.0 as usize).ok_or(KvAccessError::NoSuchBlock {
            block,
            block_count: self.count(),
        })?;
        let taken = match access {
            Access::Write => word
                .compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed)
                .is_ok(),
            // The last count below WRITER stays unused, so that readers can never add up to a writer.
            Access::Read => word
                .fetch_update(Ordering::Acquire, Ordering::Relaxed, |count| {
                    (count < WRITER - 1).then(|| count + 1)
                })
                .is_ok(),
        };
        if taken {
            Ok(())
        } else {
            Err(KvAccessError::Busy { block })
        }
    }

    fn release(&self, block: BlockId, access: Access) {
        let Some(word) = self.0.get(block.0 as usize) else {
            return;
        };
        match access {
            Access::Write => word.store(0, Ordering::Release),
            Access::Read => {
                word.fetch_sub(1, Ordering::Release);
            }
        }
    }
}

/// One claim outside a step.
pub(crate) struct BlockClaim<'a> {
    claims: &'a Claims,
    block: BlockId,
    access: Access,
}

impl Drop for BlockClaim<'_> {
    fn drop(&mut self) {
        self.claims.release(self.block, self.access);
    }
}

/// The blocks of a batch in a fixed order, each with the step's kind of access.
fn step_blocks<'a>(
    geometry: &KvGeometry,
    batch: &'a [SequenceRows<'a>],
) -> impl Iterator<Item = (BlockId, Access)> + use<'a> {
    let geometry = *geometry;
    batch.iter().flat_map(move |rows| {
        let used = geometry.blocks_for(rows.end_position()) as usize;
        let first_written = (rows.first_position / geometry.block_tokens) as usize;
        let access = move |index| match index < first_written {
            true => Access::Read,
            false => Access::Write,
        };
        let blocks = rows.block_table.iter().take(used).enumerate();
        blocks.map(move |(index, block)| (*block, access(index)))
    })
}

/// The claims of one step at a time. They end when the step has completed, or when the value is dropped.
#[derive(Debug)]
pub struct StepClaim {
    kv: Arc<KvMemory>,
    /// The buffer is used again by the next step.
    held: Vec<(BlockId, Access)>,
}

impl StepClaim {
    /// Holds nothing yet.
    pub fn new(kv: Arc<KvMemory>) -> Self {
        let held = Vec::with_capacity(kv.block_count() as usize);
        Self { kv, held }
    }

    /// Claims every block that a batch reads or writes. The batch's tables must cover its positions.
    ///
    /// # Errors
    /// A block is held by somebody else, or does not exist: nothing is held then.
    pub fn take(&mut self, batch: &[SequenceRows<'_>]) -> Result<(), KvAccessError> {
        self.release();
        for (block, access) in step_blocks(self.kv.geometry(), batch) {
            if let Err(error) = self.kv.claims().take(block, access) {
                self.release();
                return Err(error);
            }
            self.held.push((block, access));
        }
        Ok(())
    }

    /// The step has completed.
    pub fn release(&mut self) {
        for (block, access) in self.held.drain(..) {
            self.kv.claims().release(block, access);
        }
    }

    /// Start of a block in host memory, for kernels.
    ///
    /// Reading it is sound for every block of the claim; writing only for rows at the batch's own positions. The
    /// threads of a step must order a row's write before its reads themselves.
    pub(crate) fn block_pointer(&self, block: BlockId) -> Result<*mut u8, KvAccessError> {
        self.kv.host_pointer(block)
    }

    /// A block that the step reads or writes.
    pub(crate) fn block(&self, block: BlockId) -> Result<&[u8], KvAccessError> {
        let start = self.block_pointer(block)?;
        if !self.held.iter().any(|held| held.0 == block) {
            return Err(KvAccessError::Busy { block });
        }
        // SAFETY: this step holds a claim on the block, and `&self` keeps our own writes away.
        Ok(unsafe { std::slice::from_raw_parts(start, self.kv.geometry().block_bytes()) })
    }

    /// A block that the step writes.
    pub(crate) fn block_mut(&mut self, block: BlockId) -> Result<&mut [u8], KvAccessError> {
        let start = self.block_pointer(block)?;
        if !self.held.contains(&(block, Access::Write)) {
            return Err(KvAccessError::Busy { block });
        }
        // SAFETY: this step holds the block's writer claim, and `&mut self` keeps our own reads away.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, self.kv.geometry().block_bytes()) })
    }
}

impl Drop for StepClaim {
    fn drop(&mut self) {
        self.release();
    }
}
