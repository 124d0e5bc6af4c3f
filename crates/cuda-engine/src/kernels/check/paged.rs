//! A pool of KV blocks for the checks: several sequences whose blocks lie in no order, in the second of two layers.

use half::bf16;

use super::Run;
use super::data::u32_bytes;
use crate::kernels::PADDING_ROW;
use crate::kernels::attention_shape::AttentionShape;
use crate::kernels::calls::PagedKv;
use crate::kernels::compile::KernelError;
use crate::kernels::driver::DeviceMemory;
use crate::kernels::shapes::AttentionCase;

const LAYERS: usize = 2;
const LAYER: usize = 1;
/// Blocks that belong to nobody.
const SPARE_BLOCKS: usize = 3;

/// The host's copy of the pool, and where everything is.
pub(super) struct Paged {
    pub case: AttentionCase,
    pub shape: AttentionShape,
    /// bf16 bits.
    pub pool: Vec<u16>,
    /// `[sequence][stride]`.
    tables: Vec<u32>,
    stride: usize,
    /// Rows of the step, sequence by sequence, and a padding row at the end.
    pub row_sequence: Vec<u32>,
    pub row_position: Vec<u32>,
}

/// The same on the device.
pub(super) struct OnDevice {
    pub pool: DeviceMemory,
    tables: DeviceMemory,
    row_sequence: DeviceMemory,
    row_position: DeviceMemory,
}

impl Paged {
    /// Every value of the pool is `fill` at first.
    pub(super) fn new(run: &mut Run<'_, '_>, case: AttentionCase, fill: f32) -> Self {
        let block_tokens = case.block_tokens;
        let blocks_of = |(prefix, rows): &(u32, u32)| (prefix + rows).div_ceil(block_tokens) as usize;
        let stride = case.sequences.iter().map(blocks_of).max().unwrap_or(1);
        let block_count = case.sequences.iter().map(blocks_of).sum::<usize>() + SPARE_BLOCKS;
        let mut ids: Vec<u32> = (0..block_count as u32).collect();
        run.random.shuffle(&mut ids);
        let mut ids = ids.into_iter();
        let mut tables = Vec::new();
        let (mut row_sequence, mut row_position) = (Vec::new(), Vec::new());
        for (index, (prefix, rows)) in case.sequences.iter().enumerate() {
            let owned = blocks_of(&(*prefix, *rows));
            tables.extend(ids.by_ref().take(owned));
            // A kernel that looks behind a sequence's blocks reads far outside the pool.
            tables.extend(std::iter::repeat_n(u32::MAX / 2, stride - owned));
            row_sequence.extend(std::iter::repeat_n(index as u32, *rows as usize));
            row_position.extend(*prefix..prefix + rows);
        }
        row_sequence.push(PADDING_ROW);
        row_position.push(0);
        let values = block_count * LAYERS * 2 * case.kv_heads * block_tokens as usize * case.head_dim;
        Self {
            case,
            // The table of shapes has only such as there are kernels for.
            shape: AttentionShape::new(case.head_dim, case.group * case.kv_heads, case.kv_heads)
                .expect("the table of shapes names groups that have kernels"),
            pool: vec![bf16::from_f32(fill).to_bits(); values],
            tables,
            stride,
            row_sequence,
            row_position,
        }
    }

    pub(super) fn heads(&self) -> usize {
        self.case.group * self.case.kv_heads
    }

    fn head_values(&self) -> usize {
        self.case.block_tokens as usize * self.case.head_dim
    }

    fn layer_values(&self) -> usize {
        2 * self.case.kv_heads * self.head_values()
    }

    /// Where a token's keys in a head begin; its values are behind those of all heads' keys.
    fn keys_at(&self, sequence: usize, position: usize, kv_head: usize) -> usize {
        let block_tokens = self.case.block_tokens as usize;
        let block = self.tables[sequence * self.stride + position / block_tokens] as usize;
        let layer = block * LAYERS + LAYER;
        layer * self.layer_values() + kv_head * self.head_values() + position % block_tokens * self.case.head_dim
    }

    /// The range of a token's keys, or of its values.
    pub(super) fn range(
        &self,
        (sequence, position): (usize, usize),
        kv_head: usize,
        is_value: bool,
    ) -> std::ops::Range<usize> {
        let values = if is_value { self.layer_values() / 2 } else { 0 };
        let start = self.keys_at(sequence, position, kv_head) + values;
        start..start + self.case.head_dim
    }

    /// Keys, or values, of the first tokens of a sequence.
    pub(super) fn read(&self, (sequence, tokens): (usize, usize), kv_head: usize, is_value: bool) -> Vec<Vec<f64>> {
        let token = |position| {
            let values = &self.pool[self.range((sequence, position), kv_head, is_value)];
            values.iter().map(|bits| bf16::from_bits(*bits).to_f64()).collect()
        };
        (0..tokens).map(token).collect()
    }

    pub(super) fn write(&mut self, token: (usize, usize), (kv_head, is_value): (usize, bool), values: &[f32]) {
        let range = self.range(token, kv_head, is_value);
        for (to, value) in self.pool[range].iter_mut().zip(values) {
            *to = bf16::from_f32(*value).to_bits();
        }
    }

    pub(super) fn pool_bytes(&self) -> Vec<u8> {
        self.pool.iter().flat_map(|bits| bits.to_le_bytes()).collect()
    }

    pub(super) fn upload(&self, run: &Run<'_, '_>) -> Result<OnDevice, KernelError> {
        Ok(OnDevice {
            pool: run.upload(&self.pool_bytes())?,
            tables: run.upload(&u32_bytes(&self.tables))?,
            row_sequence: run.upload(&u32_bytes(&self.row_sequence))?,
            row_position: run.upload(&u32_bytes(&self.row_position))?,
        })
    }

    pub(super) fn kv(&self, device: &OnDevice) -> PagedKv {
        let layer_bytes = self.layer_values() as u64 * 2;
        PagedKv {
            pool: device.pool.ptr(),
            block_bytes: LAYERS as u64 * layer_bytes,
            layer_offset: LAYER as u64 * layer_bytes,
            tables: device.tables.ptr(),
            table_stride: self.stride as u32,
            block_tokens: self.case.block_tokens,
            kv_heads: self.case.kv_heads as u32,
            row_sequence: device.row_sequence.ptr(),
            row_position: device.row_position.ptr(),
        }
    }

    /// For people.
    pub(super) fn label(&self) -> String {
        let case = &self.case;
        format!(
            "{}/{} heads of {}, sequences {:?}, window {:?}, cap {:?}, {:?}",
            self.heads(),
            case.kv_heads,
            case.head_dim,
            case.sequences,
            case.window,
            case.softcap,
            case.scores
        )
    }
}
