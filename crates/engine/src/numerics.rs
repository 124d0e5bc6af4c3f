//! The arithmetic of the CPU engine, defined once. Two engines with equal ids give equal bits.
//!
//! # Both numerics
//! All floating-point work is IEEE f32 with the default rounding. Only `fma(a, b, c)`, which is `a * b + c`, rounds a product and a sum once. Sums have
//! the order given here. `exp` is [`crate::math::exp`]. "Tree sum" of 16 lanes: add lane i + 8 to lane i, then i + 4, i + 2, i + 1.
//! - **Embedding**: a row of the matrix, dequantised from its panels; in families that scale it, times `sqrt(hidden size)`.
//! - **RMS norm**: squares summed in 16 lanes over the row, tree sum, divided by the length, plus epsilon; `s = 1 / sqrt(that)`; result `(x * s) * weight`. A norm of
//!   heads does so for each head, before RoPE. A norm after attention or after the feed-forward part does so for the finished output of the matrix, before the residual sum.
//! - **Bias**, in architectures that have one: added to a finished output of a matrix.
//! - **RoPE**: pairs, (2i, 2i+1) or (i, i + dims/2) by architecture, of the first `dims` values of a head (usually all) turn by
//!   `position * speed`. The speed is `base^(-2i / dims)`, divided by the factor of a linear scaling or by the pair's own factor, or changed by
//!   Llama 3.1's formula. Angles and functions in f64; cosine and sine times the magnitude that comes with factors;
//!   rounded to f32 once: `(a cos - b sin, a sin + b cos)`. Layers with a window may have another base and no scaling.
//! - **Attention**, per row and query head, up to the row's own position; with a window of w tokens, from the first of the row's last w tokens, its
//!   own included. Keys and values are read back from the KV memory, also by the step that wrote them. Scores: 16 partial sums over head dim
//!   (index mod 16), `acc = fma(q, k, acc)` from zero in order, tree sum, times the scale, which is `1 / sqrt(head dim)` or what the model says, then capped in
//!   models with a cap. The context is cut into partitions of 256 tokens by position. In each partition that the row sees any token of: `m` is the
//!   largest score, `p = exp(score - m)`, `l` the tree sum of 16 partial sums of p (position mod 16), and `out = fma(p[j], v[j], out)` from zero, for
//!   each token that the row sees, in order. The first partition's are the row's. A later one's (M, L and OUT) are added: `n = max(m, M)`,
//!   `c = exp(m - n)`, `d = exp(M - n)`, `l = fma(L, d, l * c)`, `out = fma(OUT, d, out * c)`, `m = n`. At the end `out * (1 / l)`.
//! - **Gated unit**: `(g / (1 + exp(-g))) * u`, or for GELU in its tanh form `(g / (1 + exp(-z))) * u` with
//!   `z = ((g * g) * 0.071354814 + 1.595769) * g`.
//! - **Cap** of scores or logits: `y = x / cap`, `(1 - 2 / (1 + exp(y + y))) * cap`.
//!
//! # `Int8Blocks`, the default
//! Weights are Q4_1 or Q8_0 blocks of 32. Each tensor becomes one of the two:
//! - Q4_1 and Q8_0 as the file has them. Q4_0 exactly as Q4_1, with the minimum `-8 d`. Q5_0 exactly as Q8_0.
//! - Q4_K as Q4_1: the scale `d * s` and the minimum `-(dmin * m)` of each group of 32 are rounded to f16.
//! - F32, F16, BF16, Q5_1, Q5_K and Q6_K as Q8_0: dequantised to f32, then per block of 32 `d = absmax / 127`, rounded up to f16, and
//!   `q = x / d`, rounded to the nearest integer, halves to even. When gate and up differ in this, both are Q8_0, in this way, Q4_0 exactly.
//!
//! The input of every matrix is quantised per row and block of 32, from its smallest value to its largest: `middle = largest * 0.5 + smallest * 0.5`,
//! `range = largest - smallest`, `scale = range / 254`, `q = (x - middle) * (254 / range)`, kept within -127 and 127 and rounded to the nearest integer,
//! halves to even. With a range below 1e-30 the scale and all q are zero. An output is a sum over blocks in order, one f32 accumulator: `acc = fma(d * scale, dot, acc)`
//! (block scale d, dot of the weights' integers with q, exact in i32), for Q4_1 then `acc = fma(m, middle * 32 + scale * sum(q), acc)` (minimum m), and
//! `acc = fma(d * sum of the weights' integers, middle, acc)`. KV is stored as f16, rounded to nearest even.
//!
//! # `Exact`
//! The reference: weights of every type dequantised to f32 (`model_files::gguf::dequantise_row`), f32 inputs and KV. An output has 4
//! accumulators over the columns (index mod 4), `acc[i] += x * w` in order, result `(a0 + a1) + (a2 + a3)`.

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
            Numerics::Int8Blocks => "cpu-int8-blocks/3",
            Numerics::Exact => "cpu-exact-f32/2",
        }
    }

    /// How keys and values are stored.
    pub fn kv_dtype(self) -> KvDtype {
        match self {
            Numerics::Int8Blocks => KvDtype::F16,
            Numerics::Exact => KvDtype::F32,
        }
    }
}
