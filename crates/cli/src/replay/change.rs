//! One change of a cluster, as it is written after `--what-if`, and what it does to a scenario.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::Duration;

use serving_core::routing::RoutingPolicy;
use simulator::Scenario;
use simulator::topology::SimulatedTopology;
use thiserror::Error;

/// Every change, as the help shows them.
pub(super) const FORMS: &str = "policy=round-robin, nodes=+1d, nodes=2c, local-prefill-below=256, allow-local-prefill=false, \
     link-gbps=10, queue-max=32, max-num-seqs=8, max-num-batched-tokens=256, mixed-step-tokens=64, itl-target-ms=40, \
     last-chunk-tokens=0 or prefix-cache=false";

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Change {
    Policy(RoutingPolicy),
    /// So many more or fewer of one kind.
    NodesBy {
        kind: NodeKind,
        by: i64,
    },
    Nodes(SimulatedTopology),
    LocalPrefillBelow(u32),
    AllowLocalPrefill(bool),
    LinkGbps(f64),
    QueueMax(usize),
    MaxNumSeqs(u32),
    MaxNumBatchedTokens(u32),
    MixedStepTokens(u32),
    ItlTargetMs(u32),
    LastChunkTokens(u32),
    PrefixCache(bool),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeKind {
    Prefill,
    Decode,
    CoLocated,
}

#[derive(Debug, Error)]
pub(super) enum ChangeError {
    #[error("`{given}` is no change: write one of {FORMS}")]
    Form { given: String },
    #[error("`{given}`: `{value}` is no {what}")]
    Value {
        given: String,
        value: String,
        what: &'static str,
    },
    #[error("`{change}` leaves {topology}: a pool needs at least one node, and a cluster is split or co-located")]
    Nodes { change: String, topology: String },
}

impl FromStr for Change {
    type Err = ChangeError;

    fn from_str(given: &str) -> Result<Self, ChangeError> {
        let form = || ChangeError::Form {
            given: given.to_owned(),
        };
        let (key, value) = given.split_once('=').ok_or_else(form)?;
        let wrong = |what| ChangeError::Value {
            given: given.to_owned(),
            value: value.to_owned(),
            what,
        };
        let count = || value.parse::<u32>().map_err(|_| wrong("whole number"));
        let positive = || {
            count().and_then(|count| {
                if count > 0 {
                    Ok(count)
                } else {
                    Err(wrong("number above 0"))
                }
            })
        };
        let fact = || value.parse::<bool>().map_err(|_| wrong("true or false"));
        Ok(match key {
            "policy" => Self::Policy(RoutingPolicy::by_name(value).ok_or_else(|| wrong("routing policy"))?),
            "nodes" => nodes(value).ok_or_else(|| wrong("number of nodes: write +1d, -1p or 2p2d"))?,
            "local-prefill-below" => Self::LocalPrefillBelow(count()?),
            "allow-local-prefill" => Self::AllowLocalPrefill(fact()?),
            "link-gbps" => {
                let gbps: f64 = value.parse().map_err(|_| wrong("number of Gb/s"))?;
                let is_rate = (1e-3..1e6).contains(&gbps);
                Self::LinkGbps(
                    is_rate
                        .then_some(gbps)
                        .ok_or_else(|| wrong("rate from 0.001 to 1,000,000 Gb/s"))?,
                )
            }
            "queue-max" => Self::QueueMax(count()? as usize),
            "max-num-seqs" => Self::MaxNumSeqs(positive()?),
            "max-num-batched-tokens" => Self::MaxNumBatchedTokens(positive()?),
            "mixed-step-tokens" => Self::MixedStepTokens(count()?),
            "itl-target-ms" => Self::ItlTargetMs(positive()?),
            "last-chunk-tokens" => Self::LastChunkTokens(count()?),
            "prefix-cache" => Self::PrefixCache(fact()?),
            _ => return Err(form()),
        })
    }
}

/// `+1d`, `-2p`, `2c`, `2p1d`.
fn nodes(value: &str) -> Option<Change> {
    let (sign, rest) = match (value.strip_prefix('+'), value.strip_prefix('-')) {
        (Some(rest), _) => (1, rest),
        (_, Some(rest)) => (-1, rest),
        _ => return value.parse().ok().map(Change::Nodes),
    };
    let kind_at = rest.len().checked_sub(1).filter(|at| rest.is_char_boundary(*at))?;
    let (count, kind) = rest.split_at(kind_at);
    let kind = match kind {
        "p" => NodeKind::Prefill,
        "d" => NodeKind::Decode,
        "c" => NodeKind::CoLocated,
        _ => return None,
    };
    let count: u16 = count.parse().ok().filter(|count| *count > 0)?;
    Some(Change::NodesBy {
        kind,
        by: sign * i64::from(count),
    })
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(policy) => write!(f, "policy={}", policy.name()),
            Self::NodesBy { kind, by } => {
                let kind = match kind {
                    NodeKind::Prefill => 'p',
                    NodeKind::Decode => 'd',
                    NodeKind::CoLocated => 'c',
                };
                write!(f, "nodes={by:+}{kind}")
            }
            Self::Nodes(topology) => write!(f, "nodes={topology}"),
            Self::LocalPrefillBelow(tokens) => write!(f, "local-prefill-below={tokens}"),
            Self::AllowLocalPrefill(fact) => write!(f, "allow-local-prefill={fact}"),
            Self::LinkGbps(gbps) => write!(f, "link-gbps={gbps}"),
            Self::QueueMax(requests) => write!(f, "queue-max={requests}"),
            Self::MaxNumSeqs(sequences) => write!(f, "max-num-seqs={sequences}"),
            Self::MaxNumBatchedTokens(tokens) => write!(f, "max-num-batched-tokens={tokens}"),
            Self::MixedStepTokens(tokens) => write!(f, "mixed-step-tokens={tokens}"),
            Self::ItlTargetMs(target_ms) => write!(f, "itl-target-ms={target_ms}"),
            Self::LastChunkTokens(tokens) => write!(f, "last-chunk-tokens={tokens}"),
            Self::PrefixCache(fact) => write!(f, "prefix-cache={fact}"),
        }
    }
}

