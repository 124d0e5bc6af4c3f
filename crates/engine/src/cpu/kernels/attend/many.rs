//! Many queries: a tile is unpacked once, and `N` queries share each key and each value that is loaded.

use std::ops::Range;

use super::stored::{Stored, unpack_keys, unpack_values};
use super::{AttendCall, AttendScratch, CHUNKS, LANES, Lanes, PARTITION_TILES, PartitionTiles, TILE, within_tile};
use crate::cpu::kernels::vector::Vector;

/// The scores of all queries.
///
/// # Safety
/// That of `attend_partition`.
#[inline(always)]
pub(super) unsafe fn score<V: Vector, T: Stored, const N: usize>(
    call: &AttendCall<'_>,
    tiles: &PartitionTiles,
    scratch: &mut AttendScratch<'_>,
) {
    let queries = call.rows * call.group;
    for tile in tiles.tiles.clone() {
        tiles.prefetch::<V>(call, tile + 1, 0);
        let tokens = (tiles.tokens - tile * TILE).min(TILE);
        let keys = &mut scratch.keys[..call.head_dim * LANES];
        // SAFETY: the caller's promise; so many tokens of the tile are written.
        unsafe { unpack_keys::<V, T>(tiles.keys[tile].cast(), tokens, keys) };
        let keys = keys.as_chunks::<LANES>().0;
        // Rows before the tile see nothing of it.
        let before = (tiles.start + tile * TILE).saturating_sub(call.first_position);
        let mut next = before.min(call.rows) * call.group;
        while next + N <= queries {
            // SAFETY: the queries are those of the call.
            unsafe { score_queries::<V, N>(call, keys, (next, tile), scratch.scores) };
            next += N;
        }
        while next < queries {
            // SAFETY: as above.
            unsafe { score_queries::<V, 1>(call, keys, (next, tile), scratch.scores) };
            next += 1;
        }
    }
}

/// # Safety
/// As `score`, for `N` queries from this one.
#[inline(always)]
unsafe fn score_queries<V: Vector, const N: usize>(
    call: &AttendCall<'_>,
    keys: &[Lanes],
    (query, tile): (usize, usize),
    scores: &mut [Lanes],
) {
    let mut asked: [&[f32]; N] = [&[]; N];
    for next in 0..N {
        // SAFETY: the caller's promise.
        asked[next] = unsafe { call.query(query + next) };
    }
    let products = products::<V, N>(asked, keys);
    for next in 0..N {
        call.scored(products[next])
            .store(&mut scores[(query + next) * PARTITION_TILES + tile]);
    }
}

/// The products of `N` queries with the 16 keys of a tile: the tree sum of 16 partial sums.
#[inline(always)]
fn products<V: Vector, const N: usize>(queries: [&[f32]; N], keys: &[Lanes]) -> [V; N] {
    let keys = keys.as_chunks::<LANES>().0;
    let mut steps: [&[Lanes]; N] = [&[]; N];
    for query in 0..N {
        steps[query] = &queries[query].as_chunks::<LANES>().0[..keys.len()];
    }
    let mut fours = [four_partial_sums::<V, N>(&steps, keys, 0); 4];
    for (first, four) in fours.iter_mut().enumerate().skip(1) {
        *four = four_partial_sums::<V, N>(&steps, keys, first);
    }
    let mut products = [V::splat(0.0); N];
    for query in 0..N {
        products[query] = fours[0][query]
            .add(fours[2][query])
            .add(fours[1][query].add(fours[3][query]));
    }
    products
}

/// The part of a tree sum that the partial sums `first`, `first + 4`, `first + 8` and `first + 12` make.
#[inline(always)]
fn four_partial_sums<V: Vector, const N: usize>(
    steps: &[&[Lanes]; N],
    keys: &[[Lanes; LANES]],
    first: usize,
) -> [V; N] {
    let mut parts = [[V::splat(0.0); 4]; N];
    for (step, keys) in keys.iter().enumerate() {
        for part in 0..4 {
            let index = first + 4 * part;
            let key = V::load(&keys[index]);
            for query in 0..N {
                parts[query][part] = V::splat(steps[query][step][index]).mul_add(key, parts[query][part]);
            }
        }
    }
    let mut sums = [V::splat(0.0); N];
    for query in 0..N {
        let [a, b, c, d] = parts[query];
        sums[query] = a.add(c).add(b.add(d));
    }
    sums
}

