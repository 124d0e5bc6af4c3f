//! `plan xpyd`: how many prefill nodes (x) and decode nodes (y) a load or a trace needs.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use workload::plan::PlanError;
use workload::plan::pools::{PoolLoad, Split, pools, splits};
use workload::trace::facts::TraceFacts;
use workload::trace::{ReadLimits, read};

use super::sheet::{Item, Sheet, Unit};
use super::times::TimesArgs;
use crate::exit::{Exit, WithExit as _};

const EXAMPLES: &str = "\
Examples:
  baton plan xpyd --trace conversation_trace.jsonl --prefill-us-per-token 60 --decode-us-per-token 400
  baton plan xpyd --trace conversation_trace.jsonl --costs costs.json --nodes 8
  baton plan xpyd --rps 20 --prompt-tokens 1500 --output-tokens 200 --prefill-us-per-token 60 --decode-us-per-token 400 --nodes 8";

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub(super) struct XpydArgs {
    /// A trace: Mooncake JSONL, Azure CSV, or what `baton record` wrote. Rate and lengths come from it.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    trace: Option<PathBuf>,
    /// Requests a second; with a trace, instead of the rate of its busiest ten seconds.
    #[arg(long, value_name = "RATE", required_unless_present = "trace")]
    rps: Option<f64>,
    /// Prompt tokens of a request, on average.
    #[arg(
        long,
        value_name = "TOKENS",
        required_unless_present = "trace",
        conflicts_with = "trace"
    )]
    prompt_tokens: Option<f64>,
    /// Output tokens of a request, on average.
    #[arg(
        long,
        value_name = "TOKENS",
        required_unless_present = "trace",
        conflicts_with = "trace"
    )]
    output_tokens: Option<f64>,
    /// Share of the prompt tokens that a prefix cache saves, from 0 to below 1. With a trace: the share that a cache without limit
    /// would save, unless this says another.
    #[arg(long, value_name = "SHARE")]
    cached_share: Option<f64>,
    #[command(flatten)]
    times: TimesArgs,
    /// Measured time of a decode node for one output token: the time of a step by the sequences in it.
    #[arg(long, value_name = "US", required_unless_present = "costs")]
    decode_us_per_token: Option<f64>,
    /// Ceiling of the prefill pool's utilisation. Prompts wait for it, so it follows the limit of TTFT (`baton plan slo`).
    #[arg(long, value_name = "SHARE", default_value_t = 0.70)]
    prefill_utilisation: f64,
    /// Ceiling of the decode pool's utilisation.
    #[arg(long, value_name = "SHARE", default_value_t = 0.80)]
    decode_utilisation: f64,
    /// Split this many nodes as well as possible.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=100_000))]
    nodes: Option<u32>,
}

/// What a request is like, and what a cache leaves of its prompt.
struct Shape {
    rate: f64,
    prompt_tokens: f64,
    output_tokens: f64,
    cached_share: f64,
}

impl XpydArgs {
    pub fn sheet(&self) -> anyhow::Result<Sheet> {
        let (sheet, shape) = match &self.trace {
            Some(path) => self.of_trace(path).exit(Exit::Usage)?,
            None => (Sheet::new("xpyd"), self.typed()),
        };
        // A share of 1 leaves no prompt, which `pools` refuses.
        if shape.cached_share < 0.0 {
            let (what, value) = ("the cached share", shape.cached_share);
            return Err(PlanError::Negative { what, value }.into());
        }
        let measured = self.times.measured()?;
        let prefill_us = self.times.prefill_us_per_token(measured.as_ref());
        let of_file = measured.as_ref().map(|measured| measured.decode_us_per_token);
        let decode_us = self.decode_us_per_token.or(of_file).unwrap_or(f64::NAN);
        let load = PoolLoad {
            rate: shape.rate,
            prompt_tokens: shape.prompt_tokens * (1.0 - shape.cached_share),
            output_tokens: shape.output_tokens,
            prefill_s: prefill_us / 1e6,
            decode_s: decode_us / 1e6,
            prefill_ceiling: self.prefill_utilisation,
            decode_ceiling: self.decode_utilisation,
        };
        let found = pools(load)?;
        let sheet = self
            .times
            .named(sheet, measured.as_ref())
            .input(("rate_per_s", "rate"), shape.rate, Unit::Of("requests/s"))
            .input(("prompt_tokens", "prompt"), shape.prompt_tokens, Unit::Of("tokens"))
            .input(("cached_share", "prompt from the cache"), shape.cached_share, Unit::Percent)
            .input(("output_tokens", "answer"), shape.output_tokens, Unit::Of("tokens"))
            .input(("prefill_us_per_token", "prefill node, a token"), prefill_us, Unit::Of("us"))
            .input(("decode_us_per_token", "decode node, a token"), decode_us, Unit::Of("us"))
            .input(("prefill_ceiling", "ceiling of the prefill pool"), self.prefill_utilisation, Unit::Percent)
            .input(("decode_ceiling", "ceiling of the decode pool"), self.decode_utilisation, Unit::Percent)
            .formula("busy prefill nodes = rate x prompt tokens that are computed x time for one")
            .formula("busy decode nodes = rate x output tokens x time for one; nodes = busy / ceiling, rounded up")
            .result(("prompt_by_output", "prompt by answer"), shape.prompt_tokens / shape.output_tokens, Unit::Of("to 1"))
            .result(("prefill_busy", "busy prefill nodes"), found.prefill_busy, Unit::Of(""))
            .result(("decode_busy", "busy decode nodes"), found.decode_busy, Unit::Of(""))
            .result(("prefill_by_decode", "prefill by decode nodes"), found.prefill_by_decode, Unit::Of("to 1"))
            .result(("prefill_nodes", "prefill nodes"), f64::from(found.prefill_nodes), Unit::Whole(""))
            .result(("decode_nodes", "decode nodes"), f64::from(found.decode_nodes), Unit::Whole(""))
            .note("Times for one token are those of full batches. Means hide bursts and long prompts: check with `baton simulate`.");
        match self.nodes {
            Some(nodes) => Ok(sheet.table("splits", &SPLIT_COLUMNS, rows(&splits(load, nodes)?))),
            None => Ok(sheet),
        }
    }

