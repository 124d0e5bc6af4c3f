//! [`Vector`] for NEON, which every 64-bit ARM has: four registers for 16 lanes.

use std::arch::aarch64::*;

use half::f16;

use super::Vector;
use crate::cpu::kernels::{LANES, Lanes};

#[derive(Clone, Copy)]
pub(crate) struct Neon([float32x4_t; 4]);

/// Four f16 become f32.
///
/// # Safety
/// `from` points to four readable f16, at any address.
#[inline(always)]
pub(crate) unsafe fn four_halves(from: *const u8) -> float32x4_t {
    // SAFETY: the caller's promise; NEON is always there, and both vectors are any 8 bytes.
    unsafe { vcvt_f32_f16(std::mem::transmute::<uint8x8_t, float16x4_t>(vld1_u8(from))) }
}

/// `a > b ? a : b` of each lane. `vmaxq_f32` treats NaN and zeros of both signs otherwise.
#[inline(always)]
fn larger(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: NEON is always there.
    unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
}

impl Neon {
    #[inline(always)]
    fn zip(self, other: Self, operation: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> Self {
        let (a, b) = (self.0, other.0);
        Self([
            operation(a[0], b[0]),
            operation(a[1], b[1]),
            operation(a[2], b[2]),
            operation(a[3], b[3]),
        ])
    }

    /// The first two additions of a tree sum: lanes i, i + 4, i + 8 and i + 12 are in lane i.
    #[inline(always)]
    fn four_sums(self) -> float32x4_t {
        // SAFETY: NEON is always there.
        unsafe { vaddq_f32(vaddq_f32(self.0[0], self.0[2]), vaddq_f32(self.0[1], self.0[3])) }
    }
}

// SAFETY of all blocks below: NEON is always there, and the references are to 16 lanes.
#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "one reason for all of them, stated above"
)]
impl Vector for Neon {
    const REGISTERS: usize = 8;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([unsafe { vdupq_n_f32(value) }; 4])
    }
    #[inline(always)]
    fn load(from: &Lanes) -> Self {
        let (parts, _) = from.as_chunks::<4>();
        unsafe {
            Self([
                vld1q_f32(parts[0].as_ptr()),
                vld1q_f32(parts[1].as_ptr()),
                vld1q_f32(parts[2].as_ptr()),
                vld1q_f32(parts[3].as_ptr()),
            ])
        }
    }
    #[inline(always)]
    fn store(self, to: &mut Lanes) {
        for (part, to) in self.0.into_iter().zip(to.as_chunks_mut::<4>().0) {
            unsafe { vst1q_f32(to.as_mut_ptr(), part) };
        }
    }
    #[inline(always)]
    unsafe fn load_halves(from: *const f16) -> Self {
        let from = from.cast::<u8>();
        unsafe {
            Self([
                four_halves(from),
                four_halves(from.add(8)),
                four_halves(from.add(16)),
                four_halves(from.add(24)),
            ])
        }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| unsafe { vaddq_f32(a, b) })
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| unsafe { vsubq_f32(a, b) })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| unsafe { vmulq_f32(a, b) })
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, term: Self) -> Self {
        let (a, b, c) = (self.0, factor.0, term.0);
        unsafe {
            Self([
                vfmaq_f32(c[0], a[0], b[0]),
                vfmaq_f32(c[1], a[1], b[1]),
                vfmaq_f32(c[2], a[2], b[2]),
                vfmaq_f32(c[3], a[3], b[3]),
            ])
        }
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| unsafe { vdivq_f32(a, b) })
    }
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        self.zip(other, larger)
    }
    #[inline(always)]
    fn smaller(self, other: Self) -> Self {
        self.zip(other, |a, b| unsafe { vbslq_f32(vcltq_f32(a, b), a, b) })
    }
    #[inline(always)]
    fn zero_below(self, limit: Self, value: Self) -> Self {
        let below = self.zip(limit, |a, b| unsafe { vreinterpretq_f32_u32(vcltq_f32(a, b)) });
        below.zip(value, |below, value| unsafe {
            vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vreinterpretq_u32_f32(below)))
        })
    }
    #[inline(always)]
    fn power_of_two(self) -> Self {
        self.zip(self, |a, _| unsafe {
            let exponent = vshlq_n_u32::<23>(vreinterpretq_u32_f32(a));
            vreinterpretq_f32_u32(vaddq_u32(exponent, vdupq_n_u32(0x3f80_0000)))
        })
    }
    #[inline(always)]
    fn low_bytes(vectors: [Self; 2]) -> ([[i8; LANES]; 2], i32) {
        let mut bytes = [[0; LANES]; 2];
        let mut sum = 0;
        for (vector, bytes) in vectors.into_iter().zip(&mut bytes) {
            unsafe {
                let [a, b, c, d] = vector.0;
                // Every second pair of bytes, and of those every second byte.
                let low = vuzp1q_u16(vreinterpretq_u16_f32(a), vreinterpretq_u16_f32(b));
                let high = vuzp1q_u16(vreinterpretq_u16_f32(c), vreinterpretq_u16_f32(d));
                let packed = vuzp1q_s8(vreinterpretq_s8_u16(low), vreinterpretq_s8_u16(high));
                vst1q_s8(bytes.as_mut_ptr(), packed);
                sum += i32::from(vaddlvq_s8(packed));
            }
        }
        (bytes, sum)
    }
    #[inline(always)]
    fn tree_sum(self) -> f32 {
        unsafe {
            let four = self.four_sums();
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }
    #[inline(always)]
    fn tree_sums(rows: [Self; LANES]) -> Self {
        // No closures: see `attend/mod.rs`.
        let mut sums = Self::splat(0.0);
        for group in 0..4 {
            unsafe {
                let (a, b) = (rows[4 * group].four_sums(), rows[4 * group + 1].four_sums());
                let (c, d) = (rows[4 * group + 2].four_sums(), rows[4 * group + 3].four_sums());
                // Lanes 0 and 2 of two rows side by side, then lanes 1 and 3.
                let (ab_even, ab_odd) = (vtrn1q_f32(a, b), vtrn2q_f32(a, b));
                let (cd_even, cd_odd) = (vtrn1q_f32(c, d), vtrn2q_f32(c, d));
                // Lane i and lane i + 2.
                let ab = [
                    vadd_f32(vget_low_f32(ab_even), vget_high_f32(ab_even)),
                    vadd_f32(vget_low_f32(ab_odd), vget_high_f32(ab_odd)),
                ];
                let cd = [
                    vadd_f32(vget_low_f32(cd_even), vget_high_f32(cd_even)),
                    vadd_f32(vget_low_f32(cd_odd), vget_high_f32(cd_odd)),
                ];
                sums.0[group] = vcombine_f32(vadd_f32(ab[0], ab[1]), vadd_f32(cd[0], cd[1]));
            }
        }
        sums
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        let eight = [larger(self.0[0], self.0[2]), larger(self.0[1], self.0[3])];
        let four = larger(eight[0], eight[1]);
        unsafe {
            let (a, b) = (vget_low_f32(four), vget_high_f32(four));
            let two = vbsl_f32(vcgt_f32(a, b), a, b);
            let (a, b) = (vget_lane_f32::<0>(two), vget_lane_f32::<1>(two));
            if a > b { a } else { b }
        }
    }
    #[inline(always)]
    fn transpose(rows: [Self; LANES]) -> [Self; LANES] {
        // No closures: see `attend/mod.rs`.
        let mut columns = rows;
        for group in 0..4 {
            for part in 0..4 {
                // Four rows of four columns.
                unsafe {
                    let (a, b) = (rows[4 * group].0[part], rows[4 * group + 1].0[part]);
                    let (c, d) = (rows[4 * group + 2].0[part], rows[4 * group + 3].0[part]);
                    let (ab_even, ab_odd) = (vtrn1q_f32(a, b), vtrn2q_f32(a, b));
                    let (cd_even, cd_odd) = (vtrn1q_f32(c, d), vtrn2q_f32(c, d));
                    columns[4 * part].0[group] = vcombine_f32(vget_low_f32(ab_even), vget_low_f32(cd_even));
                    columns[4 * part + 1].0[group] = vcombine_f32(vget_low_f32(ab_odd), vget_low_f32(cd_odd));
                    columns[4 * part + 2].0[group] = vcombine_f32(vget_high_f32(ab_even), vget_high_f32(cd_even));
                    columns[4 * part + 3].0[group] = vcombine_f32(vget_high_f32(ab_odd), vget_high_f32(cd_odd));
                }
            }
        }
        columns
    }
}
