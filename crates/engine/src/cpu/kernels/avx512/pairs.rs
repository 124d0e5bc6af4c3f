//! Two panels at a time: six rows and two panels have 12 sums of products and 12 of blocks in the 32 registers.

use std::arch::x86_64::*;

use super::x86::{four_quants, keep_order, sums_of_weights};
use crate::cpu::kernels::pairs::{PairCall, PairKernel, UnpackedBlock};
use crate::cpu::kernels::rows::RowsAtBlock;
use crate::cpu::kernels::vector::{Avx512, Vector as _};
use crate::cpu::kernels::{BLOCK, Lanes, Q4_1_PANEL_BLOCK, Q8_0_PANEL_BLOCK, Q8_OFFSET};

pub(super) const Q4_1: PairKernel = PairKernel {
    block_bytes: Q4_1_PANEL_BLOCK,
    // SAFETY: chosen only after `detect`.
    unpack: |panel, out| unsafe { unpack_q4_1(panel, out) },
    add: add::<true>,
};

pub(super) const Q8_0: PairKernel = PairKernel {
    block_bytes: Q8_0_PANEL_BLOCK,
    // SAFETY: as above.
    unpack: |panel, out| unsafe { unpack_q8_0(panel, out) },
    add: add::<false>,
};

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn unpack_q4_1(panel: &[u8], out: &mut [UnpackedBlock]) {
    let low_nibble = _mm512_set1_epi8(15);
    for (block, out) in panel.as_chunks::<Q4_1_PANEL_BLOCK>().0.iter().zip(out) {
        for i in 0..4 {
            // SAFETY: four vectors of 64 bytes are within the block, and each vector of `out` has 64 bytes.
            unsafe {
                let packed = _mm512_loadu_si512(block[64 * i..].as_ptr().cast());
                let high = _mm512_and_si512(_mm512_srli_epi16::<4>(packed), low_nibble);
                _mm512_store_si512((&raw mut out.weights[i]).cast(), _mm512_and_si512(packed, low_nibble));
                _mm512_store_si512((&raw mut out.weights[4 + i]).cast(), high);
            }
        }
        unpack_halves(&block[256..288], &mut out.scales);
        unpack_halves(&block[288..], &mut out.minima);
        add_weights(out, 0);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn unpack_q8_0(panel: &[u8], out: &mut [UnpackedBlock]) {
    for (block, out) in panel.as_chunks::<Q8_0_PANEL_BLOCK>().0.iter().zip(out) {
        for (vector, bytes) in out.weights.iter_mut().zip(block.as_chunks::<64>().0) {
            vector.0 = *bytes;
        }
        unpack_halves(&block[512..], &mut out.scales);
        add_weights(out, -Q8_OFFSET * BLOCK as i32);
    }
}

/// Sums the weights of a block that is unpacked. `start` is what the 32 of a row are too large by, negated.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn add_weights(block: &mut UnpackedBlock, start: i32) {
    let (mut sums, ones) = (_mm512_set1_epi32(start), _mm512_set1_epi8(1));
    for vector in &block.weights {
        // SAFETY: a vector of a block has 64 bytes and their alignment.
        sums = unsafe { _mm512_dpbusd_epi32(sums, _mm512_load_si512((&raw const *vector).cast()), ones) };
    }
    // SAFETY: both are 16 f32.
    unsafe {
        let d = _mm512_loadu_ps(block.scales.as_ptr());
        _mm512_storeu_ps(block.weight_sums.as_mut_ptr(), sums_of_weights(d, sums));
    }
}

/// 16 f16 become f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn unpack_halves(halves: &[u8], out: &mut Lanes) {
    assert!(halves.len() >= 32);
    // SAFETY: 32 bytes are there, and `out` is 16 f32.
    unsafe {
        let halves = _mm256_loadu_si256(halves.as_ptr().cast());
        _mm512_storeu_ps(out.as_mut_ptr(), _mm512_cvtph_ps(halves));
    }
}

/// Lines of each panel of `ahead` that are asked for with each group of rows: few enough that the machine keeps up with them.
const LINES_AHEAD: usize = 4;

