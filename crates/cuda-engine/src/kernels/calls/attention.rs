//! Calls of both kernels of attention, and the paged KV that they read.

use super::{Call, CallError, in_range, multiple_of};
use crate::kernels::SPLIT_TOKENS;
use crate::kernels::attention_shape::AttentionShape;
use crate::kernels::driver::DevicePtr;
use crate::kernels::table::KernelId;

/// One layer of the pool, and the places of a step's rows in it.
#[derive(Clone, Copy, Debug)]
pub struct PagedKv {
    pub pool: DevicePtr,
    /// Of one block over all layers.
    pub block_bytes: u64,
    /// From a block's start to the layer.
    pub layer_offset: u64,
    /// `[sequence][table_stride]`, u32.
    pub tables: DevicePtr,
    pub table_stride: u32,
    /// A power of two, 16 to 256.
    pub block_tokens: u32,
    pub kv_heads: u32,
    /// u32 for each row of the step: its sequence, or `PADDING_ROW`.
    pub row_sequence: DevicePtr,
    /// u32 for each row of the step.
    pub row_position: DevicePtr,
}

impl PagedKv {
    /// The six arguments that every kernel over the pool has.
    pub(super) fn add_pool(&self, call: Call) -> Result<Call, CallError> {
        let tokens = u64::from(self.block_tokens);
        in_range(call.kernel, ("tokens of a block", tokens), 256)?;
        multiple_of(call.kernel, ("tokens of a block", tokens), 16)?;
        if !self.block_tokens.is_power_of_two() {
            return Err(CallError::NotMultiple {
                kernel: call.kernel,
                what: "tokens of a block",
                value: tokens,
                of: tokens.next_power_of_two(),
            });
        }
        Ok(call
            .pointer(self.pool)
            .u64(self.block_bytes)
            .u64(self.layer_offset)
            .pointer(self.tables)
            .u32(self.table_stride)
            .u32(self.block_tokens.trailing_zeros()))
    }
}

/// Query rows of one sequence that a block takes together: one entry of the table of tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowTile {
    /// In the step.
    pub first_row: u32,
    /// 1 to `TILE_ROWS`, all of one sequence, at positions that follow each other.
    pub rows: u32,
    pub sequence: u32,
    pub first_position: u32,
}

