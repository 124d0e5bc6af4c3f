//! What one step costs: what is in it, how cold the caches are, and how much it varies.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Numbers of decoding sequences for which `StepCosts::batch_seconds` has a figure. Kernels of a CPU
/// take some numbers at a time and not others, so three may take longer than four.
pub const BATCHES: [u64; 7] = [1, 2, 3, 4, 6, 8, 16];
/// Numbers of prompt tokens in a step for which `StepCosts::chunk_seconds` has a figure.
pub const CHUNKS: [u64; 11] = [16, 32, 64, 96, 128, 192, 256, 384, 512, 1_024, 2_048];

/// The time of one step: a sum of these, each times its count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepCosts {
    /// Each step, whatever is in it: the weights are read once.
    pub fixed_seconds: f64,
    /// Each token of a prompt's chunk.
    pub prefill_token_seconds: f64,
    /// Each pair of a chunk's token and a position that it attends to: the quadratic part of a prompt.
    pub prefill_pair_seconds: f64,
    /// Each sequence that decodes.
    pub decode_row_seconds: f64,
    /// Each position that a decoding sequence attends to.
    pub decode_context_token_seconds: f64,
    /// A step in which at least one token is drawn: the output head is read.
    pub draw_seconds: f64,
    /// What a step that only decodes takes more (or less) than the sum, for each number of `BATCHES`: kernels compute several
    /// sequences at once, so their time rises in steps. Between two of them it is a line; above the last one that one holds.
    #[serde(default)]
    pub batch_seconds: [f64; BATCHES.len()],
    /// The same for each position of such a step: one sequence alone waits for its KV, several hide each other's waiting.
    #[serde(default)]
    pub batch_context_token_seconds: [f64; BATCHES.len()],
    /// The same for a step with so many prompt tokens (`CHUNKS`): a large chunk no longer fits the caches, so eight chunks of 64 may be
    /// faster than one of 512.
    #[serde(default)]
    pub chunk_seconds: [f64; CHUNKS.len()],
    /// Coefficient of variation of the time of a step that only decodes; 0: none.
    #[serde(default)]
    pub variation: f64,
    /// The same for a prompt, whose chunks vary together. It takes much longer than such a step, so that short disturbances even out.
    #[serde(default)]
    pub prompt_variation: f64,
    #[serde(default)]
    pub cold: ColdCosts,
}

/// Weights that a CPU reads again and again settle in its shared cache, over some steps. A prompt or a pause drives them out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ColdCosts {
    /// What the first step takes more after a prompt or a pause, if it decodes one sequence. A step that decodes n sequences takes an
    /// n-th of it: it computes while it waits for the weights.
    pub seconds: f64,
    /// After so many steps 37 % of it is left; 0: only the first step takes more.
    pub steps: f64,
}

impl ColdCosts {
    /// A node that computes nothing for so long is cold again: other users of the machine have used its cache. The value is chosen: steps
    /// that follow each other stay warm, and after pauses of 0.1 s and more they were cold (docs/measurements/simulator.md).
    pub(crate) const PAUSE: Duration = Duration::from_millis(20);

    /// What a step of so many sequences takes more that comes after so many others which only decoded.
    pub(crate) fn seconds_after(&self, steps: u32, sequences: u64) -> f64 {
        let left = match steps {
            0 => 1.0,
            steps if self.steps > 0.0 => (-f64::from(steps) / self.steps).exp(),
            _ => 0.0,
        };
        self.seconds * left / sequences.max(1) as f64
    }
}

/// What is in one step, as far as its time depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StepShape {
    pub prefill_tokens: u64,
    /// Sum over the tokens of chunks of the positions that each attends to.
    pub prefill_pairs: u64,
    pub decode_rows: u64,
    /// Sum over decoding sequences of the positions that each attends to.
    pub decode_context: u64,
    /// Sequences whose next token is drawn.
    pub draws: u64,
}

/// What a step waits for most, as far as other nodes of its machine matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// Memory: one or two sequences decode, and the weights are read for them.
    Reading,
    /// The cores: prompts, and more sequences.
    Computing,
}

