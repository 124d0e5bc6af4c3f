//! How many nodes of which kind a local cluster has: `1p1d`, `2p2d`, `2c`.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A guard against a typing error that would start a thousand processes. It is no limit of the design.
const NODES_MAX: u32 = 32;

/// Two pools, or co-located nodes that do both phases themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    Disaggregated { prefill_count: u32, decode_count: u32 },
    CoLocated { node_count: u32 },
}

#[derive(Debug, Error, PartialEq, Eq)]
pub enum TopologyError {
    #[error(
        "`{given}` is no topology: write `1p1d` (1 prefill and 1 decode node), `2p4d`, or `2c` (2 co-located nodes)"
    )]
    Form { given: String },
    #[error("`{given}` has no {missing} node: each pool needs at least one")]
    Empty { given: String, missing: &'static str },
    #[error("`{given}` has more than {NODES_MAX} nodes, too many for one machine")]
    TooMany { given: String },
}

impl FromStr for Topology {
    type Err = TopologyError;

    fn from_str(given: &str) -> Result<Self, Self::Err> {
        let lower = given.trim().to_ascii_lowercase();
        let form = || TopologyError::Form {
            given: given.to_owned(),
        };
        let count = |digits: &str| {
            let is_number = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
            if !is_number {
                return Err(form());
            }
            // A number with more digits than a u32 holds is more nodes than a machine holds.
            Ok(digits.parse::<u32>().unwrap_or(u32::MAX))
        };
        let topology = if let Some(digits) = lower.strip_suffix('c') {
            Self::CoLocated {
                node_count: count(digits)?,
            }
        } else {
            let (prefill, rest) = lower.split_once('p').ok_or_else(form)?;
            let decode = rest.strip_suffix('d').ok_or_else(form)?;
            Self::Disaggregated {
                prefill_count: count(prefill)?,
                decode_count: count(decode)?,
            }
        };
        let missing = match topology {
            Self::Disaggregated { prefill_count: 0, .. } => Some("prefill"),
            Self::Disaggregated { decode_count: 0, .. } => Some("decode"),
            Self::CoLocated { node_count: 0 } => Some("co-located"),
            _ => None,
        };
        if let Some(missing) = missing {
            return Err(TopologyError::Empty {
                given: given.to_owned(),
                missing,
            });
        }
        if topology.node_count() > NODES_MAX {
            return Err(TopologyError::TooMany {
                given: given.to_owned(),
            });
        }
        Ok(topology)
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disaggregated {
                prefill_count,
                decode_count,
            } => write!(f, "{prefill_count}p{decode_count}d"),
            Self::CoLocated { node_count } => write!(f, "{node_count}c"),
        }
    }
}

impl Topology {
    pub fn node_count(self) -> u32 {
        match self {
            Self::Disaggregated {
                prefill_count,
                decode_count,
            } => prefill_count.saturating_add(decode_count),
            Self::CoLocated { node_count } => node_count,
        }
    }

    /// Links between prefill and decode nodes: each prefill node has one to each decode node.
    pub(crate) fn pair_count(self) -> usize {
        match self {
            Self::Disaggregated {
                prefill_count,
                decode_count,
            } => prefill_count.saturating_mul(decode_count) as usize,
            Self::CoLocated { .. } => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topologies_read_back_as_written() {
        for text in ["1p1d", "2p2d", "1p4d", "2c", "1c"] {
            assert_eq!(text.parse::<Topology>().map(|t| t.to_string()).as_deref(), Ok(text));
        }
        assert_eq!(
            "3P1D".parse(),
            Ok(Topology::Disaggregated {
                prefill_count: 3,
                decode_count: 1
            })
        );
    }

    #[test]
    fn what_is_none_says_what_one_looks_like() {
        for text in ["", "p", "1p", "1d", "1p1", "xpyd", "1p1d1c", "c", "-1c", "+1c", "1 p1d"] {
            assert!(
                matches!(text.parse::<Topology>(), Err(TopologyError::Form { .. })),
                "{text:?}"
            );
        }
        for text in ["0p1d", "1p0d", "0c"] {
            assert!(
                matches!(text.parse::<Topology>(), Err(TopologyError::Empty { .. })),
                "{text:?}"
            );
        }
        for text in ["33c", "99999999999p1d", "4294967295p4294967295d"] {
            assert!(
                matches!(text.parse::<Topology>(), Err(TopologyError::TooMany { .. })),
                "{text:?}"
            );
        }
    }
}
