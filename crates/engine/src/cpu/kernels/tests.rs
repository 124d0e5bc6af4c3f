//! Every kernel of this CPU against the portable definition, bit for bit.

use half::{bf16, f16};
use proptest::prelude::*;

use super::attend::{AttendCall, AttendScratch, PARTITION_TILES, PARTS, PartialSums};
use super::lanes::{QuantisedBlock, QuantisedRow};
use super::pairs::{PAIR_BLOCKS, UnpackedBlock};
use super::vector::Vector;
use super::*;
use crate::KvDtype;
use crate::math::exp;

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

/// Sums, maxima and bytes of lanes, also of numbers for which order and sides decide.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[test]
fn lanes_come_together_as_they_do_in_arrays() {
    fn agree<V: Vector>() {
        const SPECIAL: [f32; 6] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1e30];
        let mut random = Random(7);
        for round in 0..400 {
            let mut draw = || match random.next() as usize % 8 {
                special if round % 2 == 1 && special < SPECIAL.len() => SPECIAL[special],
                _ => random.float() * 1e3,
            };
            let (a, b): (Lanes, Lanes) = (std::array::from_fn(|_| draw()), std::array::from_fn(|_| draw()));
            // Which NaN it is, is nowhere said.
            let bits = |value: f32| (!value.is_nan()).then_some(value.to_bits());
            assert_eq!(bits(V::load(&a).tree_sum()), bits(a.tree_sum()), "{a:?}");
            let rows: [Lanes; LANES] = std::array::from_fn(|_| std::array::from_fn(|_| draw()));
            let sums = V::tree_sums(rows.map(|row| V::load(&row))).array();
            assert_eq!(sums.map(bits), rows.map(|row| bits(row.tree_sum())), "{rows:?}");
            assert_eq!(bits(V::load(&a).largest()), bits(a.largest()), "{a:?}");
            let bytes = V::low_bytes([V::load(&a), V::load(&b)]);
            assert_eq!(bytes, Vector::low_bytes([a, b]), "{a:?} {b:?}");
            let columns = V::transpose(rows.map(|row| V::load(&row))).map(|column| column.array().map(bits));
            assert_eq!(columns, Vector::transpose(rows).map(|column| column.map(bits)));
            let (x, y) = (V::load(&a), V::load(&b));
            let got = [x.larger(y), x.smaller(y), x.zero_below(y, x), x.abs(), x.power_of_two()];
            let right = [
                a.larger(b),
                a.smaller(b),
                a.zero_below(b, a),
                Vector::abs(a),
                a.power_of_two(),
            ];
            assert_eq!(
                got.map(|lanes| lanes.array().map(bits)),
                right.map(|lanes| lanes.map(bits))
            );
            let halves: [f16; LANES] = std::array::from_fn(|lane| f16::from_f32(a[lane]));
            // SAFETY: there are 16 of them.
            let (got, right) = unsafe { (V::load_halves(halves.as_ptr()), Lanes::load_halves(halves.as_ptr())) };
            assert_eq!(got.array().map(bits), right.map(bits));
        }
    }
    #[cfg(target_arch = "x86_64")]
    {
        if avx2::detect().is_some() {
            agree::<super::vector::Avx2>();
        }
        if avx512::detect().is_some() {
            agree::<super::vector::Avx512>();
        }
    }
    #[cfg(target_arch = "aarch64")]
    agree::<super::vector::Neon>();
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

/// No kernel writes these.
const UNWRITTEN: BlockMarks = BlockMarks {
    scale: 9.0,
    offset: 9.0,
    sum: 9,
};

