//! Calls of the kernels that work row by row: embedding, norms, RoPE, gate, logits.

use super::attention::PagedKv;
use super::{Call, CallError, in_range, multiple_of};
use crate::kernels::attention_shape::AttentionShape;
use crate::kernels::driver::DevicePtr;
use crate::kernels::table::KernelId;

/// Heads of a block of `rope_write`.
const HEADS_PER_BLOCK: u32 = 4;
/// Columns of a block of the gate.
const GATE_COLUMNS: u32 = 256 * 8;

/// `out[row] = table[tokens[row]] * scale`, f32.
#[derive(Clone, Copy, Debug)]
pub struct Embed {
    pub tokens: DevicePtr,
    pub table: DevicePtr,
    pub out: DevicePtr,
    pub rows: u32,
    pub columns: u32,
    pub scale: f32,
}

impl Embed {
    /// # Errors
    /// [`CallError`], as of every call here.
    pub fn call(&self) -> Result<Call, CallError> {
        multiple_of(KernelId::Embed, ("columns", self.columns.into()), 8)?;
        Call::new(KernelId::Embed, [self.rows, 1, 1])
            .pointer(self.tokens)
            .pointer(self.table)
            .pointer(self.out)
            .u32(self.columns)
            .f32(self.scale)
            .checked()
    }
}

/// `out = norm(x) * weight`, from f32 to bf16.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    pub x: DevicePtr,
    pub weight: DevicePtr,
    pub out: DevicePtr,
    pub rows: u32,
    pub columns: u32,
    pub epsilon: f32,
}

impl RmsNorm {
    /// # Errors
    /// [`CallError`].
    pub fn call(&self) -> Result<Call, CallError> {
        multiple_of(KernelId::RmsNorm, ("columns", self.columns.into()), 4)?;
        Call::new(KernelId::RmsNorm, [self.rows, 1, 1])
            .pointer(self.x)
            .pointer(self.weight)
            .pointer(self.out)
            .u32(self.columns)
            .f32(self.epsilon)
            .checked()
    }
}

/// `stream += branch`, normed first when it has a weight; then `out = norm(stream) * weight`.
#[derive(Clone, Copy, Debug)]
pub struct AddRmsNorm {
    pub stream: DevicePtr,
    pub branch: DevicePtr,
    pub branch_weight: Option<DevicePtr>,
    pub weight: DevicePtr,
    pub out: DevicePtr,
    pub rows: u32,
    pub columns: u32,
    pub epsilon: f32,
}

impl AddRmsNorm {
    /// # Errors
    /// [`CallError`].
    pub fn call(&self) -> Result<Call, CallError> {
        multiple_of(KernelId::AddRmsNorm, ("columns", self.columns.into()), 4)?;
        Call::new(KernelId::AddRmsNorm, [self.rows, 1, 1])
            .pointer(self.stream)
            .pointer(self.branch)
            .optional(self.branch_weight)
            .pointer(self.weight)
            .pointer(self.out)
            .u32(self.columns)
            .f32(self.epsilon)
            .checked()
    }
}

/// Which two numbers of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// `(2i, 2i + 1)`.
    Neighbours,
    /// `(i, i + pairs)`.
    Halves,
}

/// Cosines and sines of a step's rows: `angles[row][pair]`, two f32 each.
#[derive(Clone, Copy, Debug)]
pub struct RopeAngles {
    pub row_position: DevicePtr,
    /// f64 for each pair: the angle at position 1, with the model's scaling.
    pub speeds: DevicePtr,
    pub angles: DevicePtr,
    pub rows: u32,
    pub pairs: u32,
    pub magnitude: f32,
}

impl RopeAngles {
    /// # Errors
    /// [`CallError`].
    pub fn call(&self) -> Result<Call, CallError> {
        let count = u64::from(self.rows) * u64::from(self.pairs);
        in_range(KernelId::RopeAngles, ("angles", count), (u32::MAX - 127).into())?;
        Call::new(KernelId::RopeAngles, [count.div_ceil(128) as u32, 1, 1])
            .pointer(self.row_position)
            .pointer(self.speeds)
            .pointer(self.angles)
            .u32(self.pairs)
            .u32(count as u32)
            .f32(self.magnitude)
            .checked()
    }
}

