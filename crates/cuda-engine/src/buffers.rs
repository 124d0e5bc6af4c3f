//! All device memory of a step besides weights and KV: one allocation, made at the opening and zeroed, so that rows of padding
//! are never without a value. Addresses are fixed, because graphs keep them.

use cuda::{Device, DeviceMemory, DevicePtr, Stream};

use crate::arena::Arena;
use crate::error::WorkError;
use crate::kernels::calls::{DRAWN_BYTES, DecodeAttention};
use crate::model::{Capacity, ModelPlan};

/// Rows of logits at a time. 64 rows of a vocabulary of 128,256 are 33 MB.
pub(crate) const LOGITS_ROWS: u32 = 64;
/// Tokens that a step draws on the device at most. Rows beyond it are drawn on the host.
pub(crate) const DRAWS_MAX: usize = 8_192;
/// cuBLASLt's workspace (NVIDIA's default for Hopper: cuBLAS documentation, workspace).
const WORKSPACE_BYTES: usize = 32 << 20;

const BF16: usize = 2;
const F32: usize = 4;

/// Addresses. Those of rows are `[row][..]`.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// f32: the residual stream.
    pub hidden: DevicePtr,
    /// bf16: the normed stream, which the matrices read.
    pub normed: DevicePtr,
    /// f32: queries, keys and values.
    pub qkv: DevicePtr,
    /// bf16.
    pub queries: DevicePtr,
    /// bf16: the result of attention.
    pub attention: DevicePtr,
    /// f32: what is normed before it is added to the stream.
    pub branch: DevicePtr,
    /// bf16: both halves of the gated unit.
    pub gate_up: DevicePtr,
    /// bf16: the unit's result.
    pub ffn: DevicePtr,
    /// Cosines and sines of each RoPE.
    pub angles: Vec<DevicePtr>,
    /// Parts of decode attention.
    pub part_out: DevicePtr,
    pub part_state: DevicePtr,
    /// f32: rows whose logits are wanted, as many as [`LOGITS_ROWS`], as all below.
    pub gathered: DevicePtr,
    /// bf16.
    pub head_input: DevicePtr,
    /// f32.
    pub logits: DevicePtr,
    /// u32.
    pub status: DevicePtr,
    /// [`DRAWS_MAX`] records.
    pub drawn: DevicePtr,
    /// The tables of a step.
    pub tables: DevicePtr,
    pub workspace: DevicePtr,
    /// u32 for each row. They stay zero: the row of a bias.
    pub zeros: DevicePtr,
}

/// What the places are made for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BufferSizes {
    pub capacity: Capacity,
    pub table_bytes: usize,
    pub workspace_bytes: usize,
}

impl BufferSizes {
    /// `has_library`: cuBLASLt may compute products.
    pub(crate) fn new(capacity: Capacity, table_bytes: usize, has_library: bool) -> Self {
        Self {
            capacity,
            table_bytes,
            workspace_bytes: if has_library { WORKSPACE_BYTES } else { 0 },
        }
    }
}

impl Places {
    /// The places in an allocation that begins at `base`, and its size.
    fn new(model: &ModelPlan, sizes: &BufferSizes, base: DevicePtr) -> (Self, usize) {
        let mut arena = Arena::default();
        let mut place = |bytes: usize| arena.place(bytes).of(base);
        let capacity = sizes.capacity;
        let (rows, logits_rows) = (capacity.rows as usize, LOGITS_ROWS as usize);
        let [hidden, query, ffn, vocab] = [model.hidden, model.query, model.ffn, model.vocab].map(|size| size as usize);
        let (part_out, part_state) = match capacity.parts {
            0 => (0, 0),
            parts => DecodeAttention::scratch_bytes(model.shape, (1, model.kv_heads), parts),
        };
        // A turn is a cosine and a sine.
        let angles = |pairs: u32| rows * pairs as usize * 2 * F32;
        let places = Self {
            hidden: place(rows * hidden * F32),
            normed: place(rows * hidden * BF16),
            qkv: place(rows * model.qkv() as usize * F32),
            queries: place(rows * query * BF16),
            attention: place(rows * query * BF16),
            branch: place(rows * hidden * F32),
            gate_up: place(rows * 2 * ffn * BF16),
            ffn: place(rows * ffn * BF16),
            angles: model.ropes.iter().map(|rope| place(angles(rope.pairs()))).collect(),
            part_out: place(part_out),
            part_state: place(part_state),
            gathered: place(logits_rows * hidden * F32),
            head_input: place(logits_rows * hidden * BF16),
            logits: place(logits_rows * vocab * F32),
            status: place(logits_rows * size_of::<u32>()),
            drawn: place(DRAWS_MAX * DRAWN_BYTES),
            tables: place(sizes.table_bytes),
            workspace: place(sizes.workspace_bytes),
            zeros: place(rows * size_of::<u32>()),
        };
        (places, arena.bytes())
    }

    /// Of the one allocation.
    pub(crate) fn bytes(model: &ModelPlan, sizes: &BufferSizes) -> usize {
        Self::new(model, sizes, DevicePtr(0)).1
    }
}

#[derive(Debug)]
pub(crate) struct Buffers {
    memory: DeviceMemory,
    pub places: Places,
    pub workspace_bytes: usize,
}

impl Buffers {
    /// The zeros are there for everything that the stream is given afterwards.
    pub(crate) fn new(
        (device, stream): (&Device, &Stream),
        model: &ModelPlan,
        sizes: &BufferSizes,
    ) -> Result<Self, WorkError> {
        let memory = device.allocate(Places::bytes(model, sizes))?;
        stream.fill(memory.ptr(), 0, memory.bytes())?;
        let (places, _) = Places::new(model, sizes, memory.ptr());
        Ok(Self {
            memory,
            places,
            workspace_bytes: sizes.workspace_bytes,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.memory.bytes()
    }
}

#[cfg(test)]
mod tests {
    use engine::EngineLimits;

    use super::*;
    use crate::model::tests::plan;
    use crate::options::Mode;

    #[test]
    fn the_size_is_known_before_the_memory_is_made() {
        let model = plan();
        let limits = EngineLimits {
            max_batch_tokens: 512,
            max_sequences: 16,
        };
        let capacity = Capacity::of(limits, (model.context, 16), Mode::Fast).unwrap();
        let sizes = BufferSizes::new(capacity, 1_000, true);
        let (places, bytes) = Places::new(&model, &sizes, DevicePtr(0x10_0000));
        assert_eq!(bytes, Places::bytes(&model, &sizes));
        assert_eq!(places.hidden, DevicePtr(0x10_0000));
        assert_eq!(places.normed.0 - places.hidden.0, 512 * 576 * 4);
        let without = BufferSizes::new(capacity, 1_000, false);
        assert_eq!(bytes - Places::bytes(&model, &without), WORKSPACE_BYTES);
    }
}
