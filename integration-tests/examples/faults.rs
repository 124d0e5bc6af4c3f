//! The long runs under faults, for docs/measurements/reliability.md. Needs the binary with failpoints (`scripts/build-failpoints`).
//!
//! `USAGE` below lists them, for `faults --help` too. Exit status 1 when a promise was broken, 2 for words that are not understood.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use integration_tests::etcd_process;
use integration_tests::false_gpu::FalseGpu;
use integration_tests::fault_matrix::nodes::Nodes;
use integration_tests::fault_matrix::report::table;
use integration_tests::fault_matrix::rig::{RigOptions, Timers};
use integration_tests::fault_matrix::strike::CellReport;
use integration_tests::fault_matrix::{campaign, cells};
use integration_tests::fault_runs::load::{Rate, Terms};
use integration_tests::fault_runs::{
    cancels, coordinator_kills, coordinator_pauses, deadlines, etcd_outages, flips, kills, migrate, overload, pauses,
    quantile, retries, reuse, rolling,
};
use model_files::test_kit::TinyModel;

const USAGE: &str = "\
faults matrix SEEDS [TOPOLOGY [TRANSPORT [FILTER]]]   T2, T3, T4: every cell, once for each seed
faults probed SEEDS [FILTER]                          T14: the same cells with probes and /ready beside them
faults cancels ROUNDS [TRANSPORT]                     T9: so many at each of F1 to F11
faults deadlines REQUESTS [TRANSPORT]                 T8
faults retries SECONDS                                T22
faults reuse ROUNDS [TRANSPORT]                       T5: tiny pool, slow link
faults flips ROUNDS [grpc|gpu-grpc]                   T5: turned bits
faults kills N [TRANSPORT]                            T6: so many prefill and so many decode nodes die
faults migrate STREAMS [ROUNDS]                       a decode node dies under running streams
faults pauses N [N30 [TRANSPORT]]                     T7: 1 and 5 s so often, 30 s N30 times (N by default)
faults coordinator N                                  T11: killed and started again
faults late ROUNDS                                    the coordinator stands still for 8 s, then for 20 s
faults overload ROUNDS                                five times what fits, half of it with a short timeout
faults etcd ROUNDS [SECONDS]                          T12: each outage of at most so long; needs $BATON_ETCD
faults rolling ROUNDS                                 T20: every process is asked to go in turn

FILTER is how a cell's words begin: `link`, `decode kill`. TRANSPORT is grpc (the default), shm or shm-staged; or, with nodes
on the false GPU and a tiny model (T26), cuda-ipc, nccl or gpu-grpc. Those need $BATON_FALSE_CUDA, the folder that
scripts/false-cuda makes. A pair that cannot go by cuda-ipc or nccl goes by gRPC: the runs tell how many handoffs did.";

const SEVENTY_PERCENT: Rate = Rate::OfCapacity {
    share: 0.7,
    over: Duration::from_secs(15),
};
const FORTY_PERCENT: Rate = Rate::OfCapacity {
    share: 0.4,
    over: Duration::from_secs(15),
};
/// Of the runs under load: T6's "70 % load". Only clients of a coordinator that goes try again, for longer than that takes.
const TERMS: Terms = Terms {
    nodes: Nodes::ON_PROCESSORS,
    prompts: 48,
    rate: SEVENTY_PERCENT,
    calm: Duration::from_secs(2),
    reconnects_within: Duration::ZERO,
    seed: 1,
};
const RECONNECTING: Terms = Terms {
    reconnects_within: Duration::from_secs(45),
    ..TERMS
};
/// Of nodes on GPUs. Two layers with heads of 64 values, for which there are kernels, and room for the longest prompt of a run.
const GPU: FalseGpu = FalseGpu {
    write_model,
    kernel_cache: None,
};

fn write_model(path: &Path) -> std::io::Result<()> {
    let model = TinyModel {
        head_dim: 64,
        context_length: 512,
        ..TinyModel::default()
    };
    model.build().write(path)
}

