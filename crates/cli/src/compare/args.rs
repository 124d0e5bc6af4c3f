//! The command line of `baton compare`.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use workload::comparison::{ArmKind, Slo};
use workload::verdict::is_same_load;

use super::traffic::{Fit, ShapeName, Traffic};
use crate::bench::arguments::positive;
use crate::exit::{Exit, ExitError};
use crate::http::TrustArgs;

const EXAMPLES: &str = "\
Examples:
  baton compare --quick                                    conversations that it makes itself, 15 minutes in all
  baton compare --quick --traces traces                    the Azure conversation trace, which you have fetched
  baton compare --quick --shape long-beside-streams --out report
  baton compare --shape short --rates 2,4,8 --run-seconds 120 --repeats 5
  baton compare --quick --shape short --plan-only          what would run, and how long it takes
  baton compare --quick --shape short --save-tuning tuning.json
                                                           tune once,
  baton compare --quick --shape short --tuning tuning.json use it again on the same machine with the same model
  baton compare --quick --shape short --arms co-located,co-located
                                                           A/A: two equal arms must show no difference
  baton compare --arm split=http://a:8000 --arm whole=http://b:8000 --facts facts.toml --rates 4,8
                                                           clusters that run already

Exit status: 0 whatever the verdict is, also for \"do not disaggregate\"; 5 when there is no verdict, because the comparison is
incomplete or a field of the fairness list is missing; 130 after Ctrl-C (what was measured is written, marked incomplete).";

/// What `--quick` and a Helm Job have time for.
const QUICK: Duration = Duration::from_secs(15 * 60);

#[derive(Clone, Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct CompareArgs {
    /// Shapes of traffic [default: conversations; with --traces: azure-conversation; with --trace: its file alone].
    #[arg(long, value_enum, value_delimiter = ',', value_name = "SHAPE,..")]
    pub(super) shape: Vec<ShapeName>,
    /// Also, or only, the requests of this trace file: Mooncake JSONL, Azure CSV or baton's own format.
    #[arg(long, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,
    /// Divide the lengths of --trace by this.
    #[arg(long, default_value_t = 1, value_name = "N", requires = "trace", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(super) divide_lengths: u32,
    /// The folder with `azure2023/` and `mooncake/`: public traces, which you fetch
    /// (docs/how-to/compare-with-co-located-serving.md).
    #[arg(long, env = "BATON_TRACES", value_name = "DIR")]
    pub(super) traces: Option<PathBuf>,
    /// Arms of this machine. The first one is the baseline; the same arm twice is an A/A comparison. [default: co-located,
    /// disaggregated, conditional; long-beside-streams also has no-chunking]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "ARM,..")]
    pub(super) arms: Vec<ArmName>,
    /// End within 15 minutes: runs become as short as that asks for.
    #[arg(long)]
    pub(super) quick: bool,
    /// End within so many minutes.
    #[arg(long, value_name = "MINUTES", value_parser = clap::value_parser!(u64).range(1..=1440))]
    pub(super) time_limit: Option<u64>,
    /// Seconds of load in each measured run, at most.
    #[arg(long, default_value_t = 60, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(super) run_seconds: u64,
    /// Runs of each arm at each load. Fewer than 3 give no verdict.
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(super) repeats: u32,
    /// Loads, in requests a second [default: the knee, the highest rate at which nine of ten requests of a co-located cluster are
    /// good, and half of it].
    #[arg(long, value_delimiter = ',', value_name = "RATE,..", value_parser = positive)]
    pub(super) rates: Vec<f64>,
    /// When a request is good: first token and p99 of its own gaps within so many milliseconds [default: 1000:100; 2000:100 for
    /// traces; 4000:100 with long-beside-streams]
    #[arg(long, value_name = "TTFT:ITL")]
    slo: Option<SloLimits>,
    /// Use the sweep that --save-tuning has stored.
    #[arg(long, value_name = "FILE", conflicts_with = "save_tuning")]
    pub(super) tuning: Option<PathBuf>,
    /// Store the sweep that tuned the arms.
    #[arg(long, value_name = "FILE")]
    pub(super) save_tuning: Option<PathBuf>,
    /// Leave every arm at the nodes' defaults, for a first look. There is no verdict then: an arm may lose by a bad setting.
    #[arg(long, conflicts_with_all = ["tuning", "save_tuning"])]
    pub(super) untuned: bool,
    /// Print what would run and how long it takes. Nothing is run, and no model is fetched.
    #[arg(long)]
    pub(super) plan_only: bool,
    /// Write report.html, report.md, report.csv and report.json into this folder.
    #[arg(long, value_name = "DIR")]
    pub(super) out: Option<PathBuf>,
    /// Write a decision record: accepted, rejected, percentiles, cost, why it stopped.
    #[arg(long, value_name = "FILE")]
    pub(super) record: Option<PathBuf>,
    /// What you expect, written down before the first run.
    #[arg(long, value_name = "TEXT")]
    pub(super) hypothesis: Option<String>,
    /// Lengths, arrivals and prompts follow from it.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(super) seed: u64,
    /// As for `baton up`. With --arm: the name to ask for [default: the first that the server lists].
    #[arg(long, value_name = "PATH|NAME")]
    pub(super) model: Option<String>,
    /// As for `baton up`: cpu or stand-in.
    #[arg(long, value_name = "NAME")]
    pub(super) engine: Option<String>,
    /// Longest prompt and answer together, in tokens; longer requests of a trace are shortened.
    #[arg(long, default_value_t = 2048, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(64..))]
    pub(super) max_model_len: u32,
    /// Cores of the nodes of each arm. Client and coordinator have the others, or share all if there are no others [default: all;
    /// on a machine with 4 or more, all but one].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) node_cores: Option<u32>,
    /// A cluster that runs already. Give two or more; nothing is started.
    #[arg(long, value_name = "NAME=URL", requires = "facts", conflicts_with_all = ["arms", "tuning", "save_tuning", "untuned", "engine", "node_cores"])]
    pub(super) arm: Vec<NamedUrl>,
    /// What those clusters have: cores, GPUs, memory, price (TOML; docs/how-to/compare-with-co-located-serving.md).
    #[arg(long, value_name = "FILE", requires = "arm")]
    pub(super) facts: Option<PathBuf>,
    /// Key of the servers given with --arm.
    #[arg(long, env = "BATON_API_KEY", value_name = "KEY", hide_env_values = true)]
    pub(super) api_key: Option<String>,
    #[command(flatten)]
    pub(super) trust: TrustArgs,
}

