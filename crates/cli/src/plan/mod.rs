//! `baton plan`: figures for planning a cluster. Each subcommand prints its inputs, the formula in words and the results.
//!
//! The formulas are in `crates/workload/src/plan/`. These files read flags and put the figures on a `sheet::Sheet`.

mod breakeven;
mod cost;
mod device;
mod kv;
mod model;
mod queues;
mod servers;
mod sheet;
mod times;
mod xpyd;

use clap::{Args, Subcommand};
use workload::plan::PlanError;

use crate::exit::{Exit, WithExit};
use crate::terminal::Terminal;
use sheet::Sheet;

const EXAMPLES: &str = "\
Examples:
  baton plan littles-law --rps 1000 --latency-ms 40
  baton plan instances --rps 1000 --service-ms 40 --slo-ms 400
  baton plan cost --instances 60 --price 1.69 --against-instances 40 --against-price 1.89
  baton plan prefill --params-billion 70 --prompt-tokens 512 --peak-dense-tflops 1979
  baton plan kv --model smollm2-135m --prompt-tokens 512,2048
  baton plan xpyd --trace trace.jsonl --prefill-us-per-token 60 --decode-us-per-token 400
  baton plan breakeven --kv-bytes-per-token 131072 --prefill-us-per-token 60 --step-ms 12 --itl-ms-max 50";

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct PlanArgs {
    #[command(subcommand)]
    what: Plan,
    /// One JSON object instead of text. Names of figures end in their units.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Plan {
    /// Requests in a system at once: rate times time (Little's law).
    LittlesLaw(queues::LittlesLawArgs),
    /// Replicas by the requests that each runs at once.
    Replicas(servers::ReplicasArgs),
    /// Servers under a ceiling of utilisation, and what waits in front of them.
    Instances(servers::InstancesArgs),
    /// What a stricter or looser limit of the response time costs in servers.
    Slo(servers::SloArgs),
    /// Where a measured tail breaks its limit, and where to add servers before that.
    Concurrency(queues::ConcurrencyArgs),
    /// Dollars for an hour and a month of 720 hours.
    Cost(cost::CostArgs),
    /// Operations and time of a prompt, and whether the weights fit.
    Prefill(device::PrefillArgs),
    /// Tokens a second that memory bandwidth allows.
    Decode(device::DecodeArgs),
    /// KV bytes of a token, and how long a prompt's KV takes over each link.
    Kv(kv::KvArgs),
    /// Prefill nodes and decode nodes for a load or a trace.
    Xpyd(xpyd::XpydArgs),
    /// From which prompt length and over which link disaggregation can pay.
    Breakeven(breakeven::BreakevenArgs),
}

pub fn run(args: &PlanArgs) -> anyhow::Result<Exit> {
    let sheet = sheet_of(&args.what).or_else(|error| match error.is::<PlanError>() {
        true => Err(error).exit(Exit::Usage),
        false => Err(error),
    })?;
    crate::stdout::print_result(&match args.json {
        true => sheet.json(),
        false => sheet.text(Terminal::stdout()),
    })?;
    Ok(Exit::Ok)
}

fn sheet_of(what: &Plan) -> anyhow::Result<Sheet> {
    match what {
        Plan::LittlesLaw(args) => args.sheet(),
        Plan::Replicas(args) => args.sheet(),
        Plan::Instances(args) => args.sheet(),
        Plan::Slo(args) => args.sheet(),
        Plan::Concurrency(args) => args.sheet(),
        Plan::Cost(args) => args.sheet(),
        Plan::Prefill(args) => args.sheet(),
        Plan::Decode(args) => args.sheet(),
        Plan::Kv(args) => args.sheet(),
        Plan::Xpyd(args) => args.sheet(),
        Plan::Breakeven(args) => args.sheet(),
    }
}

#[cfg(test)]
mod tests;
