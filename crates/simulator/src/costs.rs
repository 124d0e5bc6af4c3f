//! What things cost in virtual time: a step, a byte on a link, a message, a neighbour on the same machine. One JSON file.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use workload::statistics::Samples;

use crate::arithmetic::seconds;

/// Everything that a simulation needs to know about machines and programs. Written by `baton bench engine`, or typed in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    /// Model and machine, for people.
    pub name: String,
    /// How the figures came about: the commands, or `typed in`.
    pub origin: String,
    pub step: StepCosts,
    pub overheads: Overheads,
    pub link: LinkCosts,
    #[serde(default)]
    pub host: HostCosts,
    pub kv_bytes_per_token: u64,
    /// How well `step` describes what was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fit: Option<FitReport>,
    /// How far simulations with these costs were from real runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<Accuracy>,
}

/// Numbers of decoding sequences for which `StepCosts::batch_seconds` has a figure.
pub const BATCHES: [u64; 5] = [1, 2, 4, 8, 16];
/// Numbers of prompt tokens in a step for which `StepCosts::chunk_seconds` has a figure.
pub const CHUNKS: [u64; 8] = [16, 32, 64, 128, 256, 512, 1_024, 2_048];

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
    /// The same for a step with prompt tokens. It takes much longer, so that short disturbances even out.
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

impl StepShape {
    /// A step in which so many sequences decode and nothing else happens, before the first position.
    fn of_batch(sequences: u64) -> Self {
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

/// Times of the programs around the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overheads {
    /// From the client's first byte to the coordinator's decision: connection, HTTP, template.
    pub request_seconds: f64,
    /// The same for each token of the prompt: parsing and tokenizing.
    pub prompt_token_seconds: f64,
    /// One message between the coordinator and a node, either way.
    pub hop_seconds: f64,
    /// The same for each token of a prompt that is in the message.
    pub hop_prompt_token_seconds: f64,
    /// From a token's arrival at the coordinator to its arrival at the client.
    pub egress_seconds: f64,
    /// Of a node's loop, between two steps: tokens are told, the next step is planned.
    pub loop_seconds: f64,
    /// From the last byte of a transfer to the commit: checks, and the decode node's loop.
    pub commit_seconds: f64,
    /// From the end of a drain to the first registration in the next role, the weights kept.
    pub role_change_seconds: f64,
}

/// The way of KV from prefill to decode nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkCosts {
    /// `shm-direct`, `grpc`, `100 Gb/s`...
    pub name: String,
    pub latency_seconds: f64,
    /// Of each node, in each direction; transfers of one node share it.
    pub bytes_per_second: f64,
    /// It goes over a stream and not through shared memory: prefill nodes then cut prompts of one chunk in halves.
    pub is_streamed: bool,
}

/// Nodes that share a machine slow each other down.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostCosts {
    /// In order of the topology: prefill nodes first. 1: each node has a machine of its own.
    pub nodes_per_host: u32,
    /// How many times as long a step takes while 1, 2, 3... nodes of the machine compute. The last one holds for more.
    pub slowdown: Vec<f64>,
}

impl Default for HostCosts {
    fn default() -> Self {
        Self {
            nodes_per_host: 1,
            slowdown: vec![1.0],
        }
    }
}

impl HostCosts {
    /// Speed of each of so many nodes that compute at the same time, as a share of a node that is alone.
    pub(crate) fn speed(&self, computing: u32) -> f64 {
        let place = (computing.max(1) as usize - 1).min(self.slowdown.len().saturating_sub(1));
        1.0 / self.slowdown.get(place).copied().unwrap_or(1.0)
    }
}

/// What the fit was made of, and how far it is from each point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FitReport {
    pub points: Vec<FitPoint>,
    /// Relative errors, without their sign.
    pub error_median: f64,
    pub error_max: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct FitPoint {
    pub shape: StepShape,
    /// Median of the repetitions.
    pub measured_seconds: f64,
    pub fitted_seconds: f64,
}

/// Errors against real runs, as `benchmarks/simulator/accuracy` measured them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Accuracy {
    pub date: String,
    pub command: String,
    pub entries: Vec<AccuracyEntry>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AccuracyEntry {
    pub topology: String,
    pub load: String,
    /// `ttft_ms_p50`...
    pub metric: String,
    /// Median of the real runs.
    pub real: f64,
    pub simulated: f64,
    /// Median of the differences between two real runs, as a share of `real`.
    pub real_difference: f64,
}

