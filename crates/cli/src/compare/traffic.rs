//! The shapes of traffic that are compared: from a generator or from a trace file, at any rate.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::ValueEnum;
use workload::arrivals::Arrivals;
use workload::record::RequestRecord;
use workload::shapes::conversations::Conversations;
use workload::shapes::{Length, Mix, merged};
use workload::trace::scaling::{Scaling, StepSpread};
use workload::trace::{self, ReadLimits, Trace, TraceRequest, mooncake};

use super::costs::Costs;
use crate::exit::{Exit, WithExit};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(super) enum ShapeName {
    /// Prompts of 1,500 tokens arrive beside running streams.
    LongBesideStreams,
    /// Short prompts and short answers only.
    Short,
    /// Conversations of several turns; the prompt of each turn has the turns before it.
    Conversations,
    /// The Azure 2023 conversation trace, lengths divided; it needs --traces.
    AzureConversation,
    /// The Mooncake conversation trace, lengths divided; it needs --traces.
    Mooncake,
    /// All of them; it needs --traces.
    All,
}

impl ShapeName {
    pub const EVERY: [ShapeName; 5] = [
        ShapeName::LongBesideStreams,
        ShapeName::Short,
        ShapeName::Conversations,
        ShapeName::AzureConversation,
        ShapeName::Mooncake,
    ];

    /// Tokens of the longest prompt with its answer. `None`: a file's requests are shortened to the context.
    fn longest(self) -> Option<u32> {
        match self {
            Self::LongBesideStreams => Some(LONG_PROMPT_TOKENS + LONG_OUTPUT_TOKENS),
            Self::Short => Some(SHORT_PROMPT_TOKENS + SHORT_OUTPUT_TOKENS),
            // Messages and answers are up to half as long again.
            Self::Conversations => Some(SYSTEM_TOKENS + TURNS * (MESSAGE_TOKENS + ANSWER_TOKENS) * 3 / 2),
            Self::AzureConversation | Self::Mooncake | Self::All => None,
        }
    }
}

/// A trace that its authors have published. The user fetches it.
struct PublicTrace {
    name: &'static str,
    /// Below the folder of `--traces`.
    file: &'static str,
    origin: &'static str,
    /// Chosen so that a model of 135 M parameters on two cores can bear the mix.
    length_divisor: u32,
    spread: Option<StepSpread>,
}

const AZURE: PublicTrace = PublicTrace {
    name: "Azure conversations",
    file: "azure2023/AzureLLMInferenceTrace_conv.csv",
    origin: "github.com/Azure/AzurePublicDataset, folder data",
    length_divisor: 4,
    spread: None,
};
const MOONCAKE: PublicTrace = PublicTrace {
    name: "Mooncake conversations",
    file: "mooncake/conversation_trace.jsonl",
    origin: "github.com/kvcache-ai/Mooncake, folder FAST25-release/traces",
    length_divisor: 32,
    spread: Some(StepSpread {
        step: mooncake::STEP,
        seed: 0,
    }),
};

impl PublicTrace {
    fn traffic(&self, folder: Option<&Path>, context_tokens: u32) -> anyhow::Result<Traffic> {
        let folder = folder.with_context(|| {
            format!(
                "the trace of this shape ({}) does not come with baton: fetch {} from {} and give --traces DIR; long-beside-streams, \
                 short and conversations need no file",
                self.name, self.file, self.origin
            )
        });
        let fit = Fit {
            length_divisor: self.length_divisor,
            spread: self.spread,
            context_tokens,
        };
        let mut traffic = Traffic::of_file(&folder.exit(Exit::Usage)?.join(self.file), fit)?;
        self.name.clone_into(&mut traffic.name);
        Ok(traffic)
    }
}

const LONG_PROMPT_TOKENS: u32 = 1500;
const LONG_OUTPUT_TOKENS: u32 = 16;
const STREAM_PROMPT_TOKENS: u32 = 32;
const STREAM_OUTPUT_TOKENS: u32 = 128;
/// Streams that run beside the long prompts. Four took nearly all of two cores: co-located serving then bore one prompt of 1,500 tokens
/// in five seconds, so that a run had three of them.
const STREAMS_AT_A_TIME: u32 = 2;
/// Of all cores, for long prompts that come one after the other. A prompt in the middle of others costs more, and the streams need
/// the rest: at 2 cores one long prompt comes in five seconds.
const LONG_PROMPTS_SHARE: f64 = 0.25;
/// Several streams share a step, which then takes longer than a lonely one's.
const SHARED_STEP_TIMES: f64 = 1.5;

