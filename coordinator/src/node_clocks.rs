//! The measured offsets of the nodes' clocks. They turn a time of a node into a time of this process.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use proto::messages::ClockOffset;
use service_runtime::clock::Clock;
use serving_core::ids::NodeId;
use serving_core::time::Time;

/// No offset that is worth anything is more wrong, and no mark of a node lies further ahead. A node may report any number, and
/// instants must stay within what can be added and compared.
const BEYOND_REASON: Duration = Duration::from_secs(10);

/// A time of a node, on this process's clock, and by how much it may be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeInstant {
    pub at: Instant,
    pub error: Duration,
}

/// Reads the times of one leg's node, all of them with the offset that was known at the first one: a new measurement between
/// two of them would move one against the other.
#[derive(Debug, Default)]
pub struct LegClock {
    offset: Option<ClockOffset>,
}

impl LegClock {
    /// `None` until the offset is known, and for a time before this process's clock began.
    pub fn read(&mut self, clocks: &NodeClocks, node: &NodeId, time: Time) -> Option<NodeInstant> {
        self.offset = self.offset.or_else(|| clocks.offset(node));
        let offset = self.offset?;
        let latest = Clock::now() + BEYOND_REASON;
        Some(NodeInstant {
            at: Clock::instant_of(offset.map(time)?.min(latest)),
            error: offset.error.min(BEYOND_REASON),
        })
    }
}

/// Shared by the membership streams, which write it, and the legs, which read it.
#[derive(Clone, Debug, Default)]
pub struct NodeClocks {
    by_node: Arc<RwLock<BTreeMap<NodeId, ClockOffset>>>,
}

impl NodeClocks {
    pub fn report(&self, node: &NodeId, offset: ClockOffset) {
        let mut clocks = self.by_node.write().unwrap_or_else(PoisonError::into_inner);
        clocks.insert(node.clone(), offset);
    }

    /// The life of the node is over, and the starting point of its clock with it.
    pub fn forget(&self, node: &NodeId) {
        self.by_node
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(node);
    }

    pub fn offset(&self, node: &NodeId) -> Option<ClockOffset> {
        let clocks = self.by_node.read().unwrap_or_else(PoisonError::into_inner);
        clocks.get(node).copied()
    }

    pub fn all(&self) -> Vec<(NodeId, ClockOffset)> {
        let clocks = self.by_node.read().unwrap_or_else(PoisonError::into_inner);
        clocks.iter().map(|(node, offset)| (node.clone(), *offset)).collect()
    }
}

#[cfg(test)]
mod tests {
    use serving_core::ids::{NodeEpoch, NodeName};

    use super::*;

    fn node() -> NodeId {
        NodeId {
            name: NodeName::new("prefill-0"),
            epoch: NodeEpoch(1),
        }
    }

    fn offset(monotonic_ns: i64, error: Duration) -> ClockOffset {
        ClockOffset {
            monotonic_ns,
            unix_ns: 0,
            error,
        }
    }

    #[test]
    fn an_offset_that_is_measured_anew_moves_no_mark_of_a_leg_against_another() {
        let (clocks, error) = (NodeClocks::default(), Duration::from_millis(1));
        let mut leg = LegClock::default();
        assert_eq!(leg.read(&clocks, &node(), Time(5)), None, "no offset is known");
        clocks.report(&node(), offset(1_000, error));
        let first = leg.read(&clocks, &node(), Time(5)).expect("an offset");
        clocks.report(&node(), offset(900_000, error));
        let second = leg.read(&clocks, &node(), Time(105)).expect("an offset");
        assert_eq!(second.at - first.at, Duration::from_nanos(100));
        let other = LegClock::default().read(&clocks, &node(), Time(5)).expect("an offset");
        assert_eq!(
            other.at - first.at,
            Duration::from_nanos(899_000),
            "another leg has the new one"
        );
    }

    #[test]
    fn a_node_that_reports_a_wrong_clock_makes_no_instant_beyond_reason() {
        let clocks = NodeClocks::default();
        clocks.report(&node(), offset(i64::MAX, Duration::MAX));
        let read = LegClock::default().read(&clocks, &node(), Time(0)).expect("a time");
        assert_eq!(read.error, BEYOND_REASON);
        assert!(read.at <= Instant::now() + BEYOND_REASON);
        clocks.report(&node(), offset(-10, Duration::ZERO));
        assert_eq!(LegClock::default().read(&clocks, &node(), Time(5)), None);
    }
}
