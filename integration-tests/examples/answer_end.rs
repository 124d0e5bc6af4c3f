//! How long after its last token an answer ends, by two binaries in turns: this one's and an older one's.
//!
//! `cargo run --release -p integration-tests --example answer_end -- OLD_BATON [rounds] [streams] [requests of a round]`
//! A round of a binary is a new 1p1d cluster of the real model. Prompts of 64 to 512 tokens keep the prefill node busy, so that
//! its reports come late. What clients see is compared; the coordinator's own `last_token_to_end_ms` is shown where it has one.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cli::local_cluster::LocalCluster;
use futures::StreamExt;
use integration_tests::cluster::{baton_executable, lock_machine, options_of};
use integration_tests::token_exact::tokenize;
use integration_tests::{MODEL, PROSE};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

const OUTPUT_TOKENS: u32 = 32;
const STOP_WITHIN: Duration = Duration::from_secs(20);
/// The line, on the coordinator's clock.
const END_P99_MAX: Duration = Duration::from_millis(5);

/// One answer, as its client saw it.
#[derive(Clone, Copy, Debug)]
struct Seen {
    last_gap: Duration,
    /// Of all gaps of this answer: what the machine was like.
    median_gap: Duration,
    last_token_to_done: Duration,
    last_token_to_close: Duration,
}

#[derive(Debug, Default)]
struct Of {
    seen: Vec<Seen>,
    /// Median of each round: the last gap by the same answer's median one.
    last_gap_ratios: Vec<f64>,
    /// By the coordinator's records.
    ends: Vec<Duration>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let old = PathBuf::from(args.next().context("the first word is the older baton's path")?);
    let mut number = |name: &'static str, default| args.next().map_or(Ok(default), |a| a.parse()).context(name);
    let (rounds, streams) = (number("rounds", 6)?, number("streams", 8)?);
    let requests: usize = number("requests of a round", 64)?;
    let new = baton_executable()?;
    let _machine = lock_machine().await?;
    let (mut of_old, mut of_new) = (Of::default(), Of::default());
    for round in 0..rounds {
        let mut both = [(&old, &mut of_old), (&new, &mut of_new)];
        if round % 2 == 1 {
            both.reverse();
        }
        for (binary, of) in both {
            run(binary, (round, streams, requests), of).await?;
        }
    }
    println!(
        "1p1d, {rounds} rounds of each in turns, {streams} streams at a time, {requests} requests a round, {OUTPUT_TOKENS} tokens each"
    );
    println!("| | old | new |\n|---|---|---|");
    let row = |name: &str, of: fn(&Seen) -> Duration, q: f64| {
        let of = |seen: &[Seen]| quantile(seen.iter().map(of).collect(), q).as_secs_f64() * 1e3;
        println!("| {name} | {:.2} | {:.2} |", of(&of_old.seen), of(&of_new.seen));
    };
    for (name, q) in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)] {
        row(
            &format!("last token to [DONE], {name} ms"),
            |seen| seen.last_token_to_done,
            q,
        );
        row(
            &format!("last token to the body's end, {name} ms"),
            |seen| seen.last_token_to_close,
            q,
        );
    }
    row("last gap between tokens, p50 ms", |seen| seen.last_gap, 0.5);
    row("last gap between tokens, p90 ms", |seen| seen.last_gap, 0.9);
    row("median gap between tokens, p50 ms", |seen| seen.median_gap, 0.5);
    let mut ratios: Vec<f64> = of_new
        .last_gap_ratios
        .iter()
        .zip(&of_old.last_gap_ratios)
        .map(|(n, o)| n / o)
        .collect();
    ratios.sort_by(f64::total_cmp);
    println!(
        "last gap by the answer's median gap, median of a round: old {:.2?}, new {:.2?}; new by old {ratios:.2?}",
        of_old.last_gap_ratios, of_new.last_gap_ratios
    );
    let late = |seen: &[Seen]| {
        let late = seen
            .iter()
            .filter(|seen| seen.last_token_to_done > Duration::from_millis(20));
        late.count() as f64 / seen.len().max(1) as f64 * 1e2
    };
    println!(
        "ended over 20 ms after the last token: old {:.0} %, new {:.0} %",
        late(&of_old.seen),
        late(&of_new.seen)
    );
    let q = |q| quantile(of_new.ends.clone(), q);
    println!(
        "coordinator's clock, new: n = {}, p50 {:.3?}, p99 {:.3?}, max {:.3?} (line: p99 at most {END_P99_MAX:?})",
        of_new.ends.len(),
        q(0.5),
        q(0.99),
        q(1.0)
    );
    ensure!(q(0.99) <= END_P99_MAX, "the line is broken");
    Ok(())
}

