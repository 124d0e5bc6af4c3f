//! Every kernel of this CPU against the portable definition, bit for bit.

mod attention;
mod lanes;
mod products;

use super::lanes::QuantisedRow;
use super::*;

fn others() -> Vec<Kernels> {
    #[allow(unused_mut, reason = "one more on x86-64")]
    let mut found: Vec<Kernels> = [avx2::detect(), avx_vnni::detect(), avx512::detect(), neon::detect()]
        .into_iter()
        .flatten()
        .collect();
    #[cfg(target_arch = "x86_64")]
    found.extend(avx_vnni::detect_as_avx512());
    println!(
        "compared with portable: {:?}",
        found.iter().map(|kernels| kernels.name).collect::<Vec<_>>()
    );
    found
}

/// SplitMix64, so that a proptest case is one seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// -1..1.
    fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }
    fn floats(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.float() * scale).collect()
    }
    /// A finite f16, subnormal ones included.
    fn half(&mut self) -> [u8; 2] {
        ((self.next() as u16) & 0xafff).to_le_bytes()
    }
}

/// `scripts/test-neon` names the kernels that its processor must get.
#[test]
fn the_fastest_kernels_of_this_machine_are_taken() {
    let chosen = choose(crate::cpu::KernelChoice::Auto).unwrap().name;
    match std::env::var("BATON_EXPECTED_KERNELS") {
        Ok(expected) => assert_eq!(chosen, expected),
        Err(_) => {
            let best_first = [avx512::detect(), avx_vnni::detect(), avx2::detect(), neon::detect()];
            let best = best_first.into_iter().flatten().next().unwrap_or(portable::KERNELS);
            assert_eq!(chosen, best.name);
        }
    }
}

/// A 64-byte aligned panel.
#[repr(align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

/// No kernel writes these.
const UNWRITTEN: BlockMarks = BlockMarks {
    scale: 9.0,
    middle: 9.0,
    total: 9.0,
    sum: 9,
};

fn marks_bits(marks: &[BlockMarks]) -> Vec<([u32; 3], i32)> {
    let bits = |marks: &BlockMarks| [marks.scale, marks.middle, marks.total].map(f32::to_bits);
    marks.iter().map(|marks| (bits(marks), marks.sum)).collect()
}

struct Quantised {
    values: Vec<f32>,
    quants: Vec<i8>,
    marks: Vec<BlockMarks>,
    columns: usize,
}

fn quantised(kernels: &Kernels, values: &[f32], columns: usize) -> Quantised {
    let blocks = values.len() / BLOCK;
    let mut out = Quantised {
        values: values.to_vec(),
        quants: vec![99; values.len()],
        marks: vec![UNWRITTEN; blocks],
        columns,
    };
    let row = QuantisedRow {
        quants: &mut out.quants,
        marks: &mut out.marks,
    };
    (kernels.quantise)(values, row);
    out
}

impl Quantised {
    fn row(&self, row: usize) -> InputRows<'_> {
        InputRows {
            values: &self.values[row * self.columns..],
            quants: &self.quants[row * self.columns..],
            marks: &self.marks[row * self.columns / BLOCK..],
            columns: self.columns,
        }
    }

    fn rows(&self) -> InputRows<'_> {
        InputRows {
            values: &self.values,
            quants: &self.quants,
            marks: &self.marks,
            columns: self.columns,
        }
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
