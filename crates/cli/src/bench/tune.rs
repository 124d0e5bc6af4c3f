//! `baton bench tune`: tries the settings of a cluster, one at a time, each on a fresh cluster of this machine.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use serde::Serialize;
use tokio_util::sync::CancellationToken;
use workload::arrivals::Arrivals;
use workload::comparison::{Slo, TuningPoint};
use workload::record::Run;
use workload::shapes::{Length, Mix};
use workload::summary::{Lag, Summary};

use super::arguments::{SloArg, positive};
use super::interrupt::{is_cut, until_interrupted};
use super::load::plan::LoadPlan;
use super::measure::{leave_out_edges, measure, write_json};
use super::server::WARM_UP_REQUESTS;
use crate::exit::{Exit, WithExit as _};
use crate::local_cluster::{ClusterSettings, LocalCluster, LocalClusterOptions};
use crate::model::{resolve, with_exit};
use crate::observe::table::{Cell, Table};
use crate::stdout::print_result;
use crate::terminal::{Paint, Terminal, say};
use crate::topology::Topology;

const EXAMPLES: &str = "\
Examples:
  baton bench tune --rate 4                            step budget and sequences of 1p1d with smollm2-135m
  baton bench tune --topology 2c --rate 4 --try-max-num-batched-tokens 64,128,256,512
  baton bench tune --engine stand-in --rate 20 --out tuning
First each value of max_num_batched_tokens is tried, with mixed_step_tokens the same, then, with the best of them, each value of
max_num_seqs, and then each value of itl_target_ms where nodes compute prompts and decode. A point is better when its goodput is more than 5 % higher; else the one
whose p99s are farther below their limits. Rejected points are kept.";

