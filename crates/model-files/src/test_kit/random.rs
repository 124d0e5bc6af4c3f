//! Random weights in the file format of each number type.

use crate::gguf::GgmlType;

/// Sebastiano Vigna's splitmix64: enough for weights that are only meant to differ.
pub(super) struct SplitMix(pub u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

/// The bytes of that many random weights, as tiny models have them.
pub fn random_weights_of(kind: GgmlType, elements: usize) -> Vec<u8> {
    random_weights(&mut SplitMix(1), kind, elements)
}

/// Random weights of about +-0.1 in the file format of `kind`: blocks of constant scales, then random numbers.
pub(super) fn random_weights(random: &mut SplitMix, kind: GgmlType, elements: usize) -> Vec<u8> {
    // f16 bits of the scales; where the numbers have no sign, also of a minimum that centres the weights on zero.
    let (before, after): (&[u8], &[u8]) = match kind {
        GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => (&[], &[]),
        // 2^-7.
        GgmlType::Q4_0 => (&[0x00, 0x20], &[]),
        // 2^-7 and -7.5 * 2^-7.
        GgmlType::Q4_1 => (&[0x00, 0x20, 0x80, 0xAB], &[]),
        // 2^-8.
        GgmlType::Q5_0 => (&[0x00, 0x1C], &[]),
        // 2^-8 and -15.5 * 2^-8.
        GgmlType::Q5_1 => (&[0x00, 0x1C, 0xC0, 0xAB], &[]),
        // 2^-10.
        GgmlType::Q8_0 => (&[0x00, 0x14], &[]),
        // 2^-13 and 7.5 * 2^-13, each of which a 6-bit number multiplies.
        GgmlType::Q4_K => (&[0x00, 0x08, 0x80, 0x13], &[]),
        // 2^-14 and 15.5 * 2^-14.
        GgmlType::Q5_K => (&[0x00, 0x04, 0xC0, 0x13], &[]),
        // 2^-14, which a signed byte multiplies.
        GgmlType::Q6_K => (&[], &[0x00, 0x04]),
    };
    let mut out = Vec::with_capacity(elements / kind.block_elements() * kind.block_bytes());
    for _ in 0..elements / kind.block_elements() {
        match kind {
            GgmlType::F32 => out.extend(((random.next() >> 40) as f32 / (1u32 << 24) as f32 * 0.2 - 0.1).to_le_bytes()),
            // Exponents 8..=11 (2^-7 to 2^-4) with a random sign and mantissa.
            GgmlType::F16 => {
                let bits = random.next();
                let exponent = 8 + (bits >> 20) as u16 % 4;
                out.extend(((bits as u16 & 0x83FF) | (exponent << 10)).to_le_bytes());
            }
            // The same exponents, which are 120..=123 here.
            GgmlType::BF16 => {
                let bits = random.next();
                let exponent = 120 + (bits >> 20) as u16 % 4;
                out.extend(((bits as u16 & 0x807F) | (exponent << 7)).to_le_bytes());
            }
            _ => {
                out.extend(before);
                let numbers = kind.block_bytes() - before.len() - after.len();
                let words = std::iter::repeat_with(|| random.next().to_le_bytes());
                out.extend(words.take(numbers.div_ceil(8)).flatten().take(numbers));
                out.extend(after);
            }
        }
    }
    out
}
