//! Empties the prefix caches of all nodes, and waits until this coordinator has heard of it.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::{StreamExt as _, stream};
use identity::{Expected, Identity};
use proto::v1;
use proto::v1::cache_service_client::CacheServiceClient;
use service_runtime::serve;
use serving_core::kv::CacheReset;
use tonic::{Code, Status};

use crate::insight::Insight;
use crate::node_page::NODE_ANSWER_TIME_LIMIT;

/// Nodes that are asked at a time. Each is asked over a connection of its own.
const ASKED_AT_ONCE: usize = 64;
/// How long the answer waits for the nodes' reports. A node reports a changed cache within 2 ms; while requests run, its cache
/// may have grown again by then, and this is the limit.
const HEARD_WITHIN: Duration = Duration::from_millis(500);
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(2);

/// What became of one node's cache.
#[derive(Clone, Debug)]
pub(crate) struct NodeReset {
    pub node: String,
    /// The error is text for people. The cache may be as it was.
    pub reset: Result<CacheReset, String>,
}

/// Asks every node that is a member. A node that has not answered within [`NODE_ANSWER_TIME_LIMIT`] is not waited for.
///
/// What this coordinator knows of the caches is what the nodes report, so the dropped blocks leave it with a report. Requests
/// that come after the answer are not placed by what was known before.
pub(crate) async fn reset_prefix_caches(insight: &Insight) -> Vec<NodeReset> {
    let nodes = insight.nodes().into_iter();
    let asked: Vec<_> = nodes
        .map(|(node, address)| async move {
            let reset = ask(&insight.identity, (&node, &address)).await;
            NodeReset { node, reset }
        })
        .collect();
    let answers: Vec<NodeReset> = stream::iter(asked).buffered(ASKED_AT_ONCE).collect().await;
    let kept = answers.iter();
    let kept = kept.filter_map(|answer| Some((answer.node.clone(), answer.reset.as_ref().ok()?.kept_blocks)));
    hear(insight, &kept.collect()).await;
    answers
}

async fn ask(identity: &Identity, (name, address): (&str, &str)) -> Result<CacheReset, String> {
    let endpoint = serve::endpoint(address).map_err(|error| format!("{address}: {error}"))?;
    let channel = identity.connect_lazy(&endpoint, Expected::Node(name.to_owned()));
    let mut client = CacheServiceClient::new(channel);
    let asked = client.reset_prefix_cache(v1::ResetPrefixCacheRequest {});
    match tokio::time::timeout(NODE_ANSWER_TIME_LIMIT, asked).await {
        Ok(Ok(reply)) => Ok(reply.into_inner().into()),
        Ok(Err(status)) => Err(words(&status)),
        Err(_) => Err(format!(
            "no answer within {} s; ask again, and see the node's log",
            NODE_ANSWER_TIME_LIMIT.as_secs()
        )),
    }
}

fn words(status: &Status) -> String {
    match status.code() {
        Code::Unimplemented => {
            "this node is of an older version and keeps its cache; start it again with the coordinator's version"
                .to_owned()
        }
        _ => proto::status::words(status),
    }
}

/// Waits until the directory lists no more blocks of a node than its cache has `kept`.
async fn hear(insight: &Insight, kept: &BTreeMap<String, u32>) {
    let Some(cluster) = insight.cluster.as_ref().filter(|_| !kept.is_empty()) else {
        return;
    };
    let is_known = || {
        let snapshot = cluster.snapshot();
        snapshot.nodes.iter().all(|node| {
            let kept = kept.get(node.name());
            kept.is_none_or(|kept| node.prefix_blocks <= *kept as usize)
        })
    };
    let known = async {
        while !is_known() {
            tokio::time::sleep(LOOK_AGAIN_AFTER).await;
        }
    };
    let _ = tokio::time::timeout(HEARD_WITHIN, known).await;
}
