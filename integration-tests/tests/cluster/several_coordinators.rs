//! Two coordinators over the same nodes: both place, neither starves, and one that dies costs only its own streams.

use std::time::Duration;

use integration_tests::cluster::{TestCluster, options};
use serde_json::{Value, json};

const AT_REST_WITHIN: Duration = Duration::from_secs(5);

async fn two(topology: &str) -> TestCluster {
    let mut options = options(topology).expect("options");
    options.coordinator_count = 2;
    // Permits for two chunks of 128 tokens at a time: the coordinators have to share them.
    options.settings.max_num_batched_tokens = Some(128);
    options.settings.prefix_cache = Some(false);
    TestCluster::start_with(options).await.expect("a cluster")
}

fn body(prompt_tokens: u64, salt: u64, max_tokens: u64) -> Value {
    let ids: Vec<u64> = (0..prompt_tokens)
        .map(|i| 1_000 + (i * 7 + salt * 131) % 20_000)
        .collect();
    json!({
        "model": "smollm2-135m", "prompt": ids, "max_tokens": max_tokens, "ignore_eos": true, "temperature": 0,
        "return_token_ids": true, "include_metrics": true
    })
}

async fn complete(cluster: &TestCluster, url: &str, body: &Value) -> Value {
    let answer = cluster
        .http
        .post(format!("{url}/v1/completions"))
        .json(body)
        .send()
        .await;
    let answer = answer.expect("an answer");
    let status = answer.status();
    let text = answer.text().await.expect("a body");
    assert!(status.is_success(), "{url} answers {status}: {text}");
    serde_json::from_str(&text).expect("JSON")
}

#[tokio::test(flavor = "multi_thread")]
async fn both_place_on_the_same_nodes_at_once() {
    let cluster = two("1p1d").await;
    let urls = cluster.cluster.base_urls().to_vec();
    assert_eq!(urls.len(), 2);
    // Some prompts need more than half of the node's permits, so the one has to give up what the other waits for.
    let requests: Vec<Value> = (0..24)
        .map(|i| body(if i % 3 == 0 { 200 } else { 40 + i }, i, 8))
        .collect();
    let asked = requests
        .iter()
        .enumerate()
        .map(|(i, body)| complete(&cluster, &urls[i % 2], body));
    let answers = futures::future::join_all(asked).await;
    // The same again, one at a time and the other way round: the same tokens.
    for (i, body) in requests.iter().enumerate().take(6) {
        let again = complete(&cluster, &urls[(i + 1) % 2], body).await;
        assert_eq!(
            again["choices"][0]["token_ids"], answers[i]["choices"][0]["token_ids"],
            "request {i}"
        );
    }
    for answer in &answers {
        assert!(answer["metrics"]["prefill_node"].is_string(), "handed over: {answer}");
    }
    for url in &urls {
        let page = cluster.cluster_page(url).await.expect("a page");
        let nodes = page["nodes"].as_array().expect("nodes");
        assert_eq!(nodes.len(), 2);
        assert!(nodes.iter().all(|node| node["coordinators"] == 2), "{page}");
    }
    cluster.assert_blocks_at_rest(AT_REST_WITHIN).await.expect("at rest");
    cluster.stop().await.expect("drains");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_coordinator_that_dies_costs_its_own_streams_and_the_other_gets_all_permits() {
    let cluster = two("1p1d").await;
    let urls = cluster.cluster.base_urls().to_vec();
    let nodes_before: Vec<u32> = cluster
        .cluster
        .processes()
        .iter()
        .skip(2)
        .map(|process| process.pid)
        .collect();
    let long = body(100, 1, 64);
    let alone = complete(&cluster, &urls[1], &long).await;
    let (lost, kept) = tokio::join!(
        async {
            let sent = cluster
                .http
                .post(format!("{}/v1/completions", urls[0]))
                .json(&body(100, 2, 400))
                .send();
            let answer = tokio::time::timeout(Duration::from_secs(60), async { sent.await?.text().await }).await;
            answer.expect("the connection ends with its coordinator")
        },
        async {
            // Both run now; then the first coordinator goes.
            let running = complete(&cluster, &urls[1], &long);
            let (answer, ()) = tokio::join!(running, async {
                let is_running = || async {
                    let page = cluster
                        .cluster_page(&urls[1])
                        .await
                        .map_err(|error| error.to_string())?;
                    let running: u64 = page["nodes"]
                        .as_array()
                        .into_iter()
                        .flatten()
                        .map(|n| n["running"].as_u64().unwrap_or(0))
                        .sum();
                    if running >= 2 { Ok(()) } else { Err(page.to_string()) }
                };
                integration_tests::wait::wait_until("two to run", Duration::from_secs(30), is_running)
                    .await
                    .expect("two run");
                cluster.cluster.kill_node("coordinator-0").await.expect("killed");
            });
            answer
        }
    );
    assert!(lost.is_err(), "its client sees the connection break");
    assert_eq!(kept["choices"][0]["token_ids"], alone["choices"][0]["token_ids"]);
    // More than the half that it had: the dead one's permits are void.
    let answer = complete(&cluster, &urls[1], &body(250, 3, 4)).await;
    assert!(answer["metrics"]["prefill_node"].is_string(), "{answer}");
    let nodes_after: Vec<u32> = cluster
        .cluster
        .processes()
        .iter()
        .skip(2)
        .map(|process| process.pid)
        .collect();
    assert_eq!(nodes_after, nodes_before, "no node restarted");
    let page = cluster.cluster_page(&urls[1]).await.expect("a page");
    assert!(
        page["nodes"]
            .as_array()
            .is_some_and(|nodes| nodes.iter().all(|node| node["coordinators"] == 1)),
        "{page}"
    );
    cluster.stop().await.expect("drains");
}
