//! Which ways KV bytes may travel, and why a pair does not take the one its nodes prefer.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use thiserror::Error;

/// A way KV bytes travel. Nodes list those they use in order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TransportKind {
    /// Memory shared by two processes of one host.
    Shm,
    /// Works everywhere.
    Grpc,
}

impl TransportKind {
    /// Label in metrics, spans and records.
    pub fn name(self) -> &'static str {
        match self {
            TransportKind::Shm => "shm",
            TransportKind::Grpc => "grpc",
        }
    }
}

/// Why a pair has no shared memory. It is tried again when the pair's stream is made anew.
#[derive(Debug, Error)]
pub enum ShmFault {
    #[error("the decode node does not offer it; its `transports` leave it out")]
    Disabled,
    #[error("the decode node runs on another host")]
    NotSameHost,
    /// The name is unknown in this network namespace: another container, or the decode node is just leaving.
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
    /// Every label, in the order of the counters.
    const NAMES: [&'static str; 9] = [
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

    fn index(&self) -> usize {
        match self {
            ShmFault::Disabled => 0,
            ShmFault::NotSameHost => 1,
            ShmFault::Unreachable(_) => 2,
            ShmFault::Uid { .. } => 3,
            ShmFault::Refused(_) => 4,
            ShmFault::Seals => 5,
            ShmFault::Geometry { .. } => 6,
            ShmFault::Io(_) => 7,
            ShmFault::TimeOut => 8,
        }
    }

    /// Closed label for metrics.
    pub fn name(&self) -> &'static str {
        Self::NAMES[self.index()]
    }
}

/// How often a pair was made without the shared memory that was wanted, by reason.
#[derive(Debug, Default)]
pub struct Fallbacks([AtomicU64; ShmFault::NAMES.len()]);

impl Fallbacks {
    pub(crate) fn count(&self, fault: &ShmFault) {
        self.0[fault.index()].fetch_add(1, Ordering::Relaxed);
    }

    /// Totals since the start, by [`ShmFault::name`].
    pub fn totals(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let totals = self.0.iter().map(|total| total.load(Ordering::Relaxed));
        ShmFault::NAMES.into_iter().zip(totals)
    }
}
