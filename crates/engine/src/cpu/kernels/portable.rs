//! The definition in plain Rust. It runs everywhere, and the other kernels are tested against it.

use half::f16;

use super::{
    BLOCK, BlockMarks, InputRows, Kernels, LANES, Lanes, Outputs, Q4_1_PANEL_BLOCK, Q8_0_PANEL_BLOCK, Q8_OFFSET,
    attend, lanes,
};

pub(super) const KERNELS: Kernels = Kernels {
    name: "portable",
    dot_q4_1,
    dot_q8_0,
    dot_f32,
    pair_q4_1: None,
    pair_q8_0: None,
    rms_norm: lanes::rms_norm::<Lanes>,
    quantise: lanes::quantise::<Lanes>,
    quantise_blocks: lanes::quantise_blocks::<Lanes>,
    gate_silu: lanes::gate_silu::<Lanes>,
    gate_gelu: lanes::gate_gelu::<Lanes>,
    softcap: lanes::softcap::<Lanes>,
    attend_partition: attend::attend_partition::<Lanes>,
    add_partition: attend::add_partition::<Lanes>,
};

fn dot_f32(panel: &[u8], input: &InputRows<'_>, rows: usize, out: &mut Outputs) {
    lanes::dot_f32::<Lanes>(panel, input, rows, out);
}

fn f16_at(bytes: &[u8], index: usize) -> f32 {
    f16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]).to_f32()
}

/// One block of a panel, unpacked for all rows of the call: 16-bit integers, whose products compilers pair well.
struct Unpacked {
    weights: [[i16; BLOCK]; LANES],
    scales: Lanes,
    minima: Lanes,
    /// The sum of the 32 weights without their minimum.
    sums: Lanes,
}

impl Unpacked {
    fn new(weights: [[i16; BLOCK]; LANES], scales: Lanes, minima: Lanes) -> Self {
        let sum =
            |lane: usize| scales[lane] * weights[lane].iter().map(|weight| i32::from(*weight)).sum::<i32>() as f32;
        Self {
            sums: std::array::from_fn(sum),
            weights,
            scales,
            minima,
        }
    }
}

/// `acc += (d * scale) * dot`, `acc += m * total` where there are minima, and `acc += (d * sum) * middle`, all fused, for one block
/// and every row.
fn add_block<const MINIMA: bool>(
    block: &Unpacked,
    (input, rows): (&InputRows<'_>, usize),
    index: usize,
    out: &mut Outputs,
) {
    let blocks = input.columns / BLOCK;
    for (row, sums) in out.iter_mut().enumerate().take(rows) {
        let mut quants = [0i16; BLOCK];
        for (wide, quant) in quants
            .iter_mut()
            .zip(&input.quants[row * input.columns + index * BLOCK..])
        {
            *wide = i16::from(*quant);
        }
        let BlockMarks {
            scale, middle, total, ..
        } = input.marks[row * blocks + index];
        for (lane, sum) in sums.iter_mut().enumerate() {
            let products = block.weights[lane].iter().zip(&quants);
            let dot: i32 = products
                .map(|(weight, quant)| i32::from(*weight) * i32::from(*quant))
                .sum();
            *sum = (block.scales[lane] * scale).mul_add(dot as f32, *sum);
            if MINIMA {
                *sum = block.minima[lane].mul_add(total, *sum);
            }
            *sum = block.sums[lane].mul_add(middle, *sum);
        }
    }
}

fn dot_q4_1(panel: &[u8], input: &InputRows<'_>, rows: usize, out: &mut Outputs) {
    let blocks = input.check_quantised(rows);
    out[..rows].fill([0.0; LANES]);
    for (index, bytes) in panel.chunks_exact(Q4_1_PANEL_BLOCK).enumerate().take(blocks) {
        let mut weights = [[0; BLOCK]; LANES];
        for (lane, weights) in weights.iter_mut().enumerate() {
            for i in 0..BLOCK / 2 {
                let byte = bytes[i / 4 * 64 + lane * 4 + i % 4];
                weights[i] = i16::from(byte & 15);
                weights[i + BLOCK / 2] = i16::from(byte >> 4);
            }
        }
        let scales = std::array::from_fn(|lane| f16_at(&bytes[256..288], lane));
        let minima = std::array::from_fn(|lane| f16_at(&bytes[288..320], lane));
        add_block::<true>(&Unpacked::new(weights, scales, minima), (input, rows), index, out);
    }
}

fn dot_q8_0(panel: &[u8], input: &InputRows<'_>, rows: usize, out: &mut Outputs) {
    let blocks = input.check_quantised(rows);
    out[..rows].fill([0.0; LANES]);
    for (index, bytes) in panel.chunks_exact(Q8_0_PANEL_BLOCK).enumerate().take(blocks) {
        let mut weights = [[0; BLOCK]; LANES];
        for (lane, weights) in weights.iter_mut().enumerate() {
            for (i, weight) in weights.iter_mut().enumerate() {
                *weight = i16::from(bytes[i / 4 * 64 + lane * 4 + i % 4]) - Q8_OFFSET as i16;
            }
        }
        let scales = std::array::from_fn(|lane| f16_at(&bytes[512..544], lane));
        add_block::<false>(&Unpacked::new(weights, scales, [0.0; LANES]), (input, rows), index, out);
    }
}
