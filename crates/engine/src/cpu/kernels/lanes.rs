//! The f32 loops of every instruction set, generic over [`Vector`]: one source, so one order of operations.

use half::{bf16, f16};

use super::vector::Vector;
use super::{BLOCK, InputRows, LANES, Lanes, MAX_ROWS, Outputs};
use crate::KvDtype;
use crate::math::{ROUND_F32, exp};

/// A block whose largest magnitude is below this is stored as zero, because 127 divided by it would not be finite.
const TINY: f32 = 1e-30;

/// The "tree sum" of `crate::numerics`.
#[inline(always)]
pub(crate) fn tree_sum(mut lanes: Lanes) -> f32 {
    for width in [8, 4, 2, 1] {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
    }
    lanes[0]
}

/// The largest lane. Any order gives the same result.
#[inline(always)]
fn largest(mut lanes: Lanes) -> f32 {
    for width in [8, 4, 2, 1] {
        for lane in 0..width {
            lanes[lane] = if lanes[lane] > lanes[lane + width] {
                lanes[lane]
            } else {
                lanes[lane + width]
            };
        }
    }
    lanes[0]
}

/// Lengths are equal and multiples of 16.
#[inline(always)]
pub(crate) fn rms_norm<V: Vector>(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    let (chunks, weights) = (x.as_chunks::<LANES>().0, weight.as_chunks::<LANES>().0);
    let mut squares = V::splat(0.0);
    for chunk in chunks {
        let chunk = V::load(chunk);
        squares = squares.add(chunk.mul(chunk));
    }
    let scale = V::splat(1.0 / (tree_sum(squares.array()) / x.len() as f32 + epsilon).sqrt());
    for ((out, x), weight) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(chunks).zip(weights) {
        V::load(x).mul(scale).mul(V::load(weight)).store(out);
    }
}

/// The target of a quantised row; see [`InputRows`].
pub(crate) struct QuantisedRow<'a> {
    pub quants: &'a mut [i8],
    pub scales: &'a mut [f32],
    pub offsets: &'a mut [f32],
    pub sums: &'a mut [i32],
}

/// `x` has a multiple of 32 values.
#[inline(always)]
pub(crate) fn quantise<V: Vector>(x: &[f32], out: QuantisedRow<'_>) {
    let blocks = x.as_chunks::<LANES>().0.as_chunks::<2>().0;
    let quants = out.quants.as_chunks_mut::<LANES>().0.as_chunks_mut::<2>().0;
    let per_block = out.scales.iter_mut().zip(out.offsets).zip(out.sums);
    for ((x, quants), ((scale, offset), sum)) in blocks.iter().zip(quants).zip(per_block) {
        let x = [V::load(&x[0]), V::load(&x[1])];
        let largest = largest(x[0].abs().larger(x[1].abs()).array());
        if largest < TINY {
            *quants = [[0; LANES]; 2];
            (*scale, *offset, *sum) = (0.0, 0.0, 0);
            continue;
        }
        let to_quant = V::splat(127.0 / largest);
        let mut total = 0;
        for (x, quants) in x.iter().zip(quants) {
            // The low byte of the rounded sum's bits is the integer in two's complement.
            *quants = x.mul(to_quant).add(V::splat(ROUND_F32)).low_bytes();
            total += quants.iter().map(|quant| i32::from(*quant)).sum::<i32>();
        }
        *scale = largest / 127.0;
        *offset = *scale * total as f32;
        *sum = total;
    }
}

#[inline(always)]
pub(crate) fn gate_silu<V: Vector>(gate: &mut Lanes, up: &Lanes) {
    let g = V::load(gate);
    let below = V::splat(1.0).add(V::splat(0.0).sub(g).exp());
    g.div(below).mul(V::load(up)).store(gate);
}

/// Factors of `g` and of its cube in the exponent of GELU's tanh form: `2 sqrt(2 / pi)`, and 0.044715 times that.
const GELU_LINEAR: f32 = 1.595_769;
const GELU_CUBIC: f32 = 0.071_354_814;

/// `0.5 g (1 + tanh(z / 2))` is `g / (1 + exp(-z))`.
#[inline(always)]
pub(crate) fn gate_gelu<V: Vector>(gate: &mut Lanes, up: &Lanes) {
    let g = V::load(gate);
    let slope = g.mul(g).mul(V::splat(GELU_CUBIC)).add(V::splat(GELU_LINEAR));
    let below = V::splat(1.0).add(V::splat(0.0).sub(slope.mul(g)).exp());
    g.div(below).mul(V::load(up)).store(gate);
}

#[inline(always)]
pub(crate) fn softcap<V: Vector>(values: &mut Lanes, cap: f32) {
    capped(V::load(values), cap).store(values);
}

