//! 16 lanes of f32 with the operations the f32 loops need: one register, two, or an array, with the same results.
//!
//! The compiler turned an array version of attention into code 7 times slower than the registers allow. So the loops in
//! `lanes` and `attend` are generic over this trait. Every method is inlined into a function that has the instruction set enabled. No
//! method fuses a product and a sum.

use half::f16;

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
    fn div(self, other: Self) -> Self;
    fn abs(self) -> Self;
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
    fn div(self, other: Self) -> Self {
        std::array::from_fn(|lane| self[lane] / other[lane])
    }
    #[inline(always)]
    fn abs(self) -> Self {
        self.map(f32::abs)
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

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

/// Every method is reached only from functions that enable the instruction set, which only `detect` hands out.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use half::f16;

    use super::Vector;
    use crate::cpu::kernels::{LANES, Lanes};

    const CACHE_LINE_BYTES: usize = 64;

    #[inline(always)]
    fn prefetch(from: *const u8, bytes: usize) {
        for line in (0..bytes).step_by(CACHE_LINE_BYTES) {
            // SAFETY: a prefetch reads nothing and faults nowhere.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(line).cast()) };
        }
    }

    #[derive(Clone, Copy)]
    pub(crate) struct Avx512(__m512);

    // SAFETY of all blocks below: the instruction set is enabled where this is inlined (see the module), and the
    // references are to 16 lanes.
    #[expect(
        clippy::undocumented_unsafe_blocks,
        reason = "one reason for all of them, stated above"
    )]
    impl Vector for Avx512 {
        const REGISTERS: usize = 32;

        #[inline(always)]
        fn prefetch(from: *const u8, bytes: usize) {
            prefetch(from, bytes);
        }
        #[inline(always)]
        fn splat(value: f32) -> Self {
            Self(unsafe { _mm512_set1_ps(value) })
        }
        #[inline(always)]
        fn load(from: &Lanes) -> Self {
            Self(unsafe { _mm512_loadu_ps(from.as_ptr()) })
        }
        #[inline(always)]
        fn store(self, to: &mut Lanes) {
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) }
        }
        #[inline(always)]
        unsafe fn load_halves(from: *const f16) -> Self {
            Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) })
        }
        #[inline(always)]
        fn add(self, other: Self) -> Self {
            Self(unsafe { _mm512_add_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn sub(self, other: Self) -> Self {
            Self(unsafe { _mm512_sub_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            Self(unsafe { _mm512_mul_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn div(self, other: Self) -> Self {
            Self(unsafe { _mm512_div_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn abs(self) -> Self {
            Self(unsafe { _mm512_abs_ps(self.0) })
        }
        #[inline(always)]
        fn larger(self, other: Self) -> Self {
            Self(unsafe { _mm512_max_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn smaller(self, other: Self) -> Self {
            Self(unsafe { _mm512_min_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn zero_below(self, limit: Self, value: Self) -> Self {
            unsafe {
                let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, limit.0);
                Self(_mm512_maskz_mov_ps(!below, value.0))
            }
        }
        #[inline(always)]
        fn power_of_two(self) -> Self {
            unsafe {
                let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(self.0));
                Self(_mm512_castsi512_ps(_mm512_add_epi32(
                    exponent,
                    _mm512_set1_epi32(0x3f80_0000),
                )))
            }
        }
        #[inline(always)]
        fn low_bytes(vectors: [Self; 2]) -> ([[i8; LANES]; 2], i32) {
            unsafe {
                // No closures: see `attend`.
                let bytes = [
                    _mm512_cvtepi32_epi8(_mm512_castps_si512(vectors[0].0)),
                    _mm512_cvtepi32_epi8(_mm512_castps_si512(vectors[1].0)),
                ];
                let sum = _mm512_add_epi32(_mm512_cvtepi8_epi32(bytes[0]), _mm512_cvtepi8_epi32(bytes[1]));
                (
                    std::mem::transmute::<[__m128i; 2], [[i8; LANES]; 2]>(bytes),
                    _mm512_reduce_add_epi32(sum),
                )
            }
        }
        #[inline(always)]
        fn tree_sum(self) -> f32 {
            self.halves().tree_sum()
        }
        #[inline(always)]
        fn largest(self) -> f32 {
            self.halves().largest()
        }
        #[inline(always)]
        fn transpose(rows: [Self; LANES]) -> [Self; LANES] {
            // No closures: see `attend`.
            let mut columns = rows;
            unsafe {
                // Pairs of rows, then groups of four, within each quarter of the registers.
                let mut pairs = [_mm512_setzero_ps(); LANES];
                for pair in 0..8 {
                    let (a, b) = (rows[2 * pair].0, rows[2 * pair + 1].0);
                    pairs[2 * pair] = _mm512_unpacklo_ps(a, b);
                    pairs[2 * pair + 1] = _mm512_unpackhi_ps(a, b);
                }
                // fours[4g + c]: rows 4g..4g+4 of columns c, c + 4, c + 8, c + 12, one to a quarter.
                let mut fours = [_mm512_setzero_ps(); LANES];
                for group in [0, 4, 8, 12] {
                    for half in 0..2 {
                        let a = _mm512_castps_pd(pairs[group + half]);
                        let b = _mm512_castps_pd(pairs[group + 2 + half]);
                        fours[group + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                        fours[group + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
                    }
                }
                // Quarters: column q * 4 + c needs quarter q of fours[c], fours[4 + c], fours[8 + c], fours[12 + c].
                for column in 0..4 {
                    let (a, b, c, d) = (fours[column], fours[4 + column], fours[8 + column], fours[12 + column]);
                    let (ab, cd) = (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0x44>(c, d));
                    columns[column] = Self(_mm512_shuffle_f32x4::<0x88>(ab, cd));
                    columns[4 + column] = Self(_mm512_shuffle_f32x4::<0xdd>(ab, cd));
                    let (ab, cd) = (_mm512_shuffle_f32x4::<0xee>(a, b), _mm512_shuffle_f32x4::<0xee>(c, d));
                    columns[8 + column] = Self(_mm512_shuffle_f32x4::<0x88>(ab, cd));
                    columns[12 + column] = Self(_mm512_shuffle_f32x4::<0xdd>(ab, cd));
                }
            }
            columns
        }
    }

    impl Avx512 {
        #[inline(always)]
        fn halves(self) -> Avx2 {
            // SAFETY: as for `Vector for Avx512`; the AVX-512 kernels enable AVX2, too.
            unsafe {
                let high = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(self.0));
                Avx2([_mm512_castps512_ps256(self.0), _mm256_castpd_ps(high)])
            }
        }
    }

    #[derive(Clone, Copy)]
    pub(crate) struct Avx2([__m256; 2]);

    impl Avx2 {
        #[inline(always)]
        fn zip(self, other: Self, operation: impl Fn(__m256, __m256) -> __m256) -> Self {
            Self([operation(self.0[0], other.0[0]), operation(self.0[1], other.0[1])])
        }
    }

    // SAFETY of all blocks below: as for `Avx512`.
    #[expect(
        clippy::undocumented_unsafe_blocks,
        reason = "one reason for all of them, stated above"
    )]
    impl Vector for Avx2 {
        const REGISTERS: usize = 8;

        #[inline(always)]
        fn prefetch(from: *const u8, bytes: usize) {
            prefetch(from, bytes);
        }
        #[inline(always)]
        fn splat(value: f32) -> Self {
            Self([unsafe { _mm256_set1_ps(value) }; 2])
        }
        #[inline(always)]
        fn load(from: &Lanes) -> Self {
            unsafe { Self([_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))]) }
        }
        #[inline(always)]
        fn store(self, to: &mut Lanes) {
            unsafe {
                _mm256_storeu_ps(to.as_mut_ptr(), self.0[0]);
                _mm256_storeu_ps(to.as_mut_ptr().add(8), self.0[1]);
            }
        }
        #[inline(always)]
        unsafe fn load_halves(from: *const f16) -> Self {
            unsafe {
                Self([
                    _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                    _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast())),
                ])
            }
        }
        #[inline(always)]
        fn add(self, other: Self) -> Self {
            self.zip(other, |a, b| unsafe { _mm256_add_ps(a, b) })
        }
        #[inline(always)]
        fn sub(self, other: Self) -> Self {
            self.zip(other, |a, b| unsafe { _mm256_sub_ps(a, b) })
        }
        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            self.zip(other, |a, b| unsafe { _mm256_mul_ps(a, b) })
        }
        #[inline(always)]
        fn div(self, other: Self) -> Self {
            self.zip(other, |a, b| unsafe { _mm256_div_ps(a, b) })
        }
        #[inline(always)]
        fn abs(self) -> Self {
            self.zip(self, |a, _| unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), a) })
        }
        #[inline(always)]
        fn larger(self, other: Self) -> Self {
            self.zip(other, |a, b| unsafe { _mm256_max_ps(a, b) })
        }
        #[inline(always)]
        fn smaller(self, other: Self) -> Self {
            self.zip(other, |a, b| unsafe { _mm256_min_ps(a, b) })
        }
        #[inline(always)]
        fn zero_below(self, limit: Self, value: Self) -> Self {
            let below = self.zip(limit, |a, b| unsafe { _mm256_cmp_ps::<_CMP_LT_OQ>(a, b) });
            below.zip(value, |below, value| unsafe { _mm256_andnot_ps(below, value) })
        }
        #[inline(always)]
        fn power_of_two(self) -> Self {
            self.zip(self, |a, _| unsafe {
                let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(a));
                _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f80_0000)))
            })
        }
        #[inline(always)]
        fn tree_sum(self) -> f32 {
            unsafe {
                let eight = _mm256_add_ps(self.0[0], self.0[1]);
                let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
            }
        }
        #[inline(always)]
        fn largest(self) -> f32 {
            unsafe {
                let eight = _mm256_max_ps(self.0[0], self.0[1]);
                let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
                let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
            }
        }
    }
}
