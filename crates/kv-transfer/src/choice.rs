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

/// How often a pair was made without the transport that was wanted, by reason.
#[derive(Debug)]
pub struct Fallbacks(Mutex<BTreeMap<(TransportKind, &'static str), u64>>);

impl Fallbacks {
    /// All at zero.
    pub(crate) fn of(known: impl Iterator<Item = (TransportKind, &'static str)>) -> Self {
        Self(Mutex::new(known.map(|fallback| (fallback, 0)).collect()))
    }

    pub(crate) fn count(&self, fallback: &Fallback) {
        let mut totals = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *totals.entry((fallback.wanted, fallback.reason)).or_default() += 1;
    }

    /// Totals since the start: the wanted transport, the reason, and the count. Every known reason is there.
    pub fn totals(&self) -> impl Iterator<Item = (TransportKind, &'static str, u64)> {
        let totals = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let totals = totals.iter();
        let totals = totals.map(|((wanted, reason), count)| (*wanted, *reason, *count));
        totals.collect::<Vec<_>>().into_iter()
    }
}