/// `cap * tanh(x / cap)`.
#[inline(always)]
fn capped<V: Vector>(x: V, cap: f32) -> V {
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

/// Query rows of one sequence against the KV of one head.
pub(crate) struct AttendCall<'a> {
    /// Row 0, head 0; `query_stride` values from row to row, heads of the group side by side.
    pub queries: *const f32,
    pub query_stride: usize,
    /// As `queries`.
    pub out: *mut f32,
    pub out_stride: usize,
    pub rows: usize,
    /// Query heads that share the KV head.
    pub group: usize,
    /// A multiple of 16.
    pub head_dim: usize,
    /// The position of row 0.
    pub first_position: usize,
    /// What scores are multiplied by.
    pub scale: f32,
    /// Scores become `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// A row sees this many tokens, itself included. Earlier tiles are not read.
    pub window: Option<usize>,
    /// Start of the keys of a tile (by index in the sequence) for this layer and head.
    pub keys_of: &'a dyn Fn(usize) -> *const u8,
    /// The distance from a tile's keys to its values, in bytes.
    pub values_offset: usize,
    pub dtype: KvDtype,
}

/// Scratch memory of one thread.
pub(crate) struct AttendScratch<'a> {
    /// `[head_dim]` x 16 tokens: a tile's keys, transposed.
    pub keys: &'a mut [f32],
    /// 16 tokens x `[head_dim]`.
    pub values: &'a mut [f32],
    /// Running maximum and sum of each (row, head).
    pub softmax: &'a mut [(f32, f32)],
    /// `[row][head][head_dim]`.
    pub sums: &'a mut [f32],
}

/// Tokens of an attention tile: one vector of scores. A KV block holds a whole number of tiles, side by side.
const TILE: usize = LANES;
const _: () = assert!(TILE == crate::kv_geometry::TILE_TOKENS as usize);

/// # Safety
/// The pointers of `call` are valid for what its fields say, the KV rows up to the last query's position are written
/// and not being written, and nobody else touches `out`.
#[inline(always)]
pub(crate) unsafe fn attend<V: Vector>(call: &AttendCall<'_>, scratch: &mut AttendScratch<'_>) {
    let (head_dim, queries) = (call.head_dim, call.rows * call.group);
    scratch.softmax[..queries].fill((f32::NEG_INFINITY, 0.0));
    scratch.sums[..queries * head_dim].fill(0.0);
    let end = call.first_position + call.rows;
    let first_seen = |row: usize| {
        call.window
            .map_or(0, |window| (call.first_position + row + 1).saturating_sub(window))
    };
    for tile in first_seen(0) / TILE..end.div_ceil(TILE) {
        // SAFETY: the caller's promise.
        unsafe { load_tile::<V>(call, scratch, tile, (end - tile * TILE).min(TILE)) };
        let keys = scratch.keys[..head_dim * LANES].as_chunks::<LANES>().0;
        let values = &scratch.values[..TILE * head_dim];
        for row in 0..call.rows {
            let visible = (call.first_position + row + 1).saturating_sub(tile * TILE).min(TILE);
            let seen = first_seen(row).saturating_sub(tile * TILE)..visible;
            if seen.is_empty() {
                continue;
            }
            for head in 0..call.group {
                let index = row * call.group + head;
                // SAFETY: the caller's `queries` cover `rows` rows of `group` heads of `head_dim` values.
                let query = unsafe {
                    let start = call.queries.add(row * call.query_stride + head * head_dim);
                    std::slice::from_raw_parts(start, head_dim)
                };
                let sums = &mut scratch.sums[index * head_dim..][..head_dim];
                let mut scores = tile_scores::<V>(query, keys, call.scale);
                if let Some(cap) = call.softcap {
                    scores = capped(scores, cap);
                }
                fold_tile::<V>(scores, values, seen.clone(), (&mut scratch.softmax[index], sums));
            }
        }
    }
    for index in 0..queries {
        let (row, head) = (index / call.group, index % call.group);
        let factor = 1.0 / scratch.softmax[index].1;
        // SAFETY: the caller's `out` covers `rows` rows of `group` heads, and nobody else writes there.
        let out =
            unsafe { std::slice::from_raw_parts_mut(call.out.add(row * call.out_stride + head * head_dim), head_dim) };
        for (out, sum) in out.iter_mut().zip(&scratch.sums[index * head_dim..]) {
            *out = sum * factor;
        }
    }
}

