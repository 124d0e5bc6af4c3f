//! An order empties the prefix caches of real nodes, and the coordinator's knowledge of them.

use std::time::Duration;

use anyhow::{Result, ensure};
use integration_tests::MODEL;
use integration_tests::cluster::TestCluster;
use serde_json::{Value, json};

const WITHIN: Duration = Duration::from_secs(20);

async fn answer(cluster: &TestCluster) -> Result<Value> {
    let prompt: Vec<u64> = (0..90).map(|i| 1_000 + i * 7).collect();
    let body = json!({
        "model": MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": true, "temperature": 0.0,
        "return_token_ids": true, "return_kv_hashes": true, "include_metrics": true
    });
    cluster.post("/v1/completions", &body).await
}

fn cached_tokens(answer: &Value) -> Option<u64> {
    answer["metrics"]["cached_tokens"].as_u64()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_was_cached_is_computed_again_after_the_order() -> Result<()> {
    let cluster = TestCluster::start("1p1d").await?;
    let first = answer(&cluster).await?;
    let second = answer(&cluster).await?;
    ensure!(cached_tokens(&first) == Some(0), "{first}");
    ensure!(cached_tokens(&second) >= Some(80), "{second}");
    cluster.assert_blocks_at_rest(WITHIN).await?;
    let reset = cluster.post("/flush_cache", &Value::Null).await?;
    let nodes = reset["nodes"].as_array().map_or(&[][..], Vec::as_slice);
    ensure!(nodes.len() == 2, "{reset}");
    for node in nodes {
        ensure!(
            node["dropped_blocks"].as_u64() >= Some(5) && node["kept_blocks"] == 0,
            "{reset}"
        );
    }
    let scraped = cluster.metrics().await?;
    for node in ["prefill-0", "decode-0"] {
        let known = scraped.sum("baton_node_prefix_blocks", &[("node", node)]);
        ensure!(
            known == Some(0.0),
            "the coordinator still knows {known:?} blocks of {node}"
        );
    }
    let third = answer(&cluster).await?;
    ensure!(cached_tokens(&third) == Some(0), "{third}");
    for name in ["choices", "kv_hashes"] {
        ensure!(third[name] == first[name], "{first} and {third}");
    }
    cluster.stop().await
}
