//! Attention of query rows of one sequence against the KV of one head, generic over [`Vector`].
//!
//! A tile's scores have its tokens in their lanes. Where all queries see the whole tile, 16 queries are folded together: their scores
//! are turned, so that each query has a lane, and a maximum or an exponential is one operation for all of them. The other tiles, and
//! few queries, go one query at a time. Both ways give the bits that `crate::numerics` defines.
//!
//! Vectors stay out of closures here: those are not always inlined, and then each operation is a call through memory. That made attention
//! three times slower.

use half::{bf16, f16};

use super::lanes::capped;
use super::vector::Vector;
use super::{LANES, Lanes};
use crate::KvDtype;
use crate::math::exp;

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
    /// The largest score so far of each (row, head), 16 to a vector.
    pub largest: &'a mut [Lanes],
    /// As `largest`: the sum of the weights so far.
    pub totals: &'a mut [Lanes],
    /// `[row][head][head_dim]`.
    pub sums: &'a mut [f32],
}

/// Tokens of an attention tile: one vector of scores. A KV block holds a whole number of tiles, side by side.
const TILE: usize = LANES;
const _: () = assert!(TILE == crate::kv_geometry::TILE_TOKENS as usize);
/// Fewer queries are folded one by one: most lanes would be empty. With 3 in its place decoding took as long.
const TOGETHER_MIN: usize = 6;
/// Registers that hold 4 accumulators for each of 4 queries, and what is added to them.
const REGISTERS_FOR_FOUR: usize = 24;

/// # Safety
/// The pointers of `call` are valid for what its fields say, the KV rows up to the last query's position are written
/// and not being written, and nobody else touches `out`.
#[inline(always)]
pub(crate) unsafe fn attend<V: Vector>(call: &AttendCall<'_>, scratch: &mut AttendScratch<'_>) {
    let (head_dim, queries) = (call.head_dim, call.rows * call.group);
    let vectors = queries.div_ceil(LANES);
    scratch.largest[..vectors].fill([f32::NEG_INFINITY; LANES]);
    scratch.totals[..vectors].fill([0.0; LANES]);
    scratch.sums[..queries * head_dim].fill(0.0);
    let end = call.first_position + call.rows;
    let tiles = call.first_seen(0) / TILE..end.div_ceil(TILE);
    for tile in tiles.clone() {
        let start = tile * TILE;
        if tile + 1 < tiles.end {
            call.prefetch::<V>(tile + 1);
        }
        // SAFETY: the caller's promise.
        unsafe { load_tile::<V>(call, scratch, tile, (end - start).min(TILE)) };
        let all_see_all = start + TILE <= call.first_position + 1 && start >= call.first_seen(call.rows - 1);
        // SAFETY: the caller's promise, and `load_tile` has read the tile.
        unsafe {
            match all_see_all && queries >= TOGETHER_MIN {
                true if V::REGISTERS >= REGISTERS_FOR_FOUR => fold_together::<V, 4>(call, scratch),
                true => fold_together::<V, 1>(call, scratch),
                false => fold_one_by_one::<V>(call, scratch, start),
            }
        }
    }
    for index in 0..queries {
        let (row, head) = (index / call.group, index % call.group);
        let factor = 1.0 / scratch.totals[index / LANES][index % LANES];
        // SAFETY: the caller's `out` covers `rows` rows of `group` heads, and nobody else writes there.
        let out =
            unsafe { std::slice::from_raw_parts_mut(call.out.add(row * call.out_stride + head * head_dim), head_dim) };
        for (out, sum) in out.iter_mut().zip(&scratch.sums[index * head_dim..]) {
            *out = sum * factor;
        }
    }
}

