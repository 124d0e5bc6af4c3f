//! Bytes that are easy to make and to compare, and that no copy of other bytes looks like.

/// Different numbers give different bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pattern(pub u64);

impl Pattern {
    pub fn bytes(self, count: usize) -> Vec<u8> {
        let words = (0..count.div_ceil(8) as u64).map(|at| mix(at ^ self.0.rotate_left(32)));
        words.flat_map(u64::to_le_bytes).take(count).collect()
    }

    /// The place of the first byte that is another one.
    pub fn difference(self, got: &[u8]) -> Option<usize> {
        let want = self.bytes(got.len());
        got.iter().zip(&want).position(|(got, want)| got != want)
    }

    /// Numbers in bf16 of 0.5 to 1, with a sign. Products take more power over such numbers than over zeros, and run slower.
    pub fn bf16_bytes(self, count: usize) -> Vec<u8> {
        /// Exponent 126: the numbers from 0.5 on.
        const HALF: u16 = 0x3f00;
        /// Sign and mantissa.
        const FREE: u16 = 0x807f;
        let bytes = self.bytes(count);
        let (words, _) = bytes.as_chunks::<2>();
        let numbers = words.iter().map(|word| (u16::from_le_bytes(*word) & FREE) | HALF);
        numbers.flat_map(u16::to_le_bytes).collect()
    }
}

/// The last step of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
fn mix(word: u64) -> u64 {
    let mut z = word.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_byte_is_found_and_another_pattern_is_wrong() {
        let mut bytes = Pattern(1).bytes(1_003);
        assert_eq!(bytes.len(), 1_003);
        assert_eq!(Pattern(1).difference(&bytes), None);
        assert!(Pattern(2).difference(&bytes).is_some());
        bytes[700] ^= 1;
        assert_eq!(Pattern(1).difference(&bytes), Some(700));
    }

    #[test]
    fn numbers_of_a_pattern_are_numbers() {
        let bytes = Pattern(3).bf16_bytes(200);
        let (words, _) = bytes.as_chunks::<2>();
        assert_eq!(words.len(), 100);
        for word in words {
            let value = f32::from_bits(u32::from(u16::from_le_bytes(*word)) << 16);
            assert!((0.5..1.0).contains(&value.abs()), "{value}");
        }
    }
}