const SHORT_PROMPT_TOKENS: u32 = 64;
const SHORT_OUTPUT_TOKENS: u32 = 64;

const TURNS: u32 = 4;
const SYSTEM_TOKENS: u32 = 128;
const MESSAGE_TOKENS: u32 = 64;
const ANSWER_TOKENS: u32 = 48;
const THINK_TIME: Duration = Duration::from_secs(1);
/// The nodes' default.
const BLOCK_TOKENS: u32 = 16;

/// Costs of a core of a small machine, for plans that are made before anything is measured.
pub(super) const TYPICAL: Costs = Costs {
    first_ms: 5.0,
    per_prompt_token_ms: 0.8,
    per_output_token_ms: 10.0,
    handoff_ms: 5.0,
    requests: 0,
};

/// One shape of traffic that can be sent at any rate.
#[derive(Clone, Debug)]
pub(super) struct Traffic {
    pub name: String,
    source: Source,
}

#[derive(Clone, Debug)]
enum Source {
    File(Trace),
    LongBesideStreams,
    Short,
    Conversations { context_tokens: u32 },
}

/// How a trace file is made to fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fit {
    pub length_divisor: u32,
    /// Requests of one step of the trace are spread over it.
    pub spread: Option<StepSpread>,
    pub context_tokens: u32,
}

impl Traffic {
    /// # Errors
    /// A trace file is not there or is none, or the shape does not fit the context.
    pub fn named(name: ShapeName, folder: Option<&Path>, context_tokens: u32) -> anyhow::Result<Self> {
        if let Some(longest) = name.longest().filter(|longest| *longest > context_tokens) {
            // Every arm would refuse these requests, and the verdict would be on the others.
            let error = anyhow::anyhow!(
                "a prompt with its answer has {longest} tokens in this shape, and --max-model-len is {context_tokens}: give at \
                 least {longest}, or another --shape"
            );
            return Err(error).exit(Exit::Usage);
        }
        let made = |name: &str, source| Self {
            name: name.to_owned(),
            source,
        };
        match name {
            ShapeName::LongBesideStreams => Ok(made("long prompts beside running streams", Source::LongBesideStreams)),
            ShapeName::Short => Ok(made("short prompts only", Source::Short)),
            ShapeName::AzureConversation => AZURE.traffic(folder, context_tokens),
            ShapeName::Mooncake => MOONCAKE.traffic(folder, context_tokens),
            ShapeName::Conversations => Ok(made("conversations", Source::Conversations { context_tokens })),
            ShapeName::All => anyhow::bail!("`all` is not one shape"),
        }
    }

    /// Any trace that baton reads. Lengths are divided; what is longer than the context is shortened.
    ///
    /// # Errors
    /// The file cannot be read, is no trace, or cannot be divided so.
    pub fn of_file(path: &Path, fit: Fit) -> anyhow::Result<Self> {
        let read = || -> anyhow::Result<Trace> {
            let mut file = File::open(path)?;
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
            let trace = trace::read(&name.unwrap_or_default(), &mut file, &ReadLimits::default())?;
            let scaling = Scaling {
                length_divisor: fit.length_divisor,
                spread: fit.spread,
                context_tokens_max: Some(fit.context_tokens),
                ..Scaling::default()
            };
            Ok(scaling.apply(&trace.begun_at_zero())?.trace)
        };
        let trace = read()
            .with_context(|| {
                format!(
                    "cannot use the trace {}; --traces names the folder of the known traces, --trace a file",
                    path.display()
                )
            })
            .exit(Exit::Usage)?;
        Ok(Self {
            name: trace.name.clone(),
            source: Source::File(trace),
        })
    }