/// Reads the first `tokens` tokens of a tile: keys transposed, values unchanged. The caller masks what older tiles left
/// behind these tokens.
///
/// # Safety
/// As `attend`; the tile's first `tokens` rows are written.
#[inline(always)]
unsafe fn load_tile<V: Vector>(call: &AttendCall<'_>, scratch: &mut AttendScratch<'_>, tile: usize, tokens: usize) {
    let (head_dim, keys) = (call.head_dim, (call.keys_of)(tile));
    let columns = scratch.keys[..head_dim * LANES].as_chunks_mut::<LANES>().0;
    for (chunk, columns) in columns.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        let mut rows = [V::splat(0.0); LANES];
        for (token, row) in rows.iter_mut().enumerate().take(tokens) {
            // SAFETY: the row is written and 16 values from `chunk` are within its `head_dim`.
            *row = unsafe { load_values(keys, call.dtype, token * head_dim + chunk * LANES) };
        }
        for (column, out) in V::transpose(rows).iter().zip(columns) {
            column.store(out);
        }
    }
    let rows = scratch.values[..tokens * head_dim].as_chunks_mut::<LANES>().0;
    for (chunk, out) in rows.iter_mut().enumerate() {
        // SAFETY: the first `tokens` rows are written.
        unsafe { load_values::<V>(keys.add(call.values_offset), call.dtype, chunk * LANES) }.store(out);
    }
}

/// # Safety
/// 16 values of `dtype`, aligned, can be read from index `at`.
#[inline(always)]
unsafe fn load_values<V: Vector>(from: *const u8, dtype: KvDtype, at: usize) -> V {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            KvDtype::F16 => V::load_halves(from.cast::<f16>().add(at)),
            KvDtype::F32 => V::load(&*from.cast::<f32>().add(at).cast::<Lanes>()),
            // No numerics of this engine store it.
            KvDtype::Bf16 => V::load(&(*from.cast::<bf16>().add(at).cast::<[bf16; LANES]>()).map(f32::from)),
        }
    }
}

#[inline(always)]
fn tile_scores<V: Vector>(query: &[f32], keys: &[Lanes], scale: f32) -> V {
    let mut parts = [V::splat(0.0); 4];
    for (query, keys) in query.as_chunks::<4>().0.iter().zip(keys.as_chunks::<4>().0) {
        for part in 0..4 {
            parts[part] = parts[part].add(V::splat(query[part]).mul(V::load(&keys[part])));
        }
    }
    parts[0].add(parts[1]).add(parts[2].add(parts[3])).mul(V::splat(scale))
}

/// Chunks of a head's sums that are held in registers together.
const CHUNKS: usize = 4;

/// One step of the online softmax: adds a tile's scores and values to a query's state. The query sees the tokens `seen` of
/// the tile, at least one.
#[inline(always)]
fn fold_tile<V: Vector>(
    scores: V,
    values: &[f32],
    seen: std::ops::Range<usize>,
    (state, sums): (&mut (f32, f32), &mut [f32]),
) {
    let mut scores = scores.array();
    for score in &mut scores[..seen.start] {
        *score = f32::NEG_INFINITY;
    }
    for score in &mut scores[seen.end..] {
        *score = f32::NEG_INFINITY;
    }
    let tile_largest = largest(scores);
    let largest = if tile_largest > state.0 { tile_largest } else { state.0 };
    let keep = exp(state.0 - largest);
    let weights = V::load(&scores).sub(V::splat(largest)).exp().array();
    *state = (largest, state.1 * keep + tree_sum(weights));
    let stride = sums.len() / LANES;
    let chunks = sums.as_chunks_mut::<LANES>().0;
    let values = &values.as_chunks::<LANES>().0[seen.start * stride..];
    let weights = &weights[seen];
    let mut first = 0;
    while first + CHUNKS <= stride {
        fold_chunks::<V, CHUNKS>(&mut chunks[first..], keep, weights, (&values[first..], stride));
        first += CHUNKS;
    }
    while first < stride {
        fold_chunks::<V, 1>(&mut chunks[first..], keep, weights, (&values[first..], stride));
        first += 1;
    }
}

#[inline(always)]
fn fold_chunks<V: Vector, const COUNT: usize>(
    sums: &mut [Lanes],
    keep: f32,
    weights: &[f32],
    (values, stride): (&[Lanes], usize),
) {
    let keep = V::splat(keep);
    let mut lanes: [V; COUNT] = std::array::from_fn(|chunk| V::load(&sums[chunk]).mul(keep));
    for (weight, values) in weights.iter().zip(values.chunks(stride)) {
        let weight = V::splat(*weight);
        for chunk in 0..COUNT {
            lanes[chunk] = lanes[chunk].add(weight.mul(V::load(&values[chunk])));
        }
    }
    for (lanes, sums) in lanes.iter().zip(sums) {
        lanes.store(sums);
    }
}