/// Goodputs that differ by less are equal. One request more or less is as much in a short run.
const EQUAL_SHARE: f64 = 0.05;
/// As the help of --try-itl-target-ms has it.
const ITL_TARGETS_MS_DEFAULT: [u32; 2] = [40, 80];
/// What nodes take at least.
const MIXED_STEP_TOKENS_MIN: u32 = 16;
const STOP_WITHIN: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct TuneArgs {
    #[arg(long, default_value = "1p1d", value_name = "NpMd|Nc")]
    topology: Topology,
    /// As `baton up` takes it.
    #[arg(long, default_value = "smollm2-135m", value_name = "PATH|NAME")]
    model: String,
    #[command(flatten)]
    settings: ClusterSettings,
    #[arg(long, value_delimiter = ',', default_value = "64,128,256,512", value_name = "N,..", value_parser = clap::value_parser!(u32).range(1..))]
    try_max_num_batched_tokens: Vec<u32>,
    #[arg(long, value_delimiter = ',', default_value = "4,8,16", value_name = "N,..", value_parser = clap::value_parser!(u32).range(1..))]
    try_max_num_seqs: Vec<u32>,
    /// Only where nodes compute prompts and decode (Nc) [default: 40,80]: on a decode node of its own, no prompt fills a step.
    #[arg(long, value_delimiter = ',', value_name = "MS,..", value_parser = clap::value_parser!(u32).range(1..=60_000))]
    try_itl_target_ms: Vec<u32>,
    /// Requests a second that are offered, with Poisson arrivals.
    #[arg(long, value_name = "RATE", value_parser = positive)]
    rate: f64,
    #[arg(long, default_value_t = 30.0, value_name = "SECONDS", value_parser = positive)]
    seconds: f64,
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    random_input_len: u32,
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    random_output_len: u32,
    #[arg(long, default_value = "chat", value_name = "NAME|TTFT:ITL")]
    slo: SloArg,
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
    /// Keep `tuning.json` here.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Knobs {
    max_num_batched_tokens: Option<u32>,
    /// Tried together with the step budget.
    mixed_step_tokens: Option<u32>,
    max_num_seqs: Option<u32>,
    itl_target_ms: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
enum Knob {
    MaxNumBatchedTokens,
    MaxNumSeqs,
    ItlTargetMs,
}

impl Knobs {
    fn of(settings: &ClusterSettings) -> Self {
        Self {
            max_num_batched_tokens: settings.max_num_batched_tokens,
            mixed_step_tokens: settings.mixed_step_tokens,
            max_num_seqs: settings.max_num_seqs,
            itl_target_ms: settings.itl_target_ms,
        }
    }

    fn with(mut self, knob: Knob, value: u32) -> Self {
        let turned = match knob {
            Knob::MaxNumBatchedTokens => {
                self.mixed_step_tokens = Some(value.max(MIXED_STEP_TOKENS_MIN));
                &mut self.max_num_batched_tokens
            }
            Knob::MaxNumSeqs => &mut self.max_num_seqs,
            Knob::ItlTargetMs => &mut self.itl_target_ms,
        };
        *turned = Some(value);
        self
    }

    /// Those that are set, by the names of the nodes' settings.
    fn settings(self) -> BTreeMap<String, serde_json::Value> {
        let settings = [
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("mixed_step_tokens", self.mixed_step_tokens),
            ("max_num_seqs", self.max_num_seqs),
            ("itl_target_ms", self.itl_target_ms),
        ];
        let set = settings
            .into_iter()
            .filter_map(|(name, value)| Some((name.to_owned(), value?.into())));
        set.collect()
    }
}

#[derive(Clone, Debug, Serialize)]
struct Tuning {
    topology: String,
    rate: f64,
    slo: Slo,
    points: Vec<TuningPoint>,
    left_out: Vec<LeftOut>,
}

/// Settings that could not be measured.
#[derive(Clone, Debug, Serialize)]
struct LeftOut {
    settings: BTreeMap<String, serde_json::Value>,
    why: String,
}

#[derive(Debug)]
struct Tuned {
    points: Vec<TuningPoint>,
    left_out: Vec<LeftOut>,
    /// False: Ctrl-C ended it.
    is_whole: bool,
}

pub fn run(args: &TuneArgs) -> anyhow::Result<Exit> {
    check(args).exit(Exit::Usage)?;
    let model = model_of(args)?;
    let executable = std::env::current_exe().context("cannot find this program's own file to start the nodes from")?;
    let options = LocalClusterOptions::new(executable, args.topology, model);
    options
        .check_memory()
        .with_context(|| format!("{} of {} does not fit this machine", args.topology, args.model))?;
    let tuned = until_interrupted(async |stop: CancellationToken| {
        let measured = async |knobs: Knobs| one(args, options.clone(), knobs, &stop).await;
        tune(args, measured).await
    })?;
    let tuning = Tuning {
        topology: args.topology.to_string(),
        rate: args.rate,
        slo: args.slo.0.clone(),
        points: tuned.points,
        left_out: tuned.left_out,
    };
    let out = args.out.as_deref();
    let written = out.map(|folder| write_json(folder, "tuning.json", &tuning));
    print_result(&match args.json {
        true => format!("{}\n", serde_json::to_string_pretty(&tuning)?),
        false => text(&tuning, Terminal::stdout()),
    })?;
    // A file that cannot be written must not take what was measured with it.
    written.transpose()?;
    Ok(match tuning.points.iter().any(|point| point.is_chosen) {
        _ if !tuned.is_whole => Exit::Interrupted,
        true => Exit::Ok,
        false => Exit::NoVerdict,
    })
}

/// Targets that no point would have would be passed over.
fn check(args: &TuneArgs) -> anyhow::Result<()> {
    anyhow::ensure!(
        args.try_itl_target_ms.is_empty() || matches!(args.topology, Topology::CoLocated { .. }),
        "--try-itl-target-ms is for nodes that compute prompts and decode, and each node of {} does one of the two: leave it out, or give --topology 2c",
        args.topology
    );
    Ok(())
}

fn model_of(args: &TuneArgs) -> anyhow::Result<PathBuf> {
    let model = resolve(&args.model).map_err(with_exit)?;
    Ok(model.path)
}

/// One knob after the other. The best value of the first stays while the second is turned.
///
/// # Errors
/// The first point cannot be measured.
async fn tune(
    args: &TuneArgs,
    mut measured: impl AsyncFnMut(Knobs) -> anyhow::Result<Option<Run>>,
) -> anyhow::Result<Tuned> {
    let slo = &args.slo.0;
    let mut points: Vec<Tried> = Vec::new();
    let mut left_out = Vec::new();
    let start = Knobs::of(&args.settings);
    let mut is_whole = true;
    let targets: &[u32] = match (args.topology, args.try_itl_target_ms.as_slice()) {
        (Topology::Disaggregated { .. }, _) => &[],
        (Topology::CoLocated { .. }, []) => &ITL_TARGETS_MS_DEFAULT,
        (Topology::CoLocated { .. }, given) => given,
    };
    'knobs: for (knob, values) in [
        (Knob::MaxNumBatchedTokens, args.try_max_num_batched_tokens.as_slice()),
        (Knob::MaxNumSeqs, &args.try_max_num_seqs),
        (Knob::ItlTargetMs, targets),
    ] {
        let from = best(&points, slo).map_or(start, |at| points[at].knobs);
        for value in values.iter().copied() {
            let knobs = from.with(knob, value);
            if points.iter().any(|before| before.knobs == knobs) {
                continue;
            }
            match measured(knobs).await {
                Ok(Some(run)) => points.push(Tried::of(knobs, &run, slo)),
                Ok(None) => {
                    is_whole = false;
                    break 'knobs;
                }
                Err(error) if points.is_empty() => return Err(error),
                // As when the nodes refuse a value. The points before it took minutes each.
                Err(error) => left_out.push(LeftOut::told(knobs, &error)),
            }
        }
    }
    let chosen = best(&points, slo);
    let points = points.into_iter().enumerate().map(|(at, tried)| TuningPoint {
        is_chosen: Some(at) == chosen,
        ..tried.point
    });
    Ok(Tuned {
        points: points.collect(),
        left_out,
        is_whole,
    })
}

