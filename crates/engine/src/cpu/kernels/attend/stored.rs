//! The types in which keys and values are stored, and tiles of them as f32.

use half::{bf16, f16};

use super::{LANES, Lanes, TILE};
use crate::cpu::kernels::vector::Vector;

pub(super) trait Stored {
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

/// The keys of a tile's first `tokens` tokens, transposed, with zeros for the tokens behind them.
///
/// # Safety
/// The keys of these tokens are at `keys` and written. Tiles, rows and chunks begin at multiples of 16 values, so that all of them are aligned.
#[inline(always)]
pub(super) unsafe fn unpack_keys<V: Vector, T: Stored>(keys: *const T, tokens: usize, out: &mut [f32]) {
    let head_dim = out.len() / TILE;
    let mut from = keys;
    for columns in out.as_chunks_mut::<LANES>().0.as_chunks_mut::<LANES>().0 {
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
}

/// The values of a tile's first tokens: as many as `out` has room for.
///
/// # Safety
/// As `unpack_keys`.
#[inline(always)]
pub(super) unsafe fn unpack_values<V: Vector, T: Stored>(values: *const T, out: &mut [f32]) {
    let mut from = values;
    for out in out.as_chunks_mut::<LANES>().0 {
        // SAFETY: as many values are written.
        unsafe { T::load::<V>(from) }.store(out);
        from = from.wrapping_add(LANES);
    }
}