/// From `qkv[row][queries, keys, values]` in f32 to bf16 queries, and keys and values in the pool.
#[derive(Clone, Copy, Debug)]
pub struct RopeWrite {
    pub shape: AttentionShape,
    pub qkv: DevicePtr,
    pub query_norm: Option<DevicePtr>,
    pub key_norm: Option<DevicePtr>,
    pub angles: DevicePtr,
    pub queries: DevicePtr,
    pub kv: PagedKv,
    pub rows: u32,
    /// At most half a head. Values after the last pair stay.
    pub rope_pairs: u32,
    pub kind: RopePairs,
    pub epsilon: f32,
}

impl RopeWrite {
    /// # Errors
    /// [`CallError`].
    pub fn call(&self) -> Result<Call, CallError> {
        let kv_heads = self.kv.kv_heads;
        let heads = kv_heads * self.shape.group;
        let most = self.shape.head_dim.values() / 2;
        in_range(KernelId::RopeWrite, ("pairs", self.rope_pairs.into()), most.into())?;
        let groups = (heads + 2 * kv_heads).div_ceil(HEADS_PER_BLOCK);
        let call = Call::new(KernelId::RopeWrite, [self.rows, groups, 1])
            .pointer(self.qkv)
            .optional(self.query_norm)
            .optional(self.key_norm)
            .pointer(self.angles)
            .pointer(self.kv.row_sequence)
            .pointer(self.kv.row_position)
            .pointer(self.queries);
        self.kv
            .add_pool(call)?
            .u32(heads)
            .u32(kv_heads)
            .u32(self.rope_pairs)
            .u32((self.kind == RopePairs::Halves).into())
            .f32(self.epsilon)
            .checked()
    }
}

/// The function of the gated unit's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateFunction {
    Silu,
    GeluTanh,
}

/// `out = function(gate) * up` for rows of `[gates, ups]`, bf16.
#[derive(Clone, Copy, Debug)]
pub struct Gate {
    pub function: GateFunction,
    pub gate_up: DevicePtr,
    pub out: DevicePtr,
    pub rows: u32,
    pub columns: u32,
}

impl Gate {
    /// # Errors
    /// [`CallError`].
    pub fn call(&self) -> Result<Call, CallError> {
        let kernel = match self.function {
            GateFunction::Silu => KernelId::GateSilu,
            GateFunction::GeluTanh => KernelId::GateGelu,
        };
        multiple_of(kernel, ("columns", self.columns.into()), 8)?;
        Call::new(kernel, [self.rows, self.columns.div_ceil(GATE_COLUMNS), 1])
            .pointer(self.gate_up)
            .pointer(self.out)
            .u32(self.columns)
            .checked()
    }
}

/// `out[i] = x[rows[i]]`, f32: the rows whose logits are wanted.
#[derive(Clone, Copy, Debug)]
pub struct GatherRows {
    pub x: DevicePtr,
    pub rows: DevicePtr,
    pub out: DevicePtr,
    pub count: u32,
    pub columns: u32,
}

impl GatherRows {
    /// # Errors
    /// [`CallError`].
    pub fn call(&self) -> Result<Call, CallError> {
        multiple_of(KernelId::GatherRows, ("columns", self.columns.into()), 4)?;
        Call::new(KernelId::GatherRows, [self.count, 1, 1])
            .pointer(self.x)
            .pointer(self.rows)
            .pointer(self.out)
            .u32(self.columns)
            .checked()
    }
}

/// Logits become `cap * tanh(logit / cap)`, in place.
#[derive(Clone, Copy, Debug)]
pub struct CapLogits {
    pub logits: DevicePtr,
    pub count: u64,
    pub cap: f32,
}

impl CapLogits {
    /// # Errors
    /// [`CallError`].
    pub fn call(&self) -> Result<Call, CallError> {
        let most = u64::from(super::GRID_X_MAX) * 256;
        in_range(KernelId::CapLogits, ("logits", self.count), most)?;
        Call::new(KernelId::CapLogits, [self.count.div_ceil(256) as u32, 1, 1])
            .pointer(self.logits)
            .u64(self.count)
            .f32(self.cap)
            .checked()
    }
}
