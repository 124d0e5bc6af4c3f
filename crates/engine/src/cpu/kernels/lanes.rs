//! The f32 loops of every instruction set, generic over [`Vector`]: one source, so one order of operations.

use super::vector::Vector;
use super::{BLOCK, BlockMarks, InputRows, LANES, Lanes, MAX_ROWS, Outputs};
use crate::math::ROUND_F32;

/// The quants of a block whose values differ by less are zero, because 254 divided by a far smaller range is not finite.
const TINY: f32 = 1e-30;

/// Lengths are equal and multiples of 16.
#[inline(always)]
pub(crate) fn rms_norm<V: Vector>(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    let (chunks, weights) = (x.as_chunks::<LANES>().0, weight.as_chunks::<LANES>().0);
    let mut squares = V::splat(0.0);
    for chunk in chunks {
        let chunk = V::load(chunk);
        squares = squares.add(chunk.mul(chunk));
    }
    let scale = V::splat(1.0 / (squares.tree_sum() / x.len() as f32 + epsilon).sqrt());
    for ((out, x), weight) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(chunks).zip(weights) {
        V::load(x).mul(scale).mul(V::load(weight)).store(out);
    }
}

/// The target of a quantised row; see [`InputRows`].
pub(crate) struct QuantisedRow<'a> {
    pub quants: &'a mut [i8],
    pub marks: &'a mut [BlockMarks],
}

/// `x` has a multiple of 32 values.
#[inline(always)]
pub(crate) fn quantise<V: Vector>(x: &[f32], out: QuantisedRow<'_>) {
    let blocks = x.as_chunks::<LANES>().0.as_chunks::<2>().0;
    let quants = out.quants.as_chunks_mut::<LANES>().0.as_chunks_mut::<2>().0;
    for ((x, quants), marks) in blocks.iter().zip(quants).zip(out.marks) {
        let block = quantised([V::load(&x[0]), V::load(&x[1])]);
        (*quants, *marks) = (block.quants, block.marks);
    }
}

/// One quantised block of a row.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub(crate) struct QuantisedBlock {
    pub quants: [[i8; LANES]; 2],
    pub marks: BlockMarks,
}

/// One block of each of several rows, whose two halves are in two places.
#[inline(always)]
pub(crate) fn quantise_blocks<V: Vector>([first, second]: [&[Lanes]; 2], out: &mut [QuantisedBlock]) {
    for ((first, second), out) in first.iter().zip(second).zip(out) {
        *out = quantised([V::load(first), V::load(second)]);
    }
}

#[inline(always)]
fn quantised<V: Vector>(x: [V; 2]) -> QuantisedBlock {
    let zero = V::splat(0.0);
    let largest = x[0].larger(x[1]).largest();
    let smallest = 0.0 - zero.sub(x[0].smaller(x[1])).largest();
    let (range, middle) = (largest - smallest, largest * 0.5 + smallest * 0.5);
    let (scale, to_quant) = match range < TINY {
        true => (0.0, 0.0),
        false => (range / 254.0, 254.0 / range),
    };
    let (by, from) = (V::splat(to_quant), V::splat(middle));
    let rounded = [rounded_quants(x[0], from, by), rounded_quants(x[1], from, by)];
    // The low byte of the rounded sum's bits is the integer in two's complement.
    let (quants, sum) = V::low_bytes(rounded);
    let marks = BlockMarks {
        scale,
        middle,
        total: middle * BLOCK as f32 + scale * sum as f32,
        sum,
    };
    QuantisedBlock { quants, marks }
}

/// `(x - middle) * to_quant`, with [`ROUND_F32`] added. Where the middle of two neighbouring numbers is one of them, a quant
/// would be 254. What is no number becomes -127: no kernel may get -128.
#[inline(always)]
fn rounded_quants<V: Vector>(x: V, middle: V, to_quant: V) -> V {
    let quants = x.sub(middle).mul(to_quant);
    quants
        .larger(V::splat(-127.0))
        .smaller(V::splat(127.0))
        .add(V::splat(ROUND_F32))
}

