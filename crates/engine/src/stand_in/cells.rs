//! What a stand-in writes into KV blocks and reads from them, wherever the blocks are.

use serving_core::ids::{BlockId, TokenId};
use xxhash_rust::xxh3::Xxh3;

use crate::kv_memory::hash_rows;
use crate::{KvAccessError, KvGeometry, LogitsSink, LogitsWanted, SequenceRows};

/// The blocks of a step, wherever they are.
pub(crate) trait BlockBytes {
    fn bytes(&self, block: BlockId) -> Result<&[u8], KvAccessError>;
    fn bytes_mut(&mut self, block: BlockId) -> Result<&mut [u8], KvAccessError>;
}

/// Reads and writes the chained KV content.
#[derive(Clone, Copy)]
pub(crate) struct Cells {
    pub geometry: KvGeometry,
    pub seed: u64,
}

impl Cells {
    /// Writes the KV of every row of a batch; gives back how many rows there are.
    pub(crate) fn write_rows(
        &self,
        blocks: &mut impl BlockBytes,
        batch: &[SequenceRows<'_>],
    ) -> Result<u64, KvAccessError> {
        let mut count = 0;
        for rows in batch {
            for (token, position) in rows.tokens.iter().zip(rows.first_position..) {
                self.write(blocks, rows.block_table, (*token, position))?;
                count += 1;
            }
        }
        Ok(count)
    }

    /// Gives the logits of every row that asked for them to `sink`. `logits` is scratch memory, one value for each token of the
    /// vocabulary.
    pub(crate) fn logits(
        &self,
        blocks: &impl BlockBytes,
        batch: &[SequenceRows<'_>],
        logits: &mut [f32],
        sink: &mut dyn LogitsSink,
    ) -> Result<(), KvAccessError> {
        for (sequence, rows) in batch.iter().enumerate() {
            let first = match rows.logits {
                LogitsWanted::None => continue,
                LogitsWanted::Last => rows.end_position() - 1,
                LogitsWanted::All => rows.first_position,
            };
            for position in first..rows.end_position() {
                let digest = self.digest(blocks, rows.block_table, position)?;
                fill_logits(digest, logits);
                sink.row(sequence, position, logits);
            }
        }
        Ok(())
    }

    fn place(&self, table: &[BlockId], position: u32) -> (BlockId, usize) {
        let block_tokens = self.geometry.block_tokens;
        (
            table[(position / block_tokens) as usize],
            (position % block_tokens) as usize * self.geometry.row_bytes(),
        )
    }

    /// Writes the rows of one position in every layer and head.
    fn write(
        &self,
        blocks: &mut impl BlockBytes,
        table: &[BlockId],
        (token, position): (TokenId, u32),
    ) -> Result<(), KvAccessError> {
        let mut hasher = Xxh3::with_seed(self.seed);
        hasher.update(&token.0.to_le_bytes());
        hasher.update(&position.to_le_bytes());
        if let Some(before) = position.checked_sub(1) {
            let (block, offset) = self.place(table, before);
            for head in blocks.bytes(block)?.chunks_exact(self.geometry.head_bytes()) {
                hasher.update(&head[offset..offset + self.geometry.row_bytes()]);
            }
        }
        let mut stream = hasher.digest();
        let (block, offset) = self.place(table, position);
        for head in blocks.bytes_mut(block)?.chunks_exact_mut(self.geometry.head_bytes()) {
            for out in head[offset..offset + self.geometry.row_bytes()].chunks_mut(8) {
                let bytes = next(&mut stream).to_le_bytes();
                out.copy_from_slice(&bytes[..out.len()]);
            }
        }
        Ok(())
    }

    /// Hash of every KV byte of positions 0..=position.
    fn digest(&self, blocks: &impl BlockBytes, table: &[BlockId], position: u32) -> Result<u64, KvAccessError> {
        let mut hasher = Xxh3::with_seed(self.seed);
        let mut left = position + 1;
        for block in &table[..self.geometry.blocks_for(left) as usize] {
            let valid = left.min(self.geometry.block_tokens);
            hasher.update(&hash_rows(&self.geometry, blocks.bytes(*block)?, valid).to_le_bytes());
            left -= valid;
        }
        Ok(hasher.digest())
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014): small and well mixed.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Values in -8..8: a softmax over them is neither flat nor decided, so every sampling setting has something to do.
fn fill_logits(digest: u64, logits: &mut [f32]) {
    let mut stream = digest;
    for value in logits {
        *value = (next(&mut stream) >> 40) as f32 / (1u32 << 20) as f32 - 8.0;
    }
}
