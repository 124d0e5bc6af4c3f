//! Panels: 16 output rows of a matrix in the form that the kernels read, made of the rows of a tensor of any type.
//!
//! A panel block (32 columns of 16 rows):
//! - Q4_1: 4 vectors of 64 bytes; byte `4 * row + t` of vector i has column 4i + t in its low and 16 + 4i + t in its high
//!   nibble; then 16 scales, 16 minima (f16).
//! - Q8_0: 8 vectors of 64 bytes; byte `4 * row + t` of vector i is column 4i + t, plus 128; then 16 scales (f16).
//! - f32 (`Exact`): `[column][row]`.
//!
//! `crate::numerics` says which types become which panels, and how. Rows that fill up the last panel are zero. Their
//! outputs are never read.

use half::f16;
use model_files::gguf::{GgmlType, Tensor, dequantise_row, k_scale};

use super::kernels::{BLOCK, LANES, Q4_1_PANEL_BLOCK, Q8_0_PANEL_BLOCK};
use crate::Numerics;

/// Blocks of 32 in a block of 256.
const SUPER: usize = 8;

/// Consecutive rows of a tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows<'a> {
    pub tensor: Tensor<'a>,
    pub first: usize,
    pub count: usize,
}

impl<'a> Rows<'a> {
    pub(super) fn all(tensor: Tensor<'a>) -> Self {
        let (first, count) = (0, tensor.rows());
        Self { tensor, first, count }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Q4_1,
    Q8_0,
    F32,
}

impl Format {
    /// The format of a matrix that is made of these parts.
    pub(super) fn of(parts: &[Rows<'_>], numerics: Numerics) -> Self {
        let has_4_bits = |part: &Rows<'_>| matches!(part.tensor.kind, GgmlType::Q4_0 | GgmlType::Q4_1 | GgmlType::Q4_K);
        match numerics {
            Numerics::Exact => Format::F32,
            Numerics::Int8Blocks if parts.iter().all(has_4_bits) => Format::Q4_1,
            Numerics::Int8Blocks => Format::Q8_0,
        }
    }

    /// Bytes of 32 columns of a panel.
    pub(super) fn block_bytes(self) -> usize {
        match self {
            Format::Q4_1 => Q4_1_PANEL_BLOCK,
            Format::Q8_0 => Q8_0_PANEL_BLOCK,
            Format::F32 => BLOCK * LANES * 4,
        }
    }
}

/// Packs 16 of the rows, or as many as are left from `first` on.
pub(super) fn pack_panel(format: Format, rows: &Rows<'_>, first: usize, panel: &mut [u8]) {
    let lanes = rows.count.saturating_sub(first).min(LANES);
    // The types that are kept need no f32.
    let is_kept = format == Format::Q4_1 || rows.tensor.kind == GgmlType::Q8_0 && format == Format::Q8_0;
    let mut values = vec![0.0; if is_kept { 0 } else { rows.tensor.row_elements() }];
    for lane in 0..lanes {
        let row = rows.first + first + lane;
        match format {
            Format::F32 => {
                dequantise_row(&rows.tensor, row, &mut values);
                for (column, value) in values.iter().enumerate() {
                    panel[(column * LANES + lane) * 4..][..4].copy_from_slice(&value.to_le_bytes());
                }
            }
            Format::Q4_1 => {
                let bytes = row_bytes(&rows.tensor, row);
                for (index, to) in panel.chunks_exact_mut(Q4_1_PANEL_BLOCK).enumerate() {
                    let block = four_bit_block(rows.tensor.kind, bytes, index);
                    for (i, byte) in block.nibbles.iter().enumerate() {
                        to[i / 4 * 64 + lane * 4 + i % 4] = *byte;
                    }
                    to[256 + 2 * lane..][..2].copy_from_slice(&block.scale);
                    to[288 + 2 * lane..][..2].copy_from_slice(&block.minimum);
                }
            }
            Format::Q8_0 if is_kept => {
                let blocks = row_bytes(&rows.tensor, row).chunks_exact(2 + BLOCK);
                for (from, to) in blocks.zip(panel.chunks_exact_mut(Q8_0_PANEL_BLOCK)) {
                    for (i, byte) in from[2..].iter().enumerate() {
                        to[i / 4 * 64 + lane * 4 + i % 4] = byte ^ 0x80;
                    }
                    to[512 + 2 * lane..][..2].copy_from_slice(&from[..2]);
                }
            }
            Format::Q8_0 => {
                dequantise_row(&rows.tensor, row, &mut values);
                let bytes = row_bytes(&rows.tensor, row);
                let blocks = panel
                    .chunks_exact_mut(Q8_0_PANEL_BLOCK)
                    .zip(values.as_chunks::<BLOCK>().0);
                for (index, (to, values)) in blocks.enumerate() {
                    let scale = file_scale(rows.tensor.kind, bytes, index).unwrap_or_else(|| scale_of(values));
                    for (i, quant) in quants(values, scale).into_iter().enumerate() {
                        to[i / 4 * 64 + lane * 4 + i % 4] = quant.cast_unsigned() ^ 0x80;
                    }
                    to[512 + 2 * lane..][..2].copy_from_slice(&scale.to_le_bytes());
                }
            }
        }
    }
}

fn row_bytes<'a>(tensor: &Tensor<'a>, row: usize) -> &'a [u8] {
    let length = tensor.row_elements() / tensor.kind.block_elements() * tensor.kind.block_bytes();
    &tensor.bytes[row * length..][..length]
}

