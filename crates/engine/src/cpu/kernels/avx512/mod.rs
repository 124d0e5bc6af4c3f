//! AVX-512 with VNNI: four 8-bit products and their sum per lane and instruction.

#[cfg(not(target_arch = "x86_64"))]
pub(super) use super::absent as detect;

pub(super) const NEEDS: &str = "x86-64 with AVX-512 F, BW, DQ, VL and VNNI";

#[cfg(target_arch = "x86_64")]
pub(super) use x86::detect;

#[cfg(target_arch = "x86_64")]
mod pairs;

#[cfg(target_arch = "x86_64")]
#[expect(
    clippy::needless_range_loop,
    reason = "a row indexes accumulators, inputs and scales alike"
)]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::*;

    use super::pairs;
    use crate::cpu::kernels::rows::{Call, RowsAtBlock, dot_by_rows};
    use crate::cpu::kernels::vector::{Avx512, Vector as _};
    use crate::cpu::kernels::{
        BLOCK, InputRows, Kernels, LANES, Lanes, MAX_ROWS, Outputs, Q4_1_PANEL_BLOCK, Q8_0_PANEL_BLOCK, Q8_OFFSET,
        lane_kernels,
    };

    /// A row that is alone needs a block in 15 ns, and memory answers in about 100 ns. With 4 KiB an Intel Xeon streamed weights 1.3 times as fast as
    /// without.
    const PREFETCH_AHEAD_BYTES: usize = 4_096;

    lane_kernels!(
        "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c",
        crate::cpu::kernels::vector::Avx512
    );

    pub(in super::super) fn detect() -> Option<Kernels> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Kernels {
            name: "avx512-vnni",
            dot_q4_1,
            dot_q8_0,
            dot_f32,
            pair_q4_1: Some(pairs::Q4_1),
            pair_q8_0: Some(pairs::Q8_0),
            rms_norm,
            quantise,
            quantise_blocks,
            gate_silu,
            gate_gelu,
            softcap,
            attend_partition,
            add_partition,
        })
    }

    dot_by_rows!([8: 8] [7: 7] [6: 6] [5: 5] [4: 4] [3: 3] [2: 2] [1: 1]);

    /// Four bytes of input in every lane.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn four_quants(quants: *const i8) -> __m512i {
        // SAFETY: the caller passes a pointer to at least four quants.
        _mm512_set1_epi32(unsafe { quants.cast::<i32>().read_unaligned() })
    }

    /// Sums of a block's stored integers become sums of its weights, without their minimum.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn sums_of_weights(d: __m512, stored: __m512i) -> __m512 {
        _mm512_mul_ps(d, _mm512_cvtepi32_ps(stored))
    }

    /// Keeps the compiler from computing row after row. A product waits five cycles for the one before it of the same row, and the machine does not look
    /// far enough ahead to fill them.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn keep_order<const ROWS: usize>(dots: &mut [__m512i; ROWS]) {
        for dot in dots {
            // SAFETY: no instruction; each vector stays as it is.
            unsafe {
                asm!(
                    "/* {} */",
                    inout(zmm_reg) * dot,
                    options(nomem, nostack, preserves_flags)
                )
            };
        }
    }

    /// Asks for the weights that come `PREFETCH_AHEAD_BYTES` after these, in this panel or in the next.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn prefetch(weights: *const u8, bytes: usize) {
        Avx512::prefetch(weights.wrapping_add(PREFETCH_AHEAD_BYTES), bytes);
    }

    /// # Safety
    /// The CPU has the features; `panel` holds `blocks` blocks, as many as a row of the input has; `first + ROWS` input rows exist.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn q4_1_rows<const ROWS: usize>(call: Call<'_>, out: &mut Outputs) {
        let (low_nibble, ones) = (_mm512_set1_epi8(15), _mm512_set1_epi8(1));
        let mut sums = [_mm512_setzero_ps(); ROWS];
        // SAFETY: the caller's promise.
        let (mut weights, mut input) = (call.panel, unsafe { RowsAtBlock::first(call.input, call.first) });
        for _ in 0..call.blocks {
            prefetch(weights, Q4_1_PANEL_BLOCK);
            // SAFETY: the loop runs once for each block that the callers' checks of panel and input have covered.
            unsafe {
                let mut dots = [_mm512_setzero_si512(); ROWS];
                // A byte is at most 8 * 15 = 120.
                let mut bytes = _mm512_setzero_si512();
                for i in 0..4 {
                    let packed = _mm512_loadu_si512(weights.add(64 * i).cast());
                    let low = _mm512_and_si512(packed, low_nibble);
                    let high = _mm512_and_si512(_mm512_srli_epi16::<4>(packed), low_nibble);
                    bytes = _mm512_add_epi8(bytes, _mm512_add_epi8(low, high));
                    for row in 0..ROWS {
                        dots[row] = _mm512_dpbusd_epi32(dots[row], low, four_quants(input.quants(row).add(4 * i)));
                    }
                    keep_order(&mut dots);
                    for row in 0..ROWS {
                        let quants = input.quants(row).add(16 + 4 * i);
                        dots[row] = _mm512_dpbusd_epi32(dots[row], high, four_quants(quants));
                    }
                    keep_order(&mut dots);
                }
                let d = _mm512_cvtph_ps(_mm256_loadu_si256(weights.add(256).cast()));
                let m = _mm512_cvtph_ps(_mm256_loadu_si256(weights.add(288).cast()));
                let weight_sums = sums_of_weights(d, _mm512_dpbusd_epi32(_mm512_setzero_si512(), bytes, ones));
                for row in 0..ROWS {
                    let scale = _mm512_mul_ps(d, _mm512_set1_ps(input.scale(row)));
                    sums[row] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(dots[row]), sums[row]);
                    sums[row] = _mm512_fmadd_ps(m, _mm512_set1_ps(input.total(row)), sums[row]);
                    sums[row] = _mm512_fmadd_ps(weight_sums, _mm512_set1_ps(input.middle(row)), sums[row]);
                }
            }
            weights = weights.wrapping_add(Q4_1_PANEL_BLOCK);
            input = input.after(1);
        }
        store(sums, &mut out[call.first..]);
    }

    /// # Safety
    /// As `q4_1_rows`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn q8_0_rows<const ROWS: usize>(call: Call<'_>, out: &mut Outputs) {
        let ones = _mm512_set1_epi8(1);
        let mut sums = [_mm512_setzero_ps(); ROWS];
        // SAFETY: the caller's promise.
        let (mut weights, mut input) = (call.panel, unsafe { RowsAtBlock::first(call.input, call.first) });
        for _ in 0..call.blocks {
            prefetch(weights, Q8_0_PANEL_BLOCK);
            // SAFETY: as in `q4_1_rows`.
            unsafe {
                // The weights in memory are 128 too large. A sum starts with the negated amount that this adds.
                let mut dots = [_mm512_setzero_si512(); ROWS];
                let mut weight_sums = _mm512_set1_epi32(-Q8_OFFSET * BLOCK as i32);
                for row in 0..ROWS {
                    dots[row] = _mm512_set1_epi32((-Q8_OFFSET).wrapping_mul(input.sum(row)));
                }
                for i in 0..8 {
                    let weights = _mm512_loadu_si512(weights.add(64 * i).cast());
                    weight_sums = _mm512_dpbusd_epi32(weight_sums, weights, ones);
                    for row in 0..ROWS {
                        let quants = four_quants(input.quants(row).add(4 * i));
                        dots[row] = _mm512_dpbusd_epi32(dots[row], weights, quants);
                    }
                    keep_order(&mut dots);
                }
                let d = _mm512_cvtph_ps(_mm256_loadu_si256(weights.add(512).cast()));
                let weight_sums = sums_of_weights(d, weight_sums);
                for row in 0..ROWS {
                    let scale = _mm512_mul_ps(d, _mm512_set1_ps(input.scale(row)));
                    sums[row] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(dots[row]), sums[row]);
                    sums[row] = _mm512_fmadd_ps(weight_sums, _mm512_set1_ps(input.middle(row)), sums[row]);
                }
            }
            weights = weights.wrapping_add(Q8_0_PANEL_BLOCK);
            input = input.after(1);
        }
        store(sums, &mut out[call.first..]);
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn store<const ROWS: usize>(sums: [__m512; ROWS], out: &mut [Lanes]) {
        const { assert!(LANES == 16) }
        for (sum, out) in sums.iter().zip(out) {
            // SAFETY: `out` is 16 f32.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), *sum) };
        }
    }
}
