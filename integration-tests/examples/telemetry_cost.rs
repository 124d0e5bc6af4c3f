//! What telemetry costs, or the flight recorder: clusters with the same work in turns, each new, every other one with it.
//! Telemetry is spans, records and an OTLP collector; without it is `OTEL_SDK_DISABLED=true` and `--request-records 0`. With and
//! without the flight recorder everything else is at its default. CPU seconds of the processes, TTFT of the clients.
//!
//! `cargo run --release -p integration-tests --example telemetry_cost -- [rounds] [streams] [requests a stream] [model|stand-in] [telemetry|flight-record]`

#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use cli::local_cluster::LocalCluster;
use futures::StreamExt;
use futures::future::try_join_all;
use integration_tests::cluster::{cpu_time, lock_machine, options};
use integration_tests::otlp_collector::Collector;
use integration_tests::waterfall::prompt;
use integration_tests::{MODEL, PROSE};
use serde_json::json;

/// A short chat answer; telemetry costs by the request and by the token.
const OUTPUT_TOKENS: usize = 64;
const PROMPT_WORDS: usize = 40;
/// Both are idle when asked to stop.
const STOP_WITHIN: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Default)]
struct Round {
    cpu_ms_per_1000_tokens: f64,
    /// Of the coordinator alone.
    coordinator_ms_per_1000_tokens: f64,
    ttft_ms: f64,
}

struct Load {
    streams: usize,
    requests_per_stream: usize,
}

#[tokio::main]
async fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let mut number = |name: &'static str, default| args.next().map_or(Ok(default), |a| a.parse()).context(name);
    let rounds: usize = number("rounds", 7)?;
    let load = Load {
        streams: number("streams", 16)?,
        requests_per_stream: number("requests a stream", 4)?,
    };
    let engine = std::env::args().nth(4).unwrap_or_else(|| "model".to_owned());
    ensure!(
        ["model", "stand-in"].contains(&engine.as_str()),
        "the engine is `model` or `stand-in`"
    );
    let what = std::env::args().nth(5).unwrap_or_else(|| "telemetry".to_owned());
    let _machine = lock_machine().await?;
    let collector = Collector::start().await?;
    let folder = tempfile::tempdir()?;
    let (on, off) = match what.as_str() {
        "telemetry" => telemetry(&collector),
        "flight-record" => flight_record(folder.path()),
        _ => bail!("what is compared is `telemetry` or `flight-record`"),
    };
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for turn in 0..rounds {
        let both = [(&on, &mut with), (&off, &mut without)];
        let in_turn: Vec<_> = if turn % 2 == 0 {
            both.into()
        } else {
            both.into_iter().rev().collect()
        };
        for (arm, seen) in in_turn {
            seen.push(round(&engine, arm, &load).await?);
        }
    }
    println!(
        "{what}: {engine}, 1p1d, {rounds} rounds in turns, {} streams of {} requests, prompts of {PROMPT_WORDS} words, {OUTPUT_TOKENS} tokens each",
        load.streams, load.requests_per_stream
    );
    report(&with, &without);
    Ok(())
}

/// What differs between the two.
#[derive(Default)]
struct Arm {
    environment: Vec<(String, String)>,
    coordinator_flags: Vec<OsString>,
}