impl LeftOut {
    fn told(knobs: Knobs, error: &anyhow::Error) -> Self {
        let left_out = Self {
            settings: knobs.settings(),
            why: format!("{error:#}"),
        };
        say!("{left_out}");
        left_out
    }
}

impl std::fmt::Display for LeftOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} is left out: {}", words(&self.settings), self.why)
    }
}

fn point(knobs: Knobs, run: &Run, slo: &Slo) -> TuningPoint {
    let summary = Summary::of(run, slo);
    TuningPoint {
        settings: knobs.settings(),
        goodput: summary.goodput_per_s,
        // Nothing was answered, which the goodput of 0 tells. JSON has no infinity.
        ttft_ms_p99: summary.ttft_ms.map_or(0.0, |ttft| ttft.p99),
        itl_ms_p99: summary.itl_ms.map_or(0.0, |itl| itl.p99),
        is_chosen: false,
    }
}

/// One point as it was measured.
struct Tried {
    knobs: Knobs,
    point: TuningPoint,
    /// The run says nothing about the nodes then.
    is_client_late: bool,
}

impl Tried {
    fn of(knobs: Knobs, run: &Run, slo: &Slo) -> Self {
        let point = point(knobs, run, slo);
        let is_client_late = !Lag::of(run).is_valid;
        let late = if is_client_late {
            "; the client was late, so this point is not chosen"
        } else {
            ""
        };
        say!(
            "{}: goodput {:.2} requests/s{late}",
            words(&point.settings),
            point.goodput
        );
        Self {
            knobs,
            point,
            is_client_late,
        }
    }

    /// The client was on time, and something was answered.
    fn is_evidence(&self) -> bool {
        let [ttft, _] = self.point.p99s_ms();
        !self.is_client_late && ttft.is_some()
    }
}

/// The highest goodput; among those that are about as high, the one whose worse p99 is farthest below its limit. `None`: at every point the
/// client was late, or nothing was answered.
fn best(points: &[Tried], slo: &Slo) -> Option<usize> {
    let known = || points.iter().enumerate().filter(|(_, tried)| tried.is_evidence());
    let highest = known().map(|(_, tried)| tried.point.goodput).fold(0.0, f64::max);
    let strain = |point: &TuningPoint| (point.ttft_ms_p99 / slo.ttft_ms_max).max(point.itl_ms_p99 / slo.itl_ms_max);
    let near = known().filter(|(_, tried)| tried.point.goodput >= highest * (1.0 - EQUAL_SHARE));
    near.min_by(|a, b| strain(&a.1.point).total_cmp(&strain(&b.1.point)))
        .map(|(at, _)| at)
}

