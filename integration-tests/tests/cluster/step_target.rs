//! `--itl-target-ms`: beside a running stream a long prompt comes in parts, and the answers are what they are without it.

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use integration_tests::cluster::{TestCluster, options};
use integration_tests::{MODEL, PROSE};
use serde_json::{Value, json};

/// Less than a step takes, so that a prompt gets the fewest tokens of each: eight.
const TARGET_MS: u32 = 1;
/// Eight of the prompt, the stream's row, and what rounds it up to an edge of the histogram.
const STEP_TOKENS_MAX: &str = "16.0";
/// The 128 of `--mixed-step-tokens` on the CPU, rows and guesses, rounded up to an edge.
const MIXED_STEP_TOKENS_MAX: &str = "256.0";

async fn answers(itl_target_ms: Option<u32>) -> Result<(String, TestCluster)> {
    let mut options = options("1c")?;
    options.settings.itl_target_ms = itl_target_ms;
    let cluster = TestCluster::start_with(options).await?;
    // It outlives the long prompt, also where this process is late.
    let stream =
        json!({ "model": MODEL, "prompt": "One, two,", "max_tokens": 4000, "ignore_eos": true, "stream": true });
    let sent = cluster.http.post(cluster.url("/v1/completions")).json(&stream).send();
    let mut stream = sent.await?.error_for_status()?.bytes_stream();
    stream.next().await.context("no first token")??;
    let words: Vec<&str> = PROSE.split_whitespace().take(450).collect();
    let long = json!({ "model": MODEL, "prompt": words.join(" "), "max_tokens": 8, "temperature": 0 });
    let answer: Value = cluster.post("/v1/completions", &long).await?;
    let prompt_tokens = answer["usage"]["prompt_tokens"].as_u64();
    ensure!(prompt_tokens.is_some_and(|tokens| tokens > 400), "{answer}");
    let text = answer["choices"][0]["text"].as_str().context("no text")?.to_owned();
    drop(stream);
    Ok((text, cluster))
}

/// Steps of the node, and those of them that had more tokens than this edge of the histogram.
async fn steps(cluster: &TestCluster, edge: &str) -> Result<(f64, f64)> {
    let metrics = cluster.node_metrics("decode-0").await?;
    let count = metrics.sum("baton_batch_tokens_count", &[]).context("no steps")?;
    let small = metrics.sum("baton_batch_tokens_bucket", &[("le", edge)]);
    Ok((count, count - small.context("no such edge")?))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_prompt_comes_in_parts_beside_a_stream_and_its_answer_is_the_same() -> Result<()> {
    let (whole, cluster) = answers(None).await?;
    let (_, large) = steps(&cluster, STEP_TOKENS_MAX).await?;
    ensure!(
        large >= 1.0,
        "without a target a step has as much of the prompt as a mixed step may"
    );
    let (count, large) = steps(&cluster, MIXED_STEP_TOKENS_MAX).await?;
    ensure!(large == 0.0, "{large} of {count} steps had more");
    cluster.stop().await?;
    let (in_parts, cluster) = answers(Some(TARGET_MS)).await?;
    let (count, large) = steps(&cluster, STEP_TOKENS_MAX).await?;
    ensure!(large == 0.0 && count > 50.0, "{large} of {count} steps were large");
    cluster.stop().await?;
    ensure!(whole == in_parts, "{whole} and {in_parts}");
    Ok(())
}