impl StepKind {
    pub const ALL: [Self; 2] = [Self::Reading, Self::Computing];
    /// Sequences at most that take little of a core beside the reading of weights. With two a step is slowed down like with one, and
    /// with four hardly (docs/measurements/simulator.md).
    const READING_ROWS_MAX: u64 = 2;
}

impl StepShape {
    pub(crate) fn kind(&self) -> StepKind {
        match (self.prefill_tokens, self.decode_rows) {
            (0, ..=StepKind::READING_ROWS_MAX) => StepKind::Reading,
            _ => StepKind::Computing,
        }
    }

    /// A step in which so many sequences decode and nothing else happens, before the first position.
    pub(crate) fn of_batch(sequences: u64) -> Self {
        Self {
            decode_rows: sequences,
            draws: sequences,
            ..Self::default()
        }
    }

    /// Adds `tokens` rows of one sequence, of which `before` positions are computed already.
    pub fn add(&mut self, tokens: u32, before: u32, draws: u32) {
        let (tokens, before) = (u64::from(tokens), u64::from(before));
        if tokens == 1 {
            self.decode_rows += 1;
            self.decode_context += before + 1;
        } else {
            self.prefill_tokens += tokens;
            self.prefill_pairs += tokens * before + tokens * (tokens + 1) / 2;
        }
        self.draws += u64::from(draws);
    }
}

impl StepCosts {
    pub fn seconds(&self, shape: &StepShape) -> f64 {
        let draw = if shape.draws > 0 { self.draw_seconds } else { 0.0 };
        self.fixed_seconds
            + draw
            + self.more_than_the_sum(shape)
            + self.prefill_token_seconds * shape.prefill_tokens as f64
            + self.prefill_pair_seconds * shape.prefill_pairs as f64
            + self.decode_row_seconds * shape.decode_rows as f64
            + self.decode_context_token_seconds * shape.decode_context as f64
    }

    /// How much a step of this kind varies.
    pub(crate) fn variation_of(&self, shape: &StepShape) -> f64 {
        match shape.prefill_tokens {
            0 => self.variation,
            _ => self.prompt_variation,
        }
    }

    /// In a step with prompt tokens the batch does not count: the kernels are filled anyway.
    pub(crate) fn more_than_the_sum(&self, shape: &StepShape) -> f64 {
        match (shape.prefill_tokens, shape.decode_rows) {
            (0, rows) => {
                on_the_line(&BATCHES, &self.batch_seconds, rows)
                    + on_the_line(&BATCHES, &self.batch_context_token_seconds, rows) * shape.decode_context as f64
            }
            (tokens, _) => on_the_line(&CHUNKS, &self.chunk_seconds, tokens),
        }
    }
}

/// The value between two places, on the line from nothing at 0. Above the last place its value holds.
pub(crate) fn on_the_line(places: &[u64], values: &[f64], at: u64) -> f64 {
    let above = places.partition_point(|place| *place < at);
    let (Some(next), Some(value)) = (places.get(above), values.get(above)) else {
        return values.last().copied().unwrap_or(0.0);
    };
    let before = above.checked_sub(1);
    let (last, before) = before.map_or((0, 0.0), |below| (places[below], values[below]));
    let share = (at - last) as f64 / (next - last) as f64;
    before * (1.0 - share) + value * share
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_attends_to_all_before_it_and_to_its_own_beginning() {
        let mut shape = StepShape::default();
        shape.add(4, 10, 1);
        shape.add(1, 7, 1);
        // 11 + 12 + 13 + 14 positions.
        let expected = StepShape {
            prefill_tokens: 4,
            prefill_pairs: 50,
            decode_rows: 1,
            decode_context: 8,
            draws: 2,
        };
        assert_eq!(shape, expected);
    }

    #[test]
    fn between_two_places_there_is_a_line() {
        let at = |at| on_the_line(&[2, 4, 8], &[1.0, 3.0, -1.0], at);
        let found = [0, 1, 2, 3, 4, 6, 8, 100].map(at);
        assert_eq!(found, [0.0, 0.5, 1.0, 2.0, 3.0, 1.0, -1.0, -1.0]);
    }
}
