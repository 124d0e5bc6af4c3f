//! Many queries: a tile, or two, are unpacked once for all of them, `N` queries share each key and each value that is loaded, and the keys of two tiles share
//! each number of a query. With few registers it is one tile and one query.

use std::ops::Range;

use super::stored::{Stored, unpack_keys, unpack_values};
use super::{AttendCall, AttendScratch, CHUNKS, LANES, Lanes, PARTITION_TILES, PartitionTiles, TILE, within_tile};
use crate::cpu::kernels::vector::Vector;

/// The products of all queries with the keys.
///
/// # Safety
/// That of `attend_partition`.
#[inline(always)]
pub(super) unsafe fn multiply<V: Vector, T: Stored, const N: usize, const TILES: usize>(
    call: &AttendCall<'_>,
    tiles: &PartitionTiles,
    scratch: &mut AttendScratch<'_>,
) {
    let mut tile = tiles.tiles.start;
    // SAFETY: the caller's promise.
    unsafe {
        while tile + TILES <= tiles.tiles.end {
            multiply_tiles::<V, T, N, TILES>(call, tiles, tile, scratch);
            tile += TILES;
        }
        while tile < tiles.tiles.end {
            multiply_tiles::<V, T, N, 1>(call, tiles, tile, scratch);
            tile += 1;
        }
    }
}

/// # Safety
/// As `multiply`; the partition has `TILES` tiles from this one.
#[inline(always)]
unsafe fn multiply_tiles<V: Vector, T: Stored, const N: usize, const TILES: usize>(
    call: &AttendCall<'_>,
    tiles: &PartitionTiles,
    tile: usize,
    scratch: &mut AttendScratch<'_>,
) {
    let length = call.head_dim * LANES;
    for next in 0..TILES {
        tiles.prefetch::<V>(call, tile + TILES + next, 0);
        let tokens = tiles.tokens_of(tile + next);
        let keys = &mut scratch.keys[next * length..][..length];
        // SAFETY: the caller's promise; so many tokens of the tile are written.
        unsafe { unpack_keys::<V, T>(tiles.keys[tile + next].cast(), tokens, keys) };
    }
    let mut keys: [&[[Lanes; LANES]]; TILES] = [&[]; TILES];
    for next in 0..TILES {
        let of_tile = &scratch.keys[next * length..][..length];
        keys[next] = of_tile.as_chunks::<LANES>().0.as_chunks::<LANES>().0;
    }
    // Rows before the tiles see nothing of them.
    let before = (tiles.start + tile * TILE).saturating_sub(call.first_position);
    let first = before.min(call.rows) * call.group;
    let (mut query, queries) = (first, call.rows * call.group);
    let mut asking = Asking::from_row(call, before.min(call.rows));
    // SAFETY: the queries are those of the call.
    unsafe {
        while query + N <= queries {
            multiply_queries::<V, N, TILES>(&mut asking, &keys, (query, tile), scratch.scores);
            query += N;
        }
        while query < queries {
            multiply_queries::<V, 1, TILES>(&mut asking, &keys, (query, tile), scratch.scores);
            query += 1;
        }
    }
}

/// Goes from query to query without a division for each.
struct Asking<'a> {
    call: &'a AttendCall<'a>,
    row: *const f32,
    head: usize,
}

impl<'a> Asking<'a> {
    #[inline(always)]
    fn from_row(call: &'a AttendCall<'a>, row: usize) -> Self {
        Self {
            call,
            row: call.queries.wrapping_add(row * call.query_stride),
            head: 0,
        }
    }

    /// # Safety
    /// The call has this query, and its pointer is valid for what its fields say.
    #[inline(always)]
    unsafe fn next(&mut self) -> &'a [Lanes] {
        let from = self.row.wrapping_add(self.head * self.call.head_dim);
        self.head += 1;
        if self.head == self.call.group {
            self.head = 0;
            self.row = self.row.wrapping_add(self.call.query_stride);
        }
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(from.cast(), self.call.head_dim / LANES) }
    }
}