/// What a rolling restart gives a process for its drain.
const GRACE: Duration = Duration::from_secs(10);

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if matches!(words.as_slice(), [word] if ["help", "-h", "--help"].contains(&word.as_str())) {
        println!("{USAGE}");
        return Ok(ExitCode::SUCCESS);
    }
    let started = Instant::now();
    let broken = match run(&words).await {
        Err(error) if error.is::<NotUnderstood>() => {
            eprintln!("{error}\n\n{USAGE}");
            return Ok(ExitCode::from(2));
        }
        ran => ran?,
    };
    println!("{} promises broken, {:.0?} in all", broken.len(), started.elapsed());
    for what in &broken {
        println!("- {what}");
    }
    Ok(match broken.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Of the words this was started with.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct NotUnderstood(String);

/// What was broken.
async fn run(words: &[String]) -> Result<Vec<String>> {
    let number = |i: usize| -> Result<usize> {
        let word = words.get(i).map(String::as_str);
        let found = word.and_then(|word| word.parse().ok());
        Ok(found.ok_or_else(|| {
            NotUnderstood(format!(
                "word {i} must be a number, and is {}",
                word.unwrap_or("missing")
            ))
        })?)
    };
    Ok(match words.first().map(String::as_str) {
        Some("matrix") => {
            let topology = words.get(2).map_or("2p2d", String::as_str);
            let filter = words.get(4).map_or("", String::as_str);
            let options = RigOptions::of(nodes(words.get(3))?, topology, 1);
            matrix(number(1)? as u64, &options, filter).await?
        }
        Some("probed") => {
            let options = RigOptions {
                is_probed: true,
                ..RigOptions::new("2p2d", 1)
            };
            matrix(number(1)? as u64, &options, words.get(2).map_or("", String::as_str)).await?
        }
        Some("cancels") => all_cancels(number(1)?, nodes(words.get(2))?).await?,
        Some("deadlines") => all_deadlines(number(1)?, nodes(words.get(2))?).await?,
        Some("retries") => all_retries(number(1)? as u64).await?,
        Some("reuse") => all_reuse(number(1)?, nodes(words.get(2))?).await?,
        Some("flips") => all_flips(number(1)?, nodes(words.get(2))?).await?,
        Some("kills") => all_kills(number(1)?, nodes(words.get(2))?).await?,
        Some("migrate") => all_migrations(number(1)?, number(2).unwrap_or(1)).await?,
        Some("pauses") => {
            let long = number(if words.len() > 2 { 2 } else { 1 })?;
            all_pauses((number(1)?, long), nodes(words.get(3))?).await?
        }
        Some("coordinator") => all_coordinator_kills(number(1)?).await?,
        Some("late") => all_coordinator_pauses(number(1)?).await?,
        Some("overload") => all_overloads(number(1)?).await?,
        Some("etcd") => all_etcd_outages(number(1)?, number(2).unwrap_or(60)).await?,
        Some("rolling") => all_rolling(number(1)?).await?,
        other => return Err(NotUnderstood(format!("no run is called {}", other.unwrap_or("nothing"))).into()),
    })
}

/// Nodes by the word for their transport.
fn nodes(word: Option<&String>) -> Result<Nodes> {
    let Some(wanted) = word else {
        return Ok(Nodes::ON_PROCESSORS);
    };
    let found = Nodes::named(wanted, GPU);
    found.ok_or_else(|| NotUnderstood(format!("no transport is called {wanted}")).into())
}

async fn matrix(seeds: u64, options: &RigOptions, filter: &str) -> Result<Vec<String>> {
    let (topology, transports) = (&options.topology, options.nodes.transports);
    let (mut reports, mut violations, mut commits, mut lines) = (Vec::new(), Vec::new(), 0, 0);
    let mut handoffs: BTreeMap<String, u64> = BTreeMap::new();
    for seed in 1..=seeds {
        let all = cells::sample(usize::MAX, seed)?;
        let wanted: Vec<_> = all
            .into_iter()
            .filter(|cell| cell.to_string().starts_with(filter))
            .filter(|cell| cell.victim != cells::Victim::Etcd || etcd_process::program().is_some())
            .filter(|cell| options.nodes.has_cell(*cell))
            .collect();
        let options = RigOptions {
            seed,
            ..options.clone()
        };
        let (total, done) = (wanted.len(), std::cell::Cell::new(0));
        let told = |report: &CellReport| {
            done.set(done.get() + 1);
            let CellReport {
                cell, outcomes, errors, ..
            } = report;
            let (n, took, violations) = (done.get(), report.took, &report.violations);
            let ready = report.ready_while_failing.unwrap_or_default();
            let (end, aborts) = (report.to_end.unwrap_or_default(), &report.to_aborts);
            eprintln!(
                "seed {seed} {n}/{total} {cell}: {outcomes:?} {errors:?} {took:.1?} last end {end:.1?} aborts {aborts:.1?} {ready:.1?} {violations:?}"
            );
        };
        let campaign = campaign::run(&wanted, &options, told).await?;
        violations.extend(
            campaign
                .violations()
                .into_iter()
                .map(|what| format!("seed {seed}: {what}")),
        );
        (commits, lines) = (commits + campaign.commits, lines + campaign.log_lines);
        for (transport, count) in campaign.handoffs {
            *handoffs.entry(transport).or_default() += count;
        }
        reports.extend(campaign.reports);
    }
    ensure!(
        !reports.is_empty(),
        "no cell was run: no cell begins with {filter:?}, or it needs $BATON_ETCD, which is not set"
    );
    println!("{}", table(&reports));
    println!(
        "{topology}, {transports}, seeds 1 to {seeds}: {commits} committed handoffs ({handoffs:?} by the coordinators' account), {lines} lines of event log"
    );
    Ok(violations)
}

async fn all_cancels(rounds: usize, nodes: Nodes) -> Result<Vec<String>> {
    let run = cancels::run(rounds, nodes, 1).await?;
    println!("| point | n | compute stop p50 | p99 | blocks free p50 | p99 |\n|---|---|---|---|---|---|");
    let limit = run.chunk + Duration::from_millis(100);
    let mut broken = Vec::new();
    for samples in run.samples.chunks(rounds) {
        let of = |time: fn(&cancels::Sample) -> Duration| samples.iter().map(time).collect::<Vec<_>>();
        let (stop, free) = (of(|sample| sample.to_compute_stop), of(|sample| sample.to_blocks_free));
        let point = samples[0].point.name();
        let (stop99, free99) = (quantile(&stop, 0.99), quantile(&free, 0.99));
        let n = samples.len();
        println!(
            "| {point} | {n} | {:.1?} | {stop99:.1?} | {:.1?} | {free99:.1?} |",
            quantile(&stop, 0.5),
            quantile(&free, 0.5)
        );
        if stop99 > limit {
            broken.push(format!(
                "{point}: computing stopped after {stop99:.1?}, the line is {limit:.1?}"
            ));
        }
        if free99 > Duration::from_secs(1) {
            broken.push(format!("{point}: blocks were free after {free99:.1?}, the line is 1 s"));
        }
    }
    println!(
        "a chunk of 16 tokens takes {:.1?}; handoffs by transport {:?}",
        run.chunk, run.handoffs
    );
    Ok(broken)
}

async fn all_deadlines(requests: usize, nodes: Nodes) -> Result<Vec<String>> {
    let run = deadlines::run(requests, nodes, 1).await?;
    let (n, late) = (run.requests, run.late.len());
    println!(
        "{n} requests, {} completed, {} ended by an error, {} faults, handoffs by transport {:?}",
        run.completed, run.failed, run.faults, run.handoffs
    );
    let (p50, p99, max) = (
        quantile(&run.late, 0.5),
        quantile(&run.late, 0.99),
        quantile(&run.late, 1.0),
    );
    println!(
        "{late} ended after their deadline: p50 {p50:.0?}, p99 {p99:.0?}, max {max:.0?} (line 250 ms); at rest {:.0?} after the last answer",
        run.to_rest
    );
    Ok(run.violations)
}

async fn all_retries(seconds: u64) -> Result<Vec<String>> {
    let run = retries::run(Duration::from_secs(seconds), Duration::from_secs(15), 1).await?;
    println!("{run:#?}\nattempts per request {:.3}", run.attempts_per_request());
    let mut broken = Vec::new();
    if run.attempts_per_request() > retries::ATTEMPTS_PER_REQUEST_MAX {
        broken.push(format!("{:.3} attempts for a request", run.attempts_per_request()));
    }
    if run.recovered_after > retries::RECOVERED_WITHIN {
        broken.push(format!(
            "the last retry or failure came {:?} after the faults",
            run.recovered_after
        ));
    }
    if run.failed_transfers < 1.0 {
        broken.push("no transfer failed: nothing was tried".to_owned());
    }
    Ok(broken)
}

async fn all_reuse(rounds: usize, nodes: Nodes) -> Result<Vec<String>> {
    let run = reuse::run(rounds, nodes, 1).await?;
    println!(
        "{}: {} rounds, {} texts compared, {} left, {} ended by an error, {} transfers broken off, handoffs by transport {:?}",
        nodes.transports, run.rounds, run.compared_texts, run.left, run.failed, run.broken_off, run.handoffs
    );
    Ok(run.violations)
}

async fn all_flips(rounds: usize, nodes: Nodes) -> Result<Vec<String>> {
    if !nodes.is_kv_on_link() {
        let what = format!(
            "KV by {} passes no link on which a bit could be turned",
            nodes.transports
        );
        return Err(NotUnderstood(what).into());
    }
    let run = flips::run(rounds, nodes, 1).await?;
    println!(
        "{} bits turned, {} detected, {} texts right",
        run.flipped, run.detected, run.completed
    );
    let mut broken = run.violations;
    if run.detected != run.flipped || run.flipped == 0 {
        broken.push(format!("{} of {} turned bits were detected", run.detected, run.flipped));
    }
    Ok(broken)
}

async fn all_kills(kills_each: usize, nodes: Nodes) -> Result<Vec<String>> {
    let plan = kills::Plan {
        kills_each,
        terms: TERMS.on(nodes),
    };
    let run = kills::run(plan, |victim, placements| eprintln!("{victim}: {placements:?}")).await?;
    println!("{}", run.summary());
    Ok(run.broken())
}

async fn all_migrations(streams: usize, rounds: usize) -> Result<Vec<String>> {
    let run = migrate::run(streams, rounds, 1).await?;
    println!("{}", run.summary());
    Ok(run.violations)
}

async fn all_pauses((times, long_times): (usize, usize), nodes: Nodes) -> Result<Vec<String>> {
    let lengths = [(1, times), (5, times), (30, long_times)];
    let plan = pauses::Plan {
        pauses: lengths
            .map(|(seconds, times)| (Duration::from_secs(seconds), times))
            .to_vec(),
        // Half of the nodes of a role stand still for half a minute.
        terms: Terms {
            rate: FORTY_PERCENT,
            ..TERMS
        }
        .on(nodes),
    };
    let run = pauses::run(&plan, |pause| eprintln!("{pause:?}")).await?;
    println!("{}", run.summary());
    Ok(run.violations)
}

async fn all_coordinator_kills(kills: usize) -> Result<Vec<String>> {
    let run = coordinator_kills::run(coordinator_kills::Plan {
        kills,
        terms: RECONNECTING,
    })
    .await?;
    println!("{}", run.summary());
    Ok(run.broken())
}

async fn all_coordinator_pauses(rounds: usize) -> Result<Vec<String>> {
    let plan = coordinator_pauses::Plan {
        pauses: [coordinator_pauses::SHIPPED, coordinator_pauses::LONG].repeat(rounds),
        streams: 6,
        timers: Timers::Shipped,
        seed: 1,
    };
    let run = coordinator_pauses::run(&plan, |pause| eprintln!("{pause:?}")).await?;
    println!("{}", run.summary());
    Ok(run.broken())
}

async fn all_overloads(rounds: usize) -> Result<Vec<String>> {
    let plan = overload::Plan {
        rounds,
        measured_over: Duration::from_secs(15),
        seed: 1,
    };
    let run = overload::run(plan, |load| eprintln!("{load:?}")).await?;
    println!("{}", run.summary());
    Ok(run.broken())
}

async fn all_rolling(rounds: usize) -> Result<Vec<String>> {
    let run = rolling::run(rolling::Plan {
        rounds,
        nodes_each: 2,
        grace: GRACE,
        terms: RECONNECTING,
    })
    .await?;
    println!("{}", run.summary());
    Ok(run.broken())
}

/// T12's lengths.
const OUTAGES_S: [u64; 3] = [1, 10, 60];

async fn all_etcd_outages(rounds: usize, seconds_max: usize) -> Result<Vec<String>> {
    let lengths = OUTAGES_S.into_iter().filter(|seconds| *seconds <= seconds_max as u64);
    let each = lengths.flat_map(|seconds| etcd_outages::How::ALL.map(|how| (how, Duration::from_secs(seconds))));
    let each: Vec<_> = each.collect();
    let plan = etcd_outages::Plan {
        outages: each.iter().cycle().take(each.len() * rounds).copied().collect(),
        terms: Terms {
            rate: FORTY_PERCENT,
            ..TERMS
        },
    };
    let run = etcd_outages::run(&plan, |outage| eprintln!("{outage:?}")).await?;
    println!("{}", run.summary());
    Ok(run.broken())
}
