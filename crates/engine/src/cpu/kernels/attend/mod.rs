//! Attention of query rows of one sequence against the KV of one head, generic over [`Vector`].
//!
//! The context is cut into partitions of [`PARTITION`] tokens by position. [`attend_partition`] computes the scores of a partition, their softmax, and the weighted
//! values. [`add_partition`] adds a later partition to the sums of the ones before, in order. So the partitions of one row may be computed by several threads, and
//! the bits are those that `crate::numerics` defines all the same.
//!
//! Few queries (`few`) read keys and values straight from the KV memory, with the head's values in the lanes. Many queries (`many`) share tiles that
//! are unpacked once, with the tile's tokens in the lanes of its keys. Both ways give the same bits.
//!
//! Vectors stay out of closures here: those are not always inlined, and then each operation is a call through memory. That made attention
//! three times slower.

#[expect(
    clippy::needless_range_loop,
    reason = "a query indexes vectors, weights and sums alike"
)]
mod few;
#[expect(clippy::needless_range_loop, reason = "as above")]
mod many;
mod stored;

use std::ops::Range;

use half::{bf16, f16};

use self::stored::Stored;
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
    /// `[head_dim]` x 16 tokens for each of two tiles: keys, transposed.
    pub keys: &'a mut [f32],
    /// 32 tokens x `[head_dim]`.
    pub values: &'a mut [f32],
    /// [`PARTS`]: products of few queries with keys, before their lanes are added up.
    pub parts: &'a mut [Lanes],
    /// `[row][head]` x [`PARTITION_TILES`]: scores of a partition, then the weights that they become.
    pub scores: &'a mut [Lanes],
}

/// What queries (`[row][head]`) have of the partitions so far.
pub(crate) struct PartialSums<'a> {
    /// Their largest scores.
    pub largest: &'a mut [f32],
    /// Sums of their weights. 0: the query has seen no token. (A seen token with the largest score alone weighs 1.)
    pub totals: &'a mut [f32],
    /// `[query][head_dim]`: weighted values.
    pub sums: &'a mut [f32],
}

/// Tokens of an attention tile: one vector of scores. A KV block holds a whole number of tiles, side by side.
const TILE: usize = LANES;
const _: () = assert!(TILE == crate::kv_geometry::TILE_TOKENS as usize);
/// Tiles of a partition. With short partitions more threads find work, but each costs a chunk's rows a softmax and an addition of their own: with 16
/// tiles these are about a hundredth of the operations.
pub(crate) const PARTITION_TILES: usize = 16;
/// Tokens of a partition.
pub(crate) const PARTITION: usize = PARTITION_TILES * TILE;
/// Fewer queries do not pay for unpacking: turning a tile's keys takes as many operations as the scores of about this many queries.
const MANY: usize = 8;
/// Registers that hold 4 accumulators for each of 3 queries and 2 tiles, or of 4 queries, and what is added to them.
const REGISTERS_FOR_TWO_TILES: usize = 28;
/// Vectors of a head that are held in registers together: with four queries 16 sums.
const CHUNKS: usize = 4;

/// Sums of a tile's tokens, for as many heads as `few` computes together.
pub(crate) const PARTS: usize = few::MOST_HEADS * TILE;

/// The sums of one partition, for all queries of the call.
///
/// # Safety
/// The pointers of `call` are valid for what its fields say, and the KV rows up to the last query's position are written
/// and not being written.
#[inline(always)]
pub(crate) unsafe fn attend_partition<V: Vector>(
    call: &AttendCall<'_>,
    partition: usize,
    scratch: &mut AttendScratch<'_>,
    out: &mut PartialSums<'_>,
) {
    // SAFETY: the caller's promise. The types are those of the stored values.
    unsafe {
        match call.dtype {
            KvDtype::F16 => attend_stored::<V, f16>(call, partition, scratch, out),
            KvDtype::F32 => attend_stored::<V, f32>(call, partition, scratch, out),
            // No numerics of this engine store it.
            KvDtype::Bf16 => attend_stored::<V, bf16>(call, partition, scratch, out),
        }
    }
}

