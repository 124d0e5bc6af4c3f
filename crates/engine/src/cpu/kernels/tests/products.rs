//! Panels times rows.

use proptest::prelude::*;

use super::*;
use crate::cpu::kernels::pairs::{PAIR_BLOCKS, UnpackedBlock};

fn panel(random: &mut Random, blocks: usize, (quants, halves): (usize, usize)) -> Vec<Line> {
    let mut bytes = Vec::new();
    for _ in 0..blocks {
        bytes.extend((0..quants).map(|_| random.next() as u8));
        bytes.extend((0..halves).flat_map(|_| random.half()));
    }
    let mut lines = vec![Line([0; 64]); bytes.len().div_ceil(64)];
    for (line, bytes) in lines.iter_mut().zip(bytes.chunks(64)) {
        line.0[..bytes.len()].copy_from_slice(bytes);
    }
    lines
}

fn bytes_of(lines: &[Line]) -> &[u8] {
    // SAFETY: `Line` is 64 plain bytes without padding.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), lines.len() * 64) }
}

fn outputs_bits(outputs: &Outputs) -> Vec<u32> {
    outputs.iter().flat_map(|lanes| bits(lanes)).collect()
}

/// Inputs on both sides of zero, and more on one of them.
fn inputs(random: &mut Random, count: usize, scale: f32) -> Vec<f32> {
    random
        .floats(count, scale)
        .into_iter()
        .map(|x| x + 0.7 * scale)
        .collect()
}

/// The definition against the sums of products of what the quants stand for, in f64.
#[test]
fn a_product_is_that_of_the_values_which_the_quants_stand_for() {
    const BLOCKS: usize = 5;
    let random = &mut Random(11);
    let input = quantised(&portable::KERNELS, &inputs(random, BLOCKS * BLOCK, 3.0), BLOCKS * BLOCK);
    let value = |column: usize| {
        let marks = input.marks[column / BLOCK];
        f64::from(marks.middle) + f64::from(marks.scale) * f64::from(input.quants[column])
    };
    let half = |bytes: &[u8], at: usize| f64::from(half::f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32());
    for (has_minima, block_bytes, dot) in [
        (true, Q4_1_PANEL_BLOCK, portable::KERNELS.dot_q4_1),
        (false, Q8_0_PANEL_BLOCK, portable::KERNELS.dot_q8_0),
    ] {
        let lines = panel(random, BLOCKS, if has_minima { (256, 32) } else { (512, 16) });
        let mut out = [[0.0; LANES]; MAX_ROWS];
        dot(bytes_of(&lines), &input.rows(), 1, &mut out);
        for (lane, got) in out[0].iter().enumerate() {
            let (mut right, mut magnitude) = (0.0, 0.0);
            for column in 0..BLOCKS * BLOCK {
                let block = &bytes_of(&lines)[column / BLOCK * block_bytes..][..block_bytes];
                let i = column % BLOCK;
                let weight = if has_minima {
                    let byte = block[i % 16 / 4 * 64 + lane * 4 + i % 4];
                    let quant = if i < 16 { byte & 15 } else { byte >> 4 };
                    half(block, 256 + 2 * lane) * f64::from(quant) + half(block, 288 + 2 * lane)
                } else {
                    let quant = i32::from(block[i / 4 * 64 + lane * 4 + i % 4]) - Q8_OFFSET;
                    half(block, 512 + 2 * lane) * f64::from(quant)
                };
                right += weight * value(column);
                magnitude += (weight * value(column)).abs();
            }
            assert!(
                (f64::from(*got) - right).abs() <= 1e-5 * magnitude,
                "{lane} {got} {right} of {magnitude}"
            );
        }
    }
}

