//! AVX-VNNI: the four 8-bit products of AVX-512 VNNI in registers of 256 bits, on processors that have no AVX-512. The loops for f32 are those of AVX2.

pub(super) const NEEDS: &str = "x86-64 with AVX-VNNI, AVX2, FMA and F16C";

#[cfg(not(target_arch = "x86_64"))]
pub(super) use super::absent as detect;

#[cfg(target_arch = "x86_64")]
pub(super) fn detect() -> Option<super::Kernels> {
    let kernels = super::avx2::detect()?;
    is_x86_feature_detected!("avxvnni").then_some(super::Kernels {
        name: "avx-vnni",
        dot_q4_1: of_avx_vnni::dot_q4_1,
        dot_q8_0: of_avx_vnni::dot_q8_0,
        ..kernels
    })
}

/// The same source with the instruction as AVX-512 encodes it, so that machines without AVX-VNNI test it, too.
#[cfg(all(test, target_arch = "x86_64"))]
pub(super) fn detect_as_avx512() -> Option<super::Kernels> {
    let kernels = super::avx2::detect()?;
    let found = is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512vl");
    found.then_some(super::Kernels {
        name: "avx-vnni, encoded as AVX-512",
        dot_q4_1: of_avx512::dot_q4_1,
        dot_q8_0: of_avx512::dot_q8_0,
        ..kernels
    })
}

/// Kernels with an instruction that adds four products of unsigned weights and signed quants to each lane.
#[cfg(target_arch = "x86_64")]
macro_rules! dot_kernels {
    ($name:ident, $features:tt, $add_products:ident) => {
        mod $name {
            use std::arch::x86_64::*;

            use crate::cpu::kernels::avx2::{eight_halves, four_quants, store};
            use crate::cpu::kernels::rows::{Call, RowsAtBlock, dot_by_rows};
            use crate::cpu::kernels::{
                BLOCK, InputRows, MAX_ROWS, Outputs, Q4_1_PANEL_BLOCK, Q8_0_PANEL_BLOCK, Q8_OFFSET,
            };

            dot_by_rows!([4: 4] [3: 3] [2: 2] [1: 1]);

            /// # Safety
            /// The CPU has the features; `panel` holds `blocks` blocks, as many as a row of the input has; `first + ROWS` input rows exist.
            #[target_feature(enable = $features)]
            unsafe fn q4_1_rows<const ROWS: usize>(call: Call<'_>, out: &mut Outputs) {
                let low_nibble = _mm256_set1_epi8(15);
                for half in 0..2 {
                    let mut sums = [_mm256_setzero_ps(); ROWS];
                    // SAFETY: the caller's promise.
                    let (mut weights, mut input) = (call.panel, unsafe { RowsAtBlock::first(call.input, call.first) });
                    for _ in 0..call.blocks {
                        // SAFETY: the loop runs once for each block that the callers' checks of panel and input have covered.
                        unsafe {
                            let mut dots = [_mm256_setzero_si256(); ROWS];
                            // A byte is at most 8 * 15 = 120.
                            let mut bytes = _mm256_setzero_si256();
                            for i in 0..4 {
                                let packed = _mm256_loadu_si256(weights.add(64 * i + 32 * half).cast());
                                let low = _mm256_and_si256(packed, low_nibble);
                                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(packed), low_nibble);
                                bytes = _mm256_add_epi8(bytes, _mm256_add_epi8(low, high));
                                for row in 0..ROWS {
                                    let quants = input.quants(row).add(4 * i);
                                    let dot = $add_products(dots[row], low, four_quants(quants));
                                    dots[row] = $add_products(dot, high, four_quants(quants.add(16)));
                                }
                            }
                            let d = eight_halves(weights.add(256 + 16 * half));
                            let m = eight_halves(weights.add(288 + 16 * half));
                            let weight_sum = $add_products(_mm256_setzero_si256(), bytes, _mm256_set1_epi8(1));
                            let weight_sums = _mm256_mul_ps(d, _mm256_cvtepi32_ps(weight_sum));
                            for row in 0..ROWS {
                                let scale = _mm256_mul_ps(d, _mm256_set1_ps(input.scale(row)));
                                sums[row] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(dots[row]), sums[row]);
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
            #[target_feature(enable = $features)]
            unsafe fn q8_0_rows<const ROWS: usize>(call: Call<'_>, out: &mut Outputs) {
                for half in 0..2 {
                    let mut sums = [_mm256_setzero_ps(); ROWS];
                    // SAFETY: the caller's promise.
                    let (mut weights, mut input) = (call.panel, unsafe { RowsAtBlock::first(call.input, call.first) });
                    for _ in 0..call.blocks {
                        // SAFETY: as in `q4_1_rows`.
                        unsafe {
                            // The weights in memory are 128 too large. A sum starts with the negated amount that this adds.
                            let mut dots = [_mm256_setzero_si256(); ROWS];
                            for row in 0..ROWS {
                                dots[row] = _mm256_set1_epi32((-Q8_OFFSET).wrapping_mul(input.sum(row)));
                            }
                            let mut weight_sum = _mm256_set1_epi32(-Q8_OFFSET * BLOCK as i32);
                            for i in 0..8 {
                                let stored = _mm256_loadu_si256(weights.add(64 * i + 32 * half).cast());
                                weight_sum = $add_products(weight_sum, stored, _mm256_set1_epi8(1));
                                for row in 0..ROWS {
                                    let quants = four_quants(input.quants(row).add(4 * i));
                                    dots[row] = $add_products(dots[row], stored, quants);
                                }
                            }
                            let d = eight_halves(weights.add(512 + 16 * half));
                            let weight_sums = _mm256_mul_ps(d, _mm256_cvtepi32_ps(weight_sum));
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
        }
    };
}

#[cfg(target_arch = "x86_64")]
dot_kernels!(of_avx_vnni, "avxvnni,avx2,fma,f16c", _mm256_dpbusd_avx_epi32);
#[cfg(all(test, target_arch = "x86_64"))]
dot_kernels!(of_avx512, "avx512vnni,avx512vl,avx2,fma,f16c", _mm256_dpbusd_epi32);