impl AttendCall<'_> {
    /// The first position that this row sees.
    #[inline(always)]
    fn first_seen(&self, row: usize) -> usize {
        self.window
            .map_or(0, |window| (self.first_position + row + 1).saturating_sub(window))
    }

    /// Tiles lie in blocks that are anywhere in memory, so the machine does not see which one comes next.
    #[inline(always)]
    fn prefetch<V: Vector>(&self, tile: usize) {
        let (keys, bytes) = ((self.keys_of)(tile), TILE * self.head_dim * self.dtype.bytes());
        V::prefetch(keys, bytes);
        V::prefetch(keys.wrapping_add(self.values_offset), bytes);
    }

    /// # Safety
    /// `index` is below `rows * group`, and `queries` is valid for what the fields say.
    #[inline(always)]
    unsafe fn query(&self, index: usize) -> &[f32] {
        let (row, head) = (index / self.group, index % self.group);
        // SAFETY: the caller's promise.
        unsafe {
            let start = self.queries.add(row * self.query_stride + head * self.head_dim);
            std::slice::from_raw_parts(start, self.head_dim)
        }
    }

    /// Products of a query and keys become scores.
    #[inline(always)]
    fn scored<V: Vector>(&self, products: V) -> V {
        let scores = products.mul(V::splat(self.scale));
        match self.softcap {
            Some(cap) => capped(scores, cap),
            None => scores,
        }
    }
}

/// Reads the first `tokens` tokens of a tile: keys transposed, with zeros behind them, values unchanged. The caller leaves out the values
/// that older tiles left behind these tokens.
///
/// # Safety
/// As `attend`; the tile's first `tokens` rows are written.
#[inline(always)]
unsafe fn load_tile<V: Vector>(call: &AttendCall<'_>, scratch: &mut AttendScratch<'_>, tile: usize, tokens: usize) {
    let keys = (call.keys_of)(tile);
    // SAFETY: the caller's promise. The types are those of the stored values.
    unsafe {
        match call.dtype {
            KvDtype::F16 => unpack_tile::<V, f16>(call, scratch, (keys, tokens)),
            KvDtype::F32 => unpack_tile::<V, f32>(call, scratch, (keys, tokens)),
            // No numerics of this engine store it.
            KvDtype::Bf16 => unpack_tile::<V, bf16>(call, scratch, (keys, tokens)),
        }
    }
}

/// # Safety
/// As `load_tile`; `keys` is where the tile begins, and its values are of type `T`. Tiles, rows and chunks begin at multiples of 16 values, so
/// that all of them are aligned.
#[inline(always)]
unsafe fn unpack_tile<V: Vector, T: Stored>(
    call: &AttendCall<'_>,
    scratch: &mut AttendScratch<'_>,
    (keys, tokens): (*const u8, usize),
) {
    let head_dim = call.head_dim;
    let columns = scratch.keys[..head_dim * LANES].as_chunks_mut::<LANES>().0;
    let mut from = keys.cast::<T>();
    for columns in columns.as_chunks_mut::<LANES>().0 {
        let mut rows = [V::splat(0.0); LANES];
        let mut row = from;
        // A whole tile has no end to look for, so that its loads stand side by side.
        if tokens == TILE {
            for values in &mut rows {
                // SAFETY: the row is written, and 16 values of this chunk are within its `head_dim`.
                *values = unsafe { T::load(row) };
                row = row.wrapping_add(head_dim);
            }
        } else {
            for values in rows.iter_mut().take(tokens) {
                // SAFETY: as above.
                *values = unsafe { T::load(row) };
                row = row.wrapping_add(head_dim);
            }
        }
        let turned = V::transpose(rows);
        for column in 0..LANES {
            turned[column].store(&mut columns[column]);
        }
        from = from.wrapping_add(LANES);
    }
    let mut from = keys.wrapping_add(call.values_offset).cast::<T>();
    for out in scratch.values[..tokens * head_dim].as_chunks_mut::<LANES>().0 {
        // SAFETY: the first `tokens` rows are written.
        unsafe { T::load::<V>(from) }.store(out);
        from = from.wrapping_add(LANES);
    }
}

/// A type in which keys and values are stored.
trait Stored {
    /// # Safety
    /// `from` is aligned and points to 16 readable values.
    unsafe fn load<V: Vector>(from: *const Self) -> V;
}

impl Stored for f16 {
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_halves(from) }
    }
}

impl Stored for f32 {
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: the caller's promise.
        V::load(unsafe { &*from.cast::<Lanes>() })
    }
}

impl Stored for bf16 {
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: the caller's promise.
        V::load(&unsafe { *from.cast::<[bf16; LANES]>() }.map(f32::from))
    }
}

