//! The loops, once for each instruction set that has kernels. Several independent sums hide the latency of an instruction.

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

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
        Self::found()[0]
    }

    /// All that run here, best first.
    fn found() -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        let with_instructions = [x86::avx512(), x86::avx_vnni(), x86::avx2()];
        #[cfg(target_arch = "aarch64")]
        let with_instructions = [neon::dotprod()];
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let with_instructions = [];
        let with_instructions = with_instructions.into_iter().flatten();
        with_instructions.chain([PORTABLE]).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loops_say_what_they_did() {
        for loops in Loops::found() {
            assert_eq!((loops.int8_dot)(6), 2 * (loops.int8_dot)(3), "{}", loops.name);
            assert_eq!((loops.f32_fma)(6), 2 * (loops.f32_fma)(3), "{}", loops.name);
            assert_eq!((loops.read)(&[7; 1_000]), 768, "{}: whole parts of 256", loops.name);
        }
    }
}
