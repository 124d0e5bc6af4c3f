//! The arithmetic of the CPU engine, defined once. Two engines with equal ids give equal bits.
//!
//! # Both numerics
//! All floating-point work is IEEE f32 with the default rounding and without fused multiply-add; sums have the order
//! given here, whatever the instruction set, thread, batch or chunk. `exp` is [`crate::math::exp`]. "Tree sum" of 16
//! lanes: add lane i + 8 to lane i, then i + 4, i + 2, i + 1.
//! - **RMS norm**: squares summed in 16 lanes over the row, tree sum, divided by the length, plus epsilon;
//!   `s = 1 / sqrt(that)`; result `(x * s) * weight`.
//! - **Bias**, in architectures that have one: added to a finished output of a matrix.
//! - **RoPE**: pairs, (2i, 2i+1) or (i, i + head_dim/2) by architecture, turn by `position * base^(-2i / head_dim)`, angles and functions in f64,
//!   rounded to f32 once: `(a cos - b sin, a sin + b cos)`.
//! - **Attention**, per row and query head: KV blocks of 16 tokens in order of position, up to the row's own position.
//!   A block's scores: 4 partial sums over head dim (index mod 4), `((a0 + a1) + (a2 + a3)) * (1 / sqrt(head dim))`.
//!   Online softmax: `m' = max(m, scores)`, `c = exp(m - m')`, `p = exp(score - m')` (0 beyond the row's position),
//!   `l = l * c + tree sum of p`, `out = out * c`, then `out += p[j] * v[j]` for each token in order. At the end
//!   `out * (1 / l)`. Keys and values are read back from the KV memory, also by the step that wrote them.
//! - **Gated unit**: `(g / (1 + exp(-g))) * u`.
//!
//! # `Int8Blocks`, the default
//! Weights stay as the file has them (Q4_1 or Q8_0 blocks of 32). The input of every matrix is quantised per row and
//! block of 32: `scale = absmax / 127`, `q = x * (127 / absmax)` rounded to the nearest integer, halves to even; a block
//! whose absmax is below 1e-30 is zero. An output is a sum over blocks in order, one f32 accumulator:
//! `acc += (d * scale) * dot + m * (scale * sum(q))` for Q4_1 (file scale d, minimum m, dot of 4-bit and 8-bit
//! integers, exact in i32), `acc += (d * scale) * dot` for Q8_0. KV is stored as f16, rounded to nearest even.
//!
//! # `Exact`
//! The reference: weights dequantised to f32 (`q * d + m`), f32 inputs and KV. An output has 4 accumulators over the
//! columns (index mod 4), `acc[i] += x * w` in order, result `(a0 + a1) + (a2 + a3)`.

use crate::KvDtype;

/// Which of the two definitions above an engine computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Numerics {
    /// 8-bit inputs per block of 32, weights as stored, f16 KV.
    Int8Blocks,
    /// f32 everywhere: the reference for tests and accuracy reports.
    Exact,
}

impl Numerics {
    /// Part of the compatibility hash. The number after the slash changes with any change of the definition.
    pub fn id(self) -> &'static str {
        match self {
            Numerics::Int8Blocks => "cpu-int8-blocks/1",
            Numerics::Exact => "cpu-exact-f32/1",
        }
    }

    pub fn kv_dtype(self) -> KvDtype {
        match self {
            Numerics::Int8Blocks => KvDtype::F16,
            Numerics::Exact => KvDtype::F32,
        }
    }
}