    /// The requests of one run: about `rate` a second for so long. In the shape of running streams `rate` counts the long prompts.
    ///
    /// # Errors
    /// The trace has fewer requests, or the rate is none.
    pub fn trace(&self, rate: f64, length: Duration, seed: u64, costs: &Costs) -> anyhow::Result<Trace> {
        ensure!(
            rate.is_finite() && rate > 0.0,
            "{rate} is no rate: give requests a second, above 0"
        );
        let count = ((rate * length.as_secs_f64()).round() as usize).max(1);
        match &self.source {
            Source::File(trace) => first_requests(trace, count, length),
            Source::Short => {
                let short = exactly(SHORT_PROMPT_TOKENS, SHORT_OUTPUT_TOKENS).trace(count, seed)?;
                Ok(Arrivals::poisson(rate).apply(short, seed)?)
            }
            Source::LongBesideStreams => {
                let long = exactly(LONG_PROMPT_TOKENS, LONG_OUTPUT_TOKENS).trace(count, seed)?;
                let long = Arrivals::poisson(rate).apply(long, seed)?;
                let stream_rate = streams_a_second(costs);
                let streams = (stream_rate * length.as_secs_f64()).round().max(1.0) as usize;
                let streams = exactly(STREAM_PROMPT_TOKENS, STREAM_OUTPUT_TOKENS).trace(streams, seed)?;
                let streams = Arrivals::Constant { rate: stream_rate }.apply(streams, seed)?;
                Ok(merged(&self.name, vec![long, streams])?)
            }
            Source::Conversations { context_tokens } => {
                let conversations = conversations(count.div_ceil(TURNS as usize), *context_tokens).trace(seed)?;
                let rate = rate / f64::from(TURNS);
                let mut trace = Arrivals::poisson(rate).apply(conversations, seed)?;
                // Turns after the end would make the run longer than planned.
                trace.requests.retain(|request| request.at <= length);
                Ok(trace)
            }
        }
    }

    /// Lengths, arrivals and prefixes in words.
    pub fn words(&self, costs: &Costs) -> String {
        match &self.source {
            Source::File(trace) => format!("{}, replayed at other rates in the order of the file", trace.name),
            Source::Short => {
                format!("{SHORT_PROMPT_TOKENS} prompt and {SHORT_OUTPUT_TOKENS} output tokens, Poisson arrivals")
            }
            Source::Conversations { .. } => format!(
                "{TURNS} turns with messages of {MESSAGE_TOKENS} and answers of {ANSWER_TOKENS} tokens behind a shared beginning of {SYSTEM_TOKENS}; a user thinks {} s on average; Poisson arrivals of conversations",
                THINK_TIME.as_secs()
            ),
            Source::LongBesideStreams => format!(
                "about {STREAMS_AT_A_TIME} streams at a time ({STREAM_PROMPT_TOKENS} prompt and {STREAM_OUTPUT_TOKENS} output tokens, {:.2} new ones a second, evenly), and prompts of {LONG_PROMPT_TOKENS} tokens with {LONG_OUTPUT_TOKENS} output tokens, Poisson arrivals; --rates counts the long prompts, the loads of the runs count all requests",
                streams_a_second(costs)
            ),
        }
    }

    /// Whether the interesting requests are the streams that others disturb.
    pub fn has_streams(&self) -> bool {
        matches!(self.source, Source::LongBesideStreams)
    }

    /// The one load of a shape whose streams are what counts. A knee would say nothing there: few long prompts are enough to break the
    /// limits of co-located streams, so a search ended at one long prompt in ten seconds, of which a run of 15 s has one or none.
    pub fn fixed_load(&self, costs: &Costs, cores: u32) -> Option<(String, f64)> {
        self.has_streams().then(|| {
            let label = format!("long prompts on {:.0} % of the cores", LONG_PROMPTS_SHARE * 100.0);
            (label, long_prompts_a_second(costs, cores))
        })
    }

    /// At how many loads it is measured when none are given.
    pub fn loads(&self) -> u32 {
        if self.has_streams() { 1 } else { 2 }
    }

