//! `baton bench sweep`: the same traffic at several loads, and where the SLO stops holding.

mod plan;
mod report;

use std::path::{Path, PathBuf};

use clap::Args;
use tokio_util::sync::CancellationToken;
use workload::knee::{Knee, KneePlan, KneeSearch, Probe, held};
use workload::record::Run;

use super::arguments::{Judge, JudgeArgs, positive};
use super::interrupt::{is_cut, until_interrupted};
use super::load::plan::{LoadPlan, content_seed};
use super::measure::{measure, write_json};
use super::point::Point;
use super::server::ServerArgs;
use crate::exit::{Exit, WithExit as _};
use crate::terminal::say;
use plan::{Load, Setting};
use report::SweepReport;

const EXAMPLES: &str = "\
Examples:
  baton bench sweep                                    1, 5, 10 and 20 users, and where the bend is
  baton bench sweep --rates 1,2,4,8 --slo rag          requests a second, whatever the server does
  baton bench sweep --find-knee 2 --out sweep          the last rate at which the SLO holds, to 5 %; each run is kept
  baton bench sweep --random-input-len 128,512,2048    one user, three lengths of prompts
  baton bench sweep --dataset-path trace.jsonl --length-scale 32 --rates 1,2,4    the lengths and prefixes of a trace
  baton bench sweep --hypothesis 'prefill is the limit above 2 requests/s' --contract contract.toml

Exit status: 0; 3 when no load meets the contract (with --find-knee: when the knee does not); 5 when the client sent late, which
ends --find-knee; 1 or 4 when the server fails meanwhile (the points before are printed and kept); 130 after Ctrl-C.";

#[derive(Clone, Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct SweepArgs {
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    judge: JudgeArgs,
    /// Users of a closed loop: each sends its next request when its answer has ended [default: 1,5,10,20].
    #[arg(long, value_delimiter = ',', value_name = "N,..", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    users: Vec<u32>,
    /// Requests a second of an open loop, with Poisson arrivals.
    #[arg(long, value_delimiter = ',', value_name = "RATE,..", value_parser = positive, conflicts_with = "users")]
    rates: Vec<f64>,
    /// Look for the last rate at which the SLO holds, beginning here.
    #[arg(long, value_name = "RATE", value_parser = positive, conflicts_with_all = ["users", "rates"])]
    find_knee: Option<f64>,
    /// The share of requests that must meet both limits for the SLO to hold.
    #[arg(long, default_value_t = 0.99, value_name = "SHARE")]
    attainment: f64,
    /// Prompt tokens; several lengths are a knob of their own.
    #[arg(long, value_delimiter = ',', default_value = "256", value_name = "N,..", value_parser = clap::value_parser!(u32).range(1..))]
    random_input_len: Vec<u32>,
    /// Output tokens.
    #[arg(long, value_delimiter = ',', default_value = "64", value_name = "N,..", value_parser = clap::value_parser!(u32).range(1..))]
    random_output_len: Vec<u32>,
    /// Lengths vary evenly by this share, 0 to below 1.
    #[arg(long, default_value_t = 0.0, value_name = "SHARE")]
    random_range_ratio: f64,
    /// Take the requests from a recorded trace, as `bench run --dataset-name trace` does. Each load gives them its own times.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["random_input_len", "random_output_len", "random_range_ratio"])]
    dataset_path: Option<PathBuf>,
    /// Divides the lengths and blocks of the trace.
    #[arg(long, value_name = "N", requires = "dataset_path")]
    length_scale: Option<u32>,
    /// Shortens what does not fit the model's context.
    #[arg(long, value_name = "TOKENS", requires = "dataset_path")]
    context_len: Option<u32>,
    /// Requests of each run; of a trace, at most as many as it has. A rate gets more of them when they would take less than --seconds.
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    num_prompts: u32,
    /// The shortest run of a rate, whose first and last tenth are not measured [default: 10]. Only with --rates or --find-knee.
    #[arg(long, value_name = "SECONDS", value_parser = positive)]
    seconds: Option<f64>,
    /// 1 is a Poisson process, below 1 is burstier [default: 1]. Only with --rates or --find-knee: the requests of users have no times.
    #[arg(long, value_name = "SHAPE", value_parser = positive)]
    burstiness: Option<f64>,
    /// What you expect, stored with the result.
    #[arg(long, value_name = "TEXT")]
    hypothesis: Option<String>,
    /// Allow more than one knob with several values. The result does not say which of them mattered.
    #[arg(long)]
    force: bool,
    /// Keep `sweep.json` and the records of each run here.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &SweepArgs) -> anyhow::Result<Exit> {
    let judge = args.judge.read()?;
    check(args).exit(Exit::Usage)?;
    let sweep = until_interrupted(async |stop: CancellationToken| {
        let send = async |plan: LoadPlan| measure(&plan, &stop).await;
        match args.find_knee {
            Some(first) => find_knee(args, &judge, first, send).await,
            None => settings(args, &judge, send).await,
        }
    })?;
    let report = SweepReport::of(args, &judge, &sweep);
    // A file that cannot be written must not take what was measured with it.
    let written = args.out.as_deref().map(|folder| write(folder, &report, &sweep));
    report.print(args.json)?;
    written.transpose()?;
    let status = exit(&sweep, report.status());
    sweep.broken.map_or(Ok(status), Err)
}

/// # Errors
/// The folder or a file cannot be written.
fn write(folder: &Path, report: &SweepReport, sweep: &Sweep) -> anyhow::Result<()> {
    write_json(folder, "sweep.json", report)?;
    for (at, (_, run)) in sweep.points.iter().enumerate() {
        write_json(folder, &format!("point-{at:02}.json"), run)?;
    }
    Ok(())
}

