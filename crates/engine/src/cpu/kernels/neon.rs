//! NEON with the dot product of ARMv8.2: four 8-bit products and their sum in each of four lanes, where one instruction takes four quants of a row for all
//! lanes.

#[cfg(not(target_arch = "aarch64"))]
pub(super) use super::absent as detect;

pub(super) const NEEDS: &str = "64-bit ARM with the dot product of ARMv8.2";

#[cfg(target_arch = "aarch64")]
pub(super) use aarch64::detect;

#[cfg(target_arch = "aarch64")]
#[expect(
    clippy::needless_range_loop,
    reason = "a row indexes accumulators, inputs and scales alike"
)]
mod aarch64 {
    use std::arch::aarch64::*;
    use std::arch::asm;
    use std::arch::is_aarch64_feature_detected;

    use crate::cpu::kernels::rows::{Call, RowsAtBlock, dot_by_rows};
    use crate::cpu::kernels::vector::four_halves;
    use crate::cpu::kernels::{
        BLOCK, InputRows, Kernels, LANES, Lanes, MAX_ROWS, Outputs, Q4_1_PANEL_BLOCK, Q8_0_PANEL_BLOCK, lane_kernels,
    };

    lane_kernels!("neon", crate::cpu::kernels::vector::Neon);

    pub(in super::super) fn detect() -> Option<Kernels> {
        is_aarch64_feature_detected!("dotprod").then_some(Kernels {
            name: "neon-dotprod",
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

    // Four rows and eight outputs have eight sums of products, eight of blocks and eight inputs in the 32 registers; fewer rows take all 16 outputs at a
    // time.
    dot_by_rows!([4: 4, 2] [2: 2, 4] [1: 1, 4]);

    /// A body for each of the four groups of four quants in a register.
    macro_rules! for_each_quarter {
        ($quarter:ident, $body:block) => {
            for_each_quarter!($quarter, $body, 0, 1, 2, 3)
        };
        ($quarter:ident, $body:block, $($number:literal),*) => {
            $({
                const $quarter: usize = $number;
                $body
            })*
        };
    }

    /// Adds to each lane the products of its four weights with the four quants of a quarter. The standard library has no stable intrinsic before Rust 1.98.
    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    fn add_products<const QUARTER: usize>(sums: int32x4_t, weights: int8x16_t, quants: int8x16_t) -> int32x4_t {
        let mut sums = sums;
        // SAFETY: the feature is enabled here, and the instruction touches no memory.
        unsafe {
            asm!(
                "sdot {sums:v}.4s, {weights:v}.16b, {quants:v}.4b[{quarter}]",
                sums = inout(vreg) sums,
                weights = in(vreg) weights,
                quants = in(vreg) quants,
                quarter = const QUARTER,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        sums
    }

    /// The quants of a block of each row.
    ///
    /// # Safety
    /// `ROWS` rows of the input have this block.
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn quants_of<const ROWS: usize>(input: RowsAtBlock) -> [[int8x16_t; 2]; ROWS] {
        let mut quants = [[vdupq_n_s8(0); 2]; ROWS];
        for row in 0..ROWS {
            // SAFETY: the caller's promise; a block has 32 quants.
            unsafe {
                let from = input.quants(row);
                quants[row] = [vld1q_s8(from), vld1q_s8(from.add(16))];
            }
        }
        quants
    }

    /// `PARTS` times four outputs at a time.
    ///
    /// # Safety
    /// The CPU has the features; `panel` holds `blocks` blocks, as many as a row of the input has; `first + ROWS` input rows exist; `PARTS` divides 4.
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn q4_1_rows<const ROWS: usize, const PARTS: usize>(call: Call<'_>, out: &mut Outputs) {
        let (low_nibble, ones) = (vdupq_n_u8(15), vdupq_n_s8(1));
        for first_part in (0..LANES / 4).step_by(PARTS) {
            let mut sums = [[vdupq_n_f32(0.0); PARTS]; ROWS];
            // SAFETY: the caller's promise.
            let (mut weights, mut input) = (call.panel, unsafe { RowsAtBlock::first(call.input, call.first) });
            for _ in 0..call.blocks {
                let mut dots = [[vdupq_n_s32(0); PARTS]; ROWS];
                let mut weight_sums = [vdupq_n_s32(0); PARTS];
                // SAFETY: the loop runs once for each block that the callers' checks of panel and input have covered.
                unsafe {
                    let quants = quants_of::<ROWS>(input);
                    for_each_quarter!(QUARTER, {
                        for part in 0..PARTS {
                            let packed = vld1q_u8(weights.add(64 * QUARTER + 16 * (first_part + part)));
                            let low = vreinterpretq_s8_u8(vandq_u8(packed, low_nibble));
                            let high = vreinterpretq_s8_u8(vshrq_n_u8::<4>(packed));
                            weight_sums[part] = add_products::<0>(weight_sums[part], vaddq_s8(low, high), ones);
                            for row in 0..ROWS {
                                let dot = add_products::<QUARTER>(dots[row][part], low, quants[row][0]);
                                dots[row][part] = add_products::<QUARTER>(dot, high, quants[row][1]);
                            }
                        }
                    });
                    for part in 0..PARTS {
                        let d = four_halves(weights.add(256 + 8 * (first_part + part)));
                        let m = four_halves(weights.add(288 + 8 * (first_part + part)));
                        let weight_sums = vmulq_f32(d, vcvtq_f32_s32(weight_sums[part]));
                        for row in 0..ROWS {
                            let scale = vmulq_n_f32(d, input.scale(row));
                            let sum = vfmaq_f32(sums[row][part], scale, vcvtq_f32_s32(dots[row][part]));
                            let sum = vfmaq_n_f32(sum, m, input.total(row));
                            sums[row][part] = vfmaq_n_f32(sum, weight_sums, input.middle(row));
                        }
                    }
                }
                weights = weights.wrapping_add(Q4_1_PANEL_BLOCK);
                input = input.after(1);
            }
            store(sums, first_part, &mut out[call.first..]);
        }
    }

    /// # Safety
    /// As `q4_1_rows`.
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn q8_0_rows<const ROWS: usize, const PARTS: usize>(call: Call<'_>, out: &mut Outputs) {
        // The weights in memory are 128 too large.
        let (offset, ones) = (vdupq_n_u8(0x80), vdupq_n_s8(1));
        for first_part in (0..LANES / 4).step_by(PARTS) {
            let mut sums = [[vdupq_n_f32(0.0); PARTS]; ROWS];
            // SAFETY: the caller's promise.
            let (mut weights, mut input) = (call.panel, unsafe { RowsAtBlock::first(call.input, call.first) });
            for _ in 0..call.blocks {
                let mut dots = [[vdupq_n_s32(0); PARTS]; ROWS];
                let mut weight_sums = [vdupq_n_s32(0); PARTS];
                // SAFETY: as in `q4_1_rows`.
                unsafe {
                    let quants = quants_of::<ROWS>(input);
                    for half in 0..2 {
                        for_each_quarter!(QUARTER, {
                            for part in 0..PARTS {
                                let at = 64 * (4 * half + QUARTER) + 16 * (first_part + part);
                                let signed = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(weights.add(at)), offset));
                                weight_sums[part] = add_products::<0>(weight_sums[part], signed, ones);
                                for row in 0..ROWS {
                                    dots[row][part] =
                                        add_products::<QUARTER>(dots[row][part], signed, quants[row][half]);
                                }
                            }
                        });
                    }
                    for part in 0..PARTS {
                        let d = four_halves(weights.add(512 + 8 * (first_part + part)));
                        let weight_sums = vmulq_f32(d, vcvtq_f32_s32(weight_sums[part]));
                        for row in 0..ROWS {
                            let scale = vmulq_n_f32(d, input.scale(row));
                            let dot = vcvtq_f32_s32(dots[row][part]);
                            let sum = vfmaq_f32(sums[row][part], scale, dot);
                            sums[row][part] = vfmaq_n_f32(sum, weight_sums, input.middle(row));
                        }
                    }
                }
                weights = weights.wrapping_add(Q8_0_PANEL_BLOCK);
                input = input.after(1);
            }
            store(sums, first_part, &mut out[call.first..]);
        }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    fn store<const ROWS: usize, const PARTS: usize>(
        sums: [[float32x4_t; PARTS]; ROWS],
        first_part: usize,
        out: &mut [Lanes],
    ) {
        for (sums, out) in sums.into_iter().zip(out) {
            for (sum, out) in sums.into_iter().zip(&mut out.as_chunks_mut::<4>().0[first_part..]) {
                // SAFETY: `out` is four f32.
                unsafe { vst1q_f32(out.as_mut_ptr(), sum) };
            }
        }
    }
}
