//! Why a pair has no shared memory, or not the better mode of it.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::choice::Fallback;

/// Why a pair has no shared memory. It is tried again as [`Fallback`] says.
#[derive(Debug, Error)]
pub enum ShmFault {
    #[error("the decode node does not offer it; its `transports` leave it out")]
    Disabled,
    #[error("the decode node runs on another host")]
    NotSameHost,
    /// The name is unknown in this network namespace: the decode node runs in another container, or is just leaving.
    #[error("nobody listens at the decode node's socket: {0}; processes in other network namespaces cannot meet")]
    Unreachable(std::io::Error),
    #[error("the other side runs as user {theirs}, this one as {ours}; start both as the same user to share memory")]
    Uid { ours: u32, theirs: u32 },
    #[error("the decode node refused: {0}")]
    Refused(&'static str),
    #[error("the memory that was passed can still change its size; writing to it could kill this process")]
    Seals,
    #[error("{slots} slots of {slot_bytes} bytes were announced, the memory has {bytes}")]
    Geometry { slots: u32, slot_bytes: u32, bytes: u64 },
    #[error("the socket or the memory failed: {0}")]
    Io(#[from] std::io::Error),
    #[error("the decode node did not answer in time")]
    TimeOut,
}

impl ShmFault {
    /// Every label.
    pub const NAMES: [&'static str; 9] = [
        "disabled",
        "not_same_host",
        "unreachable",
        "uid",
        "refused",
        "seals",
        "geometry",
        "io",
        "time_out",
    ];

    /// Closed label for metrics.
    pub fn name(&self) -> &'static str {
        match self {
            ShmFault::Disabled => "disabled",
            ShmFault::NotSameHost => "not_same_host",
            ShmFault::Unreachable(_) => "unreachable",
            ShmFault::Uid { .. } => "uid",
            ShmFault::Refused(_) => "refused",
            ShmFault::Seals => "seals",
            ShmFault::Geometry { .. } => "geometry",
            ShmFault::Io(_) => "io",
            ShmFault::TimeOut => "time_out",
        }
    }

    /// See [`Fallback::may_pass`]. A decode node refuses while other senders have all its memory.
    pub(in crate::transports) fn may_pass(&self) -> bool {
        matches!(self, ShmFault::Refused(_) | ShmFault::Io(_) | ShmFault::TimeOut)
    }
}

impl From<ShmFault> for Fallback {
    fn from(fault: ShmFault) -> Self {
        Fallback {
            wanted: super::KIND,
            reason: fault.name(),
            detail: fault.to_string(),
            may_pass: fault.may_pass(),
        }
    }
}

/// Why a pair stages its bytes although the direct mode was wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
pub enum DirectFault {
    #[error("the decode node holds no secret, or its KV memory cannot be mapped by others")]
    NotOffered,
    #[error("the two nodes hold different secrets: they were not started by one `baton up`")]
    Secret,
    #[error("the two nodes' blocks differ in shape; their compatibility hashes should have")]
    Geometry,
    /// Another process namespace, or a kernel before 5.3.
    #[error("the decode node cannot watch this process: it would not know when a block can be written no more")]
    Unwatched,
}

impl DirectFault {
    pub const NAMES: [&'static str; 4] = ["not_offered", "secret", "geometry", "unwatched"];

    /// Closed label for metrics.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

impl From<DirectFault> for Fallback {
    fn from(fault: DirectFault) -> Self {
        Fallback {
            wanted: super::DIRECT,
            reason: fault.name(),
            detail: fault.to_string(),
            may_pass: false,
        }
    }
}

impl From<std::io::ErrorKind> for ShmFault {
    fn from(kind: std::io::ErrorKind) -> Self {
        ShmFault::Io(kind.into())
    }
}
