//! The ways in which KV bytes may travel, and why a pair does not take the one that its nodes prefer.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use thiserror::Error;

/// A way in which KV bytes travel. Nodes list the ways that they use in order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TransportKind {
    /// Memory shared by two processes of one host.
    Shm,
    /// The mode of `Shm` between peers that trust each other: the prefill node writes the decode node's pool in place. A
    /// pair of kind `Shm` may get this mode; it is never in a list of transports.
    #[value(skip)]
    ShmDirect,
    /// Works everywhere.
    Grpc,
}

impl TransportKind {
    pub const ALL: [Self; 3] = [Self::Shm, Self::ShmDirect, Self::Grpc];

    /// Label in metrics, spans and records.
    pub fn name(self) -> &'static str {
        match self {
            TransportKind::Shm => "shm",
            TransportKind::ShmDirect => "shm-direct",
            TransportKind::Grpc => "grpc",
        }
    }

    /// Whether the sender itself writes the receiver's blocks. Such a sender may still write a block that it was given,
    /// until it has said that it will not, or is gone (PROTOCOL rule 11).
    pub fn writes_in_place(self) -> bool {
        self == TransportKind::ShmDirect
    }
}

/// Why a pair has no shared memory. It is tried again when the pair's stream is made again.
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

/// Why a pair stages its bytes although the direct mode was wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
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
    const NAMES: [&'static str; 4] = ["not_offered", "secret", "geometry", "unwatched"];

    /// Closed label for metrics.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

/// How often a pair was made without the transport that was wanted, by reason.
#[derive(Debug, Default)]
pub struct Fallbacks {
    shm: [AtomicU64; ShmFault::NAMES.len()],
    direct: [AtomicU64; DirectFault::NAMES.len()],
}

impl Fallbacks {
    pub(crate) fn count(&self, fault: &ShmFault) {
        self.shm[fault.index()].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_staged(&self, fault: DirectFault) {
        self.direct[fault as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Totals since the start: the wanted transport, [`ShmFault::name`] or [`DirectFault::name`], and the count.
    pub fn totals(&self) -> impl Iterator<Item = (TransportKind, &'static str, u64)> {
        let totals = |kind, names: &'static [&'static str], counts: &[AtomicU64]| {
            let counted = names.iter().zip(counts);
            let counted = counted.map(move |(name, count)| (kind, *name, count.load(Ordering::Relaxed)));
            counted.collect::<Vec<_>>()
        };
        let shm = totals(TransportKind::Shm, &ShmFault::NAMES, &self.shm);
        shm.into_iter()
            .chain(totals(TransportKind::ShmDirect, &DirectFault::NAMES, &self.direct))
    }
}
