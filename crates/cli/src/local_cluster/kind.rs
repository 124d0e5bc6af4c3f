//! The kinds of processes that a local cluster has.

use std::fmt;

/// Which process of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ProcessKind {
    Coordinator,
    Prefill,
    Decode,
    /// A decode node that computes every prompt itself.
    CoLocated,
}

impl fmt::Display for ProcessKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Coordinator => "coordinator",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::CoLocated => "co-located",
        })
    }
}

impl ProcessKind {
    /// The verb that runs the process.
    pub fn verb(self) -> &'static str {
        match self {
            Self::Coordinator => "serve-coordinator",
            Self::Prefill => "serve-prefill",
            Self::Decode | Self::CoLocated => "serve-decode",
        }
    }
}
