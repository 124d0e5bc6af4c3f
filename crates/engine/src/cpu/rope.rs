//! Rotary position embedding: the tables, and the rotation of one head. `crate::numerics` has the definition.

use model_files::arch::RopePairs;
use model_files::config::{ModelConfig, Rope, RopeScaling};

use crate::math::{exp_f64, ln, sin_cos_f64};

/// The table of every layer.
pub(crate) struct LayerRopes {
    everywhere: RopeTable,
    /// The table of layers with a window, where it is another one.
    windowed: Option<RopeTable>,
    /// Whether the layer's table is `windowed`.
    has_window: Vec<bool>,
}

impl LayerRopes {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        let table = |rope| RopeTable::new(config.context_length, rope);
        Self {
            everywhere: table(&config.rope),
            windowed: config.window_rope.as_ref().map(table),
            has_window: (0..config.layer_count)
                .map(|layer| config.window_of(layer).is_some())
                .collect(),
        }
    }

    pub(crate) fn of(&self, layer: usize) -> &RopeTable {
        match &self.windowed {
            Some(windowed) if self.has_window[layer] => windowed,
            _ => &self.everywhere,
        }
    }
}

/// Cosine and sine of every position and pair.
pub(crate) struct RopeTable {
    /// `[position][pair] = (cos, sin)`.
    turns: Vec<(f32, f32)>,
    pairs: usize,
    kind: RopePairs,
}

impl RopeTable {
    fn new(positions: usize, rope: &Rope) -> Self {
        let pairs = rope.dims / 2;
        let (speeds, magnitude) = rope_speeds(rope);
        let turns = (0..positions)
            .flat_map(|position| speeds.iter().map(move |speed| sin_cos_f64(position as f64 * speed)))
            .map(|(sin, cos)| ((cos * magnitude) as f32, (sin * magnitude) as f32))
            .collect();
        let kind = rope.pairs;
        Self { turns, pairs, kind }
    }

    /// Turns the pairs of one head in place. Values after the last pair stay.
    pub(crate) fn turn(&self, position: usize, head: &mut [f32]) {
        let turns = &self.turns[position * self.pairs..][..self.pairs];
        let turned = &mut head[..2 * self.pairs];
        match self.kind {
            RopePairs::Neighbours => {
                for (pair, (cos, sin)) in turned.as_chunks_mut::<2>().0.iter_mut().zip(turns) {
                    let [a, b] = *pair;
                    *pair = [a * cos - b * sin, a * sin + b * cos];
                }
            }
            RopePairs::Halves => {
                let (firsts, seconds) = turned.split_at_mut(self.pairs);
                for ((a, b), (cos, sin)) in firsts.iter_mut().zip(seconds).zip(turns) {
                    (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
                }
            }
        }
    }
}

/// The angle of each pair at position 1, and the magnitude.
pub fn rope_speeds(rope: &Rope) -> (Vec<f64>, f64) {
    let log_base = ln(f64::from(rope.base));
    let speed = |pair: usize| exp_f64(-2.0 * pair as f64 / rope.dims as f64 * log_base);
    let plain = (0..rope.dims / 2).map(speed);
    match &rope.scaling {
        RopeScaling::None => (plain.collect(), 1.0),
        RopeScaling::Linear { factor } => (plain.map(|speed| speed / f64::from(*factor)).collect(), 1.0),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context,
        } => {
            let numbers = [factor, low_freq_factor, high_freq_factor].map(|number| f64::from(*number));
            let original_context = f64::from(*original_context);
            (
                plain.map(|speed| llama3(speed, numbers, original_context)).collect(),
                1.0,
            )
        }
        RopeScaling::Factors { factors, magnitude } => (
            plain
                .zip(factors)
                .map(|(speed, factor)| speed / f64::from(*factor))
                .collect(),
            f64::from(*magnitude),
        ),
    }
}

/// Llama 3.1's scaling, as its authors' code has it: by the turns of a pair within the original context.
fn llama3(speed: f64, [factor, low, high]: [f64; 3], original_context: f64) -> f64 {
    let turns = original_context * speed / (2.0 * std::f64::consts::PI);
    if turns > high {
        speed
    } else if turns < low {
        speed / factor
    } else {
        let share = (turns - low) / (high - low);
        (1.0 - share) * speed / factor + share * speed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(pairs: RopePairs, (base, dims): (f32, usize), scaling: RopeScaling) -> Rope {
        Rope {
            pairs,
            base,
            dims,
            scaling,
        }
    }

    #[test]
    fn the_table_matches_the_formula() {
        let table = RopeTable::new(3_000, &rope(RopePairs::Neighbours, (100_000.0, 64), RopeScaling::None));
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
        let halves = RopeTable::new(6, &rope(RopePairs::Halves, (10_000.0, 4), RopeScaling::None));
        let neighbours = RopeTable::new(6, &rope(RopePairs::Neighbours, (10_000.0, 4), RopeScaling::None));
        let (mut one, mut other) = ([1.0, 2.0, 3.0, 4.0, 9.0], [1.0, 3.0, 2.0, 4.0, 9.0]);
        halves.turn(5, &mut one);
        neighbours.turn(5, &mut other);
        assert_eq!(one, [other[0], other[2], other[1], other[3], 9.0]);
    }

    #[test]
    fn scalings_change_the_speeds() {
        let plain = rope(RopePairs::Halves, (500_000.0, 128), RopeScaling::None);
        let scaled = |scaling| {
            let (speeds, magnitude) = rope_speeds(&Rope {
                scaling,
                ..plain.clone()
            });
            let ratios: Vec<f64> = rope_speeds(&plain).0.iter().zip(&speeds).map(|(a, b)| a / b).collect();
            (ratios, magnitude)
        };
        let close = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-12;
        assert!(
            scaled(RopeScaling::Linear { factor: 4.0 })
                .0
                .iter()
                .all(|ratio| close(*ratio, 4.0))
        );
        // The numbers of Llama 3.1. Its authors' formula in Python gave 1 for the first 29 pairs, 8 for the last 29, and these
        // ratios between them.
        let (ratios, _) = scaled(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8_192,
        });
        assert!(ratios[..29].iter().all(|ratio| close(*ratio, 1.0)), "{ratios:?}");
        assert!(ratios[35..].iter().all(|ratio| close(*ratio, 8.0)), "{ratios:?}");
        for (ratio, right) in ratios[29..].iter().zip([1.21, 1.55, 2.03, 2.69, 3.68, 5.26]) {
            assert!((ratio - right).abs() < 0.006, "{ratios:?}");
        }
        let factors: Vec<f32> = (1..=64).map(|i| i as f32).collect();
        let (ratios, magnitude) = scaled(RopeScaling::Factors {
            factors,
            magnitude: 1.25,
        });
        assert!(close(ratios[0], 1.0) && close(ratios[63], 64.0) && magnitude == 1.25);
    }
}