impl RowTile {
    /// As the kernel reads it.
    pub fn to_bytes(self) -> [u8; 16] {
        let words = [self.first_row, self.rows, self.sequence, self.first_position];
        let mut bytes = [0; 16];
        for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

/// Attention of chunks of prompts. Rows that no tile names are left alone.
#[derive(Clone, Copy, Debug)]
pub struct PrefillAttention {
    pub shape: AttentionShape,
    /// bf16 `[row][head][head dim]`; `out` likewise.
    pub queries: DevicePtr,
    pub out: DevicePtr,
    /// `RowTile`s.
    pub tiles: DevicePtr,
    pub tile_count: u32,
    pub kv: PagedKv,
    pub window: Option<u32>,
    pub scale: f32,
    pub softcap: Option<f32>,
}

impl PrefillAttention {
    /// # Errors
    /// [`CallError`].
    pub fn call(&self) -> Result<Call, CallError> {
        let heads = self.kv.kv_heads * self.shape.group;
        let call = Call::new(KernelId::PrefillAttention, [self.tile_count, heads, 1])
            .pointer(self.queries)
            .pointer(self.tiles)
            .pointer(self.out);
        self.kv
            .add_pool(call)?
            .u32(heads)
            .u32(self.kv.kv_heads)
            .u32(self.window.unwrap_or(0))
            .f32(self.scale)
            .f32(self.softcap.unwrap_or(0.0))
            .checked()
    }
}

/// Attention of single rows.
#[derive(Clone, Copy, Debug)]
pub struct DecodeAttention {
    pub shape: AttentionShape,
    /// bf16 `[row][head][head dim]`; `out` likewise.
    pub queries: DevicePtr,
    pub out: DevicePtr,
    /// u32: the step's row of each decode row.
    pub rows: DevicePtr,
    pub row_count: u32,
    /// The longest row of the step has at most so many splits. It does not change a result.
    pub splits: u32,
    /// Scratch memory: see [`Self::scratch_bytes`].
    pub part_out: DevicePtr,
    pub part_state: DevicePtr,
    pub kv: PagedKv,
    pub window: Option<u32>,
    pub scale: f32,
    pub softcap: Option<f32>,
}

impl DecodeAttention {
    /// Splits of a sequence of so many tokens, the row's own included.
    pub fn splits_for(tokens: u32) -> u32 {
        tokens.div_ceil(SPLIT_TOKENS)
    }

    /// Bytes of `part_out` and of `part_state` for so many rows.
    pub fn scratch_bytes(shape: AttentionShape, (rows, kv_heads): (u32, u32), splits: u32) -> (usize, usize) {
        let parts = rows as usize * (kv_heads * shape.group) as usize * splits as usize;
        (parts * shape.head_dim.values() as usize * 4, parts * 2 * 4)
    }

    /// First the splits, then their combination.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn calls(&self) -> Result<[Call; 2], CallError> {
        let heads = self.kv.kv_heads * self.shape.group;
        let grid = [self.splits, self.kv.kv_heads, self.row_count];
        let call = Call::new(KernelId::DecodeAttention, grid)
            .pointer(self.queries)
            .pointer(self.rows)
            .pointer(self.kv.row_sequence)
            .pointer(self.kv.row_position);
        let parts = self
            .kv
            .add_pool(call)?
            .pointer(self.part_out)
            .pointer(self.part_state)
            .u32(self.kv.kv_heads)
            .u32(SPLIT_TOKENS)
            .u32(self.window.unwrap_or(0))
            .f32(self.scale)
            .f32(self.softcap.unwrap_or(0.0));
        let combine = Call::new(KernelId::DecodeCombine, [heads, self.row_count, 1])
            .pointer(self.part_out)
            .pointer(self.part_state)
            .pointer(self.rows)
            .pointer(self.kv.row_sequence)
            .pointer(self.kv.row_position)
            .pointer(self.out)
            .u32(self.splits)
            .u32(SPLIT_TOKENS)
            .u32(self.window.unwrap_or(0));
        Ok([parts.checked()?, combine.checked()?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_attention_are_those_of_the_table() {
        let at = DevicePtr(4096);
        let shape = AttentionShape::new(64, 9, 3).unwrap();
        let mut kv = PagedKv {
            pool: at,
            block_bytes: 1 << 20,
            layer_offset: 0,
            tables: at,
            table_stride: 8,
            block_tokens: 16,
            kv_heads: 3,
            row_sequence: at,
            row_position: at,
        };
        let decode = |kv| DecodeAttention {
            shape,
            queries: at,
            out: at,
            rows: at,
            row_count: 2,
            splits: DecodeAttention::splits_for(257),
            part_out: at,
            part_state: at,
            kv,
            window: None,
            scale: 0.125,
            softcap: Some(50.0),
        };
        let [parts, combine] = decode(kv).calls().unwrap();
        assert_eq!((parts.grid, combine.grid), ([2, 3, 2], [9, 2, 1]));
        assert_eq!(
            DecodeAttention::scratch_bytes(shape, (2, 3), 2),
            (2 * 9 * 2 * 64 * 4, 2 * 9 * 2 * 8)
        );
        for bad in [0, 8, 48, 512] {
            kv.block_tokens = bad;
            assert!(decode(kv).calls().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_tile_is_four_words() {
        let tile = RowTile {
            first_row: 1,
            rows: 2,
            sequence: 3,
            first_position: 258,
        };
        assert_eq!(tile.to_bytes(), [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 2, 1, 0, 0]);
    }
}