/// The products of `N` queries with the 16 keys of a tile.
#[inline(always)]
fn products<V: Vector, const N: usize>(queries: [&[f32]; N], keys: &[Lanes]) -> [V; N] {
    let mut parts = [[V::splat(0.0); 4]; N];
    let keys = keys.as_chunks::<4>().0;
    let mut steps: [&[[f32; 4]]; N] = [&[]; N];
    for query in 0..N {
        steps[query] = &queries[query].as_chunks::<4>().0[..keys.len()];
    }
    for (step, keys) in keys.iter().enumerate() {
        for part in 0..4 {
            let key = V::load(&keys[part]);
            for query in 0..N {
                let value = V::splat(steps[query][step][part]);
                parts[query][part] = parts[query][part].add(value.mul(key));
            }
        }
    }
    let mut products = [V::splat(0.0); N];
    for query in 0..N {
        let [a, b, c, d] = parts[query];
        products[query] = a.add(b).add(c.add(d));
    }
    products
}

/// One step of the online softmax for all queries, each of which sees the whole tile. `N` of them share each key and each value.
///
/// # Safety
/// That of `attend`.
#[inline(always)]
unsafe fn fold_together<V: Vector, const N: usize>(call: &AttendCall<'_>, scratch: &mut AttendScratch<'_>) {
    let (head_dim, queries) = (call.head_dim, call.rows * call.group);
    let keys = scratch.keys[..head_dim * LANES].as_chunks::<LANES>().0;
    let values = scratch.values[..TILE * head_dim].as_chunks::<LANES>().0;
    let sums = scratch.sums[..queries * head_dim].as_chunks_mut::<LANES>().0;
    for first in (0..queries).step_by(LANES) {
        let count = (queries - first).min(LANES);
        let mut scores = [V::splat(0.0); LANES];
        let mut next = 0;
        while next + N <= count {
            let mut asked: [&[f32]; N] = [&[]; N];
            for (query, asked) in asked.iter_mut().enumerate() {
                // SAFETY: the index is below `queries`, and the rest is the caller's promise.
                *asked = unsafe { call.query(first + next + query) };
            }
            let products = products::<V, N>(asked, keys);
            for query in 0..N {
                scores[next + query] = call.scored(products[query]);
            }
            next += N;
        }
        while next < count {
            // SAFETY: as above.
            let [products] = products::<V, 1>([unsafe { call.query(first + next) }], keys);
            scores[next] = call.scored(products);
            next += 1;
        }
        let (largest, totals) = (&mut scratch.largest[first / LANES], &mut scratch.totals[first / LANES]);
        let (keep, weights) = weigh(V::transpose(scores), largest, totals);
        let stride = head_dim / LANES;
        let mut next = 0;
        while next + N <= count {
            let sums = &mut sums[(first + next) * stride..];
            add_values::<V, N>(sums, (&keep, &weights, next), (values, stride));
            next += N;
        }
        while next < count {
            let sums = &mut sums[(first + next) * stride..];
            add_values::<V, 1>(sums, (&keep, &weights, next), (values, stride));
            next += 1;
        }
    }
}

/// What 16 queries keep of their sums, and the weight of each token. `scores` has a vector for each token, and a lane for each query.
#[inline(always)]
fn weigh<V: Vector>(scores: [V; TILE], largest: &mut Lanes, totals: &mut Lanes) -> (Lanes, [Lanes; TILE]) {
    let before = V::load(largest);
    let mut now = before;
    for score in &scores {
        now = now.larger(*score);
    }
    let keep = before.sub(now).exp();
    let mut tree = scores;
    let mut weights = [[0.0; LANES]; TILE];
    for token in 0..TILE {
        tree[token] = scores[token].sub(now).exp();
        tree[token].store(&mut weights[token]);
    }
    for width in [8, 4, 2, 1] {
        for token in 0..width {
            tree[token] = tree[token].add(tree[token + width]);
        }
    }
    now.store(largest);
    V::load(totals).mul(keep).add(tree[0]).store(totals);
    (keep.array(), weights)
}

/// Chunks of a head's sums that are held in registers together.
const CHUNKS: usize = 4;