    /// A rate that so many cores may just bear, for the search of the knee to begin with.
    pub fn rate_guess(&self, costs: &Costs, cores: u32) -> f64 {
        match &self.source {
            Source::File(trace) => {
                let count = trace.requests.len().max(1) as f64;
                let mean = |of: fn(&TraceRequest) -> u32| {
                    trace.requests.iter().map(|one| f64::from(of(one))).sum::<f64>() / count
                };
                costs.rate_guess(cores, mean(|one| one.prompt_tokens), mean(|one| one.output_tokens))
            }
            Source::Short => costs.rate_guess(cores, f64::from(SHORT_PROMPT_TOKENS), f64::from(SHORT_OUTPUT_TOKENS)),
            Source::Conversations { .. } => costs.rate_guess(
                cores,
                f64::from(MESSAGE_TOKENS + ANSWER_TOKENS),
                f64::from(ANSWER_TOKENS),
            ),
            // Its load is fixed.
            Source::LongBesideStreams => long_prompts_a_second(costs, cores),
        }
    }
}

/// Whether a record is one of the streams that run beside long prompts.
pub(super) fn is_stream(record: &RequestRecord) -> bool {
    record.prompt_tokens < LONG_PROMPT_TOKENS / 2
}

/// How many long prompts take their share of the cores.
fn long_prompts_a_second(costs: &Costs, cores: u32) -> f64 {
    let prompt_ms = costs.per_prompt_token_ms.max(0.01) * f64::from(LONG_PROMPT_TOKENS);
    LONG_PROMPTS_SHARE * f64::from(cores) * 1000.0 / prompt_ms
}

fn streams_a_second(costs: &Costs) -> f64 {
    let stream_ms = costs.per_output_token_ms.max(0.1) * SHARED_STEP_TIMES * f64::from(STREAM_OUTPUT_TOKENS);
    f64::from(STREAMS_AT_A_TIME) * 1000.0 / stream_ms
}

fn exactly(prompt_tokens: u32, output_tokens: u32) -> Mix {
    Mix::one(Length::exactly(prompt_tokens), Length::exactly(output_tokens))
}

fn conversations(count: usize, context_tokens: u32) -> Conversations {
    Conversations {
        conversations: u32::try_from(count).unwrap_or(u32::MAX),
        turns: TURNS,
        system_tokens: SYSTEM_TOKENS,
        message: Length {
            tokens: MESSAGE_TOKENS,
            range_ratio: 0.5,
        },
        output: Length {
            tokens: ANSWER_TOKENS,
            range_ratio: 0.5,
        },
        think_time: THINK_TIME,
        block_tokens: BLOCK_TOKENS,
        context_tokens_max: Some(context_tokens),
    }
}

