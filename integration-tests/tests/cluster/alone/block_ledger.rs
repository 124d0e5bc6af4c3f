//! `/admin/blocks` on real nodes: while an answer runs it names the request that holds the blocks, afterwards nobody.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use integration_tests::MODEL;
use integration_tests::cluster::{TestCluster, options};
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
    let folder = tempfile::tempdir()?;
    let log = folder.path().join("events.jsonl");
    let mut options = options("1p1d")?;
    options.environment = vec![("BATON_EVENT_LOG".to_owned(), log.display().to_string())];
    let cluster = TestCluster::start_with(options).await?;
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
    let trace = trace_with_handoff(&cluster).await?;
    let transfers = transfers(&log)?;
    ensure!(!transfers.is_empty(), "the event log names no transfer");
    for transfer in transfers {
        let page = [decoding.to_string(), trace.clone()].concat();
        ensure!(
            !page.contains(&transfer),
            "{transfer} can be claimed by whoever reads {page}"
        );
    }
    cluster.stop().await
}

/// The last request's trace once the prefill node's span of its handoff, with the transfer's label, is in it.
async fn trace_with_handoff(cluster: &TestCluster) -> Result<String> {
    let page = |path: String| async move {
        let answer = cluster.http.get(cluster.url(&path)).send().await?;
        anyhow::Ok(answer.error_for_status()?.json::<Value>().await?)
    };
    let last = page("/admin/requests?limit=1".to_owned()).await?["records"][0]["id"].clone();
    let path = format!("/admin/traces/{}", last.as_str().context("no request")?);
    wait_until("the handoff's span", Duration::from_secs(20), || async {
        let trace = page(path.clone())
            .await
            .map_err(|error| format!("{error:#}"))?
            .to_string();
        if trace.contains("baton.transfer") {
            Ok(trace)
        } else {
            Err(trace)
        }
    })
    .await
}

/// Every transfer id that the event log has.
fn transfers(log: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(log)?;
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    Ok(lines
        .filter_map(|line| Some(line["transfer"].as_str()?.to_owned()))
        .collect())
}