/// Adds the weighted values of a tile to the sums of `N` queries, of which the first has the lane `lane`.
#[inline(always)]
fn add_values<V: Vector, const N: usize>(
    sums: &mut [Lanes],
    weighed: (&Lanes, &[Lanes; TILE], usize),
    (values, stride): (&[Lanes], usize),
) {
    let mut first = 0;
    while first + CHUNKS <= stride {
        add_chunks::<V, N, CHUNKS>(&mut sums[first..], weighed, (&values[first..], stride));
        first += CHUNKS;
    }
    while first < stride {
        add_chunks::<V, N, 1>(&mut sums[first..], weighed, (&values[first..], stride));
        first += 1;
    }
}

#[inline(always)]
fn add_chunks<V: Vector, const N: usize, const COUNT: usize>(
    sums: &mut [Lanes],
    (keep, weights, lane): (&Lanes, &[Lanes; TILE], usize),
    (values, stride): (&[Lanes], usize),
) {
    let mut lanes = [[V::splat(0.0); COUNT]; N];
    for query in 0..N {
        let keep = V::splat(keep[lane + query]);
        for chunk in 0..COUNT {
            lanes[query][chunk] = V::load(&sums[query * stride + chunk]).mul(keep);
        }
    }
    for token in 0..TILE {
        let (weights, values) = (&weights[token][lane..lane + N], &values[token * stride..][..COUNT]);
        for chunk in 0..COUNT {
            let value = V::load(&values[chunk]);
            for query in 0..N {
                lanes[query][chunk] = lanes[query][chunk].add(V::splat(weights[query]).mul(value));
            }
        }
    }
    for query in 0..N {
        for chunk in 0..COUNT {
            lanes[query][chunk].store(&mut sums[query * stride + chunk]);
        }
    }
}

/// One step of the online softmax, query by query. Each sees its own part of the tile that begins at position `start`.
///
/// # Safety
/// That of `attend`.
#[inline(always)]
unsafe fn fold_one_by_one<V: Vector>(call: &AttendCall<'_>, scratch: &mut AttendScratch<'_>, start: usize) {
    let head_dim = call.head_dim;
    let keys = scratch.keys[..head_dim * LANES].as_chunks::<LANES>().0;
    let values = &scratch.values[..TILE * head_dim];
    for row in 0..call.rows {
        let visible = (call.first_position + row + 1).saturating_sub(start).min(TILE);
        let seen = call.first_seen(row).saturating_sub(start)..visible;
        if seen.is_empty() {
            continue;
        }
        for head in 0..call.group {
            let index = row * call.group + head;
            let sums = &mut scratch.sums[index * head_dim..][..head_dim];
            // SAFETY: the caller's promise.
            let [products] = products::<V, 1>([unsafe { call.query(index) }], keys);
            let state = (
                &mut scratch.largest[index / LANES][index % LANES],
                &mut scratch.totals[index / LANES][index % LANES],
            );
            fold_tile::<V>(call.scored(products), values, seen.clone(), (state, sums));
        }
    }
}

/// One step of the online softmax: adds a tile's scores and values to a query's state. The query sees the tokens `seen` of
/// the tile, at least one.
#[inline(always)]
fn fold_tile<V: Vector>(
    scores: V,
    values: &[f32],
    seen: std::ops::Range<usize>,
    ((best, total), sums): ((&mut f32, &mut f32), &mut [f32]),
) {
    let mut scores = scores;
    if seen != (0..TILE) {
        let mut lanes = scores.array();
        lanes[..seen.start].fill(f32::NEG_INFINITY);
        lanes[seen.end..].fill(f32::NEG_INFINITY);
        scores = V::load(&lanes);
    }
    let of_tile = scores.largest();
    let now = if of_tile > *best { of_tile } else { *best };
    let keep = exp(*best - now);
    let weights = scores.sub(V::splat(now)).exp();
    *best = now;
    *total = *total * keep + weights.tree_sum();
    let weights = weights.array();
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
    let mut lanes = [V::splat(0.0); COUNT];
    for chunk in 0..COUNT {
        lanes[chunk] = V::load(&sums[chunk]).mul(keep);
    }
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
