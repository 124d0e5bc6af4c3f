//! Everything about requests and nodes that can be looked at from outside: records, service levels, clocks, the cluster.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use identity::Identity;
use opentelemetry::trace::TraceId;
use service_runtime::shutdown::Shutdown;
use service_runtime::spans;
use serving_core::ids::NodeEpoch;
use serving_core::node::NodeCapacity;
use tokio::sync::Semaphore;

use crate::cluster_metrics::ClusterSnapshot;
use crate::control_handle::ControlHandle;
use crate::node_clocks::NodeClocks;
use crate::node_page;
use crate::records::RecordStore;
use crate::records::shape::ClockShape;
use crate::registry::RegistryView;
use crate::slo::{SloLedger, SloRules};
use crate::trace_viewer::TraceViewerUrl;

/// The source of the cluster's state. The coordinator's metrics implement it.
pub trait ClusterView: Send + Sync {
    fn snapshot(&self) -> ClusterSnapshot;
    /// Of the decode nodes that take requests now. Each request may ask, so nothing else is copied.
    fn decode_capacities(&self) -> Vec<NodeCapacity>;
}

/// Shared by the HTTP edge and the pages under `/admin`.
#[derive(Default)]
pub struct Insight {
    pub records: Arc<RecordStore>,
    pub slo_rules: SloRules,
    pub slo: Arc<SloLedger>,
    pub node_clocks: NodeClocks,
    /// `None` where there is no cluster behind the edge, as in its tests.
    pub cluster: Option<Arc<dyn ClusterView>>,
    /// This coordinator's name.
    pub name: String,
    /// Of this life of it. `None` where no node knows it, as in the edge's tests.
    pub epoch: Option<NodeEpoch>,
    /// host:port of the HTTP listener.
    pub listen: String,
    /// host:port where nodes join.
    pub control: String,
    /// Who this coordinator is to the nodes that it asks.
    pub identity: Identity,
    /// Followers of the events leave when the process ends, so a drain does not wait for them.
    pub drain: Shutdown,
    pub registry: RegistryView,
    /// Gives drain orders to nodes. `None` where there is no cluster behind the edge.
    pub nodes: Option<ControlHandle>,
    pub exporting: Exporting,
    /// Whether root spans have what a request and its answer say.
    pub traces_content: bool,
    /// Reports that the console shows.
    pub reports_dir: Option<PathBuf>,
    /// Where the console's link from a request to its trace leads.
    pub trace_viewer: Option<TraceViewerUrl>,
}

/// Traces that are exported afterwards at the same time, at most. Further ones are skipped.
#[derive(Clone, Debug)]
pub struct Exporting(Arc<Semaphore>);

impl Default for Exporting {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(EXPORTING_MAX)))
    }
}

const EXPORTING_MAX: usize = 16;

impl fmt::Debug for Insight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Insight")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// The nodes' spans of a request end with its last messages, a moment after the answer.
const SPANS_END_WITHIN: Duration = Duration::from_millis(500);

impl Insight {
    /// Name and address of each node that is a member.
    pub fn nodes(&self) -> Vec<(String, String)> {
        let snapshot = self.cluster.as_ref().map(|view| view.snapshot()).unwrap_or_default();
        let here = snapshot.nodes.into_iter().filter(|node| !node.health.is_over());
        here.map(|node| (node.name().to_owned(), node.record.address)).collect()
    }

    /// The body of a page of the node with this name and address.
    ///
    /// # Errors
    /// The error is text for people. Nothing is decided by it.
    pub async fn ask_node(&self, (name, address): (&str, &str), path: &str) -> Result<Vec<u8>, String> {
        node_page::ask(&self.identity, (name, address), path).await
    }

    /// A request of these nodes went wrong, and its trace was not sampled. Every process hands its spans of it to the
    /// collector now. This is best effort and runs in the background: no request waits for it, and under many such requests
    /// some are skipped.
    pub fn export_anyway(self: &Arc<Self>, trace: TraceId, nodes: Vec<String>) {
        // Outside of a runtime no task can be started.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        let permit = self.exporting.0.clone().try_acquire_owned().ok();
        let Some(permit) = permit.filter(|_| spans::is_exporting()) else {
            return;
        };
        let insight = self.clone();
        runtime.spawn(async move {
            let _permit = permit;
            tokio::time::sleep(SPANS_END_WITHIN).await;
            spans::export_anyway(trace).await;
            for (node, address) in insight.nodes().into_iter().filter(|(node, _)| nodes.contains(node)) {
                let path = format!("/admin/spans/{trace}?export=true");
                if let Err(why) = insight.ask_node((&node, &address), &path).await {
                    tracing::debug!(
                        node,
                        why,
                        "a node did not export the spans of a request that went wrong"
                    );
                }
            }
        });
    }

    /// The clock of each node that has reported its offset.
    pub fn clocks(&self) -> Vec<ClockShape> {
        let shape = |(node, offset): (serving_core::ids::NodeId, proto::messages::ClockOffset)| ClockShape {
            node: node.name.to_string(),
            offset_ms: (offset.unix_ns as f64 / 1e3).round() / 1e3,
            error_ms: crate::records::shape::ms(offset.error),
        };
        self.node_clocks.all().into_iter().map(shape).collect()
    }
}
