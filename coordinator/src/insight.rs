//! Everything about requests and nodes that is looked at from outside: records, service levels, clocks, the cluster.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use opentelemetry::trace::TraceId;
use service_runtime::spans;
use serving_core::cluster::NodeHealth;

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
    /// For questions to nodes.
    pub http: reqwest::Client,
}

impl fmt::Debug for Insight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Insight")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// A node that has not answered by then has other worries.
const NODE_ANSWER_TIME_LIMIT: Duration = Duration::from_secs(2);
/// The nodes' spans of a request end with its last messages, a moment after the answer.
const SPANS_END_WITHIN: Duration = Duration::from_millis(500);

impl Insight {
    /// name and address of every node that is not lost.
    pub fn nodes(&self) -> Vec<(String, String)> {
        let snapshot = self.cluster.as_ref().map(|view| view.snapshot()).unwrap_or_default();
        let here = snapshot
            .nodes
            .into_iter()
            .filter(|node| node.health != NodeHealth::Lost);
        here.map(|node| (node.name, node.address)).collect()
    }

    /// The body of a node's page.
    ///
    /// # Errors
    /// In words, for people: nothing is decided by it.
    pub async fn ask_node(&self, address: &str, path: &str) -> Result<Bytes, String> {
        let asked = async {
            let response = self.http.get(format!("http://{address}{path}")).send().await?;
            response.error_for_status()?.bytes().await
        };
        match tokio::time::timeout(NODE_ANSWER_TIME_LIMIT, asked).await {
            Ok(answered) => answered.map_err(|error| error.without_url().to_string()),
            Err(_) => Err("no answer within 2 s".to_owned()),
        }
    }

    /// A request went wrong whose trace nobody had sampled: every process hands its spans of it to the collector now. Best
    /// effort, and in the background: no request waits for it.
    pub fn export_anyway(self: &Arc<Self>, trace: TraceId) {
        let insight = self.clone();
        // Outside of a runtime there is nobody to ask.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        runtime.spawn(async move {
            tokio::time::sleep(SPANS_END_WITHIN).await;
            spans::export_anyway(trace);
            for (node, address) in insight.nodes() {
                let path = format!("/admin/spans/{trace}?export=true");
                if let Err(why) = insight.ask_node(&address, &path).await {
                    tracing::debug!(
                        node,
                        why,
                        "a node did not export the spans of a request that went wrong"
                    );
                }
            }
        });
    }

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
