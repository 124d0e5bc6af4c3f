//! Loops for AVX-512 with VNNI, for AVX-VNNI, and for AVX2.

use std::arch::asm;
use std::arch::x86_64::*;
use std::hint::black_box;

use super::Loops;

/// Of 32 registers.
const SUMS_512: usize = 16;
/// Of 16 registers, some of which hold the factors.
const SUMS_256: usize = 8;
/// Of 16 registers: an instruction takes five cycles, and two may begin in each.
const SUMS_VNNI_256: usize = 12;

pub(super) fn avx512() -> Option<Loops> {
    let found = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni");
    found.then_some(Loops {
        name: "avx512-vnni",
        int8_dot: dot_512,
        f32_fma: fma_512,
        read: read_512,
    })
}

pub(super) fn avx_vnni() -> Option<Loops> {
    let loops = avx2()?;
    is_x86_feature_detected!("avxvnni").then_some(Loops {
        name: "avx-vnni",
        int8_dot: dot_avx_vnni,
        ..loops
    })
}

pub(super) fn avx2() -> Option<Loops> {
    let found = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    found.then_some(Loops {
        name: "avx2",
        int8_dot: dot_256,
        f32_fma: fma_256,
        read: read_256,
    })
}

fn dot_512(rounds: u64) -> u64 {
    #[target_feature(enable = "avx512f,avx512vnni")]
    fn inner(rounds: u64) -> u64 {
        let (a, b) = (black_box(_mm512_set1_epi8(3)), black_box(_mm512_set1_epi8(5)));
        let mut sums = [_mm512_setzero_si512(); SUMS_512];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, a, b);
            }
        }
        black_box(sums);
        // 64 pairs of numbers for each sum.
        rounds * 2 * 64 * SUMS_512 as u64
    }
    // SAFETY: chosen only where these features were found.
    unsafe { inner(rounds) }
}

fn fma_512(rounds: u64) -> u64 {
    #[target_feature(enable = "avx512f")]
    fn inner(rounds: u64) -> u64 {
        let (a, b) = (black_box(_mm512_set1_ps(1.000_001)), black_box(_mm512_set1_ps(0.5)));
        let mut sums = [_mm512_setzero_ps(); SUMS_512];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, a, b);
            }
        }
        black_box(sums);
        rounds * 2 * 16 * SUMS_512 as u64
    }
    // SAFETY: chosen only where these features were found.
    unsafe { inner(rounds) }
}

fn read_512(bytes: &[u8]) -> u64 {
    #[target_feature(enable = "avx512f")]
    fn inner(bytes: &[u8]) -> u64 {
        // Whole registers: the compiler left `super::read` in single words in one build.
        let (parts, _) = bytes.as_chunks::<256>();
        let mut sums = [_mm512_setzero_si512(); 4];
        for part in parts {
            for (sum, words) in sums.iter_mut().zip(part.as_chunks::<64>().0) {
                // SAFETY: there are 64 bytes.
                *sum = _mm512_xor_si512(*sum, unsafe { _mm512_loadu_si512(words.as_ptr().cast()) });
            }
        }
        black_box(sums);
        parts.len() as u64 * 256
    }
    // SAFETY: chosen only where these features were found.
    unsafe { inner(bytes) }
}

fn dot_256(rounds: u64) -> u64 {
    #[target_feature(enable = "avx2")]
    fn inner(rounds: u64) -> u64 {
        let (mut a, b) = (_mm256_set1_epi8(3), black_box(_mm256_set1_epi8(5)));
        let ones = black_box(_mm256_set1_epi16(1));
        let mut sums = [_mm256_setzero_si256(); SUMS_256];
        for _ in 0..rounds {
            for sum in &mut sums {
                // SAFETY: no instruction. It only keeps the compiler from computing the product once, before the loop.
                unsafe { asm!("/* {0} */", inout(ymm_reg) a, options(nomem, nostack, preserves_flags)) };
                let pairs = _mm256_maddubs_epi16(a, b);
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
            }
        }
        black_box(sums);
        rounds * 2 * 32 * SUMS_256 as u64
    }
    // SAFETY: chosen only where these features were found.
    unsafe { inner(rounds) }
}

fn dot_avx_vnni(rounds: u64) -> u64 {
    #[target_feature(enable = "avx2,avxvnni")]
    fn inner(rounds: u64) -> u64 {
        let (a, b) = (black_box(_mm256_set1_epi8(3)), black_box(_mm256_set1_epi8(5)));
        let mut sums = [_mm256_setzero_si256(); SUMS_VNNI_256];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm256_dpbusd_avx_epi32(*sum, a, b);
            }
        }
        black_box(sums);
        rounds * 2 * 32 * SUMS_VNNI_256 as u64
    }
    // SAFETY: chosen only where these features were found.
    unsafe { inner(rounds) }
}

fn fma_256(rounds: u64) -> u64 {
    #[target_feature(enable = "avx2,fma")]
    fn inner(rounds: u64) -> u64 {
        let (a, b) = (black_box(_mm256_set1_ps(1.000_001)), black_box(_mm256_set1_ps(0.5)));
        let mut sums = [_mm256_setzero_ps(); SUMS_256];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, a, b);
            }
        }
        black_box(sums);
        rounds * 2 * 8 * SUMS_256 as u64
    }
    // SAFETY: chosen only where these features were found.
    unsafe { inner(rounds) }
}

fn read_256(bytes: &[u8]) -> u64 {
    #[target_feature(enable = "avx2")]
    fn inner(bytes: &[u8]) -> u64 {
        let (parts, _) = bytes.as_chunks::<256>();
        let mut sums = [_mm256_setzero_si256(); 8];
        for part in parts {
            for (sum, words) in sums.iter_mut().zip(part.as_chunks::<32>().0) {
                // SAFETY: there are 32 bytes.
                *sum = _mm256_xor_si256(*sum, unsafe { _mm256_loadu_si256(words.as_ptr().cast()) });
            }
        }
        black_box(sums);
        parts.len() as u64 * 256
    }
    // SAFETY: chosen only where these features were found.
    unsafe { inner(bytes) }
}
