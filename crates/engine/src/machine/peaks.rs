//! The loops, once for each instruction set that has kernels. Several independent sums hide the latency of an instruction.

use std::hint::black_box;

/// Each is told how many rounds to do, or what to read, and says how many operations or bytes that was.
#[derive(Clone, Copy, Debug)]
pub(super) struct Loops {
    pub name: &'static str,
    pub int8_dot: fn(u64) -> u64,
    pub f32_fma: fn(u64) -> u64,
    pub read: fn(&[u8]) -> u64,
}

impl Loops {
    pub fn of_this_machine() -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(loops) = x86::avx512().or_else(x86::avx2) {
            return loops;
        }
        PORTABLE
    }
}

/// What the compiler makes of plain loops.
const PORTABLE: Loops = Loops {
    name: "portable",
    int8_dot: portable_dot,
    f32_fma: portable_fma,
    read,
};

/// Values of one round of the plain loops.
const VALUES: usize = 256;

fn portable_dot(rounds: u64) -> u64 {
    let (a, b) = ([3i8; VALUES], [5i8; VALUES]);
    let mut sum = 0i32;
    for _ in 0..rounds {
        let products = black_box(&a).iter().zip(black_box(&b));
        let round: i32 = products.map(|(a, b)| i32::from(*a) * i32::from(*b)).sum();
        sum = sum.wrapping_add(round);
    }
    black_box(sum);
    rounds * 2 * VALUES as u64
}

fn portable_fma(rounds: u64) -> u64 {
    let (a, b) = (black_box(1.000_001f32), black_box(0.5f32));
    let mut sums = [0f32; VALUES];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = *sum * a + b;
        }
        black_box(&mut sums);
    }
    rounds * 2 * VALUES as u64
}

/// Reads every byte once, in words.
fn read(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; 32];
    let (parts, _) = bytes.as_chunks::<256>();
    for part in parts {
        let (words, _) = part.as_chunks::<8>();
        for (sum, word) in sums.iter_mut().zip(words) {
            *sum ^= u64::from_ne_bytes(*word);
        }
    }
    black_box(sums);
    parts.len() as u64 * 256
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::Loops;

    /// Of 32 registers.
    const SUMS_512: usize = 16;
    /// Of 16 registers, some of which hold the factors.
    const SUMS_256: usize = 8;

    pub(super) fn avx512() -> Option<Loops> {
        let found = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni");
        found.then_some(Loops {
            name: "avx512-vnni",
            int8_dot: dot_512,
            f32_fma: fma_512,
            read: read_512,
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loops_say_what_they_did() {
        let of_here = Loops::of_this_machine();
        for loops in [PORTABLE, of_here] {
            assert_eq!((loops.int8_dot)(6), 2 * (loops.int8_dot)(3), "{}", loops.name);
            assert_eq!((loops.f32_fma)(6), 2 * (loops.f32_fma)(3), "{}", loops.name);
            assert_eq!((loops.read)(&[7; 1_000]), 768, "{}: whole parts of 256", loops.name);
        }
    }
}