/// The first `count` requests, their times stretched or shrunk to `length`.
fn first_requests(trace: &Trace, count: usize, length: Duration) -> anyhow::Result<Trace> {
    let next = trace.requests.get(count).with_context(|| {
        format!(
            "{} has {} requests, and {} would be sent in one run: take shorter runs or lower rates",
            trace.name,
            trace.requests.len(),
            count
        )
    })?;
    let scaling = Scaling {
        requests_max: Some(count),
        rate_factor: (next.at.as_secs_f64() / length.as_secs_f64().max(1e-3)).max(1e-9),
        ..Scaling::default()
    };
    Ok(scaling.apply(trace)?.trace)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn named(name: ShapeName) -> Traffic {
        Traffic::named(name, None, 2048).expect("made without a file")
    }

    #[test]
    fn the_same_seed_gives_the_same_requests_and_the_rate_that_was_asked_for() {
        for name in [ShapeName::Short, ShapeName::LongBesideStreams, ShapeName::Conversations] {
            let traffic = named(name);
            let of = |seed| traffic.trace(2.0, MINUTE, seed, &TYPICAL).expect("a trace");
            assert_eq!(of(1), of(1));
            assert_ne!(of(1).requests, of(2).requests);
            assert!(of(1).requests.is_sorted_by_key(|request| request.at));
            let last = of(1).requests.last().expect("requests").at;
            assert!(last <= MINUTE + Duration::from_secs(2), "{last:?}");
        }
        let trace = named(ShapeName::Short)
            .trace(2.0, MINUTE, 1, &TYPICAL)
            .expect("a trace");
        assert_eq!(trace.requests.len(), 120);
        assert!(named(ShapeName::Short).trace(f64::NAN, MINUTE, 1, &TYPICAL).is_err());
    }

    #[test]
    fn streams_and_long_prompts_are_told_apart() {
        let trace = named(ShapeName::LongBesideStreams);
        assert!(trace.has_streams());
        // A prompt takes 1.2 s, and a quarter of two cores is half a second in each second.
        let (_, rate) = trace.fixed_load(&TYPICAL, 2).expect("streams");
        assert!((rate - 0.5 / 1.2).abs() < 1e-9, "{rate}");
        assert!(named(ShapeName::Short).fixed_load(&TYPICAL, 2).is_none());
        let trace = trace.trace(0.5, MINUTE, 1, &TYPICAL).expect("a trace");
        let long = trace
            .requests
            .iter()
            .filter(|request| request.prompt_tokens == LONG_PROMPT_TOKENS);
        assert_eq!(long.count(), 30);
        // Two at a time, each for 128 steps of 15 ms.
        assert_eq!(trace.requests.len() - 30, 63);
        let mut record = crate::compare::test_kit::record(0, &[1.0]);
        record.prompt_tokens = STREAM_PROMPT_TOKENS + 1;
        assert!(is_stream(&record));
        record.prompt_tokens = LONG_PROMPT_TOKENS;
        assert!(!is_stream(&record));
    }

    #[test]
    fn a_shape_whose_requests_every_arm_would_refuse_is_refused() {
        for (name, longest) in [
            (ShapeName::LongBesideStreams, 1516),
            (ShapeName::Short, 128),
            (ShapeName::Conversations, 800),
        ] {
            let of = |context_tokens| Traffic::named(name, None, context_tokens);
            let traffic = of(longest).expect("it fits");
            traffic.trace(2.0, MINUTE, 1, &TYPICAL).expect("a trace");
            let error = of(longest - 1).expect_err("one token too many");
            assert_eq!(crate::exit::of(&error), Exit::Usage, "{error:#}");
            assert!(error.to_string().contains(&longest.to_string()), "{error:#}");
        }
    }

    #[test]
    fn the_first_requests_of_a_file_arrive_at_the_rate_that_was_asked_for() {
        let mut all = exactly(10, 5).trace(11, 1).expect("a trace");
        for (index, request) in all.requests.iter_mut().enumerate() {
            request.at = Duration::from_secs(10 * index as u64);
        }
        let cut = first_requests(&all, 5, Duration::from_secs(10)).expect("enough");
        let times: Vec<u64> = cut.requests.iter().map(|request| request.at.as_secs()).collect();
        assert_eq!(times, [0, 2, 4, 6, 8]);
        assert!(first_requests(&all, 11, MINUTE).is_err());
    }

    #[test]
    fn a_file_from_the_middle_of_a_trace_begins_with_the_run() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("middle.jsonl");
        let row = |at_s: u64| {
            format!(
                "{{\"at_ns\":{},\"prompt_tokens\":10,\"output_tokens\":5}}\n",
                at_s * 1_000_000_000
            )
        };
        let rows: String = (3600..3604).map(row).collect();
        std::fs::write(&path, format!("{{\"baton_trace\":1}}\n{rows}")).expect("written");
        let fit = Fit {
            length_divisor: 1,
            spread: None,
            context_tokens: 2048,
        };
        let traffic = Traffic::of_file(&path, fit).expect("a trace");
        let cut = traffic
            .trace(1.0, Duration::from_secs(3), 1, &TYPICAL)
            .expect("three requests");
        let times: Vec<u64> = cut.requests.iter().map(|request| request.at.as_secs()).collect();
        assert_eq!(times, [0, 1, 2]);
    }

    #[test]
    fn a_file_that_is_missing_is_named() {
        for folder in [None, Some(Path::new("/no/such/folder"))] {
            let error = Traffic::named(ShapeName::Mooncake, folder, 2048).expect_err("no file");
            let words = format!("{error:#}");
            assert!(words.contains("--traces") && words.contains(MOONCAKE.file), "{words}");
            assert_eq!(crate::exit::of(&error), Exit::Usage);
        }
    }
}