/// # Safety
/// As `multiply`, for `N` queries from this one.
#[inline(always)]
unsafe fn multiply_queries<V: Vector, const N: usize, const TILES: usize>(
    asking: &mut Asking<'_>,
    keys: &[&[[Lanes; LANES]]; TILES],
    (query, tile): (usize, usize),
    scores: &mut [Lanes],
) {
    let mut asked: [&[Lanes]; N] = [&[]; N];
    for next in 0..N {
        // SAFETY: the caller's promise.
        asked[next] = unsafe { asking.next() };
    }
    // The tree sum of 16 partial sums.
    let a = four_partial_sums::<V, N, TILES, 0>(&asked, keys);
    let b = four_partial_sums::<V, N, TILES, 1>(&asked, keys);
    let c = four_partial_sums::<V, N, TILES, 2>(&asked, keys);
    let d = four_partial_sums::<V, N, TILES, 3>(&asked, keys);
    for next in 0..N {
        let scores = &mut scores[(query + next) * PARTITION_TILES + tile..][..TILES];
        for tile in 0..TILES {
            let even = a[next][tile].add(c[next][tile]);
            even.add(b[next][tile].add(d[next][tile])).store(&mut scores[tile]);
        }
    }
}

/// The part of a tree sum that the partial sums `FIRST`, `FIRST + 4`, `FIRST + 8` and `FIRST + 12` make.
#[inline(always)]
fn four_partial_sums<V: Vector, const N: usize, const TILES: usize, const FIRST: usize>(
    queries: &[&[Lanes]; N],
    keys: &[&[[Lanes; LANES]]; TILES],
) -> [[V; TILES]; N] {
    let mut parts = [[[V::splat(0.0); 4]; TILES]; N];
    let steps = keys[0].len();
    let (mut queries, mut keys) = (*queries, *keys);
    for query in 0..N {
        queries[query] = &queries[query][..steps];
    }
    for tile in 0..TILES {
        keys[tile] = &keys[tile][..steps];
    }
    for step in 0..steps {
        for part in 0..4 {
            let index = FIRST + 4 * part;
            let mut key = [V::splat(0.0); TILES];
            for tile in 0..TILES {
                key[tile] = V::load(&keys[tile][step][index]);
            }
            for query in 0..N {
                let value = V::splat(queries[query][step][index]);
                for tile in 0..TILES {
                    parts[query][tile][part] = value.mul_add(key[tile], parts[query][tile][part]);
                }
            }
        }
    }
    let mut sums = [[V::splat(0.0); TILES]; N];
    for query in 0..N {
        for tile in 0..TILES {
            let [a, b, c, d] = parts[query][tile];
            sums[query][tile] = a.add(c).add(b.add(d));
        }
    }
    sums
}

/// The weighted values of all queries.
///
/// # Safety
/// That of `attend_partition`.
#[inline(always)]
pub(super) unsafe fn weigh<V: Vector, T: Stored, const N: usize, const TILES: usize>(
    call: &AttendCall<'_>,
    tiles: &PartitionTiles,
    scratch: &mut AttendScratch<'_>,
    sums: &mut [f32],
) {
    let sums = &mut sums[..call.rows * call.group * call.head_dim];
    sums.fill(0.0);
    let sums = sums.as_chunks_mut::<LANES>().0;
    let mut tile = tiles.tiles.start;
    while tile < tiles.tiles.end {
        let count = TILES.min(tiles.tiles.end - tile);
        for next in 0..count {
            tiles.prefetch::<V>(call, tile + count + next, call.values_offset);
            let from = tiles.keys[tile + next].wrapping_add(call.values_offset).cast::<T>();
            let values = &mut scratch.values[next * TILE * call.head_dim..];
            let length = tiles.tokens_of(tile + next) * call.head_dim;
            // SAFETY: the caller's promise; so many tokens of the tile are written.
            unsafe { unpack_values::<V, T>(from, &mut values[..length]) };
        }
        let of = Weighing {
            call,
            tiles,
            values: scratch.values.as_chunks::<LANES>().0,
            weights: scratch.scores,
            first_tile: tile,
        };
        of.add::<V, N>(sums, count);
        tile += count;
    }
}

/// Values of one or two tiles, and the weights of all queries.
struct Weighing<'a> {
    call: &'a AttendCall<'a>,
    tiles: &'a PartitionTiles,
    /// `[token][head_dim]`, from the first tile on.
    values: &'a [Lanes],
    weights: &'a [Lanes],
    first_tile: usize,
}

