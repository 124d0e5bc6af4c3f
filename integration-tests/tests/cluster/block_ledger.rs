//! `/admin/blocks` on real nodes: while an answer runs it names the request that holds the blocks, afterwards nobody.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use integration_tests::MODEL;
use integration_tests::cluster::TestCluster;
use integration_tests::wait::wait_until;
use serde_json::{Value, json};

async fn report(cluster: &TestCluster, node: &str) -> Result<Value> {
    let addresses = cluster.cluster.node_addresses();
    let address = addresses.get(node).with_context(|| format!("no {node}"))?;
    let answer = cluster
        .http
        .get(format!("http://{address}/admin/blocks"))
        .send()
        .await?;
    Ok(answer.error_for_status()?.json().await?)
}

/// The whole pool, by state: nothing may be missing or counted twice.
fn total(report: &Value) -> u64 {
    let states = report["blocks"].as_object().into_iter().flatten();
    states.filter_map(|(_, count)| count.as_u64()).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn who_holds_blocks_is_named_while_it_does_and_not_after() -> Result<()> {
    let cluster = TestCluster::start("1p1d").await?;
    let pools = (
        total(&report(&cluster, "prefill-0").await?),
        total(&report(&cluster, "decode-0").await?),
    );
    let body = json!({ "model": MODEL, "prompt": "Count: one, two, three,", "max_tokens": 1000, "ignore_eos": true, "stream": true });
    let sent = cluster.http.post(cluster.url("/v1/completions")).json(&body).send();
    let answer = sent.await?.error_for_status()?;
    let mut stream = answer.bytes_stream();
    stream.next().await.context("no first token")??;
    let decoding = wait_until("the answer's blocks on decode-0", Duration::from_secs(20), || async {
        let now = report(&cluster, "decode-0")
            .await
            .map_err(|error| format!("{error:#}"))?;
        match now["holders"][0]["stage"].as_str() {
            Some("decode") => Ok(now),
            _ => Err(now.to_string()),
        }
    })
    .await?;
    let holder = &decoding["holders"][0];
    ensure!(holder["request_id"].is_string() && holder["attempt"] == 0, "{decoding}");
    ensure!(holder["holds"]["active"].as_u64() > Some(0), "{decoding}");
    ensure!(decoding["dropped_handles_total"] == 0, "{decoding}");
    ensure!(total(&decoding) == pools.1, "{decoding} is not a pool of {}", pools.1);

    drop(stream);
    for (node, pool) in [("prefill-0", pools.0), ("decode-0", pools.1)] {
        wait_until("nobody to hold a block", Duration::from_secs(1), || async {
            let now = report(&cluster, node).await.map_err(|error| format!("{error:#}"))?;
            let is_at_rest = now["holders"].as_array().is_some_and(Vec::is_empty) && total(&now) == pool;
            if is_at_rest { Ok(()) } else { Err(now.to_string()) }
        })
        .await?;
    }
    cluster.stop().await
}