/// The largest and smallest stored integers with the largest and smallest quants: where a sum of 16 bits would overflow first.
#[test]
fn products_of_extremes_agree() {
    let random = &mut Random(5);
    let x: Vec<f32> = (0..4 * BLOCK)
        .map(|i| if i % BLOCK == i / BLOCK * 5 { 1.0 } else { -1.0 })
        .collect();
    for sign in [1.0, -1.0] {
        let input = quantised(
            &portable::KERNELS,
            &x.iter().map(|x| x * sign).collect::<Vec<_>>(),
            x.len(),
        );
        assert!(input.quants.iter().all(|quant| quant.unsigned_abs() == 127));
        for byte in [0, 0xff] {
            for kernels in others() {
                for (quants, halves, right, other) in [
                    (256, 32, portable::KERNELS.dot_q4_1, kernels.dot_q4_1),
                    (512, 16, portable::KERNELS.dot_q8_0, kernels.dot_q8_0),
                ] {
                    let mut lines = panel(random, 4, (quants, halves));
                    let block_bytes = quants + 2 * halves;
                    for at in (0..4 * block_bytes).filter(|at| at % block_bytes < quants) {
                        lines[at / 64].0[at % 64] = byte;
                    }
                    let (mut expected, mut got) = ([[7.0; LANES]; MAX_ROWS], [[7.0; LANES]; MAX_ROWS]);
                    right(bytes_of(&lines), &input.rows(), 1, &mut expected);
                    other(bytes_of(&lines), &input.rows(), 1, &mut got);
                    assert_eq!(
                        outputs_bits(&expected),
                        outputs_bits(&got),
                        "{} {quants} {byte}",
                        kernels.name
                    );
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn dot_products_agree(seed: u64, blocks in 1usize..20, rows in 1usize..=MAX_ROWS, scale in 1e-3f32..1e3) {
        let random = &mut Random(seed);
        let input = quantised(&portable::KERNELS, &inputs(random, rows * blocks * BLOCK, scale), blocks * BLOCK);
        let q4_1 = panel(random, blocks, (256, 32));
        let q8_0 = panel(random, blocks, (512, 16));
        // Any bytes, made finite by clearing one exponent bit.
        let mut f32s = panel(random, blocks, (BLOCK * LANES * 4, 0));
        f32s.iter_mut().for_each(|line| line.0.iter_mut().skip(3).step_by(4).for_each(|byte| *byte &= 0xbf));
        for kernels in others() {
            for (format, right, other, panel) in [
                ("q4_1", portable::KERNELS.dot_q4_1, kernels.dot_q4_1, &q4_1),
                ("q8_0", portable::KERNELS.dot_q8_0, kernels.dot_q8_0, &q8_0),
                ("f32", portable::KERNELS.dot_f32, kernels.dot_f32, &f32s),
            ] {
                let (mut expected, mut got) = ([[7.0; LANES]; MAX_ROWS], [[7.0; LANES]; MAX_ROWS]);
                right(bytes_of(panel), &input.rows(), rows, &mut expected);
                other(bytes_of(panel), &input.rows(), rows, &mut got);
                prop_assert_eq!(outputs_bits(&expected), outputs_bits(&got), "{} {}", kernels.name, format);
                prop_assert!(expected[rows - 1] != [7.0; LANES]);
                // A row alone gives what it gives in company.
                other(bytes_of(panel), &input.row(rows - 1), 1, &mut got);
                prop_assert_eq!(bits(&expected[rows - 1]), bits(&got[0]));
            }
        }
    }

    #[test]
    fn pairs_of_panels_give_what_each_panel_gives(seed: u64, blocks in 1usize..40, rows in 1usize..20, scale in 1e-3f32..1e3) {
        let random = &mut Random(seed);
        let input = quantised(&portable::KERNELS, &inputs(random, rows * blocks * BLOCK, scale), blocks * BLOCK);
        for kernels in others() {
            for (dot, pair, bytes) in [
                (portable::KERNELS.dot_q4_1, kernels.pair_q4_1, (256, 32)),
                (portable::KERNELS.dot_q8_0, kernels.pair_q8_0, (512, 16)),
            ] {
                let Some(pair) = pair else { continue };
                let both = [panel(random, blocks, bytes), panel(random, blocks, bytes)];
                let panels = both.each_ref().map(|lines| &bytes_of(lines)[..blocks * pair.block_bytes]);
                let mut sums = [vec![[7.0; LANES]; rows], vec![[7.0; LANES]; rows]];
                let mut scratch = vec![UnpackedBlock::default(); 2 * PAIR_BLOCKS];
                pair.dot((panels, panels), &input.rows(), &mut scratch, sums.each_mut().map(Vec::as_mut_slice));
                for (panel, sums) in panels.iter().zip(&sums) {
                    for (row, sum) in sums.iter().enumerate() {
                        let mut expected = [[7.0; LANES]; MAX_ROWS];
                        dot(panel, &input.row(row), 1, &mut expected);
                        prop_assert_eq!(bits(&expected[0]), bits(sum), "{} row {}", kernels.name, row);
                    }
                }
            }
        }
    }
}
