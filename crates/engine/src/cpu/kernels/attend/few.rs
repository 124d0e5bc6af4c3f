//! Few queries: keys and values are read from the KV memory as they are. Each that is loaded serves up to four heads of a row.

use std::ops::Range;

use super::stored::Stored;
use super::{AttendCall, CHUNKS, LANES, Lanes, PARTITION_TILES, PartitionTiles, TILE, within_tile};
use crate::cpu::kernels::vector::Vector;

/// A tile is asked for this many tiles ahead: 4 KiB of f16 with heads of 64, as for weights.
const TILES_AHEAD: usize = 2;
/// Heads that are computed together: with heads of 64, their queries fit into half of the registers of AVX-512.
pub(super) const MOST_HEADS: usize = 4;

/// Splits the heads of a group into 4, 3, 2 and 1, each with its own unrolled code.
macro_rules! in_head_groups {
    ($group:expr, $head:ident => $function:ident::<$v:ty, $t:ty>($($argument:expr),*)) => {{
        let mut $head = 0;
        while $head < $group {
            match $group - $head {
                MOST_HEADS.. => $function::<$v, $t, MOST_HEADS>($($argument),*),
                3 => $function::<$v, $t, 3>($($argument),*),
                2 => $function::<$v, $t, 2>($($argument),*),
                _ => $function::<$v, $t, 1>($($argument),*),
            }
            $head += MOST_HEADS.min($group - $head);
        }
    }};
}

/// The products of all queries with the keys.
///
/// # Safety
/// That of `attend_partition`.
#[inline(always)]
pub(super) unsafe fn multiply<V: Vector, T: Stored>(
    call: &AttendCall<'_>,
    tiles: &PartitionTiles,
    (parts, scores): (&mut [Lanes], &mut [Lanes]),
) {
    for row in 0..call.rows {
        let seen = tiles.seen(call, row);
        for tile in tiles.tiles.clone() {
            tiles.prefetch::<V>(call, tile + TILES_AHEAD, 0);
            let tokens = within_tile(&seen, tile);
            if tokens.is_empty() {
                continue;
            }
            let keys = tiles.keys[tile].cast::<T>();
            // SAFETY: the heads are those of the call, and the tokens are written.
            unsafe {
                in_head_groups!(call.group, head => multiply_heads::<V, T>(
                    call,
                    (row * call.group + head, tile),
                    (keys, tokens.clone()),
                    (parts, scores)
                ));
            }
        }
    }
}

/// The products of a tile with `N` heads of a row.
///
/// # Safety
/// As `multiply`; the keys of `tokens` are at `keys`.
#[inline(always)]
unsafe fn multiply_heads<V: Vector, T: Stored, const N: usize>(
    call: &AttendCall<'_>,
    (query, tile): (usize, usize),
    (keys, tokens): (*const T, Range<usize>),
    (parts, scores): (&mut [Lanes], &mut [Lanes]),
) {
    let mut queries = [std::ptr::null(); N];
    for head in 0..N {
        // SAFETY: the caller's promise.
        queries[head] = unsafe { call.query(query + head) }.as_ptr();
    }
    // Parts of tokens that the row does not see are left over from before. What becomes of them is replaced by the lowest score.
    let parts = &mut parts.as_chunks_mut::<LANES>().0[..N];
    let stride = call.head_dim / LANES;
    let mut chunk = 0;
    // SAFETY: the chunks are within the head, and the tokens are written.
    unsafe {
        while chunk + CHUNKS <= stride {
            add_parts::<V, T, N, CHUNKS>(parts, &queries, (keys, stride), (chunk, tokens.clone()));
            chunk += CHUNKS;
        }
        while chunk < stride {
            add_parts::<V, T, N, 1>(parts, &queries, (keys, stride), (chunk, tokens.clone()));
            chunk += 1;
        }
    }
    for head in 0..N {
        let mut loaded = [V::splat(0.0); LANES];
        for token in 0..LANES {
            loaded[token] = V::load(&parts[head][token]);
        }
        V::tree_sums(loaded).store(&mut scores[(query + head) * PARTITION_TILES + tile]);
    }
}

