//! Which decode nodes are not tried by NCCL for a while: their last communicator ended before a byte had moved. Without a rest a
//! pair whose ports are closed would wait for a communicator again and again, and never take its next transport.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serving_core::ids::NodeId;

/// As long as a human needs to see the log line; twice the time that a pair may wait for a communicator.
const REST: Duration = Duration::from_secs(30);
/// Nodes that are remembered. Each has an epoch, so old lives are forgotten when their rest is over, or when this is full.
const NODES_MAX: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Rests(Mutex<BTreeMap<NodeId, Instant>>);

impl Rests {
    /// What is left of a node's rest.
    pub fn left(&self, node: &NodeId, now: Instant) -> Option<Duration> {
        let until = *self.lock().get(node)?;
        let left = until.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }

    pub fn begin(&self, node: &NodeId, now: Instant) {
        let mut rests = self.lock();
        rests.retain(|_, until| *until > now);
        if rests.len() >= NODES_MAX {
            rests.pop_first();
        }
        rests.insert(node.clone(), now + REST);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<NodeId, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::node;

    #[test]
    fn a_node_rests_for_a_while_and_its_next_life_does_not() {
        let (rests, now) = (Rests::default(), Instant::now());
        let (old, new) = (node("decode-0", 1), node("decode-0", 2));
        assert_eq!(rests.left(&old, now), None);
        rests.begin(&old, now);
        assert_eq!(rests.left(&old, now), Some(REST));
        assert_eq!(rests.left(&new, now), None);
        assert_eq!(rests.left(&old, now + REST), None);
        for epoch in 0..2 * NODES_MAX as u64 {
            rests.begin(&node("decode-1", epoch), now);
        }
        assert_eq!(rests.lock().len(), NODES_MAX);
    }
}
