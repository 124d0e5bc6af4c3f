//! Which decode nodes are not tried by NCCL for a while: their last communicator ended before a byte had moved. Without a rest a
//! pair whose ports are closed would wait for a communicator again and again, and never take its next transport.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serving_core::ids::NodeId;

/// As long as a human needs to see the log line; twice the time that a pair may wait for a communicator.
const REST: Duration = Duration::from_secs(30);
/// Each rest is twice as long as the last one, up to this: between two nodes that never reach each other, every try fails the
/// transfers that wait for its communicator.
const REST_MAX: Duration = Duration::from_secs(480);
/// Nodes that are remembered. Each has an epoch, so old lives are forgotten when their rest is over, or when this is full.
const NODES_MAX: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Rests(Mutex<BTreeMap<NodeId, Rest>>);

#[derive(Clone, Copy, Debug)]
struct Rest {
    until: Instant,
    length: Duration,
}

impl Rests {
    /// What is left of a node's rest.
    pub fn left(&self, node: &NodeId, now: Instant) -> Option<Duration> {
        let rest = *self.lock().get(node)?;
        let left = rest.until.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }

    pub fn begin(&self, node: &NodeId, now: Instant) {
        let mut rests = self.lock();
        // A rest that is over is remembered for a while, because the next one depends on it.
        rests.retain(|_, rest| rest.until + REST_MAX > now);
        let last = rests.remove(node);
        let length = last.map_or(REST, |last| REST_MAX.min(2 * last.length));
        if rests.len() >= NODES_MAX {
            rests.pop_first();
        }
        let until = now + length;
        rests.insert(node.clone(), Rest { until, length });
    }

    /// Its communicator works.
    pub fn forget(&self, node: &NodeId) {
        self.lock().remove(node);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<NodeId, Rest>> {
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

    #[test]
    fn each_rest_is_twice_as_long_as_the_last_one_until_the_communicator_works() {
        let (rests, mut now) = (Rests::default(), Instant::now());
        let node = node("decode-0", 1);
        for seconds in [30, 60, 120, 240, 480, 480] {
            let rest = Duration::from_secs(seconds);
            rests.begin(&node, now);
            assert_eq!(rests.left(&node, now), Some(rest));
            // Over, and the next communicator is waited for.
            now += rest + Duration::from_secs(15);
            assert_eq!(rests.left(&node, now), None);
        }
        rests.forget(&node);
        rests.begin(&node, now);
        assert_eq!(rests.left(&node, now), Some(REST));
        // Or until it is long ago.
        now += REST + REST_MAX;
        rests.begin(&node, now);
        assert_eq!(rests.left(&node, now), Some(REST));
    }
}