/// Adds the products of `COUNT` chunks of the head. The first begin new sums.
///
/// # Safety
/// The chunks are within the queries and keys, and the keys of `tokens` are written.
#[inline(always)]
unsafe fn add_parts<V: Vector, T: Stored, const N: usize, const COUNT: usize>(
    parts: &mut [[Lanes; LANES]],
    queries: &[*const f32; N],
    (keys, stride): (*const T, usize),
    (chunk, tokens): (usize, Range<usize>),
) {
    let mut asked = [[V::splat(0.0); COUNT]; N];
    for query in 0..N {
        for next in 0..COUNT {
            let from = queries[query].wrapping_add((chunk + next) * LANES);
            // SAFETY: the caller's promise.
            asked[query][next] = V::load(unsafe { &*from.cast::<Lanes>() });
        }
    }
    let mut row = keys.wrapping_add((tokens.start * stride + chunk) * LANES);
    for token in tokens {
        let mut sums = [V::splat(0.0); N];
        if chunk > 0 {
            for query in 0..N {
                sums[query] = V::load(&parts[query][token]);
            }
        }
        for next in 0..COUNT {
            // SAFETY: the caller's promise.
            let key: V = unsafe { T::load(row.wrapping_add(next * LANES)) };
            for query in 0..N {
                sums[query] = asked[query][next].mul_add(key, sums[query]);
            }
        }
        for query in 0..N {
            sums[query].store(&mut parts[query][token]);
        }
        row = row.wrapping_add(stride * LANES);
    }
}

/// The weighted values of all queries.
///
/// # Safety
/// That of `attend_partition`.
#[inline(always)]
pub(super) unsafe fn weigh<V: Vector, T: Stored>(
    call: &AttendCall<'_>,
    tiles: &PartitionTiles,
    weights: &[Lanes],
    sums: &mut [f32],
) {
    let stride = call.head_dim / LANES;
    let sums = sums.as_chunks_mut::<LANES>().0;
    for row in 0..call.rows {
        let seen = tiles.seen(call, row);
        // SAFETY: the caller's promise.
        unsafe {
            in_head_groups!(call.group, head => weigh_heads::<V, T>(
                call,
                (tiles, seen.clone()),
                &weights[(row * call.group + head) * PARTITION_TILES..],
                &mut sums[(row * call.group + head) * stride..]
            ));
        }
    }
}

/// # Safety
/// As `weigh`, for the `N` heads whose weights and sums begin here.
#[inline(always)]
unsafe fn weigh_heads<V: Vector, T: Stored, const N: usize>(
    call: &AttendCall<'_>,
    seen: (&PartitionTiles, Range<usize>),
    weights: &[Lanes],
    sums: &mut [Lanes],
) {
    let stride = call.head_dim / LANES;
    let mut chunk = 0;
    // SAFETY: the chunks are within the head.
    unsafe {
        while chunk + CHUNKS <= stride {
            add_values::<V, T, N, CHUNKS>(call, (seen.0, seen.1.clone()), weights, (chunk, sums));
            chunk += CHUNKS;
        }
        while chunk < stride {
            add_values::<V, T, N, 1>(call, (seen.0, seen.1.clone()), weights, (chunk, sums));
            chunk += 1;
        }
    }
}

/// The weighted values of `COUNT` chunks of the head, over all tiles that the row sees.
///
/// # Safety
/// As `weigh_heads`.
#[inline(always)]
unsafe fn add_values<V: Vector, T: Stored, const N: usize, const COUNT: usize>(
    call: &AttendCall<'_>,
    (tiles, seen): (&PartitionTiles, Range<usize>),
    weights: &[Lanes],
    (chunk, out): (usize, &mut [Lanes]),
) {
    let stride = call.head_dim / LANES;
    let mut sums = [[V::splat(0.0); COUNT]; N];
    for tile in tiles.tiles.clone() {
        if chunk == 0 {
            tiles.prefetch::<V>(call, tile + TILES_AHEAD, call.values_offset);
        }
        let tokens = within_tile(&seen, tile);
        let values = tiles.keys[tile].wrapping_add(call.values_offset).cast::<T>();
        let mut row = values.wrapping_add((tokens.start * stride + chunk) * LANES);
        for token in tokens {
            let mut weight = [V::splat(0.0); N];
            // The remainder is the token itself, and needs no check of bounds.
            for head in 0..N {
                weight[head] = V::splat(weights[head * PARTITION_TILES + tile][token % TILE]);
            }
            for next in 0..COUNT {
                // SAFETY: the row is written, and the chunk is within it.
                let value: V = unsafe { T::load(row.wrapping_add(next * LANES)) };
                for head in 0..N {
                    sums[head][next] = weight[head].mul_add(value, sums[head][next]);
                }
            }
            row = row.wrapping_add(stride * LANES);
        }
    }
    for head in 0..N {
        for next in 0..COUNT {
            sums[head][next].store(&mut out[head * stride + chunk + next]);
        }
    }
}
