//! Rotary position embedding: the table, and the rotation of one head. `crate::numerics` has the definition.

use model_files::arch::RopePairs;

use crate::math::{exp_f64, ln, sin_cos_f64};

/// Cosine and sine of every position and pair.
pub(crate) struct RopeTable {
    /// `[position][pair] = (cos, sin)`.
    turns: Vec<(f32, f32)>,
    pairs: usize,
    kind: RopePairs,
}

impl RopeTable {
    pub(crate) fn new(positions: usize, head_dim: usize, (kind, base): (RopePairs, f32)) -> Self {
        let pairs = head_dim / 2;
        let log_base = ln(f64::from(base));
        let speeds: Vec<f64> = (0..pairs)
            .map(|pair| exp_f64(-2.0 * pair as f64 / head_dim as f64 * log_base))
            .collect();
        let turns = (0..positions)
            .flat_map(|position| speeds.iter().map(move |speed| sin_cos_f64(position as f64 * speed)))
            .map(|(sin, cos)| (cos as f32, sin as f32))
            .collect();
        Self { turns, pairs, kind }
    }

    /// Turns the pairs of one head in place.
    pub(crate) fn turn(&self, position: usize, head: &mut [f32]) {
        let turns = &self.turns[position * self.pairs..][..self.pairs];
        match self.kind {
            RopePairs::Neighbours => {
                for (pair, (cos, sin)) in head.as_chunks_mut::<2>().0.iter_mut().zip(turns) {
                    let [a, b] = *pair;
                    *pair = [a * cos - b * sin, a * sin + b * cos];
                }
            }
            RopePairs::Halves => {
                let (firsts, seconds) = head.split_at_mut(self.pairs);
                for ((a, b), (cos, sin)) in firsts.iter_mut().zip(seconds).zip(turns) {
                    (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_matches_the_formula() {
        let table = RopeTable::new(3_000, 64, (RopePairs::Neighbours, 100_000.0));
        for position in [0usize, 1, 17, 2_999] {
            for pair in [0usize, 1, 15, 31] {
                let angle = position as f64 * 100_000f64.powf(-(pair as f64) / 32.0);
                let (cos, sin) = table.turns[position * 32 + pair];
                assert!((f64::from(cos) - angle.cos()).abs() < 1e-7, "{position} {pair}");
                assert!((f64::from(sin) - angle.sin()).abs() < 1e-7, "{position} {pair}");
            }
        }
        let mut head = vec![1.0f32; 64];
        table.turn(5, &mut head);
        assert!(
            (head.iter().map(|v| v * v).sum::<f32>() - 64.0).abs() < 1e-4,
            "turning keeps the length"
        );
        let halves = RopeTable::new(6, 4, (RopePairs::Halves, 10_000.0));
        let neighbours = RopeTable::new(6, 4, (RopePairs::Neighbours, 10_000.0));
        let (mut one, mut other) = ([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]);
        halves.turn(5, &mut one);
        neighbours.turn(5, &mut other);
        assert_eq!(one, [other[0], other[2], other[1], other[3]]);
    }
}
