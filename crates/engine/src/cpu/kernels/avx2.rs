//! AVX2: 8 output rows per register, and 8-bit products through 16-bit sums that cannot overflow.

pub(super) const NEEDS: &str = "x86-64 with AVX2, FMA and F16C";

#[cfg(not(target_arch = "x86_64"))]
pub(super) use super::absent as detect;

#[cfg(target_arch = "x86_64")]
pub(super) use x86::detect;
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{eight_halves, four_quants, store};

#[cfg(target_arch = "x86_64")]
#[expect(
    clippy::needless_range_loop,
    reason = "a row indexes accumulators, inputs and scales alike"
)]
mod x86 {
    use std::arch::x86_64::*;

    use crate::cpu::kernels::rows::{Call, RowsAtBlock, dot_by_rows};
    use crate::cpu::kernels::{
        BLOCK, InputRows, Kernels, Lanes, MAX_ROWS, Outputs, Q4_1_PANEL_BLOCK, Q8_0_PANEL_BLOCK, lane_kernels,
    };

    lane_kernels!("avx2,fma,f16c", crate::cpu::kernels::vector::Avx2);

    pub(in super::super) fn detect() -> Option<Kernels> {
        let found =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        found.then_some(Kernels {
            name: "avx2",
            dot_q4_1,
            dot_q8_0,
            dot_f32,
            pair_q4_1: None,
            pair_q8_0: None,
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

    // 16 registers hold 8 weight vectors and 4 sums.
    dot_by_rows!([4: 4] [3: 3] [2: 2] [1: 1]);

    /// Four bytes of input in every lane.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(in super::super) unsafe fn four_quants(quants: *const i8) -> __m256i {
        // SAFETY: the caller passes a pointer to at least four quants.
        _mm256_set1_epi32(unsafe { quants.cast::<i32>().read_unaligned() })
    }

    /// Eight f16 to f32.
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    pub(in super::super) unsafe fn eight_halves(halves: *const u8) -> __m256 {
        // SAFETY: the caller passes a pointer to at least 16 bytes.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(halves.cast()) })
    }

    /// # Safety
    /// The CPU has the features; `panel` holds `blocks` blocks, as many as a row of the input has; `first + ROWS` input rows exist.
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn q4_1_rows<const ROWS: usize>(call: Call<'_>, out: &mut Outputs) {
        let (low_nibble, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
        for half in 0..2 {
            let mut sums = [_mm256_setzero_ps(); ROWS];
            // SAFETY: the caller's promise.
            let (mut weights, mut input) = (call.panel, unsafe { RowsAtBlock::first(call.input, call.first) });
            for _ in 0..call.blocks {
                // SAFETY: the loop runs once for each block that the callers' checks of panel and input have covered.
                unsafe {
                    let mut unpacked = [_mm256_setzero_si256(); 8];
                    for i in 0..4 {
                        let packed = _mm256_loadu_si256(weights.add(64 * i + 32 * half).cast());
                        unpacked[i] = _mm256_and_si256(packed, low_nibble);
                        unpacked[i + 4] = _mm256_and_si256(_mm256_srli_epi16::<4>(packed), low_nibble);
                    }
                    let d = eight_halves(weights.add(256 + 16 * half));
                    let m = eight_halves(weights.add(288 + 16 * half));
                    // A byte is at most 8 * 15 = 120.
                    let mut bytes = unpacked[0];
                    for weights in &unpacked[1..] {
                        bytes = _mm256_add_epi8(bytes, *weights);
                    }
                    let weight_sum = _mm256_madd_epi16(_mm256_maddubs_epi16(bytes, _mm256_set1_epi8(1)), ones);
                    let weight_sums = _mm256_mul_ps(d, _mm256_cvtepi32_ps(weight_sum));
                    for row in 0..ROWS {
                        let quants = input.quants(row);
                        // 16-bit sums stay below 8 * 2 * 15 * 127 = 30,480.
                        let mut pairs = _mm256_setzero_si256();
                        for (i, weights) in unpacked.iter().enumerate() {
                            let products = _mm256_maddubs_epi16(*weights, four_quants(quants.add(4 * i)));
                            pairs = _mm256_add_epi16(pairs, products);
                        }
                        let dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones));
                        let scale = _mm256_mul_ps(d, _mm256_set1_ps(input.scale(row)));
                        sums[row] = _mm256_fmadd_ps(scale, dot, sums[row]);
                        sums[row] = _mm256_fmadd_ps(m, _mm256_set1_ps(input.total(row)), sums[row]);
                        sums[row] = _mm256_fmadd_ps(weight_sums, _mm256_set1_ps(input.middle(row)), sums[row]);
                    }
                }
                weights = weights.wrapping_add(Q4_1_PANEL_BLOCK);
                input = input.after(1);
            }
            store(sums, &mut out[call.first..], half);
        }
    }

    /// # Safety
    /// As `q4_1_rows`.
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn q8_0_rows<const ROWS: usize>(call: Call<'_>, out: &mut Outputs) {
        let (offset, ones) = (_mm256_set1_epi8(-128), _mm256_set1_epi16(1));
        for half in 0..2 {
            let mut sums = [_mm256_setzero_ps(); ROWS];
            // SAFETY: the caller's promise.
            let (mut weights, mut input) = (call.panel, unsafe { RowsAtBlock::first(call.input, call.first) });
            for _ in 0..call.blocks {
                // SAFETY: as in `q4_1_rows`.
                unsafe {
                    let d = eight_halves(weights.add(512 + 16 * half));
                    let mut dots = [_mm256_setzero_si256(); ROWS];
                    let mut weight_sum = _mm256_setzero_si256();
                    for i in 0..8 {
                        let stored = _mm256_loadu_si256(weights.add(64 * i + 32 * half).cast());
                        let signed = _mm256_xor_si256(stored, offset);
                        // 16-bit sums are at most 8 * 2 * 128 = 2,048.
                        let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), signed);
                        weight_sum = _mm256_add_epi16(weight_sum, pairs);
                        let magnitude = _mm256_abs_epi8(signed);
                        for (row, dot) in dots.iter_mut().enumerate() {
                            let quants = input.quants(row);
                            // |w| * (q with the sign of w) = w * q; a quant is never -128, so its negation exists,
                            // and a pair is at most 2 * 128 * 127 = 32,512.
                            let turned = _mm256_sign_epi8(four_quants(quants.add(4 * i)), signed);
                            let pairs = _mm256_maddubs_epi16(magnitude, turned);
                            *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(pairs, ones));
                        }
                    }
                    let weight_sums = _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_madd_epi16(weight_sum, ones)));
                    for row in 0..ROWS {
                        let scale = _mm256_mul_ps(d, _mm256_set1_ps(input.scale(row)));
                        sums[row] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(dots[row]), sums[row]);
                        sums[row] = _mm256_fmadd_ps(weight_sums, _mm256_set1_ps(input.middle(row)), sums[row]);
                    }
                }
                weights = weights.wrapping_add(Q8_0_PANEL_BLOCK);
                input = input.after(1);
            }
            store(sums, &mut out[call.first..], half);
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    pub(in super::super) fn store<const ROWS: usize>(sums: [__m256; ROWS], out: &mut [Lanes], half: usize) {
        for (sum, out) in sums.iter().zip(out) {
            // SAFETY: `out` is 16 f32 and `half` is 0 or 1.
            unsafe { _mm256_storeu_ps(out[8 * half..].as_mut_ptr(), *sum) };
        }
    }
}