/// The weighted values of all queries.
///
/// # Safety
/// That of `attend_partition`.
#[inline(always)]
pub(super) unsafe fn weigh<V: Vector, T: Stored, const N: usize>(
    call: &AttendCall<'_>,
    tiles: &PartitionTiles,
    scratch: &mut AttendScratch<'_>,
    sums: &mut [f32],
) {
    let (queries, head_dim) = (call.rows * call.group, call.head_dim);
    let stride = head_dim / LANES;
    let sums = &mut sums[..queries * head_dim];
    sums.fill(0.0);
    let sums = sums.as_chunks_mut::<LANES>().0;
    for tile in tiles.tiles.clone() {
        tiles.prefetch::<V>(call, tile + 1, call.values_offset);
        let tokens = (tiles.tokens - tile * TILE).min(TILE);
        let from = tiles.keys[tile].wrapping_add(call.values_offset).cast::<T>();
        let values = &mut scratch.values[..tokens * head_dim];
        // SAFETY: the caller's promise; so many tokens of the tile are written.
        unsafe { unpack_values::<V, T>(from, values) };
        let values = values.as_chunks::<LANES>().0;
        let mut query = 0;
        while query < queries {
            let seen_by = |query: usize| within_tile(&tiles.seen(call, query / call.group), tile);
            let seen = seen_by(query);
            // Rows between two that see the whole tile see it, too.
            let is_whole = query + N <= queries && seen == (0..TILE) && seen_by(query + N - 1) == (0..TILE);
            let sums = &mut sums[query * stride..];
            let weights = &scratch.scores[query * PARTITION_TILES + tile..];
            if is_whole {
                add_values::<V, N>(sums, weights, (values, stride), 0..TILE);
                query += N;
            } else {
                add_values::<V, 1>(sums, weights, (values, stride), seen);
                query += 1;
            }
        }
    }
}

/// Adds the weighted values of a tile's `tokens` to the sums of `N` queries.
#[inline(always)]
fn add_values<V: Vector, const N: usize>(
    sums: &mut [Lanes],
    weights: &[Lanes],
    (values, stride): (&[Lanes], usize),
    tokens: Range<usize>,
) {
    let mut first = 0;
    while first + CHUNKS <= stride {
        add_chunks::<V, N, CHUNKS>(&mut sums[first..], weights, (&values[first..], stride), tokens.clone());
        first += CHUNKS;
    }
    while first < stride {
        add_chunks::<V, N, 1>(&mut sums[first..], weights, (&values[first..], stride), tokens.clone());
        first += 1;
    }
}

#[inline(always)]
fn add_chunks<V: Vector, const N: usize, const COUNT: usize>(
    sums: &mut [Lanes],
    weights: &[Lanes],
    (values, stride): (&[Lanes], usize),
    tokens: Range<usize>,
) {
    let mut of_query: [&Lanes; N] = [&weights[0]; N];
    let mut lanes = [[V::splat(0.0); COUNT]; N];
    for query in 0..N {
        of_query[query] = &weights[query * PARTITION_TILES];
        for chunk in 0..COUNT {
            lanes[query][chunk] = V::load(&sums[query * stride + chunk]);
        }
    }
    for token in tokens {
        let values = &values[token * stride..][..COUNT];
        for chunk in 0..COUNT {
            let value = V::load(&values[chunk]);
            for query in 0..N {
                // The remainder is the token itself, and needs no check of bounds.
                let weight = V::splat(of_query[query][token % TILE]);
                lanes[query][chunk] = weight.mul_add(value, lanes[query][chunk]);
            }
        }
    }
    for query in 0..N {
        for chunk in 0..COUNT {
            lanes[query][chunk].store(&mut sums[query * stride + chunk]);
        }
    }
}