fn exit(sweep: &Sweep, judged: Exit) -> Exit {
    match (sweep.is_cut, sweep.client_late_at) {
        (true, _) => Exit::Interrupted,
        (false, Some(_)) => Exit::NoVerdict,
        (false, None) => judged,
    }
}

fn check(args: &SweepArgs) -> anyhow::Result<()> {
    let shapes = args.random_input_len.len() * args.random_output_len.len();
    anyhow::ensure!(
        args.find_knee.is_none() || shapes == 1,
        "--find-knee looks at one shape: give one --random-input-len and one --random-output-len, and search each shape by itself"
    );
    let knobs = [
        ("--users", args.users.len()),
        ("--rates", args.rates.len()),
        ("--find-knee", usize::from(args.find_knee.is_some()) * 2),
        ("--random-input-len", args.random_input_len.len()),
        ("--random-output-len", args.random_output_len.len()),
    ];
    let turned: Vec<&str> = knobs
        .into_iter()
        .filter(|(_, count)| *count > 1)
        .map(|(name, _)| name)
        .collect();
    anyhow::ensure!(
        turned.len() < 2 || args.force,
        "{} change at once, so the result would not say which of them mattered; change one, or say --force",
        turned.join(" and ")
    );
    let has_rates = args.find_knee.is_some() || !args.rates.is_empty();
    for (flag, given) in [("--seconds", args.seconds), ("--burstiness", args.burstiness)] {
        anyhow::ensure!(
            has_rates || given.is_none(),
            "{flag} is for rates, and this sweep has users, who send a request when the answer before it has ended: leave it out, or give --rates or --find-knee"
        );
    }
    anyhow::ensure!(
        (0.0..=1.0).contains(&args.attainment),
        "--attainment is a share, 0 to 1"
    );
    anyhow::ensure!(
        (0.0..1.0).contains(&args.random_range_ratio),
        "--random-range-ratio is a share, 0 to below 1"
    );
    Ok(())
}

/// What was measured, in its order.
#[derive(Debug, Default)]
struct Sweep {
    points: Vec<(Point, Run)>,
    settings: Vec<Setting>,
    knee: Option<Knee>,
    /// The rate at which the client sent late, which ended the search for the knee: it would be the client's own.
    client_late_at: Option<f64>,
    /// Ctrl-C ended it.
    is_cut: bool,
    /// Why a later run could not be made, as when the server has died of its load. The points before it are kept.
    broken: Option<anyhow::Error>,
}

impl Sweep {
    /// `None`: it was cut short or could not be made, and this run does not count.
    ///
    /// # Errors
    /// The first run cannot be made.
    async fn add(
        &mut self,
        args: &SweepArgs,
        setting: Setting,
        judge: &Judge,
        send: &mut impl AsyncFnMut(LoadPlan) -> anyhow::Result<Run>,
    ) -> anyhow::Result<Option<&Point>> {
        let made = match setting.plan(args) {
            Ok(mut plan) => {
                plan.seed = content_seed(args.server.seed, self.points.len() as u64);
                send(plan).await
            }
            Err(error) => Err(error),
        };
        let run = match made {
            Ok(run) => run,
            Err(error) if self.points.is_empty() => return Err(error),
            Err(error) => {
                let words = format!("{} could not be measured, so the sweep ends there", setting.label(args));
                self.broken = Some(error.context(words));
                return Ok(None);
            }
        };
        if is_cut(&run) {
            self.is_cut = true;
            return Ok(None);
        }
        let point = Point::of(setting.label(args), &run, judge);
        say!(
            "{}: {:.0} % met the SLO",
            point.label,
            point.summary.attainment.both * 100.0
        );
        self.points.push((point, run));
        self.settings.push(setting);
        Ok(self.points.last().map(|(point, _)| point))
    }
}

/// Each setting once. Higher rates than one that is over-saturated are not tried: they show only longer queues.
async fn settings(
    args: &SweepArgs,
    judge: &Judge,
    mut send: impl AsyncFnMut(LoadPlan) -> anyhow::Result<Run>,
) -> anyhow::Result<Sweep> {
    let mut sweep = Sweep::default();
    for setting in Setting::all(args) {
        let is_over = sweep.points.iter().zip(&sweep.settings).any(|((point, _), before)| {
            point.over_saturation.is_some() && before.is_same_shape(&setting) && before.load.is_below(setting.load)
        });
        if is_over {
            say!(
                "{}: left out, because a lower rate is over-saturated",
                setting.label(args)
            );
            continue;
        }
        if sweep.add(args, setting, judge, &mut send).await?.is_none() {
            break;
        }
    }
    Ok(sweep)
}

/// A rate at which the client sends late ends the search. The points that were measured are kept.
async fn find_knee(
    args: &SweepArgs,
    judge: &Judge,
    first: f64,
    mut send: impl AsyncFnMut(LoadPlan) -> anyhow::Result<Run>,
) -> anyhow::Result<Sweep> {
    let mut sweep = Sweep::default();
    let mut search = KneeSearch::new(KneePlan::around(first));
    loop {
        let rate = match search.next() {
            Ok(rate) => rate,
            Err(knee) => {
                sweep.knee = Some(knee);
                return Ok(sweep);
            }
        };
        let setting = Setting {
            load: Load::Rate(rate),
            ..Setting::first(args)
        };
        let Some(point) = sweep.add(args, setting, judge, &mut send).await? else {
            return Ok(sweep);
        };
        if !point.summary.lag.is_valid {
            sweep.client_late_at = Some(rate);
            return Ok(sweep);
        }
        let held = held(&point.summary, args.attainment) && point.over_saturation.is_none();
        search.record(Probe { rate, held });
    }
}

#[cfg(test)]
#[path = "sweep_tests.rs"]
mod tests;