#[inline(always)]
pub(crate) fn gate_silu<V: Vector>(gate: &mut [Lanes], up: &[Lanes]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        let g = V::load(gate);
        let below = V::splat(1.0).add(V::splat(0.0).sub(g).exp());
        g.div(below).mul(V::load(up)).store(gate);
    }
}

/// Factors of `g` and of its cube in the exponent of GELU's tanh form: `2 sqrt(2 / pi)`, and 0.044715 times that.
const GELU_LINEAR: f32 = 1.595_769;
const GELU_CUBIC: f32 = 0.071_354_814;

/// `0.5 g (1 + tanh(z / 2))` is `g / (1 + exp(-z))`.
#[inline(always)]
pub(crate) fn gate_gelu<V: Vector>(gate: &mut [Lanes], up: &[Lanes]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        let g = V::load(gate);
        let slope = g.mul(g).mul(V::splat(GELU_CUBIC)).add(V::splat(GELU_LINEAR));
        let below = V::splat(1.0).add(V::splat(0.0).sub(slope.mul(g)).exp());
        g.div(below).mul(V::load(up)).store(gate);
    }
}

#[inline(always)]
pub(crate) fn softcap<V: Vector>(values: &mut Lanes, cap: f32) {
    capped(V::load(values), cap).store(values);
}

/// `cap * tanh(x / cap)`.
#[inline(always)]
pub(super) fn capped<V: Vector>(x: V, cap: f32) -> V {
    let half = x.div(V::splat(cap));
    let below = V::splat(1.0).add(half.add(half).exp());
    V::splat(1.0).sub(V::splat(2.0).div(below)).mul(V::splat(cap))
}

/// Input rows that share one pass over an f32 panel: 4 rows x 4 accumulators fill half the AVX-512 registers.
const F32_ROWS: usize = 4;

#[inline(always)]
pub(crate) fn dot_f32<V: Vector>(panel: &[u8], input: &InputRows<'_>, rows: usize, out: &mut Outputs) {
    assert!(rows <= MAX_ROWS && input.columns.is_multiple_of(BLOCK));
    assert!(input.values.len() >= rows * input.columns && panel.len() >= input.columns * LANES * 4);
    assert!(panel.as_ptr().cast::<Lanes>().is_aligned());
    // SAFETY: alignment and length were checked, and any bytes are valid f32.
    let panel = unsafe { std::slice::from_raw_parts(panel.as_ptr().cast::<Lanes>(), input.columns) };
    let mut first = 0;
    while first + F32_ROWS <= rows {
        dot_f32_rows::<V, F32_ROWS>(panel, input, first, out);
        first += F32_ROWS;
    }
    while first < rows {
        dot_f32_rows::<V, 1>(panel, input, first, out);
        first += 1;
    }
}

#[inline(always)]
fn dot_f32_rows<V: Vector, const ROWS: usize>(panel: &[Lanes], input: &InputRows<'_>, first: usize, out: &mut Outputs) {
    let mut sums = [[V::splat(0.0); 4]; ROWS];
    let rows: [&[[f32; 4]]; ROWS] = std::array::from_fn(|row| {
        input.values[(first + row) * input.columns..][..input.columns]
            .as_chunks::<4>()
            .0
    });
    for (step, weights) in panel.as_chunks::<4>().0.iter().enumerate() {
        for part in 0..4 {
            let weights = V::load(&weights[part]);
            for row in 0..ROWS {
                sums[row][part] = sums[row][part].add(V::splat(rows[row][step][part]).mul(weights));
            }
        }
    }
    for (s, out) in sums.iter().zip(&mut out[first..]) {
        s[0].add(s[1]).add(s[2].add(s[3])).store(out);
    }
}