fn marks_bits(marks: &[BlockMarks]) -> Vec<(u32, u32, i32)> {
    marks
        .iter()
        .map(|marks| (marks.scale.to_bits(), marks.offset.to_bits(), marks.sum))
        .collect()
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

fn outputs_bits(outputs: &Outputs) -> Vec<u32> {
    outputs.iter().flat_map(|lanes| bits(lanes)).collect()
}

proptest! {
    #[test]
    fn dot_products_agree(seed: u64, blocks in 1usize..20, rows in 1usize..=MAX_ROWS, scale in 1e-3f32..1e3) {
        let random = &mut Random(seed);
        let input = quantised(&portable::KERNELS, &random.floats(rows * blocks * BLOCK, scale), blocks * BLOCK);
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
        let input = quantised(&portable::KERNELS, &random.floats(rows * blocks * BLOCK, scale), blocks * BLOCK);
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

    #[test]
    fn row_operations_agree(seed: u64, blocks in 1usize..60, exponent in -40i32..38) {
        let random = &mut Random(seed);
        let scale = 10f32.powi(exponent);
        let x = random.floats(blocks * BLOCK, scale);
        let weight = random.floats(x.len(), 2.0);
        for kernels in others() {
            let (mut expected, mut got) = (vec![0.0; x.len()], vec![0.0; x.len()]);
            (portable::KERNELS.rms_norm)(&x, &weight, 1e-5, &mut expected);
            (kernels.rms_norm)(&x, &weight, 1e-5, &mut got);
            prop_assert_eq!(bits(&expected), bits(&got));
            let (right, other) = (quantised(&portable::KERNELS, &x, x.len()), quantised(&kernels, &x, x.len()));
            prop_assert_eq!(&right.quants, &other.quants);
            prop_assert_eq!(marks_bits(&right.marks), marks_bits(&other.marks));
            let halves: [Vec<Lanes>; 2] = std::array::from_fn(|half| x.as_chunks::<LANES>().0.iter().skip(half).step_by(2).copied().collect());
            let unwritten = QuantisedBlock { marks: UNWRITTEN, ..Default::default() };
            let mut in_blocks = vec![unwritten; blocks];
            (kernels.quantise_blocks)(halves.each_ref().map(Vec::as_slice), &mut in_blocks);
            let of_row = right.quants.as_chunks::<BLOCK>().0.iter().zip(&right.marks);
            for ((quants, marks), block) in of_row.zip(&in_blocks) {
                prop_assert_eq!((&quants[..], *marks), (block.quants.as_flattened(), block.marks));
            }
            let (x, up) = (*x.first_chunk::<LANES>().unwrap(), *weight.first_chunk::<LANES>().unwrap());
            let (expected, got) = (unary(&portable::KERNELS, &x, &up), unary(&kernels, &x, &up));
            prop_assert_eq!(expected.map(|lanes| bits(&lanes)), got.map(|lanes| bits(&lanes)));
        }
    }

    #[test]
    fn attention_agrees_and_matches_the_softmax(
        seed: u64, first_position in prop_oneof![9 => 0usize..70, 1 => 230usize..560], rows in 1usize..=16, group in 1usize..10, chunks in 1usize..9,
        dtype in prop::sample::select(vec![KvDtype::F16, KvDtype::F32, KvDtype::Bf16]),
        window in prop::option::of(prop_oneof![1usize..60, 200usize..300]), softcap in prop::option::of(0.5f32..60.0),
    ) {
        let case = AttendCase {
            window,
            softcap,
            ..AttendCase::new(&mut Random(seed), (first_position, rows, group, chunks * LANES), dtype)
        };
        let expected = case.by_definition();
        prop_assert_eq!(bits(&expected), bits(&case.run(&portable::KERNELS)));
        for kernels in others() {
            prop_assert_eq!(bits(&expected), bits(&case.run(&kernels)), "{}", kernels.name);
        }
        // Threads that share a context also compute what is before a window.
        if case.window.is_some() {
            for kernels in others().iter().chain([&portable::KERNELS]) {
                prop_assert_eq!(bits(&expected), bits(&case.run_partitions(kernels, 0..case.partitions().end)));
            }
        }
        // A step that decodes has one row.
        let alone = (0..rows).flat_map(|row| case.row(row).run(&portable::KERNELS));
        prop_assert_eq!(bits(&expected), bits(&alone.collect::<Vec<f32>>()));
        for (got, right) in expected.iter().zip(case.in_double_precision()) {
            prop_assert!((f64::from(*got) - right).abs() < 1e-5, "{} {}", got, right);
        }
    }
}

/// Both gates and a cap.
fn unary(kernels: &Kernels, x: &Lanes, up: &Lanes) -> [Lanes; 3] {
    let mut out = [*x; 3];
    (kernels.gate_silu)(&mut out[..1], std::slice::from_ref(up));
    (kernels.gate_gelu)(&mut out[1..2], std::slice::from_ref(up));
    (kernels.softcap)(&mut out[2], 3.0);
    out
}

/// The quantised form against its definition: half a step of error at most, sums as told.
#[test]
fn quantisation_is_what_it_says() {
    let x = Random(3).floats(10 * BLOCK, 5.0);
    let got = quantised(&portable::KERNELS, &x, x.len());
    for (block, x) in x.chunks(BLOCK).enumerate() {
        let quants = &got.quants[block * BLOCK..][..BLOCK];
        assert_eq!(quants.iter().map(|q| i32::from(*q)).sum::<i32>(), got.marks[block].sum);
        assert!(quants.iter().any(|q| q.unsigned_abs() == 127));
        for (x, quant) in x.iter().zip(quants) {
            assert!((x - f32::from(*quant) * got.marks[block].scale).abs() <= got.marks[block].scale * 0.5001);
        }
    }
    // Halves go to even: 127 fixes the step at 1.
    let mut halves = [0.0; BLOCK];
    halves[..6].copy_from_slice(&[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]);
    assert_eq!(
        quantised(&portable::KERNELS, &halves, BLOCK).quants[..6],
        [127, 0, 2, 2, 0, -2]
    );
    let zero = quantised(&portable::KERNELS, &[1e-31; BLOCK], BLOCK);
    assert_eq!((zero.quants[0], zero.marks[0]), (0, BlockMarks::default()));
}

struct AttendCase {
    first_position: usize,
    rows: usize,
    group: usize,
    head_dim: usize,
    window: Option<usize>,
    softcap: Option<f32>,
    dtype: KvDtype,
    queries: Vec<f32>,
    /// `[position][head_dim]`, already rounded to the dtype.
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl AttendCase {
    fn new(
        random: &mut Random,
        (first_position, rows, group, head_dim): (usize, usize, usize, usize),
        dtype: KvDtype,
    ) -> Self {
        let tokens = first_position + rows;
        let mut stored = |scale| {
            let values = random.floats(tokens * head_dim, scale);
            values
                .into_iter()
                .map(|v| match dtype {
                    KvDtype::F16 => f16::from_f32(v).to_f32(),
                    KvDtype::F32 => v,
                    KvDtype::Bf16 => bf16::from_f32(v).to_f32(),
                })
                .collect::<Vec<_>>()
        };
        let (keys, values) = (stored(3.0), stored(1.0));
        let queries = random.floats(rows * group * head_dim, 1.0);
        Self {
            first_position,
            rows,
            group,
            head_dim,
            window: None,
            softcap: None,
            dtype,
            queries,
            keys,
            values,
        }
    }

    /// The same with one of its rows.
    fn row(&self, row: usize) -> Self {
        let (first_position, width) = (self.first_position + row, self.group * self.head_dim);
        let stored = (first_position + 1) * self.head_dim;
        Self {
            first_position,
            rows: 1,
            queries: self.queries[row * width..][..width].to_vec(),
            keys: self.keys[..stored].to_vec(),
            values: self.values[..stored].to_vec(),
            ..*self
        }
    }

    fn partitions(&self) -> std::ops::Range<usize> {
        let tiles = |position: usize| position / LANES / PARTITION_TILES;
        let first = self
            .window
            .map_or(0, |window| (self.first_position + 1).saturating_sub(window));
        tiles(first)..tiles(self.first_position + self.rows - 1) + 1
    }

    fn run(&self, kernels: &Kernels) -> Vec<f32> {
        self.run_partitions(kernels, self.partitions())
    }

    fn run_partitions(&self, kernels: &Kernels, partitions: std::ops::Range<usize>) -> Vec<f32> {
        let (head_dim, width) = (self.head_dim, self.dtype.bytes());
        let half = LANES * head_dim * width;
        let blocks = (self.first_position + self.rows).div_ceil(LANES);
        // Unwritten rows hold NaN: what is beyond a row's position must not be looked at.
        let mut memory = vec![Line([0xff; 64]); (blocks * 2 * half).div_ceil(64)];
        let start = memory.as_mut_ptr().cast::<u8>();
        for position in 0..self.first_position + self.rows {
            for column in 0..head_dim {
                let at = position / LANES * 2 * half + (position % LANES * head_dim + column) * width;
                for (offset, value) in [(0, &self.keys), (half, &self.values)] {
                    let value = value[position * head_dim + column];
                    // SAFETY: `at + offset` is within the block of this position.
                    unsafe {
                        match self.dtype {
                            KvDtype::F16 => start.add(at + offset).cast::<f16>().write(f16::from_f32(value)),
                            KvDtype::F32 => start.add(at + offset).cast::<f32>().write(value),
                            KvDtype::Bf16 => start.add(at + offset).cast::<bf16>().write(bf16::from_f32(value)),
                        }
                    }
                }
            }
        }
        let queries = self.rows * self.group;
        let call = AttendCall {
            queries: self.queries.as_ptr(),
            query_stride: self.group * head_dim,
            rows: self.rows,
            group: self.group,
            head_dim,
            first_position: self.first_position,
            scale: 1.0 / (head_dim as f32).sqrt(),
            softcap: self.softcap,
            window: self.window,
            keys_of: &|block| start.wrapping_add(block * 2 * half).cast_const(),
            values_offset: half,
            dtype: self.dtype,
        };
        assert_eq!(call.partitions(), self.partitions());
        let mut scratch = AttendScratch {
            keys: &mut vec![f32::NAN; 2 * head_dim * LANES],
            values: &mut vec![f32::NAN; 2 * head_dim * LANES],
            parts: &mut vec![[f32::NAN; LANES]; PARTS],
            scores: &mut vec![[f32::NAN; LANES]; queries * PARTITION_TILES],
        };
        let (mut totals, mut sums) = (vec![f32::NAN; queries], vec![f32::NAN; queries * head_dim]);
        let mut so_far = PartialSums {
            largest: &mut vec![f32::NAN; queries],
            totals: &mut totals,
            sums: &mut sums,
        };
        let first = partitions.start;
        for partition in partitions {
            let mut later = PartialSums {
                largest: &mut vec![f32::NAN; queries],
                totals: &mut vec![f32::NAN; queries],
                sums: &mut vec![f32::NAN; queries * head_dim],
            };
            // SAFETY: all pointers are to the vectors above, sized by the same numbers.
            unsafe {
                // The first is computed where the others are added.
                match partition == first {
                    true => (kernels.attend_partition)(&call, partition, &mut scratch, &mut so_far),
                    false => {
                        (kernels.attend_partition)(&call, partition, &mut scratch, &mut later);
                        (kernels.add_partition)(&mut so_far, &later);
                    }
                }
            }
        }
        let quotients = sums.chunks(head_dim).zip(&totals);
        quotients
            .flat_map(|(sums, total)| sums.iter().map(move |sum| sum * (1.0 / total)))
            .collect()
    }

    /// As `crate::numerics` says it, one number after the other.
    fn by_definition(&self) -> Vec<f32> {
        let (d, scale) = (self.head_dim, 1.0 / (self.head_dim as f32).sqrt());
        let tree_sum = |lanes: [f32; 16]| Vector::tree_sum(lanes);
        let mut out = Vec::new();
        for query in 0..self.rows * self.group {
            let end = self.first_position + query / self.group + 1;
            let start = self.window.map_or(0, |window| end.saturating_sub(window));
            let score = |position: usize| {
                let mut parts = [0f32; 16];
                for index in 0..d {
                    let (q, k) = (self.queries[query * d + index], self.keys[position * d + index]);
                    parts[index % 16] = q.mul_add(k, parts[index % 16]);
                }
                let mut score = [tree_sum(parts) * scale; LANES];
                if let Some(cap) = self.softcap {
                    (portable::KERNELS.softcap)(&mut score, cap);
                }
                score[0]
            };
            let mut row: Option<(f32, f32, Vec<f32>)> = None;
            for first in (start / 256 * 256..end).step_by(256) {
                let seen = first.max(start)..end.min(first + 256);
                let scores: Vec<f32> = seen.clone().map(score).collect();
                let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let (mut totals, mut values) = ([0f32; 16], vec![0f32; d]);
                for (position, score) in seen.zip(scores) {
                    let weight = exp(score - largest);
                    totals[position % 16] += weight;
                    for (value, stored) in values.iter_mut().zip(&self.values[position * d..]) {
                        *value = weight.mul_add(*stored, *value);
                    }
                }
                let total = tree_sum(totals);
                row = Some(match row {
                    None => (largest, total, values),
                    Some((m, l, before)) => {
                        let n = m.max(largest);
                        let (c, d) = (exp(m - n), exp(largest - n));
                        let values = before.iter().zip(&values).map(|(v, later)| later.mul_add(d, v * c));
                        (n, total.mul_add(d, l * c), values.collect())
                    }
                });
            }
            let (_, total, values) = row.expect("a row sees itself");
            out.extend(values.iter().map(|value| value * (1.0 / total)));
        }
        out
    }

    fn in_double_precision(&self) -> Vec<f64> {
        let d = self.head_dim;
        let mut out = Vec::new();
        for query in 0..self.rows * self.group {
            let visible = self.first_position + query / self.group + 1;
            let dot = |position: usize| -> f64 {
                let pairs = self.queries[query * d..][..d]
                    .iter()
                    .zip(&self.keys[position * d..][..d]);
                let score = pairs.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() / (d as f64).sqrt();
                match self.softcap.map(f64::from) {
                    Some(cap) => cap * (score / cap).tanh(),
                    None => score,
                }
            };
            let first = self.window.map_or(0, |window| visible.saturating_sub(window));
            let scores: Vec<f64> = (first..visible).map(dot).collect();
            let best = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - best).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for column in 0..d {
                let weighted = weights
                    .iter()
                    .enumerate()
                    .map(|(p, w)| w * f64::from(self.values[(first + p) * d + column]));
                out.push(weighted.sum::<f64>() / sum);
            }
        }
        out
    }
}

#[test]
fn gates_and_caps_agree_at_the_edges_and_are_what_they_say() {
    let edges = [
        0.0, -0.0, 1e-30, 20.0, -20.0, 86.9, -86.9, 87.1, -87.1, 88.1, -88.1, 1e30, -1e30, 0.5, -0.5, 3.0,
    ];
    let expected = unary(&portable::KERNELS, &edges, &[1.0; LANES]);
    for kernels in others() {
        let got = unary(&kernels, &edges, &[1.0; LANES]);
        assert_eq!(
            expected.map(|lanes| bits(&lanes)),
            got.map(|lanes| bits(&lanes)),
            "{}",
            kernels.name
        );
    }
    let close = |got: f32, right: f64| {
        assert!(
            (f64::from(got) - right).abs() <= 2e-6 * (1.0 + right.abs()),
            "{got} {right}"
        )
    };
    for step in -200..200 {
        let x = step as f32 * 0.05;
        let [silu, gelu, cap] = unary(&portable::KERNELS, &[x; LANES], &[2.0; LANES]).map(|lanes| lanes[0]);
        let x = f64::from(x);
        close(silu, 2.0 * x / (1.0 + (-x).exp()));
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        close(gelu, 2.0 * 0.5 * x * (1.0 + inner.tanh()));
        close(cap, 3.0 * (x / 3.0).tanh());
    }
}
