//! Which nodes a simulated cluster has: `1p1d`, `2c`, `100p100d`.

use std::fmt;
use std::str::FromStr;

use serving_core::node::AssignedRole;
use thiserror::Error;

/// A coordinator remembers at most 1,024 names of nodes (`serving_core::cluster`); some are left for later joins.
const NODES_MAX: u32 = 1_000;

/// As a local cluster's, with a limit of its own: nodes are not processes here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimulatedTopology {
    pub prefill: u32,
    pub decode: u32,
    pub co_located: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TopologyError {
    #[error("`{given}` is no topology: write `1p1d`, `100p100d` or `2c` (co-located nodes)")]
    Form { given: String },
    #[error("`{given}` has a pool without a node; each pool needs at least one")]
    Empty { given: String },
    #[error("`{given}` has more than {NODES_MAX} nodes, which a coordinator cannot remember")]
    TooMany { given: String },
}

impl FromStr for SimulatedTopology {
    type Err = TopologyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let given = text.to_owned();
        let lower = text.trim().to_ascii_lowercase();
        let count = |digits: &str| {
            let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
            // More digits than a number holds are more nodes than there may be.
            is_number.then(|| digits.parse::<u32>().unwrap_or(u32::MAX))
        };
        let parsed = match lower.strip_suffix('c') {
            Some(digits) => count(digits).map(|co_located| Self {
                prefill: 0,
                decode: 0,
                co_located,
            }),
            None => lower
                .strip_suffix('d')
                .and_then(|rest| rest.split_once('p'))
                .and_then(|(prefill, decode)| {
                    Some(Self {
                        prefill: count(prefill)?,
                        decode: count(decode)?,
                        co_located: 0,
                    })
                }),
        };
        let Some(topology) = parsed else {
            return Err(TopologyError::Form { given });
        };
        if topology.co_located == 0 && (topology.prefill == 0 || topology.decode == 0) {
            return Err(TopologyError::Empty { given });
        }
        if topology.node_count() > NODES_MAX {
            return Err(TopologyError::TooMany { given });
        }
        Ok(topology)
    }
}

impl fmt::Display for SimulatedTopology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.co_located {
            0 => write!(f, "{}p{}d", self.prefill, self.decode),
            count => write!(f, "{count}c"),
        }
    }
}

impl SimulatedTopology {
    pub fn node_count(self) -> u32 {
        self.prefill.saturating_add(self.decode).saturating_add(self.co_located)
    }

    /// Names and roles as `baton up` gives them.
    pub(crate) fn nodes(self) -> impl Iterator<Item = (String, AssignedRole)> {
        let prefill = (0..self.prefill).map(|i| (format!("prefill-{i}"), AssignedRole::Prefill));
        let decode = (0..self.decode).map(|i| (format!("decode-{i}"), AssignedRole::Decode));
        let co_located = (0..self.co_located).map(|i| (format!("decode-{i}"), AssignedRole::CoLocated));
        prefill.chain(decode).chain(co_located)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topologies_read_back_as_written_and_large_ones_are_allowed() {
        for text in ["1p1d", "2c", "100p100d", "500p500d"] {
            let topology: SimulatedTopology = text.parse().expect("a topology");
            assert_eq!(topology.to_string(), text);
            assert_eq!(topology.nodes().count() as u32, topology.node_count());
        }
    }

    #[test]
    fn what_is_none_is_refused_with_its_reason() {
        for text in ["", "p", "1p", "1d", "c", "-1c", "1p1d1c", "1p1"] {
            let parsed = text.parse::<SimulatedTopology>();
            assert!(matches!(parsed, Err(TopologyError::Form { .. })), "{text:?}");
        }
        for text in ["0p1d", "1p0d", "0c"] {
            let parsed = text.parse::<SimulatedTopology>();
            assert!(matches!(parsed, Err(TopologyError::Empty { .. })), "{text:?}");
        }
        for text in ["501p500d", "99999999999c"] {
            let parsed = text.parse::<SimulatedTopology>();
            assert!(matches!(parsed, Err(TopologyError::TooMany { .. })), "{text:?}");
        }
    }
}
