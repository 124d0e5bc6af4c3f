//! Every change of a request's phase, for the event log. A checker compares these changes with the table of phases.

use crate::cluster::Cluster;
use crate::cluster::handoff::Phase;
use crate::request::AttemptKey;

/// One step in the life of a request at the coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transition {
    pub key: AttemptKey,
    pub change: Change,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Into the queue.
    Arrived,
    Phase {
        from: Phase,
        to: Phase,
    },
    /// Done, failed, cancelled or displaced: the request is forgotten.
    Ended,
}

impl Cluster {
    /// What the last `apply` changed, in order.
    pub fn transitions(&self) -> &[Transition] {
        &self.transitions
    }

    pub(super) fn note(&mut self, key: AttemptKey, change: Change) {
        self.transitions.push(Transition { key, change });
    }
}
