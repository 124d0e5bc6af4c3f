//! What things cost in virtual time: a step, a byte on a link, a message, a neighbour on the same machine. One JSON file.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use crate::accuracy::{Accuracy, AccuracyEntry};
use crate::arithmetic::seconds;
pub use crate::step_costs::{BATCHES, CHUNKS, ColdCosts, StepCosts, StepKind, StepShape};

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
    /// For 1, 2, 3... other nodes of the machine that compute: how many times as long a step takes, by its own kind, then by that of the
    /// others' steps. The last one holds for more nodes. Empty: they do not slow each other down.
    #[serde(default)]
    pub slowdown: Vec<ByKind<ByKind<f64>>>,
}

/// One value for each kind of step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ByKind<T> {
    pub reading: T,
    pub computing: T,
}

impl Default for HostCosts {
    fn default() -> Self {
        Self {
            nodes_per_host: 1,
            slowdown: Vec::new(),
        }
    }
}

impl HostCosts {
    /// Speed of a step while so many other nodes of its machine compute, as a share of a node that is alone. Of others of both kinds
    /// each counts by its share.
    pub(crate) fn speed(&self, own: StepKind, others: &ByKind<u32>) -> f64 {
        let count = others.reading + others.computing;
        let place = (count as usize).min(self.slowdown.len());
        let Some(slowdown) = place.checked_sub(1).map(|place| self.slowdown[place].of(own)) else {
            return 1.0;
        };
        let of_kind = |times: f64, others: u32| times * f64::from(others);
        let sum = of_kind(slowdown.reading, others.reading) + of_kind(slowdown.computing, others.computing);
        f64::from(count) / sum
    }
}

impl<T> ByKind<T> {
    pub fn of_each(value: impl Fn(StepKind) -> T) -> Self {
        Self {
            reading: value(StepKind::Reading),
            computing: value(StepKind::Computing),
        }
    }

    pub fn of(&self, kind: StepKind) -> &T {
        match kind {
            StepKind::Reading => &self.reading,
            StepKind::Computing => &self.computing,
        }
    }

    pub fn of_mut(&mut self, kind: StepKind) -> &mut T {
        match kind {
            StepKind::Reading => &mut self.reading,
            StepKind::Computing => &mut self.computing,
        }
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

/// What is wrong with a file of costs.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum CostsError {
    #[error("the costs are no valid JSON of that kind: {0}; `baton bench engine --out costs.json` writes one")]
    Json(String),
    #[error("`{field}` is {value}; it must be a number of at least 0 and below 1e6")]
    Range { field: &'static str, value: f64 },
    #[error("`{field}` is {value}; it must be above 0")]
    NotPositive { field: &'static str, value: f64 },
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
        let mut times = times.into_iter().chain(of_positions);
        if let Some((field, value)) = times.find(|(_, value)| !(0.0..1e6).contains(value)) {
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
        let of_kinds = |ByKind { reading, computing }: &ByKind<ByKind<f64>>| {
            [
                reading.reading,
                reading.computing,
                computing.reading,
                computing.computing,
            ]
        };
        let slowdown = self.host.slowdown.iter().flat_map(of_kinds);
        positive.extend(slowdown.map(|times| ("host.slowdown", times)));
        let is_wrong = |value: f64| !value.is_finite() || value <= 0.0;
        match positive.into_iter().find(|(_, value)| is_wrong(*value)) {
            Some((field, value)) => Err(CostsError::NotPositive { field, value }),
            None => Ok(()),
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
pub(crate) mod tests {
    use super::*;

    pub(crate) fn costs() -> Costs {
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
        wrong.host.slowdown = vec![ByKind::default()];
        let error = CostsError::NotPositive {
            field: "host.slowdown",
            value: 0.0,
        };
        assert_eq!(wrong.check(), Err(error));
        assert!(matches!(Costs::from_json("{}"), Err(CostsError::Json(_))));
    }

    #[test]
    fn others_of_both_kinds_slow_a_step_down_by_their_shares() {
        let slows = |reading| ByKind {
            reading: ByKind {
                reading,
                computing: 1.1,
            },
            computing: ByKind {
                reading: 1.0,
                computing: 1.0,
            },
        };
        let host = HostCosts {
            nodes_per_host: 4,
            slowdown: vec![slows(1.25), slows(2.0)],
        };
        let of_both = f64::midpoint(2.0, 1.1);
        for (reading, computing, expected) in [(0, 0, 1.0), (1, 0, 1.25), (0, 1, 1.1), (1, 1, of_both), (3, 0, 2.0)] {
            let others = ByKind { reading, computing };
            let found = 1.0 / host.speed(StepKind::Reading, &others);
            assert!((found - expected).abs() < 1e-12, "{others:?}: {found}");
            assert_eq!(host.speed(StepKind::Computing, &others), 1.0);
        }
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