/// # Safety
/// As `attend_partition`, whose keys and values have the type `T`.
#[inline(always)]
unsafe fn attend_stored<V: Vector, T: Stored>(
    call: &AttendCall<'_>,
    partition: usize,
    scratch: &mut AttendScratch<'_>,
    out: &mut PartialSums<'_>,
) {
    let tiles = PartitionTiles::of(call, partition);
    if tiles.tiles.is_empty() {
        // All rows' windows begin later. A total of 0 says so, and nobody reads the sums.
        out.largest.fill(f32::NEG_INFINITY);
        out.totals.fill(0.0);
        return;
    }
    let is_many = call.rows * call.group >= MANY;
    // SAFETY: the caller's promise.
    unsafe {
        match is_many {
            true if V::REGISTERS >= REGISTERS_FOR_TWO_TILES => many::multiply::<V, T, 3, 2>(call, &tiles, scratch),
            true => many::multiply::<V, T, 1, 1>(call, &tiles, scratch),
            false => few::multiply::<V, T>(call, &tiles, (scratch.parts, scratch.scores)),
        }
    }
    softmax::<V>(call, &tiles, scratch.scores, out);
    // SAFETY: the caller's promise.
    unsafe {
        match is_many {
            true if V::REGISTERS >= REGISTERS_FOR_TWO_TILES => {
                many::weigh::<V, T, 4, 2>(call, &tiles, scratch, out.sums)
            }
            true => many::weigh::<V, T, 1, 1>(call, &tiles, scratch, out.sums),
            false => few::weigh::<V, T>(call, &tiles, scratch.scores, out.sums),
        }
    }
}

/// Products become weights, which nobody has divided by their sums yet.
#[inline(always)]
fn softmax<V: Vector>(call: &AttendCall<'_>, tiles: &PartitionTiles, scores: &mut [Lanes], out: &mut PartialSums<'_>) {
    // All largest scores before all weights: a largest score is known late, and meanwhile the machine works on the next query.
    for row in 0..call.rows {
        let seen = tiles.seen(call, row);
        for query in row * call.group..(row + 1) * call.group {
            let scores = &mut scores[query * PARTITION_TILES..][..PARTITION_TILES];
            out.largest[query] = score::<V>(call, scores, seen.clone());
        }
    }
    for row in 0..call.rows {
        let seen = tiles.seen(call, row);
        for query in row * call.group..(row + 1) * call.group {
            let scores = &mut scores[query * PARTITION_TILES..][..PARTITION_TILES];
            out.totals[query] = weigh::<V>(scores, seen.clone(), out.largest[query]);
        }
    }
}

/// Products become scores, those of tokens that are not `seen` the lowest. Returns the largest.
#[inline(always)]
fn score<V: Vector>(call: &AttendCall<'_>, scores: &mut [Lanes], seen: Range<usize>) -> f32 {
    if seen.is_empty() {
        return f32::NEG_INFINITY;
    }
    let scores = &mut scores[seen.start / TILE..seen.end.div_ceil(TILE)];
    let scale = V::splat(call.scale);
    for score in scores.iter_mut() {
        let scaled = V::load(score).mul(scale);
        match call.softcap {
            Some(cap) => capped(scaled, cap).store(score),
            None => scaled.store(score),
        }
    }
    let last = scores.len() - 1;
    scores[0][..seen.start % TILE].fill(f32::NEG_INFINITY);
    scores[last][(seen.end - 1) % TILE + 1..].fill(f32::NEG_INFINITY);
    let mut largest = V::load(&scores[0]);
    for score in &scores[1..] {
        largest = largest.larger(V::load(score));
    }
    largest.largest()
}

/// Scores become weights. Returns their sum.
#[inline(always)]
fn weigh<V: Vector>(scores: &mut [Lanes], seen: Range<usize>, largest: f32) -> f32 {
    if seen.is_empty() {
        return 0.0;
    }
    let (largest, mut total) = (V::splat(largest), V::splat(0.0));
    for score in &mut scores[seen.start / TILE..seen.end.div_ceil(TILE)] {
        let weight = V::load(score).sub(largest).exp();
        weight.store(score);
        total = total.add(weight);
    }
    total.tree_sum()
}

