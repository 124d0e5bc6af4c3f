//! The requests of a simulation: a trace's file, made to fit, or a shape with arrivals.

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use simulator::intervention::parse_duration;
use workload::arrivals::{Arrivals, Rate};
use workload::shapes::named::NamedShape;
use workload::shapes::{Length, Mix};
use workload::trace::scaling::{Scaling, StepSpread};
use workload::trace::{ReadLimits, Trace, read};

/// Which requests arrive when.
#[derive(Debug, Args)]
pub struct TrafficArgs {
    /// A trace: Mooncake JSONL, Azure CSV, or baton's own format.
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "shape", "prompt_tokens", "output_tokens", "range_ratio", "requests", "rate", "burstiness"
    ])]
    trace: Option<PathBuf>,
    /// Divide the trace's lengths by this.
    #[arg(long, default_value_t = 1, value_name = "N", requires = "trace")]
    length_divisor: u32,
    /// 2 sends the trace's requests at twice the rate.
    #[arg(long, default_value_t = 1.0, value_name = "X", requires = "trace")]
    rate_factor: f64,
    /// Spread requests that a trace has at one time over so long (Mooncake's times are steps of 3 s).
    #[arg(long, value_parser = duration, value_name = "TIME", requires = "trace")]
    spread_steps: Option<Duration>,
    /// Only the first part of the trace.
    #[arg(long, value_parser = duration, value_name = "TIME", requires = "trace")]
    first: Option<Duration>,
    /// At most so many requests of the trace.
    #[arg(long, value_name = "N", requires = "trace")]
    first_requests: Option<usize>,
    /// Shorten prompt and answer of the trace's longest requests, or the lengths of a shape, to so many tokens together.
    #[arg(long, value_name = "TOKENS")]
    shorten_to: Option<u32>,
    /// A shape with a name instead: prefill-heavy, balanced, decode-heavy, short, long-beside-streams. Its lengths are not those of the
    /// shapes of `baton compare`.
    #[arg(long, value_parser = shape, conflicts_with_all = ["prompt_tokens", "output_tokens", "range_ratio"])]
    shape: Option<NamedShape>,
    /// Tokens of each prompt.
    #[arg(long, default_value_t = 512)]
    prompt_tokens: u32,
    /// Tokens of each answer.
    #[arg(long, default_value_t = 64)]
    output_tokens: u32,
    /// Lengths vary by this part of themselves, from 0 to below 1.
    #[arg(long, default_value_t = 0.0)]
    range_ratio: f64,
    /// Requests that are made.
    #[arg(long, default_value_t = 200)]
    requests: usize,
    /// Requests a second that are made.
    #[arg(long, default_value_t = 1.0)]
    rate: f64,
    /// 1: a Poisson process; below 1 burstier, above 1 more even.
    #[arg(long, default_value_t = 1.0)]
    burstiness: f64,
    /// Requests that are due in this time from the start do not count.
    #[arg(long, default_value = "0s", value_parser = duration, value_name = "TIME")]
    warm_up: Duration,
    /// Nor do those that are due in so much time before the last one.
    #[arg(long, default_value = "0s", value_parser = duration, value_name = "TIME")]
    cool_down: Duration,
}

/// Context for which named shapes are scaled: that of the default model.
const CONTEXT_TOKENS: u32 = 8_192;

fn duration(text: &str) -> Result<Duration, String> {
    parse_duration(text).ok_or_else(|| "write a time such as 250ms, 90s, 5m or 1h".to_owned())
}

fn shape(text: &str) -> Result<NamedShape, String> {
    NamedShape::of_name(text).ok_or_else(|| {
        let names = NamedShape::ALL.map(NamedShape::name);
        format!("no such shape; there are {}", names.join(", "))
    })
}

impl TrafficArgs {
    pub fn left_out(&self) -> (Duration, Duration) {
        (self.warm_up, self.cool_down)
    }

    pub fn trace(&self, seed: u64) -> anyhow::Result<Trace> {
        match &self.trace {
            Some(path) => self.read(path, seed),
            None => self.made(seed),
        }
    }

