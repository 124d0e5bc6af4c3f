//! [`Vector`] for AVX-512 and AVX2.
//!
//! Every method is reached only from functions that enable the instruction set, which only `detect` hands out.

use std::arch::x86_64::*;

use half::f16;

use super::Vector;
use crate::cpu::kernels::{LANES, Lanes};

const CACHE_LINE_BYTES: usize = 64;

#[inline(always)]
fn prefetch(from: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(CACHE_LINE_BYTES) {
        // SAFETY: a prefetch reads nothing and faults nowhere.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(line).cast()) };
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
    fn mul_add(self, factor: Self, term: Self) -> Self {
        Self(unsafe { _mm512_fmadd_ps(self.0, factor.0, term.0) })
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Self(unsafe { _mm512_div_ps(self.0, other.0) })
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
            // No closures: see `attend/mod.rs`.
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
    fn tree_sums(rows: [Self; LANES]) -> Self {
        // No closures: see `attend/mod.rs`.
        unsafe {
            let mut quarters = [_mm512_setzero_ps(); 4];
            for index in 0..4 {
                // Each vector adds its halves, two to a register.
                let (a, b) = (rows[index].0, rows[index + 4].0);
                let (c, d) = (rows[index + 8].0, rows[index + 12].0);
                let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
                let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
                // Then its quarters: the four vectors have one of the register each.
                quarters[index] = _mm512_add_ps(
                    _mm512_shuffle_f32x4::<0x88>(ab, cd),
                    _mm512_shuffle_f32x4::<0xdd>(ab, cd),
                );
            }
            let mut pairs = [_mm512_setzero_ps(); 2];
            for index in 0..2 {
                let a = _mm512_castps_pd(quarters[2 * index]);
                let b = _mm512_castps_pd(quarters[2 * index + 1]);
                pairs[index] = _mm512_add_ps(
                    _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)),
                );
            }
            Self(_mm512_add_ps(
                _mm512_shuffle_ps::<0x88>(pairs[0], pairs[1]),
                _mm512_shuffle_ps::<0xdd>(pairs[0], pairs[1]),
            ))
        }
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        self.halves().largest()
    }
    #[inline(always)]
    fn transpose(rows: [Self; LANES]) -> [Self; LANES] {
        // No closures: see `attend/mod.rs`.
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
    fn mul_add(self, factor: Self, term: Self) -> Self {
        unsafe {
            Self([
                _mm256_fmadd_ps(self.0[0], factor.0[0], term.0[0]),
                _mm256_fmadd_ps(self.0[1], factor.0[1], term.0[1]),
            ])
        }
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| unsafe { _mm256_div_ps(a, b) })
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
