//! One point of a sweep: a topology with the settings that are tuned.

use std::collections::BTreeMap;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use workload::comparison::ArmKind;

use crate::topology::Topology;

/// The defaults of the nodes (`deploy/local/decode.toml`).
const MAX_NUM_SEQS: u32 = 16;
const MAX_NUM_BATCHED_TOKENS: u32 = 512;

/// Everything in which the arms of this machine may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Point {
    /// Prefill and decode nodes; both 0 in a co-located arm.
    pub prefill_nodes: u32,
    pub decode_nodes: u32,
    pub co_located_nodes: u32,
    /// Cores of all prefill nodes together.
    pub prefill_cores: u32,
    /// Step budget of co-located and decode nodes.
    pub max_num_batched_tokens: u32,
    /// Step budget of prefill nodes.
    pub prefill_max_num_batched_tokens: u32,
    pub max_num_seqs: u32,
    /// Of prompts in a step of co-located and decode nodes in which sequences decode, too. `None`: the nodes' default.
    #[serde(default)]
    pub mixed_step_tokens: Option<u32>,
    pub local_prefill_below_tokens: u32,
}

impl Point {
    pub fn co_located(nodes: u32) -> Self {
        Self {
            prefill_nodes: 0,
            decode_nodes: 0,
            co_located_nodes: nodes,
            prefill_cores: 0,
            max_num_batched_tokens: MAX_NUM_BATCHED_TOKENS,
            prefill_max_num_batched_tokens: MAX_NUM_BATCHED_TOKENS,
            max_num_seqs: MAX_NUM_SEQS,
            mixed_step_tokens: None,
            local_prefill_below_tokens: 0,
        }
    }

    /// One prefill node with so many cores, one decode node with the rest.
    pub fn disaggregated(prefill_cores: u32) -> Self {
        Self {
            prefill_nodes: 1,
            decode_nodes: 1,
            co_located_nodes: 0,
            prefill_cores,
            ..Self::co_located(0)
        }
    }

    /// What an arm is before it is tuned.
    pub fn default_of(kind: ArmKind, cores: u32, threshold: u32) -> Self {
        match kind {
            ArmKind::Disaggregated => Self::disaggregated(cores / 2),
            ArmKind::Conditional => Self {
                local_prefill_below_tokens: threshold,
                ..Self::disaggregated(cores / 2)
            },
            ArmKind::CoLocated | ArmKind::External => Self::co_located(cores),
        }
    }

    pub fn topology(&self) -> Topology {
        match self.co_located_nodes {
            0 => Topology::Disaggregated {
                prefill_count: self.prefill_nodes,
                decode_count: self.decode_nodes,
            },
            node_count => Topology::CoLocated { node_count },
        }
    }

    /// How many cores each node has, by the names that a local cluster gives them.
    pub fn cores_of_nodes(&self, cores: u32) -> Vec<(String, u32)> {
        let share = |word: &'static str, nodes: u32, cores: u32| {
            // The first nodes get what is left over.
            (0..nodes).map(move |index| {
                let extra = u32::from(index < cores % nodes.max(1));
                (format!("{word}-{index}"), cores / nodes.max(1) + extra)
            })
        };
        match self.co_located_nodes {
            0 => share("prefill", self.prefill_nodes, self.prefill_cores)
                .chain(share(
                    "decode",
                    self.decode_nodes,
                    cores.saturating_sub(self.prefill_cores),
                ))
                .collect(),
            nodes => share("decode", nodes, cores).collect(),
        }
    }

    /// The settings with the names of the processes' own flags, for reports.
    pub fn settings(&self, cores: u32) -> BTreeMap<String, Value> {
        let cores: BTreeMap<String, u32> = self.cores_of_nodes(cores).into_iter().collect();
        let mut settings = BTreeMap::from([
            ("topology".to_owned(), self.topology().to_string().into()),
            ("cores".to_owned(), serde_json::json!(cores)),
            ("max_num_batched_tokens".to_owned(), self.max_num_batched_tokens.into()),
            ("max_num_seqs".to_owned(), self.max_num_seqs.into()),
            (
                "local_prefill_below_tokens".to_owned(),
                self.local_prefill_below_tokens.into(),
            ),
        ]);
        if self.prefill_nodes > 0 {
            let budget = self.prefill_max_num_batched_tokens.into();
            settings.insert("prefill_max_num_batched_tokens".to_owned(), budget);
        }
        if let Some(tokens) = self.mixed_step_tokens {
            settings.insert("mixed_step_tokens".to_owned(), tokens.into());
        }
        settings
    }

    /// `2c, 1 core each, chunks of 128, 16 sequences`
    pub fn words(&self, cores: u32) -> String {
        let nodes: Vec<String> = self
            .cores_of_nodes(cores)
            .into_iter()
            .map(|(name, count)| format!("{name} on {count}"))
            .collect();
        let threshold = match self.local_prefill_below_tokens {
            0 => String::new(),
            tokens => format!(", local prefill below {tokens} tokens"),
        };
        let chunks = match (self.prefill_nodes, self.local_prefill_below_tokens) {
            (0, _) => format!("chunks of {} tokens", self.max_num_batched_tokens),
            (_, 0) => format!("chunks of {} tokens", self.prefill_max_num_batched_tokens),
            _ => format!(
                "chunks of {} and {} tokens",
                self.prefill_max_num_batched_tokens, self.max_num_batched_tokens
            ),
        };
        format!(
            "{} ({} cores), {chunks}, {} sequences{threshold}",
            self.topology(),
            nodes.join(", "),
            self.max_num_seqs
        )
    }
}