    fn read(&self, path: &PathBuf, seed: u64) -> anyhow::Result<Trace> {
        let Some(name) = path.file_name().map(|name| name.to_string_lossy().into_owned()) else {
            bail!("{} is no file", path.display());
        };
        let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        let trace =
            read(&name, &mut file, &ReadLimits::default()).with_context(|| format!("cannot use {}", path.display()))?;
        let scaling = Scaling {
            length_divisor: self.length_divisor,
            spread: self.spread_steps.map(|step| StepSpread { step, seed }),
            rate_factor: self.rate_factor,
            duration_max: self.first,
            requests_max: self.first_requests,
            context_tokens_max: self.shorten_to,
        };
        Ok(scaling.apply(&trace.begun_at_zero())?.trace)
    }

    fn made(&self, seed: u64) -> anyhow::Result<Trace> {
        ensure!(
            self.shape.is_some() || self.shorten_to.is_none(),
            "--shorten-to is for a trace or a shape: give shorter --prompt-tokens and --output-tokens instead"
        );
        let length = |tokens| Length {
            tokens,
            range_ratio: self.range_ratio,
        };
        let mix = match self.shape {
            Some(shape) => shape.mix(self.shorten_to.unwrap_or(CONTEXT_TOKENS)),
            None => Mix::one(length(self.prompt_tokens), length(self.output_tokens)),
        };
        let arrivals = Arrivals::Gamma {
            rate: Rate::Fixed(self.rate),
            burstiness: self.burstiness,
        };
        Ok(arrivals.apply(mix.trace(self.requests, seed)?, seed)?)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: TrafficArgs,
    }

    #[test]
    fn flags_that_would_be_passed_over_are_refused() {
        let is_taken = |words: &str| {
            let line = Line::try_parse_from(std::iter::once("simulate").chain(words.split_whitespace()));
            line.is_ok_and(|line| line.args.requests > 0)
        };
        for of_traces in [
            "--length-divisor 4",
            "--rate-factor 2",
            "--spread-steps 3s",
            "--first 10s",
            "--first-requests 5",
        ] {
            assert!(is_taken(&format!("--trace t.jsonl {of_traces}")), "{of_traces}");
            assert!(!is_taken(of_traces), "{of_traces}");
        }
        for of_made in ["--range-ratio 0.5", "--burstiness 2"] {
            assert!(is_taken(of_made), "{of_made}");
            assert!(!is_taken(&format!("--trace t.jsonl {of_made}")), "{of_made}");
        }
        assert!(!is_taken("--shape short --range-ratio 0.5"));
        assert!(is_taken("--shape short --shorten-to 2048"));
        let made = |words: &str| {
            let line = Line::try_parse_from(std::iter::once("simulate").chain(words.split_whitespace()));
            line.expect("usable words").args.trace(1)
        };
        assert!(made("--shape short --shorten-to 2048").is_ok());
        assert!(made("--prompt-tokens 4096").is_ok());
        let error = made("--prompt-tokens 4096 --shorten-to 2048").expect_err("it would be passed over");
        assert!(error.to_string().contains("--prompt-tokens"), "{error}");
    }

    #[test]
    fn a_trace_that_begins_late_begins_with_the_run() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("middle.jsonl");
        let row = |ns: u64| format!("{{\"at_ns\":{ns},\"prompt_tokens\":10,\"output_tokens\":5}}\n");
        let rows = [9_000_000_000, 9_500_000_000, 11_000_000_000].map(row).concat();
        std::fs::write(&file, format!("{{\"baton_trace\":1}}\n{rows}")).expect("written");
        let words = format!("simulate --trace {} --first 2s", file.display());
        let line = Line::try_parse_from(words.split_whitespace()).expect("usable words");
        let trace = line.args.trace(1).expect("a trace");
        let times: Vec<u128> = trace.requests.iter().map(|request| request.at.as_millis()).collect();
        assert_eq!(times, [0, 500]);
    }
}