async fn run(binary: &Path, (round, streams, requests): (usize, usize, usize), of: &mut Of) -> Result<()> {
    let mut options = options_of(binary.to_owned(), "1p1d")?;
    options.settings.threads_per_node = Some(1);
    let cluster = LocalCluster::start(options).await?;
    let client = reqwest::Client::builder().tcp_nodelay(true).build()?;
    let text = tokenize(&client, cluster.base_url(), PROSE).await?;
    // The same prompts for both binaries.
    let mut random = StdRng::seed_from_u64(round as u64);
    let prompts: Vec<Vec<u32>> = (0..requests)
        .map(|_| {
            let length = random.random_range(64..512);
            let start = random.random_range(0..text.len() - length);
            text[start..start + length].to_vec()
        })
        .collect();
    let seen: Vec<Result<Seen>> = futures::stream::iter(prompts)
        .map(|prompt| ask(&client, cluster.base_url(), prompt))
        .buffer_unordered(streams)
        .collect()
        .await;
    let seen = seen.into_iter().collect::<Result<Vec<Seen>>>()?;
    let mut ratios: Vec<f64> = seen
        .iter()
        .map(|seen| seen.last_gap.div_duration_f64(seen.median_gap))
        .collect();
    ratios.sort_by(f64::total_cmp);
    of.last_gap_ratios.extend(ratios.get(ratios.len() / 2));
    of.seen.extend(seen);
    let url = format!("{}/admin/requests?limit=1000", cluster.base_url());
    let page: Value = client.get(url).send().await?.error_for_status()?.json().await?;
    let ends = page["records"].as_array().into_iter().flatten();
    let ends = ends.filter_map(|record| record["last_token_to_end_ms"].as_f64());
    of.ends.extend(ends.map(|ms| Duration::from_secs_f64(ms / 1e3)));
    cluster.stop(STOP_WITHIN).await;
    Ok(())
}

async fn ask(client: &reqwest::Client, base_url: &str, prompt: Vec<u32>) -> Result<Seen> {
    let body = json!({ "model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": true, "stream": true });
    let url = format!("{base_url}/v1/completions");
    let answer = client.post(url).json(&body).send().await?.error_for_status()?;
    let mut pieces = answer.bytes_stream();
    let (mut rest, mut tokens, mut done) = (String::new(), Vec::new(), None);
    while let Some(piece) = pieces.next().await {
        rest.push_str(std::str::from_utf8(&piece?)?);
        let now = Instant::now();
        while let Some(end) = rest.find("\n\n") {
            match rest[..end].trim_start_matches("data: ") {
                "[DONE]" => done = Some(now),
                _ => tokens.push(now),
            }
            rest.drain(..end + 2);
        }
    }
    let closed = Instant::now();
    ensure!(tokens.len() == OUTPUT_TOKENS as usize, "{} tokens", tokens.len());
    let last = tokens[tokens.len() - 1];
    Ok(Seen {
        last_gap: last - tokens[tokens.len() - 2],
        median_gap: quantile(tokens.windows(2).map(|pair| pair[1] - pair[0]).collect(), 0.5),
        last_token_to_done: done.context("no [DONE]")? - last,
        last_token_to_close: closed - last,
    })
}

/// Nearest rank.
fn quantile(mut values: Vec<Duration>, q: f64) -> Duration {
    values.sort_unstable();
    let rank = (values.len() as f64 * q).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}