/// An arm of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum ArmName {
    /// Every node prefills and decodes; tuned.
    CoLocated,
    /// The same without chunks: a prompt is computed in one step. Not tuned; it shows what chunking is worth.
    NoChunking,
    /// One prefill and one decode node; tuned.
    Disaggregated,
    /// The same, but short prompts are computed on the decode node; tuned.
    Conditional,
}

impl ArmName {
    pub fn name(self) -> &'static str {
        match self {
            Self::CoLocated => "co-located",
            Self::NoChunking => "no-chunking",
            Self::Disaggregated => "disaggregated",
            Self::Conditional => "conditional",
        }
    }

    /// The kind of arm that its settings come from.
    pub fn kind(self) -> ArmKind {
        match self {
            Self::CoLocated | Self::NoChunking => ArmKind::CoLocated,
            Self::Disaggregated => ArmKind::Disaggregated,
            Self::Conditional => ArmKind::Conditional,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NamedUrl {
    pub name: String,
    pub url: String,
}

impl FromStr for NamedUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('=') {
            Some((name, url)) if !name.is_empty() && url.starts_with("http") => Ok(Self {
                name: name.to_owned(),
                url: url.to_owned(),
            }),
            _ => Err("write NAME=URL, such as split=http://10.0.0.5:8000".to_owned()),
        }
    }
}

/// `1000:100`
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SloLimits {
    ttft_ms_max: f64,
    itl_ms_max: f64,
}

impl FromStr for SloLimits {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let limits = text
            .split_once(':')
            .and_then(|(ttft, itl)| Some((positive(ttft).ok()?, positive(itl).ok()?)));
        let (ttft_ms_max, itl_ms_max) = limits.ok_or("write two numbers of milliseconds, such as 1000:100")?;
        Ok(Self {
            ttft_ms_max,
            itl_ms_max,
        })
    }
}

/// Ten tokens a second are faster than most people read.
const ITL_MS_MAX: f64 = 100.0;
/// The longest prompts of a divided public trace take one core about a second on an idle node.
const TTFT_MS_MAX_OF_TRACES: f64 = 2000.0;

impl CompareArgs {
    /// The limits that were given, or those of the shape with the longest prompts.
    pub(super) fn slo(&self) -> Slo {
        let own = self.shapes().into_iter().map(|shape| match shape {
            ShapeName::LongBesideStreams => 4000.0,
            ShapeName::AzureConversation | ShapeName::Mooncake | ShapeName::All => TTFT_MS_MAX_OF_TRACES,
            ShapeName::Short | ShapeName::Conversations => 1000.0,
        });
        let traces = self.trace.as_ref().map(|_| TTFT_MS_MAX_OF_TRACES);
        let limits = self.slo.unwrap_or(SloLimits {
            ttft_ms_max: own.chain(traces).fold(0.0, f64::max),
            itl_ms_max: ITL_MS_MAX,
        });
        Slo {
            name: "custom".to_owned(),
            ttft_ms_max: limits.ttft_ms_max,
            itl_ms_max: limits.itl_ms_max,
        }
    }

    pub(super) fn limit(&self) -> Option<Duration> {
        let minutes = self.time_limit.map(|minutes| Duration::from_secs(minutes * 60));
        minutes.or(self.quick.then_some(QUICK))
    }

    pub(super) fn run_max(&self) -> Duration {
        Duration::from_secs(self.run_seconds)
    }

