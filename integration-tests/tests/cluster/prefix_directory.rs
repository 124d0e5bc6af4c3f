//! A prompt goes where it is cached: known from what the nodes report, so also by a coordinator that has just started.

use std::time::Duration;

use integration_tests::cluster::{TestCluster, options};
use integration_tests::wait::wait_until;
use serde_json::{Value, json};

const WITHIN: Duration = Duration::from_secs(30);
/// Pairs of new prompts sent at once until one of them has gone to the second decode node.
const PAIRS_MAX: u64 = 10;
const PROMPT_TOKENS: u64 = 90;
/// Above this a prompt would not count as short; less the five cached blocks of 16 it does.
const LOCAL_PREFILL_BELOW: u32 = 64;

async fn answer(cluster: &TestCluster, prompt: u64) -> Result<Value, String> {
    let ids: Vec<u64> = (0..PROMPT_TOKENS)
        .map(|i| 1_000 + (i * 7 + prompt * 131) % 20_000)
        .collect();
    let body = json!({
        "model": "smollm2-135m", "prompt": ids, "max_tokens": 16, "ignore_eos": true, "temperature": 0.0,
        "return_token_ids": true, "return_kv_hashes": true, "include_metrics": true
    });
    let asked = cluster.post("/v1/completions", &body).await;
    asked.map_err(|error| format!("{error:#}"))
}

fn content(answer: &Value) -> (Value, Value) {
    (answer["choices"][0]["token_ids"].clone(), answer["kv_hashes"].clone())
}

/// Until both decode nodes can be given work with both prefill nodes, and the coordinator knows of the prompt's five whole
/// blocks in that node's cache.
async fn is_known(cluster: &TestCluster, node: &str) {
    let look = || async {
        let scraped = cluster.metrics().await.map_err(|error| format!("{error:#}"))?;
        let blocks = scraped.sum("baton_node_prefix_blocks", &[("node", node)]);
        let permits = ["prefill-0", "prefill-1", "decode-0", "decode-1"].map(|node| {
            scraped
                .sum("baton_node_permits_available", &[("node", node)])
                .unwrap_or(0.0)
        });
        // Of pairs whose nodes are both there.
        let ready = cluster.http.get(cluster.url("/ready")).send().await;
        let ready: Value = ready
            .map_err(|error| error.to_string())?
            .json()
            .await
            .unwrap_or_default();
        match blocks >= Some(5.0) && ready["usable_pairs"] == 4 && permits.iter().all(|free| *free > 0.0) {
            true => Ok(()),
            false => Err(format!("{blocks:?} blocks, permits {permits:?}, {ready}")),
        }
    };
    wait_until("the prefix directory", WITHIN, look).await.expect("in time");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_goes_where_it_is_cached_also_after_the_coordinators_restart() {
    let mut options = options("2p2d").expect("options");
    options.settings.local_prefill_below_tokens = Some(LOCAL_PREFILL_BELOW);
    let mut cluster = TestCluster::start_with(options).await.expect("a cluster");
    let mut on_second = None;
    for pair in 0..PAIRS_MAX {
        let (first, second) = (2 * pair, 2 * pair + 1);
        let answers = tokio::join!(answer(&cluster, first), answer(&cluster, second));
        let answers = [
            (first, answers.0.expect("an answer")),
            (second, answers.1.expect("an answer")),
        ];
        on_second = answers
            .into_iter()
            .find(|(_, answer)| answer["metrics"]["decode_node"] == "decode-1");
        if on_second.is_some() {
            break;
        }
    }
    let (prompt, before) = on_second.expect("of two at once one goes to the second decode node");
    assert_eq!(before["metrics"]["local_prefill"], Value::Null, "{before}");
    is_known(&cluster, "decode-1").await;
    cluster.cluster.kill_node("coordinator").await.expect("killed");
    cluster
        .cluster
        .restart_node("coordinator")
        .await
        .expect("started again");
    is_known(&cluster, "decode-1").await;

    let again = answer(&cluster, prompt).await.expect("an answer");
    let metrics = &again["metrics"];
    assert_eq!(metrics["decode_node"], "decode-1", "{metrics}");
    assert_eq!(metrics["local_prefill"], "cached", "{metrics}");
    assert_eq!(metrics["cached_tokens"], 80, "{metrics}");
    let scraped = cluster.metrics().await.expect("metrics");
    let chosen = scraped.sum("baton_routing_decisions_total", &[("reason", "cached")]);
    assert_eq!(chosen, Some(1.0), "{metrics}");
    assert_eq!(
        content(&again),
        content(&before),
        "tokens and KV are those of the handoff"
    );
    let fresh = answer(&cluster, 2 * PAIRS_MAX).await.expect("an answer");
    assert_eq!(
        fresh["metrics"]["decode_node"], "decode-0",
        "a prompt that nobody has: {fresh}"
    );
    assert_eq!(fresh["metrics"]["local_prefill"], Value::Null, "{fresh}");
    cluster.stop().await.expect("drains");
}