/// What a sweep tries for one arm, in two steps: first each of `first` is measured, then each of `then` on the best of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sweep {
    pub first: Vec<Point>,
    pub max_num_seqs: Vec<u32>,
}

impl Sweep {
    /// How many points are measured.
    pub fn len(&self) -> usize {
        self.first.len() + self.max_num_seqs.len()
    }
}

/// Step budgets that are tried, with and without running streams. The nodes' defaults are the largest, and beside streams the second:
/// larger ones make the gaps of the streams longer.
const CHUNKS: [u32; 3] = [64, 128, MAX_NUM_BATCHED_TOKENS];
/// Prefill nodes have no running streams, so that a small budget only costs them time.
const CHUNKS_OF_PREFILL: [u32; 2] = [128, MAX_NUM_BATCHED_TOKENS];
/// Tried on the best point, beside the default.
const SEQUENCES: [u32; 1] = [8];

/// The points of an arm on so many cores. `threshold` is what the measured costs say of a conditional arm.
///
/// # Errors
/// The arm needs more cores.
pub(super) fn sweep(kind: ArmKind, cores: u32, threshold: u32) -> anyhow::Result<Sweep> {
    let first = match kind {
        ArmKind::CoLocated => {
            let mut counts = vec![1, cores];
            counts.dedup();
            let points = counts.into_iter().flat_map(|nodes| {
                CHUNKS.map(|chunk| Point {
                    max_num_batched_tokens: chunk,
                    mixed_step_tokens: Some(chunk),
                    ..Point::co_located(nodes)
                })
            });
            points.collect()
        }
        ArmKind::Disaggregated => {
            let points = splits(cores)?.into_iter().flat_map(|base| {
                CHUNKS_OF_PREFILL.map(|chunk| Point {
                    prefill_max_num_batched_tokens: chunk,
                    ..base
                })
            });
            points.collect()
        }
        ArmKind::Conditional => {
            let thresholds = [threshold, threshold.saturating_mul(2), threshold.saturating_mul(4)];
            let conditional = splits(cores)?.into_iter().flat_map(|base| {
                thresholds.map(|tokens| Point {
                    local_prefill_below_tokens: tokens,
                    // What the decode node computes itself is cut as in a co-located node.
                    max_num_batched_tokens: CHUNKS[1],
                    mixed_step_tokens: Some(CHUNKS[1]),
                    ..base
                })
            });
            conditional.collect()
        }
        ArmKind::External => Vec::new(),
    };
    Ok(Sweep {
        first,
        max_num_seqs: SEQUENCES.to_vec(),
    })
}

/// One prefill node with a quarter, a half and three quarters of the cores.
fn splits(cores: u32) -> anyhow::Result<Vec<Point>> {
    (cores >= 2).then_some(()).with_context(|| {
        format!("a disaggregated arm needs two cores, one for each node; there is {cores}. Give more with --node-cores")
    })?;
    let mut prefill: Vec<u32> = [cores / 4, cores / 2, cores * 3 / 4]
        .into_iter()
        .map(|count| count.clamp(1, cores - 1))
        .collect();
    prefill.dedup();
    Ok(prefill.into_iter().map(Point::disaggregated).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_point_of_every_arm_uses_every_core() {
        for cores in 2..9 {
            for kind in [ArmKind::CoLocated, ArmKind::Disaggregated, ArmKind::Conditional] {
                for point in sweep(kind, cores, 32).expect("enough cores").first {
                    let nodes = point.cores_of_nodes(cores);
                    let sum: u32 = nodes.iter().map(|(_, count)| count).sum();
                    assert_eq!(sum, cores, "{point:?}");
                    assert!(nodes.iter().all(|(_, count)| *count > 0), "{point:?}");
                    assert_eq!(nodes.len() as u32, point.topology().node_count());
                }
            }
        }
    }

    #[test]
    fn two_cores_have_one_split_and_two_co_located_shapes() {
        let of = |kind| sweep(kind, 2, 48).expect("two cores");
        assert_eq!(of(ArmKind::CoLocated).first.len(), 2 * CHUNKS.len());
        assert_eq!(of(ArmKind::Disaggregated).first.len(), CHUNKS_OF_PREFILL.len());
        let thresholds: Vec<u32> = of(ArmKind::Conditional)
            .first
            .iter()
            .map(|point| point.local_prefill_below_tokens)
            .collect();
        assert_eq!(thresholds, [48, 96, 192]);
        assert_eq!(
            sweep(ArmKind::CoLocated, 1, 0).expect("one core").first.len(),
            CHUNKS.len()
        );
        assert!(sweep(ArmKind::Disaggregated, 1, 0).is_err());
    }

    #[test]
    fn a_point_reads_back_and_names_its_settings() {
        let point = Point {
            local_prefill_below_tokens: 64,
            ..Point::disaggregated(1)
        };
        let text = serde_json::to_string(&point).expect("JSON");
        assert_eq!(serde_json::from_str::<Point>(&text).expect("a point"), point);
        let settings = point.settings(3);
        assert_eq!(settings["topology"], "1p1d");
        assert_eq!(settings["cores"]["decode-0"], 2);
        assert!(point.words(3).contains("64 tokens"), "{}", point.words(3));
    }
}
