//! `POST /admin/reset_prefix_cache` in front of scripted nodes.

use std::collections::BTreeSet;

use futures::future::join_all;
use proto::v1;
use proto::v1::cache_service_server::{CacheService, CacheServiceServer};
use serde_json::{Value, json};
use serving_core::node::NodeRole;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use super::client::{get, post};
use super::common::{coordinator, decode, decode_node, start_node, until_up};
use super::harness::Server;

const PATHS: [&str; 3] = ["/admin/reset_prefix_cache", "/reset_prefix_cache", "/flush_cache"];

/// A node's cache.
#[derive(Clone, Copy)]
enum Cache {
    Empties,
    /// The node stands still.
    Silent,
}

impl Cache {
    fn routes(self) -> Routes {
        Routes::new(CacheServiceServer::new(self))
    }
}

#[tonic::async_trait]
impl CacheService for Cache {
    async fn reset_prefix_cache(
        &self,
        _: Request<v1::ResetPrefixCacheRequest>,
    ) -> Result<Response<v1::ResetPrefixCacheReply>, Status> {
        match self {
            Cache::Empties => Ok(Response::new(v1::ResetPrefixCacheReply {
                dropped_blocks: 7,
                kept_blocks: 2,
            })),
            Cache::Silent => std::future::pending().await,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_node_tells_what_it_dropped_under_every_name_of_the_order() {
    let cluster = coordinator(&[]).await;
    let _node = start_node(&cluster, "decode-0", NodeRole::Decode, Cache::Empties.routes()).await;
    until_up(&cluster, "decode", 1).await;
    let server = Server::in_front_of(&cluster).await;
    let node = json!({"node": "decode-0", "dropped_blocks": 7, "kept_blocks": 2, "error": null});
    for path in PATHS {
        let answer = post(server.address, path, &Value::Null).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        assert_eq!(answer.json(), json!({"dropped_blocks": 7, "nodes": [node]}));
        assert_eq!(
            get(server.address, path).await.status,
            405,
            "nothing changes by looking"
        );
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_silent_or_too_old_is_named_and_keeps_nobody_waiting() {
    let cluster = coordinator(&[]).await;
    let _empties = start_node(&cluster, "decode-0", NodeRole::Decode, Cache::Empties.routes()).await;
    let _old = decode_node(&cluster, "decode-1", decode(|_, _| async {})).await;
    let _silent = start_node(&cluster, "prefill-0", NodeRole::Prefill, Cache::Silent.routes()).await;
    until_up(&cluster, "decode", 2).await;
    until_up(&cluster, "prefill", 1).await;
    let server = Server::in_front_of(&cluster).await;
    let asked = PATHS.map(|path| async move { post(server.address, path, &Value::Null).await });
    for answer in join_all(asked).await {
        assert_eq!(answer.status, 502, "{}", answer.text());
        let body = answer.json();
        assert_eq!(body["dropped_blocks"], 7);
        let nodes = body["nodes"].as_array().unwrap();
        let failed = nodes
            .iter()
            .filter(|node| node["error"].is_string() && node["dropped_blocks"].is_null());
        let failed: BTreeSet<&str> = failed.filter_map(|node| node["node"].as_str()).collect();
        assert_eq!(failed, BTreeSet::from(["decode-1", "prefill-0"]), "{body}");
    }
    cluster.stop().await;
}

#[tokio::test]
async fn without_nodes_there_is_nothing_to_drop() {
    let server = Server::saying("x").await;
    let answer = post(server.address, "/flush_cache", &Value::Null).await;
    assert_eq!(
        (answer.status, answer.json()),
        (200, json!({"dropped_blocks": 0, "nodes": []}))
    );
}
