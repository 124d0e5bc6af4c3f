//! `baton bench engine`: how long this machine's engine takes for a step, as a function of what is in the step.
//!
//! The steps are those of the real scheduler and of the real engine, in this process and without a network. The fit is what
//! `baton simulate` computes with. With `--limits` it shows the engine's speed beside the machine's limits.

mod limits;
mod neighbour;
mod report;
mod rig;
mod speed;
mod sweep;

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::Args;
use engine::{EngineKind, EngineLimits, KeptWeights, KernelChoice, KvBacking, Numerics, OpenOptions, OpenedEngine};
use rustix::thread::{CpuSet, sched_setaffinity};
use service_runtime::config::ByteSize;
use simulator::costs::{Costs, HostCosts, LinkCosts, Overheads};

use crate::exit::{Exit, WithExit as _};
use crate::model::{resolve, with_exit};
use crate::terminal::say;
use rig::Rig;
use sweep::Sweep;

const EXAMPLES: &str = "\
Examples:
  baton bench engine --threads 1 --cores 0 --out costs.json
  baton bench engine --threads 1 --cores 0,1 --neighbours 1 --link transfer.json --out costs.json
  baton bench engine --quick --json
  baton bench engine --limits --threads 2 --repeats 5

The link comes from `baton bench transfer --json > transfer.json`, the overheads from benchmarks/simulator/overheads.";

#[derive(Clone, Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct EngineArgs {
    /// A GGUF file, a Hugging Face folder, or a name, as `baton up` takes it.
    #[arg(long, default_value = "smollm2-135m")]
    model: String,
    /// What runs the model.
    #[arg(long, value_enum, default_value = "cpu")]
    engine: EngineKind,
    /// Arithmetic of the CPU engine.
    #[arg(long, value_enum, default_value = "int8-blocks")]
    numerics: Numerics,
    /// Threads of the engine: as many as each node will have.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// Cores that the engine may use, the first --threads of them; neighbours get the next ones. Default: all.
    #[arg(long, value_delimiter = ',', value_name = "CORE,..")]
    cores: Vec<u32>,
    /// Also measure how much slower steps are while so many other nodes of this machine compute.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=7))]
    neighbours: u32,
    /// The nodes beside have the weights in memory each for itself, as processes that are started one by one. Nodes of one `baton up`
    /// share them.
    #[arg(long, requires = "neighbours")]
    own_weights: bool,
    /// Memory for KV blocks. Batches that do not fit are left out.
    #[arg(long, default_value = "512MiB")]
    kv_cache_memory: ByteSize,
    /// How often everything is measured; medians count.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,
    /// Once, with few kinds of steps: half a minute.
    #[arg(long)]
    quick: bool,
    /// Speed instead of costs: tokens a second for prompts, one stream and several, beside the least time that this machine could
    /// take by its arithmetic and its memory. Costs are not fitted.
    #[arg(long, conflicts_with_all = ["quick", "neighbours", "link", "overheads"])]
    limits: bool,
    /// Output of `baton bench transfer --json`: the best transport between two nodes of this machine becomes the link.
    #[arg(long, value_name = "FILE")]
    link: Option<PathBuf>,
    /// Output of benchmarks/simulator/overheads. Default: those of docs/measurements/simulator.md.
    #[arg(long, value_name = "FILE")]
    overheads: Option<PathBuf>,
    /// Write the costs to this file; with --limits, the speeds.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// For whoever has not measured: what `benchmarks/simulator/overheads` gave on the machine of docs/measurements/simulator.md.
const OVERHEADS: Overheads = Overheads {
    request_seconds: 0.000_22,
    prompt_token_seconds: 0.000_000_1,
    hop_seconds: 0.000_14,
    hop_prompt_token_seconds: 0.000_000_14,
    egress_seconds: 0.000_06,
    loop_seconds: 0.000_14,
    commit_seconds: 0.000_02,
    role_change_seconds: 0.5,
};

/// Shared memory between two nodes of one `baton up`, in direct mode, as docs/measurements/transfer.md has it: 10 GB/s, and half a
/// millisecond for the messages.
fn default_link() -> LinkCosts {
    LinkCosts {
        name: "shm-direct".to_owned(),
        latency_seconds: 0.000_5,
        bytes_per_second: 1e10,
        is_streamed: false,
    }
}

pub fn run(args: &EngineArgs) -> anyhow::Result<Exit> {
    if args.limits {
        pin(&args.cores, 0, args.threads).exit(Exit::Usage)?;
        return speed::run(args, &Opening::of(args)?);
    }
    let overheads = match &args.overheads {
        Some(path) => read_overheads(path).exit(Exit::Usage)?,
        None => OVERHEADS,
    };
    let link = match &args.link {
        Some(path) => read_link(path).exit(Exit::Usage)?,
        None => default_link(),
    };
    let opening = Opening::of(args)?;
    pin(&args.cores, 0, args.threads).exit(Exit::Usage)?;
    let (mut rig, model_name) = opening.open()?;
    let sweep = Sweep::new(args.quick, args.repeats);
    say!(
        "measuring {model_name}: {} kinds of steps, {} times",
        sweep.kinds(),
        sweep.repeats()
    );
    let samples = sweep.measure(&mut rig)?;
    let slowdown = neighbour::slowdown(&opening)?;
    let measured = samples.medians();
    let (mut step, fit) = simulator::fit::fit(&measured).context("the steps cannot be described")?;
    step.variation = samples.variation();
    // Of prompts it is not measured. `benchmarks/simulator/serving` fits it; until then it is at most this.
    step.prompt_variation = step.variation;
    let costs = Costs {
        name: format!("{model_name}, {} threads, {}", args.threads, report::machine()),
        origin: origin(args),
        step,
        overheads,
        link,
        host: HostCosts {
            nodes_per_host: args.neighbours + 1,
            slowdown,
        },
        kv_bytes_per_token: rig.kv_bytes_per_token(),
        fit: Some(fit),
        accuracy: None,
    };
    costs.check()?;
    let json = serde_json::to_string_pretty(&costs)?;
    // A file that cannot be written must not take what was measured with it.
    let written = write(args, &json);
    let printed = report::print(&costs, args.json.then_some(json.as_str()));
    written?;
    printed?;
    Ok(Exit::Ok)
}

