//! Attention, against its definition and against double precision.

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::KvDtype;
use crate::cpu::kernels::attend::{AttendCall, AttendScratch, PARTITION_TILES, PARTS, PartialSums};
use crate::cpu::kernels::vector::Vector;
use crate::math::exp;

proptest! {
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