impl AccuracyEntry {
    /// As a share of the real figure, without its sign.
    pub fn error(&self) -> f64 {
        (self.simulated - self.real).abs() / self.real.abs().max(1e-9)
    }

    /// The larger of 10 % and 1.5 times what real runs differ by.
    pub fn allowed(&self) -> f64 {
        (1.5 * self.real_difference).max(0.1)
    }
}

impl Accuracy {
    /// One sentence for whoever reads a simulated figure.
    pub fn sentence(&self) -> String {
        let errors = Samples::new(self.entries.iter().map(AccuracyEntry::error));
        let met = self
            .entries
            .iter()
            .filter(|entry| entry.error() <= entry.allowed())
            .count();
        let median = errors.percentile(50.0).unwrap_or(0.0);
        let largest = errors.percentile(100.0).unwrap_or(0.0);
        format!(
            "against real runs of {}: median error {:.0} %, largest {:.0} %, {met} of {} figures within the larger of 10 % and 1.5 times what real runs differ by",
            self.date,
            median * 100.0,
            largest * 100.0,
            self.entries.len()
        )
    }
}

/// What is wrong with a file of costs.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum CostsError {
    #[error("the costs are no valid JSON of that kind: {0}; `baton bench engine --out costs.json` writes one")]
    Json(String),
    #[error("`{field}` is {value}; it must be a number of at least 0 and below 1e6")]
    Range { field: &'static str, value: f64 },
    #[error("`{field}` is {value}; it must be above 0")]
    NotPositive { field: &'static str, value: f64 },
    #[error("`host.slowdown` has no entry; write [1.0] where nodes do not slow each other down")]
    NoSlowdown,
}

impl Costs {
    /// Reads and checks one file's text.
    ///
    /// # Errors
    /// [`CostsError`]: the file's fault.
    pub fn from_json(text: &str) -> Result<Self, CostsError> {
        let costs: Self = serde_json::from_str(text).map_err(|error| CostsError::Json(error.to_string()))?;
        costs.check()?;
        Ok(costs)
    }

    /// # Errors
    /// A figure that no time or rate can be.
    pub fn check(&self) -> Result<(), CostsError> {
        let (step, overheads) = (&self.step, &self.overheads);
        let times = [
            ("step.fixed_seconds", step.fixed_seconds),
            ("step.prefill_token_seconds", step.prefill_token_seconds),
            ("step.prefill_pair_seconds", step.prefill_pair_seconds),
            ("step.decode_row_seconds", step.decode_row_seconds),
            ("step.decode_context_token_seconds", step.decode_context_token_seconds),
            ("step.draw_seconds", step.draw_seconds),
            ("step.variation", step.variation),
            ("step.prompt_variation", step.prompt_variation),
            ("step.cold.seconds", step.cold.seconds),
            ("step.cold.steps", step.cold.steps),
            ("overheads.request_seconds", overheads.request_seconds),
            ("overheads.prompt_token_seconds", overheads.prompt_token_seconds),
            ("overheads.hop_seconds", overheads.hop_seconds),
            ("overheads.hop_prompt_token_seconds", overheads.hop_prompt_token_seconds),
            ("overheads.egress_seconds", overheads.egress_seconds),
            ("overheads.loop_seconds", overheads.loop_seconds),
            ("overheads.commit_seconds", overheads.commit_seconds),
            ("overheads.role_change_seconds", overheads.role_change_seconds),
            ("link.latency_seconds", self.link.latency_seconds),
        ];
        let of_positions = step
            .batch_context_token_seconds
            .map(|more| step.decode_context_token_seconds + more);
        let of_positions = of_positions.map(|seconds| ("a position with `step.batch_context_token_seconds`", seconds));
        let times = times.into_iter().chain(of_positions);
        if let Some((field, value)) = times.into_iter().find(|(_, value)| !(0.0..1e6).contains(value)) {
            return Err(CostsError::Range { field, value });
        }
        let all_steps = step.fixed_seconds + step.prefill_token_seconds + step.decode_row_seconds;
        let mut positive = vec![
            ("link.bytes_per_second", self.link.bytes_per_second),
            ("kv_bytes_per_token", self.kv_bytes_per_token as f64),
            ("host.nodes_per_host", f64::from(self.host.nodes_per_host)),
            // A step that takes no time would be followed by endless others in one instant.
            ("the time of a step", all_steps),
        ];
        let of_batches = BATCHES.map(|batch| step.seconds(&StepShape::of_batch(batch)));
        positive.extend(of_batches.map(|seconds| ("the time of a step with `step.batch_seconds`", seconds)));
        let of_chunk =
            |(chunk, more): (u64, f64)| step.fixed_seconds + step.prefill_token_seconds * chunk as f64 + more;
        let of_chunks = CHUNKS.into_iter().zip(step.chunk_seconds).map(of_chunk);
        positive.extend(of_chunks.map(|seconds| ("the time of a step with `step.chunk_seconds`", seconds)));
        positive.extend(self.host.slowdown.iter().map(|slowdown| ("host.slowdown", *slowdown)));
        let is_wrong = |value: f64| !value.is_finite() || value <= 0.0;
        if let Some((field, value)) = positive.into_iter().find(|(_, value)| is_wrong(*value)) {
            return Err(CostsError::NotPositive { field, value });
        }
        match self.host.slowdown.is_empty() {
            true => Err(CostsError::NoSlowdown),
            false => Ok(()),
        }
    }

    /// What is said beside each simulated figure.
    pub fn accuracy_sentence(&self) -> String {
        match &self.accuracy {
            Some(accuracy) => accuracy.sentence(),
            None => "error not measured for these costs".to_owned(),
        }
    }
}

impl Overheads {
    /// From the client to the coordinator's decision.
    pub(crate) fn edge(&self, prompt_tokens: u32) -> Duration {
        seconds(self.request_seconds + self.prompt_token_seconds * f64::from(prompt_tokens))
    }
    /// A message without a prompt.
    pub(crate) fn hop(&self) -> Duration {
        seconds(self.hop_seconds)
    }
    /// A message that carries a prompt.
    pub(crate) fn hop_with_prompt(&self, prompt_tokens: u32) -> Duration {
        seconds(self.hop_seconds + self.hop_prompt_token_seconds * f64::from(prompt_tokens))
    }
    pub(crate) fn egress(&self) -> Duration {
        seconds(self.egress_seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs() -> Costs {
        Costs {
            name: "test".into(),
            origin: "typed in".into(),
            step: StepCosts {
                fixed_seconds: 0.01,
                ..StepCosts::default()
            },
            overheads: Overheads::default(),
            link: LinkCosts {
                name: "grpc".into(),
                latency_seconds: 0.0,
                bytes_per_second: 1e9,
                is_streamed: true,
            },
            host: HostCosts::default(),
            kv_bytes_per_token: 1,
            fit: None,
            accuracy: None,
        }
    }

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

    #[test]
    fn impossible_costs_are_refused_by_name() {
        assert_eq!(costs().check(), Ok(()));
        let mut wrong = costs();
        wrong.step.draw_seconds = f64::NAN;
        assert!(matches!(
            wrong.check(),
            Err(CostsError::Range {
                field: "step.draw_seconds",
                ..
            })
        ));
        let mut wrong = costs();
        wrong.step.fixed_seconds = 0.0;
        assert!(matches!(
            wrong.check(),
            Err(CostsError::NotPositive {
                field: "the time of a step",
                ..
            })
        ));
        let mut wrong = costs();
        wrong.step.batch_context_token_seconds[0] = -1e-6;
        assert!(matches!(wrong.check(), Err(CostsError::Range { field, .. }) if field.contains("position")));
        let mut wrong = costs();
        wrong.step.batch_seconds[4] = -0.02;
        assert!(matches!(wrong.check(), Err(CostsError::NotPositive { field, .. }) if field.contains("batch")));
        let mut wrong = costs();
        wrong.host.slowdown.clear();
        assert_eq!(wrong.check(), Err(CostsError::NoSlowdown));
        assert!(matches!(Costs::from_json("{}"), Err(CostsError::Json(_))));
    }

    #[test]
    fn costs_read_back_as_written_and_say_what_they_are_worth() {
        let mut with = costs();
        assert_eq!(with.accuracy_sentence(), "error not measured for these costs");
        let entry = |real, simulated, real_difference| AccuracyEntry {
            topology: "1p1d".into(),
            load: "short".into(),
            metric: "ttft_ms_p50".into(),
            real,
            simulated,
            real_difference,
        };
        with.accuracy = Some(Accuracy {
            date: "2026-11-25".into(),
            command: "x".into(),
            entries: vec![
                entry(100.0, 108.0, 0.0),
                entry(100.0, 125.0, 0.1),
                entry(100.0, 120.0, 0.2),
            ],
        });
        let sentence = with.accuracy_sentence();
        assert!(
            sentence.contains("largest 25 %") && sentence.contains("2 of 3"),
            "{sentence}"
        );
        let text = serde_json::to_string(&with).expect("JSON");
        assert_eq!(Costs::from_json(&text), Ok(with));
    }
}
