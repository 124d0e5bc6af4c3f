//! `baton simulate`: a cluster in virtual time, of any size, with the product's own coordinator and scheduler.

mod cluster;
mod report;
mod traffic;

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context;
use clap::Args;
use simulator::costs::Costs;
use simulator::topology::SimulatedTopology;
use simulator::{Scenario, simulate};
use workload::comparison::Slo;
use workload::record::Run;
use workload::summary::Summary;

use crate::bench::arguments::positive;
use crate::exit::{Exit, WithExit as _};
use cluster::ClusterArgs;
use traffic::TrafficArgs;

const EXAMPLES: &str = "\
Examples:
  baton bench engine --threads 1 --cores 0,1 --neighbours 1 --out costs.json
  baton simulate --costs costs.json --topology 1p1d --prompt-tokens 512 --output-tokens 64 --rate 1.5 --requests 200
  baton simulate --costs costs.json --topology 2c --trace conversation_trace.jsonl --length-divisor 32 --rate-factor 0.1
  baton simulate --costs costs.json --topology 4p4d --shape short --rate 5 --fail decode-3@20s --out run.json
  baton simulate --costs h100.json --topology 100p100d --trace conversation_trace.jsonl --spread-steps 3s \\
      --max-model-len 131072 --kv-cache-memory 64GiB --max-num-batched-tokens 8192 --max-num-seqs 128

The same command gives the same figures, and the same bytes in files and with --json.
docs/how-to/simulate-a-cluster.md says what is simulated and what is not.";

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct SimulateArgs {
    /// What steps, messages and links cost: a file of `baton bench engine --out`, or one that was typed in.
    #[arg(long, value_name = "FILE")]
    costs: PathBuf,
    /// Nodes: 1p1d, 100p100d, 2c (co-located).
    #[arg(long, default_value = "1p1d")]
    topology: SimulatedTopology,
    #[command(flatten)]
    traffic: TrafficArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Of made traffic, of the variation of steps, and of ids.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Limit of the time to the first token, for goodput.
    #[arg(long, default_value_t = 2_000.0, value_name = "MS", value_parser = positive)]
    slo_ttft_ms: f64,
    /// Limit of the 99th percentile of a request's gaps, for goodput.
    #[arg(long, default_value_t = 200.0, value_name = "MS", value_parser = positive)]
    slo_itl_ms: f64,
    /// Write the run, with a record for each request, as JSON: reports read it as they read a measured run.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write a line for each request as CSV.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Print the figures as one JSON object.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &SimulateArgs) -> anyhow::Result<Exit> {
    let costs = costs(&args.costs).exit(Exit::Usage)?;
    let trace = args.traffic.trace(args.seed).exit(Exit::Usage)?;
    let (warm_up, cool_down) = args.traffic.left_out();
    let scenario = Scenario {
        name: format!("simulated {}", args.topology),
        topology: args.topology,
        nodes: args.cluster.nodes(costs.kv_bytes_per_token),
        cluster: args.cluster.policy(),
        interventions: args.cluster.interventions(),
        costs,
        trace,
        warm_up,
        cool_down,
        seed: args.seed,
    };
    let began = Instant::now();
    let outcome = simulate(&scenario).exit(Exit::Usage)?;
    let took = began.elapsed();
    // A file that cannot be written must not take what was simulated with it.
    let written = write_files(args, &outcome.run);
    let slo = Slo {
        name: "custom".to_owned(),
        ttft_ms_max: args.slo_ttft_ms,
        itl_ms_max: args.slo_itl_ms,
    };
    let summary = Summary::of(&outcome.run, &slo);
    let printed = match args.json {
        true => report::print_json(&scenario, (&outcome, &summary)),
        false => report::print(&scenario, (&outcome, &summary), took),
    };
    written?;
    printed?;
    Ok(Exit::Ok)
}

/// # Errors
/// A file cannot be written. The other one is.
fn write_files(args: &SimulateArgs, run: &Run) -> anyhow::Result<()> {
    let json = |path: &PathBuf| -> anyhow::Result<()> { write(path, &serde_json::to_vec(run)?) };
    let out = args.out.as_ref().map(json);
    let csv = args.csv.as_ref().map(|path| write(path, report::csv(run).as_bytes()));
    [out, csv].into_iter().flatten().collect()
}

/// A file of costs with all points of its fit has some 20 KiB.
const COSTS_BYTES_MAX: u64 = 1 << 20;

/// Reads and checks a file of costs.
pub(crate) fn costs(path: &Path) -> anyhow::Result<Costs> {
    let reading = || format!("cannot read {}", path.display());
    let mut text = String::new();
    let file = File::open(path).with_context(reading)?;
    file.take(COSTS_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .with_context(reading)?;
    anyhow::ensure!(
        text.len() as u64 <= COSTS_BYTES_MAX,
        "{} is no file of costs: it has more than {COSTS_BYTES_MAX} bytes",
        path.display()
    );
    Costs::from_json(&text).with_context(|| format!("cannot use {}", path.display()))
}

fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    std::fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::compare::test_kit;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: SimulateArgs,
    }

    #[test]
    fn a_file_that_cannot_be_written_takes_no_other_with_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let (out, csv) = (folder.path().join("missing/run.json"), folder.path().join("run.csv"));
        let files = [("--out", &out), ("--csv", &csv)];
        let files = files.map(|(flag, file)| [flag.to_owned(), file.display().to_string()]);
        let words = ["simulate", "--costs", "costs.json"].map(str::to_owned);
        let line = Line::try_parse_from(words.into_iter().chain(files.into_iter().flatten())).expect("usable words");
        let run = test_kit::run("a", vec![test_kit::record(0, &[20.0])]);
        assert!(write_files(&line.args, &run).is_err(), "a folder is missing");
        assert!(csv.is_file());
    }

    #[test]
    fn limits_of_goodput_are_above_zero() {
        let is_taken = |limit: &str| {
            let words = ["simulate", "--costs", "costs.json"]
                .into_iter()
                .chain(limit.split(' '));
            Line::try_parse_from(words).is_ok_and(|line| line.args.slo_ttft_ms > 0.0)
        };
        assert!(is_taken("--slo-ttft-ms 300") && is_taken("--slo-itl-ms 12.5"));
        for bad in ["--slo-ttft-ms 0", "--slo-itl-ms nan", "--slo-itl-ms=-5"] {
            assert!(!is_taken(bad), "{bad}");
        }
    }
}
