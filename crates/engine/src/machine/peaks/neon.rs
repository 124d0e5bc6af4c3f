//! Loops for NEON with dot products.

use std::arch::aarch64::*;
use std::arch::asm;
use std::arch::is_aarch64_feature_detected;
use std::hint::black_box;

use super::Loops;

/// Of 32 registers: an instruction may take four cycles, and four may begin in each.
const SUMS: usize = 16;

pub(super) fn dotprod() -> Option<Loops> {
    is_aarch64_feature_detected!("dotprod").then_some(Loops {
        name: "neon-dotprod",
        int8_dot: dot,
        f32_fma: fma,
        read,
    })
}

fn dot(rounds: u64) -> u64 {
    #[target_feature(enable = "neon,dotprod")]
    fn inner(rounds: u64) -> u64 {
        let (a, b) = (black_box(vdupq_n_s8(3)), black_box(vdupq_n_s8(5)));
        let mut sums = [vdupq_n_s32(0); SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                // SAFETY: the feature is enabled here, and the instruction touches no memory.
                unsafe {
                    asm!(
                        "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
                        sum = inout(vreg) *sum,
                        a = in(vreg) a,
                        b = in(vreg) b,
                        options(pure, nomem, nostack, preserves_flags)
                    );
                }
            }
        }
        black_box(sums);
        // 16 pairs of numbers for each sum.
        rounds * 2 * 16 * SUMS as u64
    }
    // SAFETY: chosen only where the feature was found.
    unsafe { inner(rounds) }
}

fn fma(rounds: u64) -> u64 {
    #[target_feature(enable = "neon")]
    fn inner(rounds: u64) -> u64 {
        let (a, b) = (black_box(vdupq_n_f32(1.000_001)), black_box(vdupq_n_f32(0.5)));
        let mut sums = [vdupq_n_f32(0.0); SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = vfmaq_f32(*sum, a, b);
            }
        }
        black_box(sums);
        rounds * 2 * 4 * SUMS as u64
    }
    // SAFETY: NEON is always there.
    unsafe { inner(rounds) }
}

fn read(bytes: &[u8]) -> u64 {
    #[target_feature(enable = "neon")]
    fn inner(bytes: &[u8]) -> u64 {
        let (parts, _) = bytes.as_chunks::<256>();
        let mut sums = [vdupq_n_u8(0); 16];
        for part in parts {
            for (sum, words) in sums.iter_mut().zip(part.as_chunks::<16>().0) {
                // SAFETY: there are 16 bytes.
                *sum = veorq_u8(*sum, unsafe { vld1q_u8(words.as_ptr()) });
            }
        }
        black_box(sums);
        parts.len() as u64 * 256
    }
    // SAFETY: NEON is always there.
    unsafe { inner(bytes) }
}
