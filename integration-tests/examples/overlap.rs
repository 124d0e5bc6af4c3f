//! How much of the transfer hides behind the prefill: `1p1d` at its defaults, idle, one request at a time.
//!
//! `cargo run --release -p integration-tests --example overlap -- [requests]`, with `BATON_TRANSPORTS=grpc` for gRPC and
//! `BATON_SHM_DIRECT_SECRET=` for staged shared memory. Hidden share = 1 - (transfer_tail + commit) / kv_transfer: what the
//! decode node still waits for after the last forward, of the time that the transfer's frames were moving.

#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use integration_tests::cluster::TestCluster;
use integration_tests::token_exact::tokenize;
use integration_tests::{MODEL, PROSE};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;

const PROMPT_TOKENS: [usize; 3] = [512, 1_024, 2_048];
/// Room for an answer within the model's 2,048.
const OUTPUT_TOKENS: usize = 2;
/// First requests on fresh processes touch every weight page once.
const WARM_UPS: usize = 2;

#[tokio::main]
async fn main() -> Result<()> {
    let requests: usize = std::env::args().nth(1).map_or(Ok(20), |word| word.parse())?;
    let cluster = TestCluster::start("1p1d").await?;
    let text = tokenize(&cluster.http, cluster.cluster.base_url(), PROSE).await?;
    let mut random = StdRng::seed_from_u64(1);
    println!(
        "| prompt tokens | n | transport | kv_transfer ms | transfer_tail ms | commit ms | hidden share |\n|---|---|---|---|---|---|---|"
    );
    for wanted in PROMPT_TOKENS {
        let prompt_tokens = wanted.min(2_048 - OUTPUT_TOKENS);
        let (mut moved, mut tails, mut commits, mut shares) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut transport = String::new();
        for i in 0..requests + WARM_UPS {
            // A fresh slice each time: no prefix cache may have it.
            let start = random.random_range(0..text.len() - prompt_tokens);
            let body = json!({ "model": MODEL, "prompt": &text[start..start + prompt_tokens], "max_tokens": OUTPUT_TOKENS, "ignore_eos": true, "include_metrics": true });
            let answer = cluster.post("/v1/completions", &body).await?;
            let metrics = &answer["metrics"];
            transport = metrics["transport"]
                .as_str()
                .context("nothing was handed over")?
                .to_owned();
            let ms = |value: &serde_json::Value| value.as_f64().context("a figure is missing");
            let rest = &metrics["stages_rest_ms"];
            let (moving, tail, commit) = (
                ms(&metrics["kv_transfer_ms"])?,
                ms(&rest["transfer_tail"])?,
                ms(&rest["commit"])?,
            );
            ensure!(moving > 0.0, "nothing moved: {metrics}");
            if i >= WARM_UPS {
                moved.push(moving);
                tails.push(tail);
                commits.push(commit);
                shares.push(1.0 - (tail + commit) / moving);
            }
        }
        let (moved, tail, commit) = (median(moved), median(tails), median(commits));
        let share = 100.0 * median(shares);
        println!(
            "| {prompt_tokens} | {requests} | {transport} | {moved:.2} | {tail:.2} | {commit:.2} | {share:.0} % |"
        );
    }
    cluster.stop().await
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