/// 32 weights `quant * scale + minimum`; element i in the low and 16 + i in the high nibble of byte i.
struct FourBitBlock {
    nibbles: [u8; BLOCK / 2],
    scale: [u8; 2],
    minimum: [u8; 2],
}

/// The 32 weights from `32 * index` of a row of a type with 4 bits.
fn four_bit_block(kind: GgmlType, row: &[u8], index: usize) -> FourBitBlock {
    let size = kind.block_bytes();
    if kind == GgmlType::Q4_K {
        let block = &row[index / SUPER * size..][..size];
        let group = index % SUPER;
        let (scale, minimum) = k_scale(block, group);
        // 32 bytes hold two groups: the even one in the low nibbles.
        let quants = &block[16 + group / 2 * BLOCK..][..BLOCK];
        let quant = |i: usize| quants[i] >> (group % 2 * 4) & 15;
        return FourBitBlock {
            nibbles: std::array::from_fn(|i| quant(i) | quant(i + BLOCK / 2) << 4),
            scale: f16::from_f32(scale).to_le_bytes(),
            minimum: f16::from_f32(-minimum).to_le_bytes(),
        };
    }
    let block = &row[index * size..][..size];
    let scale = [block[0], block[1]];
    let minimum = match kind {
        GgmlType::Q4_1 => [block[2], block[3]],
        _ => f16::from_f32(f16::from_le_bytes(scale).to_f32() * -8.0).to_le_bytes(),
    };
    let from = &block[size - BLOCK / 2..];
    FourBitBlock {
        nibbles: std::array::from_fn(|i| from[i]),
        scale,
        minimum,
    }
}

/// The scale of the 32 weights from `32 * index`, for types whose weights are 8-bit multiples of one.
fn file_scale(kind: GgmlType, row: &[u8], index: usize) -> Option<f16> {
    matches!(kind, GgmlType::Q5_0 | GgmlType::Q4_0).then(|| {
        let at = index * kind.block_bytes();
        f16::from_le_bytes([row[at], row[at + 1]])
    })
}

/// `largest magnitude / 127`, rounded up to f16, so that no quotient is above 127.
fn scale_of(values: &[f32; BLOCK]) -> f16 {
    let largest = values.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
    let mut scale = f16::from_f32(largest / 127.0);
    if scale.to_f32() * 127.0 < largest {
        scale = f16::from_bits(scale.to_bits() + 1);
    }
    if scale.is_finite() { scale } else { f16::MAX }
}