/// Adds the sums of a later partition.
#[inline(always)]
pub(crate) fn add_partition<V: Vector>(sums: &mut PartialSums<'_>, later: &PartialSums<'_>) {
    let head_dim = sums.sums.len() / sums.largest.len();
    for query in 0..sums.largest.len() {
        if later.totals[query] == 0.0 {
            continue;
        }
        let (before, of_partition) = (sums.largest[query], later.largest[query]);
        let (sums_of_query, later_of_query) = (
            &mut sums.sums[query * head_dim..][..head_dim],
            &later.sums[query * head_dim..][..head_dim],
        );
        if sums.totals[query] == 0.0 {
            sums.largest[query] = of_partition;
            sums.totals[query] = later.totals[query];
            sums_of_query.copy_from_slice(later_of_query);
            continue;
        }
        let largest = if of_partition > before { of_partition } else { before };
        let (keep, added) = (exp(before - largest), exp(of_partition - largest));
        sums.largest[query] = largest;
        sums.totals[query] = later.totals[query].mul_add(added, sums.totals[query] * keep);
        let (keep, added) = (V::splat(keep), V::splat(added));
        let later = later_of_query.as_chunks::<LANES>().0;
        for (sum, later) in sums_of_query.as_chunks_mut::<LANES>().0.iter_mut().zip(later) {
            V::load(later).mul_add(added, V::load(sum).mul(keep)).store(sum);
        }
    }
}

/// The tiles of a partition that the call's rows see.
struct PartitionTiles {
    /// The first position of the partition.
    start: usize,
    /// Tiles of the partition, from its first.
    tiles: Range<usize>,
    /// Tokens of the partition that are written.
    tokens: usize,
    /// Where the keys of each tile start.
    keys: [*const u8; PARTITION_TILES],
}

impl PartitionTiles {
    #[inline(always)]
    fn of(call: &AttendCall<'_>, partition: usize) -> Self {
        let start = partition * PARTITION;
        let tokens = (call.first_position + call.rows).saturating_sub(start).min(PARTITION);
        let tiles = (call.first_seen(0).saturating_sub(start) / TILE).min(PARTITION_TILES)..tokens.div_ceil(TILE);
        let mut keys = [std::ptr::null(); PARTITION_TILES];
        for tile in tiles.clone() {
            keys[tile] = (call.keys_of)(partition * PARTITION_TILES + tile);
        }
        Self {
            start,
            tiles,
            tokens,
            keys,
        }
    }

    /// The tokens of the partition that a row sees.
    #[inline(always)]
    fn seen(&self, call: &AttendCall<'_>, row: usize) -> Range<usize> {
        let end = (call.first_position + row + 1)
            .saturating_sub(self.start)
            .min(PARTITION);
        call.first_seen(row).saturating_sub(self.start).min(end)..end
    }

    /// Tokens of a tile that are written.
    #[inline(always)]
    fn tokens_of(&self, tile: usize) -> usize {
        (self.tokens - tile * TILE).min(TILE)
    }

    /// The rows that see all tokens of these tiles.
    #[inline(always)]
    fn rows_that_see(&self, call: &AttendCall<'_>, tiles: Range<usize>) -> Range<usize> {
        let (start, end) = (self.start + tiles.start * TILE, self.start + tiles.end * TILE);
        // A row at `end - 1` or later sees the last token; one whose window is not behind `start` sees the first.
        let first = (end - 1).saturating_sub(call.first_position).min(call.rows);
        let behind = call.window.map_or(call.rows, |window| {
            (start + window).saturating_sub(call.first_position).min(call.rows)
        });
        first..behind.max(first)
    }

    /// Tiles lie in blocks that are anywhere in memory, so the machine does not see which one comes next.
    #[inline(always)]
    fn prefetch<V: Vector>(&self, call: &AttendCall<'_>, tile: usize, offset: usize) {
        if tile < self.tiles.end {
            let bytes = TILE * call.head_dim * call.dtype.bytes();
            V::prefetch(self.keys[tile].wrapping_add(offset), bytes);
        }
    }
}

/// The part of `seen` that is in a tile, counted from the tile's first token.
#[inline(always)]
fn within_tile(seen: &Range<usize>, tile: usize) -> Range<usize> {
    let start = tile * TILE;
    let end = seen.end.saturating_sub(start).min(TILE);
    seen.start.saturating_sub(start).min(end)..end
}

impl AttendCall<'_> {
    /// The first position that this row sees.
    #[inline(always)]
    fn first_seen(&self, row: usize) -> usize {
        self.window
            .map_or(0, |window| (self.first_position + row + 1).saturating_sub(window))
    }

    /// The partitions of which some row sees something.
    pub(crate) fn partitions(&self) -> Range<usize> {
        self.first_seen(0) / PARTITION..(self.first_position + self.rows).div_ceil(PARTITION)
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
}