impl Weighing<'_> {
    /// Adds so many tiles together for rows that see all of them, and one by one for the others.
    #[inline(always)]
    fn add<V: Vector, const N: usize>(&self, sums: &mut [Lanes], count: usize) {
        let all = self
            .tiles
            .rows_that_see(self.call, self.first_tile..self.first_tile + count);
        self.add_whole::<V, N>(sums, all.clone(), 0..count * TILE);
        for index in 0..count {
            let tile = self.first_tile + index;
            let whole = self.tiles.rows_that_see(self.call, tile..tile + 1);
            let done = match all.is_empty() {
                true => whole.start..whole.start,
                false => all.clone(),
            };
            self.add_whole::<V, N>(sums, whole.start..done.start, index * TILE..(index + 1) * TILE);
            self.add_whole::<V, N>(sums, done.end..whole.end, index * TILE..(index + 1) * TILE);
            for row in (0..whole.start).chain(whole.end..self.call.rows) {
                let seen = within_tile(&self.tiles.seen(self.call, row), tile);
                self.add_whole::<V, 1>(sums, row..row + 1, index * TILE + seen.start..index * TILE + seen.end);
            }
        }
    }

    /// Adds the weighted values of `tokens`, counted from the first tile's first, to the sums of all queries of `rows`.
    #[inline(always)]
    fn add_whole<V: Vector, const N: usize>(&self, sums: &mut [Lanes], rows: Range<usize>, tokens: Range<usize>) {
        let (group, stride) = (self.call.group, self.call.head_dim / LANES);
        let (mut query, end) = (rows.start * group, rows.end * group);
        while query + N <= end {
            self.add_values::<V, N>(&mut sums[query * stride..], query, tokens.clone());
            query += N;
        }
        while query < end {
            self.add_values::<V, 1>(&mut sums[query * stride..], query, tokens.clone());
            query += 1;
        }
    }

    #[inline(always)]
    fn add_values<V: Vector, const N: usize>(&self, sums: &mut [Lanes], query: usize, tokens: Range<usize>) {
        let stride = self.call.head_dim / LANES;
        let mut first = 0;
        while first + CHUNKS <= stride {
            self.add_chunks::<V, N, CHUNKS>(sums, (query, first), tokens.clone());
            first += CHUNKS;
        }
        while first < stride {
            self.add_chunks::<V, N, 1>(sums, (query, first), tokens.clone());
            first += 1;
        }
    }

    #[inline(always)]
    fn add_chunks<V: Vector, const N: usize, const COUNT: usize>(
        &self,
        sums: &mut [Lanes],
        (query, first): (usize, usize),
        tokens: Range<usize>,
    ) {
        let stride = self.call.head_dim / LANES;
        let mut lanes = [[V::splat(0.0); COUNT]; N];
        for next in 0..N {
            for chunk in 0..COUNT {
                lanes[next][chunk] = V::load(&sums[next * stride + first + chunk]);
            }
        }
        for tile in tokens.start / TILE..tokens.end.div_ceil(TILE) {
            let mut weights: [&Lanes; N] = [&self.weights[0]; N];
            for next in 0..N {
                weights[next] = &self.weights[(query + next) * PARTITION_TILES + self.first_tile + tile];
            }
            for token in tokens.start.max(tile * TILE)..tokens.end.min((tile + 1) * TILE) {
                let values = &self.values[token * stride + first..][..COUNT];
                let mut weight = [V::splat(0.0); N];
                for next in 0..N {
                    // The remainder is the token's place in its tile, and needs no check of bounds.
                    weight[next] = V::splat(weights[next][token % TILE]);
                }
                for chunk in 0..COUNT {
                    let value = V::load(&values[chunk]);
                    for next in 0..N {
                        lanes[next][chunk] = weight[next].mul_add(value, lanes[next][chunk]);
                    }
                }
            }
        }
        for next in 0..N {
            for chunk in 0..COUNT {
                lanes[next][chunk].store(&mut sums[next * stride + first + chunk]);
            }
        }
    }
}
