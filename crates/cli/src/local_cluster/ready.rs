//! When a started cluster counts as ready: the coordinator is ready, and every prefill node reaches every decode node.

use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::{ClusterEvent, LocalCluster, LocalClusterError};
use crate::http::Client;

/// How often `/ready` is asked while the cluster starts.
const POLL_EVERY: Duration = Duration::from_millis(50);

/// The words of `/ready` when it answers 200.
#[derive(serde::Deserialize)]
struct ReadyAnswer {
    prefill_nodes: usize,
    decode_nodes: usize,
    usable_pairs: usize,
}

impl ReadyAnswer {
    /// What is not there yet, in words. `nodes`: how many node processes run. Roles are those that the coordinator knows,
    /// because somebody may give a node another one as soon as the API answers. `pairs_max`: the pairs of the topology; nodes
    /// of others that share the etcd may make more.
    fn missing(&self, nodes: usize, pairs_max: usize) -> Option<String> {
        let ready = self.prefill_nodes.saturating_add(self.decode_nodes);
        if ready < nodes {
            return Some(format!("{ready} of {nodes} nodes are ready"));
        }
        let pairs = self.prefill_nodes.saturating_mul(self.decode_nodes).min(pairs_max);
        let usable = self.usable_pairs;
        (usable < pairs).then(|| format!("{usable} of {pairs} links between prefill and decode nodes work"))
    }
}

impl LocalCluster {
    /// Waits until nothing is missing. A node that was drained meanwhile is not waited for.
    pub(super) async fn wait_for_ready(&mut self, base_url: &str, deadline: Instant) -> Result<(), LocalClusterError> {
        let url = format!("{base_url}/ready");
        let client = self.client().map_err(LocalClusterError::Start)?;
        let (mut last, mut told) = (String::new(), String::new());
        while Instant::now() < deadline {
            if let Some(exit) = self.first_failure() {
                return Err(LocalClusterError::Exited(exit));
            }
            let Ok(missing) = timeout_at(deadline, self.missing(&client, &url)).await else {
                break;
            };
            let Some(missing) = missing else {
                return Ok(());
            };
            last = missing;
            if told != last {
                told.clone_from(&last);
                self.options
                    .observer
                    .tell(&ClusterEvent::Waiting { what: last.clone() });
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
        Err(LocalClusterError::NotReady {
            within: self.options.start_within,
            waiting_for: last,
        })
    }

    async fn missing(&self, client: &Client, url: &str) -> Option<String> {
        let answer = match client.get(url).send().await {
            Ok(answer) => answer,
            // Why no connection came about is in the causes.
            Err(error) => return Some(format!("{url}: {:#}", anyhow::Error::new(error))),
        };
        if !answer.status().is_success() {
            let status = answer.status();
            return Some(format!(
                "{url} answers {status}: {}",
                answer.text().await.unwrap_or_default()
            ));
        }
        match answer.json::<ReadyAnswer>().await {
            Ok(ready) => ready.missing(self.running_nodes(), self.options.topology.pair_count()),
            Err(error) => Some(format!(
                "{url} answers what is not understood: {:#}",
                anyhow::Error::new(error)
            )),
        }
    }
}