/// A fresh cluster with these settings, its load, and away with it. `None`: Ctrl-C cut it short.
async fn one(
    args: &TuneArgs,
    mut options: LocalClusterOptions,
    knobs: Knobs,
    stop: &CancellationToken,
) -> anyhow::Result<Option<Run>> {
    options.settings = ClusterSettings {
        max_num_batched_tokens: knobs.max_num_batched_tokens,
        mixed_step_tokens: knobs.mixed_step_tokens,
        max_num_seqs: knobs.max_num_seqs,
        itl_target_ms: knobs.itl_target_ms,
        ..args.settings.clone()
    };
    let started = tokio::select! {
        started = LocalCluster::start(options) => started,
        () = stop.cancelled() => return Ok(None),
    };
    let cluster = started.with_context(|| format!("a cluster with {knobs:?} does not start"))?;
    let mut plan = plan(args, cluster.base_url())?;
    plan.server.ca = cluster.api_ca();
    plan.server.pids = cluster
        .processes()
        .into_iter()
        .map(|process| (process.name, process.pid))
        .collect();
    let run = measure(&plan, stop).await;
    cluster.stop(STOP_WITHIN).await;
    let run = run?;
    Ok((!is_cut(&run)).then_some(run))
}

fn plan(args: &TuneArgs, url: &str) -> anyhow::Result<LoadPlan> {
    let requests = (args.rate * args.seconds).ceil().clamp(1.0, 1e6) as usize;
    let mix = Mix::one(
        Length::exactly(args.random_input_len),
        Length::exactly(args.random_output_len),
    );
    let trace = mix.trace(requests, args.seed).exit(Exit::Usage)?;
    let trace = Arrivals::poisson(args.rate).apply(trace, args.seed).exit(Exit::Usage)?;
    let mut plan = LoadPlan::new(url, trace);
    plan.seed = args.seed;
    plan.warm_up_requests = WARM_UP_REQUESTS;
    leave_out_edges(&mut plan, args.rate)?;
    Ok(plan)
}

fn words(settings: &BTreeMap<String, serde_json::Value>) -> String {
    let words: Vec<String> = settings.iter().map(|(name, value)| format!("{name} {value}")).collect();
    words.join(", ")
}

fn text(tuning: &Tuning, terminal: Terminal) -> String {
    let time = |ms: Option<f64>| ms.map_or("-".to_owned(), |ms| format!("{ms:.1}"));
    let mut table = Table::new(&["settings", ">goodput/s", ">TTFT p99 ms", ">ITL p99 ms", ""]);
    for point in &tuning.points {
        let paint = if point.is_chosen { Paint::Good } else { Paint::Dim };
        let [ttft, itl] = point.p99s_ms().map(time);
        table.row(vec![
            Cell::new(words(&point.settings)).paint(paint),
            format!("{:.2}", point.goodput).into(),
            ttft.into(),
            itl.into(),
            Cell::new(if point.is_chosen { "<- chosen" } else { "" }).paint(paint),
        ]);
    }
    let offered = format!(
        "{} at {} requests/s offered, SLO {}\n",
        tuning.topology, tuning.rate, tuning.slo.name
    );
    let none = match tuning.points.is_empty() || tuning.points.iter().any(|point| point.is_chosen) {
        true => "",
        false => {
            "No point is chosen: at each of them the client was late, or nothing was answered. Give the client a core of its own, or a lower rate.\n"
        }
    };
    let left_out = tuning.left_out.iter().map(|left_out| format!("{left_out}\n"));
    table.render(terminal) + &left_out.collect::<String>() + &offered + none
}

#[cfg(test)]
#[path = "tune_tests.rs"]
mod tests;
