//! How exact the load client is: its times beside those at which a server with scripted delays handed each token to the socket.
//!
//! `cargo run --release -p cli --example client_accuracy -- [streams] [tokens] [gap ms]` starts the server as a process of its own.
//! `... --example client_accuracy -- serve ADDRESS FIRST_MS GAP_MS` is the server alone, until its stdin closes; it prints its URL.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cli::bench::load::plan::{LoadPlan, Observer};
use cli::bench::load::scripted_server::{End, Script, ScriptedServer};
use serde_json::Value;
use service_runtime::descriptors;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};
use workload::arrivals::Arrivals;
use workload::record::{RequestRecord, Run};
use workload::shapes::{Length, Mix};
use workload::statistics::Samples;
use workload::summary::Lag;

const FIRST_MS: u64 = 40;
const PROMPT_TOKENS: u32 = 100;
const SEED: u64 = 1;
/// What the client may differ by: 1 ms or 2 %, whichever is more.
const DIFFERENCE_MS_MAX: f64 = 1.0;
const DIFFERENCE_SHARE_MAX: f64 = 0.02;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().is_some_and(|word| word == "serve") {
        return serve(&args[1..]).await;
    }
    let number = |at: usize, default: u64| args.get(at).map_or(Ok(default), |arg| arg.parse());
    let (streams, tokens, gap_ms) = (number(0, 1000)?, number(1, 200)?, number(2, 50)?);
    let (mut server, url) = start_server(gap_ms).await?;
    let lengths = Mix::one(Length::exactly(PROMPT_TOKENS), Length::exactly(u32::try_from(tokens)?));
    // All have begun when half of the first one's tokens have come.
    let rate = streams as f64 / (tokens * gap_ms) as f64 * 2000.0;
    let trace = Arrivals::poisson(rate).apply(lengths.trace(usize::try_from(streams)?, SEED)?, SEED)?;
    let mut plan = LoadPlan::new(&url, trace);
    plan.warm_up_requests = 16;
    let run = cli::bench::load::run(&plan, Observer::silent()).await?;
    let seen: Value = reqwest::get(format!("{url}/seen")).await?.json().await?;
    drop(server.stdin.take());
    server.wait().await?;
    report(&run, &seen)
}

async fn serve(args: &[String]) -> Result<()> {
    let [address, first, gap] = args else {
        anyhow::bail!("serve ADDRESS FIRST_MS GAP_MS");
    };
    let script = Script {
        status: 200,
        first: Duration::from_millis(first.parse()?),
        gap: Duration::from_millis(gap.parse()?),
        end: End::Whole,
    };
    // A table that grows would stop the server, and all that is late then would come to the client at once.
    descriptors::make_room(descriptors::OF_A_SERVER);
    let server = ScriptedServer::start(address.parse()?, Arc::new(move |_, _| script.clone()), None).await?;
    println!("{}", server.url());
    let mut rest = Vec::new();
    tokio::io::stdin().read_to_end(&mut rest).await?;
    Ok(())
}

async fn start_server(gap_ms: u64) -> Result<(Child, String)> {
    let mut server = Command::new(std::env::current_exe()?)
        .args(["serve", "127.0.0.1:0", &FIRST_MS.to_string(), &gap_ms.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let out = server.stdout.take().context("its stdout is piped")?;
    let url = BufReader::new(out)
        .lines()
        .next_line()
        .await?
        .context("the server ended")?;
    Ok((server, url))
}

/// One metric as the client measured it and as the server's own times say it.
#[derive(Default)]
struct Both {
    client: Vec<f64>,
    server: Vec<f64>,
}

fn report(run: &Run, seen: &Value) -> Result<()> {
    let start = run.environment["started_monotonic_ns"]
        .as_u64()
        .context("the run's start")?;
    let mut late = Vec::new();
    let mut metrics: BTreeMap<&str, Both> = BTreeMap::new();
    for record in run.records.iter().filter(|record| record.is_completed()) {
        let sent = seen[&record.id]["sent_ns"]
            .as_array()
            .context("a request that the server has seen")?;
        let sent: Vec<f64> = sent
            .iter()
            .filter_map(Value::as_u64)
            .map(|ns| (ns - start) as f64 / 1e6)
            .collect();
        ensure!(sent.len() == record.tokens.len(), "{}: a token is missing", record.id);
        let came: Vec<f64> = record.tokens.iter().map(|time| time.as_secs_f64() * 1e3).collect();
        late.extend(came.iter().zip(&sent).map(|(came, sent)| came - sent));
        add(&mut metrics, record, &came, true);
        add(&mut metrics, record, &sent, false);
    }
    ensure!(
        !late.is_empty(),
        "no request has a whole answer: {:?}",
        run.records.first()
    );
    let late = Samples::new(late);
    let lag = Lag::of(run);
    let seconds = run.measured.as_secs_f64();
    println!(
        "{} requests, {} tokens in {seconds:.1} s",
        run.records.len(),
        late.count()
    );
    println!(
        "client {:.2} cores, lag p50 {:.2} p99 {:.2} max {:.2} ms",
        run.client.cpu.as_secs_f64() / seconds,
        lag.ms_p50,
        lag.ms_p99,
        lag.ms_max
    );
    println!(
        "client CPU for each token: {:.1} us",
        run.client.cpu.as_secs_f64() * 1e6 / late.count() as f64
    );
    for (name, usage) in &run.server {
        println!("server {name}: {:.2} cores", usage.cpu.as_secs_f64() / seconds);
    }
    print!("a token came after it was sent: ms");
    [50.0, 90.0, 99.0, 99.9, 100.0]
        .iter()
        .for_each(|at| print!("  p{at} {:.3}", late.percentile(*at).unwrap_or(0.0)));
    println!("\nmetric  percentile  client ms  server ms  difference ms  within");
    let mut is_within = true;
    for (name, both) in metrics {
        let (client, server) = (Samples::new(both.client), Samples::new(both.server));
        for at in [50.0, 90.0, 95.0, 99.0] {
            let (ours, theirs) = (
                client.percentile(at).unwrap_or(0.0),
                server.percentile(at).unwrap_or(0.0),
            );
            let difference = ours - theirs;
            let is_good = difference.abs() <= DIFFERENCE_MS_MAX.max(theirs * DIFFERENCE_SHARE_MAX);
            is_within &= is_good;
            println!("{name:6}  p{at:<9}  {ours:9.3}  {theirs:9.3}  {difference:13.3}  {is_good}");
        }
    }
    ensure!(
        is_within,
        "a percentile differs by more than {DIFFERENCE_MS_MAX} ms and 2 %"
    );
    Ok(())
}

fn add(metrics: &mut BTreeMap<&str, Both>, record: &RequestRecord, times: &[f64], is_client: bool) {
    let (Some(first), Some(last)) = (times.first(), times.last()) else {
        return;
    };
    let mut put = |name, value| {
        let both: &mut Both = metrics.entry(name).or_default();
        if is_client {
            both.client.push(value)
        } else {
            both.server.push(value)
        }
    };
    put("TTFT", first - record.scheduled.as_secs_f64() * 1e3);
    put("TPOT", (last - first) / (times.len().max(2) - 1) as f64);
    times.windows(2).for_each(|pair| put("ITL", pair[1] - pair[0]));
}
