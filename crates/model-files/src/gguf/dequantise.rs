//! From the bytes of a row to f32. One function for each number type, with the arithmetic of ggml's reference in its order,
//! so that the results are the same bits.

use half::{bf16, f16};

use super::tensors::{GgmlType, Tensor};

/// Elements of a block of the `K` types.
const SUPER_BLOCK: usize = 256;
/// Bytes of the eight 6-bit scales and the eight 6-bit minima of a `Q4_K` or `Q5_K` block.
const K_SCALES: usize = 12;

/// Writes row `row` of the tensor as f32.
///
/// # Panics
/// When the tensor has no such row, or when `out` is not as long as a row: both are the caller's bugs. No content of a row
/// makes it panic.
pub fn dequantise_row(tensor: &Tensor<'_>, row: usize, out: &mut [f32]) {
    assert_eq!(out.len(), tensor.row_elements(), "{}: the row's length", tensor.name);
    let (elements, bytes) = (tensor.kind.block_elements(), tensor.kind.block_bytes());
    let row_bytes = tensor.row_elements() / elements * bytes;
    let row = &tensor.bytes[row * row_bytes..][..row_bytes];
    let block: fn(&[u8], &mut [f32]) = match tensor.kind {
        GgmlType::F32 => |block, out| out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
        GgmlType::F16 => |block, out| out[0] = half_at(block, 0),
        GgmlType::BF16 => |block, out| out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
        GgmlType::Q4_0 => q4_0,
        GgmlType::Q4_1 => q4_1,
        GgmlType::Q5_0 => q5_0,
        GgmlType::Q5_1 => q5_1,
        GgmlType::Q8_0 => q8_0,
        GgmlType::Q4_K => q4_k,
        GgmlType::Q5_K => q5_k,
        GgmlType::Q6_K => q6_k,
    };
    for (from, to) in row.chunks_exact(bytes).zip(out.chunks_exact_mut(elements)) {
        block(from, to);
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// f16 scale, 16 bytes of nibbles. The low nibbles come first.
fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    let (low, high) = out.split_at_mut(16);
    for ((byte, low), high) in block[2..].iter().zip(low).zip(high) {
        *low = d * (f32::from(byte & 15) - 8.0);
        *high = d * (f32::from(byte >> 4) - 8.0);
    }
}

/// As `Q4_0`, with an f16 minimum after the scale.
fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let (low, high) = out.split_at_mut(16);
    for ((byte, low), high) in block[4..].iter().zip(low).zip(high) {
        *low = d * f32::from(byte & 15) + m;
        *high = d * f32::from(byte >> 4) + m;
    }
}

/// f16 scale, a word with the fifth bit of each element, 16 bytes of nibbles.
fn q5_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (i, out) in out.iter_mut().enumerate() {
        *out = d * (f32::from(five_bits(&block[2..], i)) - 16.0);
    }
}

/// As `Q5_0`, with an f16 minimum after the scale.
fn q5_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (i, out) in out.iter_mut().enumerate() {
        *out = d * f32::from(five_bits(&block[4..], i)) + m;
    }
}

/// Element `i` of 32 out of a word of fifth bits and 16 bytes of nibbles.
fn five_bits(bytes: &[u8], i: usize) -> u8 {
    let fifth = bytes[i / 8] >> (i % 8) & 1;
    let byte = bytes[4 + i % 16];
    let nibble = if i < 16 { byte & 15 } else { byte >> 4 };
    nibble | fifth << 4
}

/// f16 scale, 32 signed bytes.
fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (quant, out) in block[2..].iter().zip(out) {
        *out = d * f32::from(quant.cast_signed());
    }
}

/// f16 scale of the scales, f16 scale of the minima, eight scales and minima of 6 bits, 128 bytes of nibbles. Each 32 bytes
/// of nibbles are two groups of 32 elements, the low nibbles first.
fn q4_k(block: &[u8], out: &mut [f32]) {
    let (head, quants) = block.split_at(4 + K_SCALES);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, minimum) = k_scale(head, group);
        let nibbles = &quants[group / 2 * 32..][..32];
        for (byte, out) in nibbles.iter().zip(out) {
            *out = scale * f32::from(nibble(*byte, group)) - minimum;
        }
    }
}

/// As `Q4_K`, with 32 bytes of fifth bits before the nibbles: bit `g` of byte `i` belongs to element `i` of group `g`.
fn q5_k(block: &[u8], out: &mut [f32]) {
    let (head, rest) = block.split_at(4 + K_SCALES);
    let (fifths, quants) = rest.split_at(SUPER_BLOCK / 8);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, minimum) = k_scale(head, group);
        let nibbles = &quants[group / 2 * 32..][..32];
        for ((byte, fifth), out) in nibbles.iter().zip(fifths).zip(out) {
            let quant = nibble(*byte, group) | (fifth >> group & 1) << 4;
            *out = scale * f32::from(quant) - minimum;
        }
    }
}