fn add<const HAS_MINIMA: bool>(call: PairCall<'_>, [first, second]: [&mut [Lanes]; 2]) {
    let PairCall {
        panels,
        input,
        first_block,
        ahead,
    } = call;
    let rows = first.len();
    let blocks = input.check_quantised(rows);
    let length = panels[0].len();
    assert!(first_block + length <= blocks && panels[1].len() == length && second.len() == rows);
    let mut ahead = ahead.map(|panel| panel.chunks(64 * LINES_AHEAD));
    let mut row = 0;
    while row < rows {
        for lines in ahead.iter_mut().filter_map(Iterator::next) {
            Avx512::prefetch(lines.as_ptr(), lines.len());
        }
        // SAFETY: chosen only after `detect`; rows and blocks were checked above, and the groups end with the rows.
        unsafe {
            let input = RowsAtBlock::first(input, row).after(first_block);
            let sums = ([&mut first[row..], &mut second[row..]], first_block == 0);
            row += match rows - row {
                6.. => add_rows::<6, HAS_MINIMA>(panels, input, sums),
                4.. => add_rows::<4, HAS_MINIMA>(panels, input, sums),
                2.. => add_rows::<2, HAS_MINIMA>(panels, input, sums),
                _ => add_rows::<1, HAS_MINIMA>(panels, input, sums),
            };
        }
    }
}

/// Returns `ROWS`.
///
/// # Safety
/// The CPU has the features. Each of the `ROWS` rows has as many blocks as the panels, and `sums` as many entries as there are rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[expect(
    clippy::needless_range_loop,
    reason = "a row indexes accumulators, inputs and scales alike"
)]
unsafe fn add_rows<const ROWS: usize, const HAS_MINIMA: bool>(
    panels: [&[UnpackedBlock]; 2],
    mut input: RowsAtBlock,
    (sums, begins): ([&mut [Lanes]; 2], bool),
) -> usize {
    let mut acc = [[_mm512_setzero_ps(); ROWS]; 2];
    if !begins {
        for panel in 0..2 {
            for row in 0..ROWS {
                // SAFETY: a sum is 16 f32.
                acc[panel][row] = unsafe { _mm512_loadu_ps(sums[panel][row].as_ptr()) };
            }
        }
    }
    for (first, second) in panels[0].iter().zip(panels[1]) {
        let both = [first, second];
        // SAFETY: the rows have as many blocks as the panels, and vectors of a block have 64 bytes.
        unsafe {
            let mut dots = [[_mm512_setzero_si512(); ROWS]; 2];
            if !HAS_MINIMA {
                // The weights in memory are 128 too large. A sum starts with the negated amount that this adds.
                for row in 0..ROWS {
                    let start = _mm512_set1_epi32((-Q8_OFFSET).wrapping_mul(input.sum(row)));
                    (dots[0][row], dots[1][row]) = (start, start);
                }
            }
            for i in 0..8 {
                let weights = both.map(|block| _mm512_load_si512((&raw const block.weights[i]).cast()));
                for row in 0..ROWS {
                    let quants = four_quants(input.quants(row).add(4 * i));
                    for panel in 0..2 {
                        dots[panel][row] = _mm512_dpbusd_epi32(dots[panel][row], weights[panel], quants);
                    }
                }
                keep_order(&mut dots[0]);
                keep_order(&mut dots[1]);
            }
            for row in 0..ROWS {
                let (scale, total) = (_mm512_set1_ps(input.scale(row)), _mm512_set1_ps(input.total(row)));
                let middle = _mm512_set1_ps(input.middle(row));
                for panel in 0..2 {
                    let scale = _mm512_mul_ps(_mm512_load_ps(both[panel].scales.as_ptr()), scale);
                    let sum = &mut acc[panel][row];
                    *sum = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(dots[panel][row]), *sum);
                    if HAS_MINIMA {
                        *sum = _mm512_fmadd_ps(_mm512_load_ps(both[panel].minima.as_ptr()), total, *sum);
                    }
                    *sum = _mm512_fmadd_ps(_mm512_load_ps(both[panel].weight_sums.as_ptr()), middle, *sum);
                }
            }
        }
        input = input.after(1);
    }
    for (acc, sums) in acc.iter().zip(sums) {
        for (acc, sum) in acc.iter().zip(sums) {
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(sum.as_mut_ptr(), *acc) };
        }
    }
    ROWS
}
