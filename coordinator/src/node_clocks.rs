//! The measured offsets of the nodes' clocks. They turn a time of a node into a time of this process.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use proto::messages::ClockOffset;
use service_runtime::clock::Clock;
use serving_core::ids::NodeId;
use serving_core::time::Time;

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

    /// A time of the node on this process's clock. `None` until the offset is known.
    pub fn instant(&self, node: &NodeId, node_time: Time) -> Option<Instant> {
        let time = self.offset(node)?.map(node_time)?;
        // A node that reports a wrong clock must not produce an instant that cannot be compared with others.
        (time <= Clock::now())
            .then(|| Clock::instant_of(time))
            .or_else(|| Some(Instant::now()))
    }

    pub fn all(&self) -> Vec<(NodeId, ClockOffset)> {
        let clocks = self.by_node.read().unwrap_or_else(PoisonError::into_inner);
        clocks.iter().map(|(node, offset)| (node.clone(), *offset)).collect()
    }
}