/// `value / scale`, rounded to the nearest integer, halves to even.
fn quants(values: &[f32; BLOCK], scale: f16) -> [i8; BLOCK] {
    let scale = scale.to_f32();
    if scale == 0.0 {
        return [0; BLOCK];
    }
    // The conversion saturates, and makes zero of NaN.
    values.map(|value| (value / scale).round_ties_even() as i8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use model_files::test_kit::random_weights_of;

    /// The weights of a panel, as its formula gives them.
    fn unpacked(format: Format, panel: &[u8], columns: usize) -> Vec<Vec<f32>> {
        let half_at = |at: usize| f16::from_le_bytes([panel[at], panel[at + 1]]).to_f32();
        let weight = |lane: usize, column: usize| {
            let (block, i) = (column / BLOCK * format.block_bytes(), column % BLOCK);
            match format {
                Format::Q4_1 => {
                    let byte = panel[block + i % 16 / 4 * 64 + lane * 4 + i % 4];
                    let quant = if i < 16 { byte & 15 } else { byte >> 4 };
                    half_at(block + 256 + 2 * lane) * f32::from(quant) + half_at(block + 288 + 2 * lane)
                }
                Format::Q8_0 => {
                    let quant = f32::from(panel[block + i / 4 * 64 + lane * 4 + i % 4]) - 128.0;
                    half_at(block + 512 + 2 * lane) * quant
                }
                Format::F32 => {
                    let at = (column * LANES + lane) * 4;
                    f32::from_le_bytes([panel[at], panel[at + 1], panel[at + 2], panel[at + 3]])
                }
            }
        };
        (0..LANES)
            .map(|lane| (0..columns).map(|column| weight(lane, column)).collect())
            .collect()
    }

    fn packed(kind: GgmlType, bytes: &[u8], numerics: Numerics) -> (Format, Vec<Vec<f32>>, Vec<Vec<f32>>) {
        let dims = [512, 20];
        let tensor = Tensor {
            name: "w",
            kind,
            dims: &dims,
            bytes,
        };
        // Rows 3..20 of 20: the second panel has one row.
        let rows = Rows {
            tensor,
            first: 3,
            count: 17,
        };
        let format = Format::of(&[rows], numerics);
        let (mut got, mut right) = (Vec::new(), Vec::new());
        for first in [0, 16] {
            let mut panel = vec![0; 512 / BLOCK * format.block_bytes()];
            pack_panel(format, &rows, first, &mut panel);
            got.extend(unpacked(format, &panel, 512));
        }
        for row in 3..20 {
            let mut values = vec![0.0; 512];
            dequantise_row(&tensor, row, &mut values);
            right.push(values);
        }
        (format, got, right)
    }

    #[test]
    fn panels_hold_what_the_file_has_as_closely_as_promised() {
        for kind in GgmlType::ALL {
            let bytes = random_weights_of(kind, 512 * 20);
            let (format, got, right) = packed(kind, &bytes, Numerics::Exact);
            assert_eq!(format, Format::F32);
            assert_eq!(got[..17], right[..]);

            let (format, got, right) = packed(kind, &bytes, Numerics::Int8Blocks);
            let exact = matches!(kind, GgmlType::Q4_0 | GgmlType::Q4_1 | GgmlType::Q5_0 | GgmlType::Q8_0);
            for (got, right) in got.iter().zip(&right) {
                for (got, right) in got.as_chunks::<BLOCK>().0.iter().zip(right.as_chunks::<BLOCK>().0) {
                    let largest = right.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
                    let bound = match (exact, format) {
                        (true, _) => 0.0,
                        // Scale and minimum lose their last bits only.
                        (_, Format::Q4_1) => largest * 0.003,
                        // Half a step, whose size may be an f16 step above the quotient.
                        _ => largest / 127.0 * 0.501,
                    };
                    for (got, right) in got.iter().zip(right) {
                        assert!((got - right).abs() <= bound, "{} {got} {right}", kind.name());
                    }
                }
            }
            assert!(got[17..].iter().flatten().all(|weight| *weight == got[17][0]));
        }
    }

    #[test]
    fn mixed_parts_have_8_bits() {
        let (four, six) = (vec![0; 512 / 256 * 144], vec![0; 512 / 256 * 210]);
        let rows = |kind, bytes| {
            Rows::all(Tensor {
                name: "w",
                kind,
                dims: &[512, 1],
                bytes,
            })
        };
        let (four, six) = (rows(GgmlType::Q4_K, &four), rows(GgmlType::Q6_K, &six));
        assert_eq!(Format::of(&[four, four], Numerics::Int8Blocks), Format::Q4_1);
        assert_eq!(Format::of(&[four, six], Numerics::Int8Blocks), Format::Q8_0);
    }

    #[test]
    fn extreme_weights_neither_panic_nor_overflow() {
        let mut values = [0.0; BLOCK];
        assert_eq!((scale_of(&values), quants(&values, f16::ZERO)), (f16::ZERO, [0; BLOCK]));
        values[..4].copy_from_slice(&[1e30, -1e30, f32::NAN, f32::INFINITY]);
        let scale = scale_of(&values);
        assert_eq!(scale, f16::MAX);
        assert_eq!(quants(&values, scale)[..4], [127, -128, 0, 127]);
        // Rounding to nearest would make 127.4 steps of the largest.
        for largest in [1e-4f32, 3.3e-5, 0.777, 8.1e3] {
            values = [largest; BLOCK];
            assert_eq!(
                quants(&values, scale_of(&values)).iter().max(),
                Some(&quants(&values, scale_of(&values))[0])
            );
            assert!(scale_of(&values).to_f32() * 127.0 >= largest);
        }
    }
}