/// # Errors
/// The file of `--out` cannot be written.
fn write(args: &EngineArgs, json: &str) -> anyhow::Result<()> {
    let Some(path) = &args.out else {
        return Ok(());
    };
    std::fs::write(path, format!("{json}\n")).with_context(|| format!("cannot write {}", path.display()))
}

/// The command, and what it did not measure.
fn origin(args: &EngineArgs) -> String {
    let mut origin = std::env::args().collect::<Vec<_>>().join(" ");
    if args.overheads.is_none() {
        origin += "; overheads: those of docs/measurements/simulator.md";
    }
    if args.link.is_none() {
        origin += "; link: that of docs/measurements/transfer.md";
    }
    origin
}

/// # Errors
/// The file cannot be read, or is something else.
fn read_overheads(path: &Path) -> anyhow::Result<Overheads> {
    serde_json::from_str(&read(path)?)
        .with_context(|| format!("{} is no output of benchmarks/simulator/overheads", path.display()))
}

/// # Errors
/// As [`read_overheads`].
fn read_link(path: &Path) -> anyhow::Result<LinkCosts> {
    report::link_of(&read(path)?).with_context(|| format!("cannot use {}", path.display()))
}

fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Puts this thread, and those that it starts from now on, on its share of the cores.
fn pin(cores: &[u32], number: u32, threads: u32) -> anyhow::Result<()> {
    if cores.is_empty() {
        return Ok(());
    }
    let first = (number * threads) as usize % cores.len();
    let own = cores.iter().cycle().skip(first).take(threads as usize);
    let mut set = CpuSet::new();
    for core in own.clone().map(|core| *core as usize) {
        ensure!(core < CpuSet::MAX_CPU, "there is no core {core}");
        set.set(core);
    }
    sched_setaffinity(None, &set).with_context(|| format!("cannot use the cores {:?}", own.collect::<Vec<_>>()))
}

/// What opens one engine after the other. Those of one opening share the packed weights.
#[derive(Debug)]
struct Opening<'a> {
    args: &'a EngineArgs,
    path: PathBuf,
    kept: KeptWeights,
}

impl<'a> Opening<'a> {
    fn of(args: &'a EngineArgs) -> anyhow::Result<Self> {
        Ok(Self {
            path: resolve(&args.model).map_err(with_exit)?.path,
            kept: KeptWeights::default(),
            args,
        })
    }

    /// The same with the weights at another place in memory.
    fn afresh(&self) -> Self {
        Self {
            args: self.args,
            path: self.path.clone(),
            kept: KeptWeights::default(),
        }
    }

    fn open(&self) -> anyhow::Result<(Rig, String)> {
        let OpenedEngine { engine, model_name, .. } = engine::open_engine(OpenOptions {
            kind: self.args.engine,
            model: Some(&self.path),
            numerics: self.args.numerics,
            kernel: KernelChoice::Auto,
            threads: self.args.threads as usize,
            block_tokens: engine::BLOCK_TOKENS,
            kv_bytes: self.args.kv_cache_memory.bytes(),
            kv_backing: KvBacking::Private,
            limits: EngineLimits {
                max_batch_tokens: sweep::CHUNK_MAX,
                max_sequences: speed::STREAMS_MAX,
            },
            protocol_version: 0,
            kept_weights: self.kept.clone(),
            progress: None,
        })?;
        Ok((Rig::new(engine), model_name))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: EngineArgs,
    }

    #[test]
    fn a_name_that_no_model_has_is_a_usage_error() {
        let line = Line::try_parse_from(["engine", "--model", "gpt-17"]).expect("flags");
        let error = Opening::of(&line.args).expect_err("no such model");
        assert_eq!(crate::exit::of(&error), Exit::Usage, "{error:#}");
    }

    #[test]
    fn a_core_that_is_not_there_is_a_usage_error() {
        let line = Line::try_parse_from(["engine", "--limits", "--cores", "100000"]).expect("flags");
        let error = run(&line.args).expect_err("no such core");
        assert_eq!(crate::exit::of(&error), Exit::Usage, "{error:#}");
    }

    #[test]
    fn a_file_that_is_not_there_or_is_something_else_is_a_usage_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let other = folder.path().join("other.json");
        std::fs::write(&other, "something else").expect("a file");
        for flag in ["--link", "--overheads"] {
            for file in [&other, &folder.path().join("none.json")] {
                let words = ["engine", flag, file.to_str().expect("text")];
                let line = Line::try_parse_from(words).expect("flags");
                let error = run(&line.args).expect_err("no such costs");
                assert_eq!(crate::exit::of(&error), Exit::Usage, "{error:#}");
            }
        }
    }
}
