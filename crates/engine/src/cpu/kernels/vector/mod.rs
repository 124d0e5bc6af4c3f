//! 16 lanes of f32 with the operations the f32 loops need: one register, two, four, or an array, with the same results.
//!
//! The compiler turned an array version of attention into code 7 times slower than the registers allow. So the loops in
//! `lanes` and `attend` are generic over this trait. Every method is inlined into a function that has the instruction set enabled. Only
//! `mul_add` fuses a product and a sum.

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

use half::f16;

#[cfg(target_arch = "aarch64")]
pub(crate) use self::neon::{Neon, four_halves};
#[cfg(target_arch = "x86_64")]
pub(crate) use self::x86::{Avx2, Avx512};

use super::{LANES, Lanes};
use crate::math::{EXP_HIGHEST, EXP_LOWEST, LN_2_HIGH, LN_2_LOW, ROUND_F32};

pub(crate) trait Vector: Copy {
    /// Vectors that the registers hold.
    const REGISTERS: usize;

    fn splat(value: f32) -> Self;
    fn load(from: &Lanes) -> Self;
    fn store(self, to: &mut Lanes);
    /// # Safety
    /// `from` points to 16 readable f16.
    unsafe fn load_halves(from: *const f16) -> Self;

    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// `self * factor + term`, rounded once.
    fn mul_add(self, factor: Self, term: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// `self > other ? self : other`.
    fn larger(self, other: Self) -> Self;
    /// `self < other ? self : other`.
    fn smaller(self, other: Self) -> Self;
    /// `self < limit ? 0 : value`.
    fn zero_below(self, limit: Self, value: Self) -> Self;
    /// 2^n for an n that was rounded by adding `ROUND_F32`. The added number is still in it.
    fn power_of_two(self) -> Self;
    /// Low bytes of the lanes' bits, and the sum of all of them.
    #[inline(always)]
    fn low_bytes(vectors: [Self; 2]) -> ([[i8; LANES]; 2], i32) {
        let mut bytes = [[0; LANES]; 2];
        let mut sum = 0;
        for vector in 0..2 {
            let lanes = vectors[vector].array();
            for lane in 0..LANES {
                bytes[vector][lane] = lanes[lane].to_bits() as i8;
                sum += i32::from(bytes[vector][lane]);
            }
        }
        (bytes, sum)
    }

    /// The "tree sum" of `crate::numerics`.
    #[inline(always)]
    fn tree_sum(self) -> f32 {
        let mut lanes = self.array();
        for width in [8, 4, 2, 1] {
            for lane in 0..width {
                lanes[lane] += lanes[lane + width];
            }
        }
        lanes[0]
    }

    /// The tree sum of each vector: that of `rows[i]` is in lane i.
    #[inline(always)]
    fn tree_sums(rows: [Self; LANES]) -> Self {
        let mut columns = Self::transpose(rows);
        for width in [8, 4, 2, 1] {
            for lane in 0..width {
                columns[lane] = columns[lane].add(columns[lane + width]);
            }
        }
        columns[0]
    }

    /// `a > b ? a : b` of lanes i and i + 8, then + 4, + 2, + 1. With a NaN, or zeros of both signs, order and sides matter, so all versions
    /// have these.
    #[inline(always)]
    fn largest(self) -> f32 {
        let mut lanes = self.array();
        for width in [8, 4, 2, 1] {
            for lane in 0..width {
                lanes[lane] = if lanes[lane] > lanes[lane + width] {
                    lanes[lane]
                } else {
                    lanes[lane + width]
                };
            }
        }
        lanes[0]
    }

    /// Asks for memory that is read soon. It has no effect on any result, so any address will do.
    #[inline(always)]
    fn prefetch(_from: *const u8, _bytes: usize) {}

    /// Rows to columns.
    #[inline(always)]
    fn transpose(rows: [Self; LANES]) -> [Self; LANES] {
        let mut from = [[0.0; LANES]; LANES];
        for row in 0..LANES {
            rows[row].store(&mut from[row]);
        }
        let mut columns = rows;
        for column in 0..LANES {
            let mut lanes = [0.0; LANES];
            for row in 0..LANES {
                lanes[row] = from[row][column];
            }
            columns[column] = Self::load(&lanes);
        }
        columns
    }

    #[inline(always)]
    fn array(self) -> Lanes {
        let mut lanes = [0.0; LANES];
        self.store(&mut lanes);
        lanes
    }

    /// [`crate::math::exp`] of every lane.
    #[inline(always)]
    fn exp(self) -> Self {
        let clamped = Self::splat(EXP_HIGHEST).smaller(self);
        let clamped = Self::splat(EXP_LOWEST).larger(clamped);
        let round = Self::splat(ROUND_F32);
        let shifted = clamped.mul(Self::splat(std::f32::consts::LOG2_E)).add(round);
        let n = shifted.sub(round);
        let r = clamped
            .sub(n.mul(Self::splat(LN_2_HIGH)))
            .sub(n.mul(Self::splat(LN_2_LOW)));
        let mut p = Self::splat(1.0 / 720.0);
        for coefficient in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5] {
            p = p.mul(r).add(Self::splat(coefficient));
        }
        let y = p.mul(r.mul(r)).add(r).add(Self::splat(1.0));
        self.zero_below(Self::splat(EXP_LOWEST), y.mul(shifted.power_of_two()))
    }
}

impl Vector for Lanes {
    const REGISTERS: usize = 4;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        [value; LANES]
    }
    #[inline(always)]
    fn load(from: &Lanes) -> Self {
        *from
    }
    #[inline(always)]
    fn store(self, to: &mut Lanes) {
        *to = self;
    }
    #[inline(always)]
    unsafe fn load_halves(from: *const f16) -> Self {
        // SAFETY: the caller's promise.
        std::array::from_fn(|lane| unsafe { from.add(lane).read() }.to_f32())
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        std::array::from_fn(|lane| self[lane] + other[lane])
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        std::array::from_fn(|lane| self[lane] - other[lane])
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        std::array::from_fn(|lane| self[lane] * other[lane])
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, term: Self) -> Self {
        std::array::from_fn(|lane| self[lane].mul_add(factor[lane], term[lane]))
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        std::array::from_fn(|lane| self[lane] / other[lane])
    }
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        std::array::from_fn(|lane| {
            if self[lane] > other[lane] {
                self[lane]
            } else {
                other[lane]
            }
        })
    }
    #[inline(always)]
    fn smaller(self, other: Self) -> Self {
        std::array::from_fn(|lane| {
            if self[lane] < other[lane] {
                self[lane]
            } else {
                other[lane]
            }
        })
    }
    #[inline(always)]
    fn zero_below(self, limit: Self, value: Self) -> Self {
        std::array::from_fn(|lane| if self[lane] < limit[lane] { 0.0 } else { value[lane] })
    }
    #[inline(always)]
    fn power_of_two(self) -> Self {
        self.map(|lane| f32::from_bits((lane.to_bits() << 23).wrapping_add(0x3f80_0000)))
    }
}