    fn typed(&self) -> Shape {
        Shape {
            rate: self.rps.unwrap_or(f64::NAN),
            prompt_tokens: self.prompt_tokens.unwrap_or(f64::NAN),
            output_tokens: self.output_tokens.unwrap_or(f64::NAN),
            cached_share: self.cached_share.unwrap_or(0.0),
        }
    }

    fn of_trace(&self, path: &Path) -> anyhow::Result<(Sheet, Shape)> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let mut file = File::open(path).with_context(|| format!("{} cannot be read", path.display()))?;
        let trace = read(&name, &mut file, &ReadLimits::default()).with_context(|| format!("{}", path.display()))?;
        let facts = TraceFacts::of(&trace);
        let peak_rate = facts.arrivals_in_10s.max / 10.0;
        let of_trace = facts.arrivals_per_s.map(|mean| peak_rate.max(mean));
        let rate = self
            .rps
            .or(of_trace)
            .context("all requests of the trace arrive at once, so it has no rate: give one with --rps")?;
        let prompt = facts.prompt_tokens.mean;
        let saved = facts.prefixes.as_ref().map_or(0.0, |prefixes| prefixes.hit_tokens);
        let sheet = Sheet::new("xpyd")
            .input_words(("trace", "trace"), facts.name.clone())
            .input(
                ("trace_requests", "requests of the trace"),
                facts.requests as f64,
                Unit::Whole(""),
            )
            .input(
                ("trace_prompt_p99_tokens", "its prompts, 99th percentile"),
                facts.prompt_tokens.p99,
                Unit::Whole("tokens"),
            );
        let sheet = match facts.arrivals_per_s {
            Some(mean_rate) => sheet
                .input(("trace_rate_per_s", "its mean rate"), mean_rate, Unit::Of("requests/s"))
                .input(
                    ("trace_peak_rate_per_s", "rate of its busiest 10 s"),
                    peak_rate,
                    Unit::Of("requests/s"),
                ),
            None => sheet,
        };
        let shape = Shape {
            rate,
            prompt_tokens: prompt,
            output_tokens: facts.output_tokens.mean,
            cached_share: self.cached_share.unwrap_or(saved),
        };
        Ok((sheet, shape))
    }
}

const SPLIT_COLUMNS: [(&str, &str); 5] = [
    ("prefill_nodes", ">prefill"),
    ("decode_nodes", ">decode"),
    ("rate_max_per_s", ">highest rate"),
    ("limited_by", "limited by"),
    ("best", ""),
];

fn rows(splits: &[Split]) -> Vec<Vec<Item>> {
    let row = |split: &Split| {
        vec![
            Item::Number(f64::from(split.prefill_nodes), Unit::Whole("")),
            Item::Number(f64::from(split.decode_nodes), Unit::Whole("")),
            Item::Number(split.rate_max, Unit::Of("requests/s")),
            Item::Words(
                if split.prefill_is_the_limit {
                    "prefill"
                } else {
                    "decode"
                }
                .to_owned(),
            ),
            Item::Words(if split.is_best { "best" } else { "" }.to_owned()),
        ]
    };
    splits.iter().map(row).collect()
}
