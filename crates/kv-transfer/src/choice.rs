//! The names of transports, and why a pair does not take the one that its nodes prefer.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use serde::{Serialize, Serializer};
use thiserror::Error;

/// A way in which KV bytes travel, by its name: the label in metrics, spans and records. Nodes list the ways that they use in
/// order of preference. Each transport declares its own names; `transports::kinds` has them all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TransportKind(&'static str);

impl TransportKind {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self(name)
    }

    pub const fn name(self) -> &'static str {
        self.0
    }
}

impl Serialize for TransportKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0)
    }
}

/// Why a pair goes without a transport, or without a mode of it, that this node would have used. It is tried again when the
/// pair's stream is made again, and after a while where its reason may pass.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{detail}")]
pub(crate) struct Fallback {
    pub wanted: TransportKind,
    /// One of the closed list that the transport declares.
    pub reason: &'static str,
    pub detail: String,
    /// Whether it may end while both nodes live on. Else only a new start of one of them helps.
    pub may_pass: bool,
}

/// How a later try of a better transport ends, beside the stream of a pair that goes without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RetryEnd {
    /// It carries the pair from now on.
    Taken,
    /// It could, but no moment without a transfer came for the change.
    NeverQuiet,
    Failed,
}

impl RetryEnd {
    pub const ALL: [Self; 3] = [Self::Taken, Self::NeverQuiet, Self::Failed];

    /// Closed label for metrics.
    pub fn name(self) -> &'static str {
        match self {
            RetryEnd::Taken => "taken",
            RetryEnd::NeverQuiet => "never_quiet",
            RetryEnd::Failed => "failed",
        }
    }
}

/// How often a pair was made without the transport that was wanted, by reason, and how later tries of it ended.
#[derive(Debug)]
pub struct Fallbacks {
    made: Totals,
    retries: Totals,
}

impl Fallbacks {
    /// All at zero. `retried`: the transports that are tried again beside a pair's stream.
    pub(crate) fn of(
        known: impl Iterator<Item = (TransportKind, &'static str)>,
        retried: impl Iterator<Item = TransportKind>,
    ) -> Self {
        let ends = |kind| RetryEnd::ALL.map(|end| (kind, end.name()));
        Self {
            made: Totals::of(known),
            retries: Totals::of(retried.flat_map(ends)),
        }
    }

    pub(crate) fn count(&self, fallback: &Fallback) {
        self.made.add(fallback.wanted, fallback.reason);
    }

    pub(crate) fn count_retry(&self, wanted: TransportKind, end: RetryEnd) {
        self.retries.add(wanted, end.name());
    }

    /// Totals since the start: the wanted transport, the reason, and the count. Every known reason is there.
    pub fn totals(&self) -> impl Iterator<Item = (TransportKind, &'static str, u64)> {
        self.made.all().into_iter()
    }

    /// Totals of later tries since the start: the wanted transport, how the try ended, and the count. Every end is there.
    pub fn retries(&self) -> impl Iterator<Item = (TransportKind, &'static str, u64)> {
        self.retries.all().into_iter()
    }
}

/// Counts by transport and label.
#[derive(Debug)]
struct Totals(Mutex<BTreeMap<(TransportKind, &'static str), u64>>);

impl Totals {
    fn of(known: impl Iterator<Item = (TransportKind, &'static str)>) -> Self {
        Self(Mutex::new(known.map(|known| (known, 0)).collect()))
    }

    fn add(&self, kind: TransportKind, label: &'static str) {
        let mut totals = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *totals.entry((kind, label)).or_default() += 1;
    }

    fn all(&self) -> Vec<(TransportKind, &'static str, u64)> {
        let totals = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all = totals.iter().map(|((kind, label), count)| (*kind, *label, *count));
        all.collect()
    }
}
