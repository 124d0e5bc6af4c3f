//! What the handoff costs on an idle machine: TTFT and first-to-second token of `1p1d` against `1c`, alternating.
//!
//! `cargo run --release -p integration-tests --example latency -- [pairs] [prompt tokens] [engine threads of a node]`

#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use cli::local_cluster::LocalCluster;
use futures::StreamExt;
use integration_tests::MODEL;
use integration_tests::cluster::{lock_machine, options};
use integration_tests::token_exact::tokenize;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;

/// Output tokens of a probe: enough gaps after the second token for a median decode step.
const OUTPUT_TOKENS: u32 = 12;

struct Probe {
    ttft: Duration,
    first_to_second: Duration,
    /// Median of the later gaps: one decode step as the client sees it.
    decode_step: Duration,
}

#[tokio::main]
async fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let pairs: usize = args.next().map_or(Ok(30), |a| a.parse()).context("pairs")?;
    let prompt_tokens: usize = args.next().map_or(Ok(512), |a| a.parse()).context("prompt tokens")?;
    let threads: u32 = args.next().map_or(Ok(2), |a| a.parse()).context("threads")?;
    let _machine = lock_machine().await?;
    let start = async |topology: &str| -> Result<LocalCluster> {
        let mut options = options(topology)?;
        options.settings.threads_per_node = Some(threads);
        Ok(LocalCluster::start(options).await?)
    };
    let split = start("1p1d").await?;
    let co_located = start("1c").await?;
    let client = reqwest::Client::builder().tcp_nodelay(true).build()?;
    let text = tokenize(&client, split.base_url(), integration_tests::PROSE).await?;

    let mut rng = StdRng::seed_from_u64(1);
    let (mut split_probes, mut co_located_probes) = (Vec::new(), Vec::new());
    for i in 0..pairs + WARM_UPS {
        // A fresh slice each time: neither side may have it in its prefix cache.
        let start = rng.random_range(0..text.len() - prompt_tokens);
        let prompt = &text[start..start + prompt_tokens];
        // Each goes first every other time: what the one leaves behind in the machine meets both.
        let (a, b) = if i % 2 == 0 {
            let a = probe(&client, split.base_url(), prompt).await?;
            (a, probe(&client, co_located.base_url(), prompt).await?)
        } else {
            let b = probe(&client, co_located.base_url(), prompt).await?;
            (probe(&client, split.base_url(), prompt).await?, b)
        };
        if i >= WARM_UPS {
            split_probes.push(a);
            co_located_probes.push(b);
        }
    }
    println!(
        "prompt {prompt_tokens} tokens, {threads} engine threads in each node, n = {pairs} alternating pairs, medians"
    );
    report(&split_probes, &co_located_probes);
    split.stop(STOP_WITHIN).await;
    co_located.stop(STOP_WITHIN).await;
    Ok(())
}

/// Both are idle when asked to stop.
const STOP_WITHIN: Duration = Duration::from_secs(10);
/// First requests on fresh processes touch every weight page once.
const WARM_UPS: usize = 2;

fn report(split: &[Probe], co_located: &[Probe]) {
    let ms = |values: Vec<Duration>| median(values).as_secs_f64() * 1e3;
    let of = |probes: &[Probe], f: fn(&Probe) -> Duration| ms(probes.iter().map(f).collect());
    let mut differences: Vec<f64> = split
        .iter()
        .zip(co_located)
        .map(|(a, b)| (a.ttft.as_secs_f64() - b.ttft.as_secs_f64()) * 1e3)
        .collect();
    differences.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let index = (differences.len().saturating_sub(1) as f64 * share).round() as usize;
        differences.get(index).copied().unwrap_or(f64::NAN)
    };
    let step = of(split, |p| p.decode_step);
    println!("| | 1p1d | 1c |\n|---|---|---|");
    println!(
        "| TTFT ms | {:.1} | {:.1} |",
        of(split, |p| p.ttft),
        of(co_located, |p| p.ttft)
    );
    println!(
        "| first to second token ms | {:.1} | {:.1} |",
        of(split, |p| p.first_to_second),
        of(co_located, |p| p.first_to_second)
    );
    println!(
        "| decode step ms | {step:.1} | {:.1} |",
        of(co_located, |p| p.decode_step)
    );
    println!();
    println!(
        "TTFT 1p1d - 1c: median of differences {:+.1} ms (quartiles {:+.1} and {:+.1}; line: at most +5), difference of medians {:+.1} ms",
        at(0.5),
        at(0.25),
        at(0.75),
        of(split, |p| p.ttft) - of(co_located, |p| p.ttft),
    );
    println!(
        "first to second token on 1p1d: {:.1} ms (line: at most 2 decode steps = {:.1})",
        of(split, |p| p.first_to_second),
        2.0 * step
    );
}

fn median(mut values: Vec<Duration>) -> Duration {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or_default()
}

async fn probe(client: &reqwest::Client, base_url: &str, prompt: &[u32]) -> Result<Probe> {
    let body = json!({ "model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": true, "stream": true });
    let sent = Instant::now();
    let response = client
        .post(format!("{base_url}/v1/completions"))
        .json(&body)
        .send()
        .await?
        .error_for_status()?;
    let mut stream = response.bytes_stream();
    let mut tokens = Vec::new();
    while let Some(bytes) = stream.next().await {
        let now = Instant::now();
        // One event per token, each flushed by itself; two that arrive in one read are two tokens at one instant.
        let text = String::from_utf8_lossy(&bytes?).into_owned();
        let events = text.lines().filter(|l| l.starts_with("data: {")).count();
        tokens.extend(std::iter::repeat_n(now, events));
    }
    let first = *tokens.first().context("no token came")?;
    let second = *tokens.get(1).context("only one token came")?;
    let gaps = tokens.windows(2).skip(1).map(|w| w[1] - w[0]).collect();
    Ok(Probe {
        ttft: first - sent,
        first_to_second: second - first,
        decode_step: median(gaps),
    })
}