    /// The shapes that were asked for, each once.
    pub(super) fn shapes(&self) -> Vec<ShapeName> {
        let asked = match (self.shape.as_slice(), &self.trace) {
            ([], None) if self.traces.is_some() => vec![ShapeName::AzureConversation],
            // Who has only the program has no trace.
            ([], None) => vec![ShapeName::Conversations],
            (shapes, _) if shapes.contains(&ShapeName::All) => ShapeName::EVERY.to_vec(),
            (shapes, _) => shapes.to_vec(),
        };
        let mut each = Vec::new();
        for shape in asked {
            if !each.contains(&shape) {
                each.push(shape);
            }
        }
        each
    }

    /// Where nobody has named traffic: what is taken, and how to get something else.
    pub(super) fn words_on_default(&self) -> Option<&'static str> {
        let is_named = !self.shape.is_empty() || self.trace.is_some() || self.traces.is_some();
        (!is_named).then_some(
            "the traffic is conversations that this program makes; --traces takes the Azure conversation trace instead, --trace one of \
             your own, --shape other made traffic",
        )
    }

    /// What is to be sent.
    ///
    /// # Errors
    /// A trace file is not there or is none, or two of the rates are so near that they would count as one load.
    pub(super) fn traffic(&self) -> anyhow::Result<Vec<Traffic>> {
        let mut rates = self.rates.clone();
        rates.sort_by(f64::total_cmp);
        let near = rates.windows(2).find(|pair| is_same_load(pair[0], pair[1]));
        if let Some(pair) = near {
            let error = anyhow::anyhow!("--rates {},{} are one load: leave one of them out", pair[0], pair[1]);
            return Err(ExitError::new(Exit::Usage, error).into());
        }
        let named = self.shapes().into_iter();
        let mut all: Vec<Traffic> = named
            .map(|shape| Traffic::named(shape, self.traces.as_deref(), self.max_model_len))
            .collect::<anyhow::Result<_>>()?;
        if let Some(path) = &self.trace {
            let fit = Fit {
                length_divisor: self.divide_lengths,
                spread: None,
                context_tokens: self.max_model_len,
            };
            all.push(Traffic::of_file(path, fit)?);
        }
        Ok(all)
    }

    pub(super) fn arm_names(&self) -> Vec<ArmName> {
        if !self.arms.is_empty() {
            return self.arms.clone();
        }
        let mut arms = vec![ArmName::CoLocated, ArmName::Disaggregated, ArmName::Conditional];
        if self.shapes().contains(&ShapeName::LongBesideStreams) {
            arms.push(ArmName::NoChunking);
        }
        arms
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: CompareArgs,
    }

    fn parse(words: &str) -> Result<CompareArgs, clap::Error> {
        let words = std::iter::once("compare").chain(words.split_whitespace());
        Line::try_parse_from(words).map(|line| line.args)
    }

    #[test]
    fn shapes_and_arms_have_defaults_that_fit_together() {
        let args = parse("").expect("no flag is needed");
        assert_eq!(args.shapes(), [ShapeName::Conversations]);
        assert!(args.words_on_default().is_some());
        assert_eq!(args.traffic().expect("it needs no file").len(), 1);
        assert_eq!(args.arm_names().len(), 3);
        assert_eq!(args.limit(), None);
        let args = parse("--traces traces").expect("a folder");
        assert_eq!(args.shapes(), [ShapeName::AzureConversation]);
        assert!(args.words_on_default().is_none());
        let args = parse("--quick --shape long-beside-streams,short,short").expect("two shapes");
        assert_eq!(args.shapes(), [ShapeName::LongBesideStreams, ShapeName::Short]);
        assert_eq!(args.arm_names().last(), Some(&ArmName::NoChunking));
        assert_eq!(args.limit(), Some(QUICK));
        assert_eq!(parse("--shape all").expect("all").shapes(), ShapeName::EVERY);
        assert!(parse("--trace t.csv").expect("a file").shapes().is_empty());
        assert_eq!(
            parse("--quick --time-limit 2").expect("a limit").limit(),
            Some(Duration::from_secs(120))
        );
    }

    #[test]
    fn wrong_words_are_refused() {
        for wrong in [
            "--slo 100",
            "--slo 0:1",
            "--slo nan:1",
            "--arm x",
            "--arm a=http://h:1",
            "--facts f.toml",
            "--arms co-located --arm a=http://h:1 --facts f",
            "--repeats 0",
            "--rates 2,0",
            "--rates nan",
            "--tuning a --save-tuning b",
            "--divide-lengths 4",
            "--shape mooncake --divide-lengths 4",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        let args = parse("--arm a=http://h:1 --arm b=http://h:2 --facts f --slo 300:50.5").expect("deployed");
        assert_eq!(args.arm[1].name, "b");
        assert_eq!(args.slo().itl_ms_max, 50.5);
        let default = |words| parse(words).expect("a shape").slo().ttft_ms_max;
        assert_eq!(default("--shape short"), 1000.0);
        assert_eq!(default("--shape short,long-beside-streams"), 4000.0);
        assert_eq!(default("--trace t.csv"), 2000.0);
    }
}
