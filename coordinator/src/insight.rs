//! Everything about requests and nodes that is looked at from outside: records, service levels, clocks, the cluster.

use std::fmt;
use std::sync::Arc;

use crate::cluster_metrics::ClusterSnapshot;
use crate::node_clocks::NodeClocks;
use crate::records::RecordStore;
use crate::records::shape::ClockShape;
use crate::slo::{SloLedger, SloRules};

/// Where the cluster's state is read from; the coordinator's metrics implement it.
pub trait ClusterView: Send + Sync {
    fn snapshot(&self) -> ClusterSnapshot;
}

/// Shared by the HTTP edge and what serves `/admin`.
#[derive(Default)]
pub struct Insight {
    pub records: Arc<RecordStore>,
    pub slo_rules: SloRules,
    pub slo: Arc<SloLedger>,
    pub node_clocks: NodeClocks,
    /// `None` where there is no cluster behind the edge: its tests.
    pub cluster: Option<Arc<dyn ClusterView>>,
    /// This coordinator's name.
    pub name: String,
    /// host:port of the HTTP listener.
    pub listen: String,
}

impl fmt::Debug for Insight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Insight")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Insight {
    /// Of every node that has told its offset.
    pub fn clocks(&self) -> Vec<ClockShape> {
        let shape = |(node, offset): (serving_core::ids::NodeId, proto::messages::ClockOffset)| ClockShape {
            node: node.name.to_string(),
            offset_ms: (offset.unix_ns as f64 / 1e3).round() / 1e3,
            error_ms: crate::records::shape::ms(offset.error),
        };
        self.node_clocks.all().into_iter().map(shape).collect()
    }
}