fn telemetry(collector: &Collector) -> (Arm, Arm) {
    let variable = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
    let on = Arm {
        environment: variable("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint()),
        coordinator_flags: Vec::new(),
    };
    let off = Arm {
        environment: variable("OTEL_SDK_DISABLED", "true"),
        coordinator_flags: vec!["--request-records=0".into()],
    };
    (on, off)
}

/// Each cluster's record replaces the one of the cluster before.
fn flight_record(folder: &Path) -> (Arm, Arm) {
    let mut flag = OsString::from("--flight-record=");
    flag.push(folder.join("flight.record"));
    let on = Arm {
        environment: Vec::new(),
        coordinator_flags: vec![flag],
    };
    (on, Arm::default())
}

/// On a cluster of its own: two clusters of the same settings differ by more in their time to a first token (where their
/// memory lies, how their loops fall in step) than any telemetry costs, so no pair of them may stand for all.
async fn round(engine: &str, arm: &Arm, load: &Load) -> Result<Round> {
    let mut options = options("1p1d")?;
    if engine == "stand-in" {
        options.settings.engine = Some(engine.to_owned());
    }
    options.environment = arm.environment.clone();
    options.coordinator_flags = arm.coordinator_flags.clone();
    let cluster = LocalCluster::start(options).await?;
    let client = reqwest::Client::builder().tcp_nodelay(true).build()?;
    let warm_up = Load {
        requests_per_stream: 1,
        ..*load
    };
    measure(&client, &cluster, &warm_up, 0).await?;
    let round = measure(&client, &cluster, load, 1).await?;
    cluster.stop(STOP_WITHIN).await;
    Ok(round)
}

/// Of the coordinator, and of all processes.
fn cpu(cluster: &LocalCluster) -> Result<(Duration, Duration)> {
    let mut spent = (Duration::ZERO, Duration::ZERO);
    for process in cluster.processes() {
        let time = cpu_time(process.pid)?;
        spent.1 += time;
        if process.role == "coordinator" {
            spent.0 += time;
        }
    }
    Ok(spent)
}

async fn measure(client: &reqwest::Client, cluster: &LocalCluster, load: &Load, turn: usize) -> Result<Round> {
    let before = cpu(cluster)?;
    let streams = (0..load.streams).map(|stream| async move {
        let mut ttfts = Vec::new();
        for request in 0..load.requests_per_stream {
            let number = (turn * load.streams + stream) * load.requests_per_stream + request;
            ttfts.push(ttft(client, cluster.base_url(), number).await?);
        }
        anyhow::Ok(ttfts)
    });
    let mut ttfts: Vec<f64> = try_join_all(streams).await?.into_iter().flatten().collect();
    let after = cpu(cluster)?;
    let tokens = ttfts.len() * OUTPUT_TOKENS;
    let per_1000 = |after: Duration, before| after.saturating_sub(before).as_secs_f64() * 1e6 / tokens as f64;
    Ok(Round {
        cpu_ms_per_1000_tokens: per_1000(after.1, before.1),
        coordinator_ms_per_1000_tokens: per_1000(after.0, before.0),
        ttft_ms: median(&mut ttfts),
    })
}

async fn ttft(client: &reqwest::Client, base_url: &str, number: usize) -> Result<f64> {
    let places = PROSE.split_whitespace().count() - PROMPT_WORDS;
    // Another text each time, the same ones for both clusters.
    let text = format!("{number} {}", prompt(PROMPT_WORDS, number % (places / 97)));
    let body = json!({ "model": MODEL, "prompt": text, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": true, "stream": true });
    let sent = Instant::now();
    let response = client
        .post(format!("{base_url}/v1/completions"))
        .json(&body)
        .send()
        .await?;
    let mut stream = response.error_for_status()?.bytes_stream();
    let mut first = None;
    while let Some(bytes) = stream.next().await {
        bytes?;
        first.get_or_insert_with(|| sent.elapsed());
    }
    Ok(first.context("no token came")?.as_secs_f64() * 1e3)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Median of sorted values, and the interval that holds the true one with 95 %: by order statistics, so of any distribution
/// (sign test; normal approximation of the binomial, which is near from ten values on). Fewer give the whole range.
fn median_with_interval(sorted: &[f64]) -> (f64, f64, f64) {
    let at = |index: usize| sorted.get(index).copied().unwrap_or(f64::NAN);
    let (n, last) = (sorted.len() as f64, sorted.len().saturating_sub(1));
    let reach = ((n - 1.96 * n.sqrt()) / 2.0 - 1.0).floor().max(0.0) as usize;
    (at(sorted.len() / 2), at(reach), at(last.saturating_sub(reach)))
}

/// Rounds are compared pair by pair: what the machine does meanwhile meets both of a pair.
fn report(with: &[Round], without: &[Round]) {
    let of = |rounds: &[Round], value: fn(&Round) -> f64| median(&mut rounds.iter().map(value).collect::<Vec<_>>());
    let of_pairs = |of_pair: fn(&Round, &Round) -> f64| {
        let mut values: Vec<f64> = with.iter().zip(without).map(|(a, b)| of_pair(a, b)).collect();
        values.sort_by(f64::total_cmp);
        median_with_interval(&values)
    };
    // Of five values the whole range holds their median with 94 %.
    let interval = if with.len() < 6 { "range of pairs" } else { "95 % of it" };
    println!("| | on | off | median of pairs | {interval} | line |\n|---|---|---|---|---|---|");
    let (ratio, least, most) = of_pairs(|a, b| (a.cpu_ms_per_1000_tokens / b.cpu_ms_per_1000_tokens - 1.0) * 1e2);
    println!(
        "| CPU ms per 1,000 tokens | {:.0} | {:.0} | {ratio:+.2} % | {least:+.2} to {most:+.2} % | +2 % |",
        of(with, |r| r.cpu_ms_per_1000_tokens),
        of(without, |r| r.cpu_ms_per_1000_tokens)
    );
    let (ratio, least, most) =
        of_pairs(|a, b| (a.coordinator_ms_per_1000_tokens / b.coordinator_ms_per_1000_tokens - 1.0) * 1e2);
    println!(
        "| of the coordinator | {:.1} | {:.1} | {ratio:+.2} % | {least:+.2} to {most:+.2} % | +1 % (flight record) |",
        of(with, |r| r.coordinator_ms_per_1000_tokens),
        of(without, |r| r.coordinator_ms_per_1000_tokens)
    );
    let (later, least, most) = of_pairs(|a, b| a.ttft_ms - b.ttft_ms);
    println!(
        "| TTFT ms, median of a round | {:.1} | {:.1} | {later:+.2} ms | {least:+.2} to {most:+.2} ms | +1 ms |",
        of(with, |r| r.ttft_ms),
        of(without, |r| r.ttft_ms)
    );
}