impl Change {
    /// # Errors
    /// The change leaves a cluster that cannot serve.
    pub(super) fn apply(&self, scenario: &mut Scenario) -> Result<(), ChangeError> {
        match *self {
            Self::Policy(policy) => scenario.cluster.routing = policy,
            Self::NodesBy { kind, by } => {
                let topology = &mut scenario.topology;
                let count = match kind {
                    NodeKind::Prefill => &mut topology.prefill,
                    NodeKind::Decode => &mut topology.decode,
                    NodeKind::CoLocated => &mut topology.co_located,
                };
                let changed = i64::from(*count).saturating_add(by);
                *count = u32::try_from(changed.max(0)).unwrap_or(u32::MAX);
            }
            Self::Nodes(topology) => scenario.topology = topology,
            Self::LocalPrefillBelow(tokens) => scenario.cluster.local_prefill_below_tokens = tokens,
            Self::AllowLocalPrefill(fact) => scenario.cluster.allow_local_prefill = fact,
            Self::LinkGbps(gbps) => scenario.costs.link.bytes_per_second = gbps * 1e9 / 8.0,
            Self::QueueMax(requests) => scenario.cluster.queue_requests_max = requests,
            Self::MaxNumSeqs(sequences) => scenario.nodes.limits.max_sequences = sequences,
            Self::MaxNumBatchedTokens(tokens) => scenario.nodes.limits.max_batch_tokens = tokens,
            Self::MixedStepTokens(tokens) => scenario.nodes.mixed_step_tokens = NonZeroU32::new(tokens),
            Self::ItlTargetMs(target_ms) => scenario.nodes.step_target = Some(Duration::from_millis(target_ms.into())),
            Self::LastChunkTokens(tokens) => scenario.nodes.last_chunk_tokens = tokens,
            Self::PrefixCache(fact) => scenario.nodes.limits.prefix_cache = fact,
        }
        // Reading it back applies the rules of a topology: no empty pool, no mixture.
        let topology = scenario.topology;
        let is_whole = topology.to_string().parse() == Ok(topology);
        is_whole.then_some(()).ok_or_else(|| ChangeError::Nodes {
            change: self.to_string(),
            topology: topology.to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_reads_back_as_written() {
        for text in FORMS.replace(" or ", ", ").split(", ") {
            let change: Change = text.trim().parse().expect("a change of the help");
            assert_eq!(change.to_string(), text.trim());
        }
        for text in ["nodes=-1p", "nodes=+2c", "nodes=2p2d", "link-gbps=2.5"] {
            assert_eq!(
                text.parse::<Change>().map(|change| change.to_string()).ok().as_deref(),
                Some(text)
            );
        }
    }

    #[test]
    fn what_is_no_change_is_refused() {
        for text in [
            "",
            "policy",
            "policy=none",
            "nodes=",
            "nodes=+",
            "nodes=+0d",
            "nodes=+1é",
            "nodes=0p1d",
            "link-gbps=nan",
            "link-gbps=-1",
            "max-num-seqs=0",
            "queue-max=-1",
            "speed=2",
        ] {
            assert!(text.parse::<Change>().is_err(), "{text}");
        }
    }
}