fn nibble(byte: u8, group: usize) -> u8 {
    byte >> (group % 2 * 4) & 15
}

/// Scale and minimum of one of the eight groups of a `Q4_K` or `Q5_K` block. Of the 12 bytes, four hold the scales of the
/// first four groups, four their minima, and four the low halves of the others, whose high halves are the upper two bits
/// of the first eight bytes.
///
/// # Panics
/// When the block is shorter than 16 bytes or has no such group: the caller's bugs.
pub fn k_scale(head: &[u8], group: usize) -> (f32, f32) {
    let packed = &head[4..];
    let (scale, minimum) = if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        let low = packed[group + 4];
        (
            low & 15 | packed[group - 4] >> 6 << 4,
            low >> 4 | packed[group] >> 6 << 4,
        )
    };
    (
        half_at(head, 0) * f32::from(scale),
        half_at(head, 2) * f32::from(minimum),
    )
}

/// 128 bytes of low nibbles, 64 bytes of upper pairs of bits, 16 signed scales, f16 scale of the scales. Each half of the
/// block has 64 bytes of nibbles and 32 bytes of pairs for four groups of 32 elements.
fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, rest) = block.split_at(SUPER_BLOCK / 2);
    let (high, rest) = rest.split_at(SUPER_BLOCK / 4);
    let (scales, d) = rest.split_at(SUPER_BLOCK / 16);
    let d = half_at(d, 0);
    for (i, out) in out.iter_mut().enumerate() {
        let (half, group, at) = (i / 128, i / 32 % 4, i % 32);
        let byte = low[half * 64 + group % 2 * 32 + at];
        let nibble = byte >> (group / 2 * 4) & 15;
        let pair = high[half * 32 + at] >> (2 * group) & 3;
        let scale = d * f32::from(scales[i / 16].cast_signed());
        *out = scale * (f32::from(nibble | pair << 4) - 32.0);
    }
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng, rngs::StdRng};

    use super::*;

    /// Random blocks of every type, against the Python package gguf: the same bits. See `make_quantised_blocks.py` beside
    /// the data.
    #[test]
    fn every_type_gives_the_bits_of_the_reference() {
        let bytes_of = |hex: &serde_json::Value| -> Vec<u8> {
            let digits = hex.as_str().unwrap().as_bytes();
            let digit = |byte: u8| char::from(byte).to_digit(16).unwrap() as u8;
            digits
                .as_chunks::<2>()
                .0
                .iter()
                .map(|[high, low]| digit(*high) << 4 | digit(*low))
                .collect()
        };
        let mut seen = Vec::new();
        for line in include_str!("../../testdata/quantised_blocks.jsonl").lines() {
            let case: serde_json::Value = serde_json::from_str(line).unwrap();
            let id = case["type_id"].as_u64().unwrap() as u32;
            let kind = GgmlType::from_id(id).unwrap();
            assert_eq!(kind.name(), case["type"]);
            let bytes = bytes_of(&case["blocks"]);
            let expected = bytes_of(&case["values"]);
            let expected: Vec<f32> = expected
                .as_chunks::<4>()
                .0
                .iter()
                .map(|value| f32::from_le_bytes(*value))
                .collect();
            // Two rows, so that the start of a row counts.
            let dims = [expected.len() as u64 / 2, 2];
            let tensor = Tensor {
                name: "w",
                kind,
                dims: &dims,
                bytes: &bytes,
            };
            for (row, expected) in expected.chunks_exact(expected.len() / 2).enumerate() {
                let mut out = vec![f32::NAN; expected.len()];
                dequantise_row(&tensor, row, &mut out);
                for (index, (out, expected)) in out.iter().zip(expected).enumerate() {
                    assert_eq!(
                        out.to_bits(),
                        expected.to_bits(),
                        "{} row {row} {index}: {out} {expected}",
                        kind.name()
                    );
                }
            }
            seen.push(kind);
        }
        assert_eq!(seen, GgmlType::ALL);
    }

    /// Every pattern of bits in a block is a number, an infinity or a NaN, and never a panic.
    #[test]
    fn arbitrary_blocks_never_panic() {
        let mut random = StdRng::seed_from_u64(6);
        for kind in GgmlType::ALL {
            let (elements, block_bytes) = (kind.block_elements(), kind.block_bytes());
            for round in 0..200 {
                let mut bytes = vec![0u8; 3 * block_bytes];
                match round {
                    0 => bytes.fill(0xFF),
                    1 => bytes.fill(0x7F),
                    _ => random.fill(&mut bytes[..]),
                }
                let dims = [3 * elements as u64];
                let tensor = Tensor {
                    name: "w",
                    kind,
                    dims: &dims,
                    bytes: &bytes,
                };
                dequantise_row(&tensor, 0, &mut vec![0.0; 3 * elements]);
            }
        }
    }
}
