//! From the flags to a trace, its prompts and the pace: what `LoadPlan` needs.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use workload::arrivals::{Arrivals, Rate};
use workload::prompts::datasets;
use workload::shapes::conversations::Conversations;
use workload::shapes::prefixes::SharedPrefixes;
use workload::shapes::{Length, Mix};
use workload::trace::scaling::{Scaling, StepSpread};
use workload::trace::{ReadLimits, Trace, Turn};

use super::args::{Cache, Dataset, PaceArgs, PromptForm, RampUp, Scenario, TrafficArgs};
use super::plan::{Pace, Prompts};

/// As many as `vllm bench serve` sends.
const REQUESTS_DEFAULT: usize = 1000;
/// As many as `vllm bench serve` asks for.
const OUTPUT_TOKENS_DEFAULT: u32 = 128;
/// As the help of --turns has it.
const TURNS_DEFAULT: u32 = 4;
/// As the help of --think-time-ms has it.
const THINK_TIME_MS_DEFAULT: u64 = 1_000;
/// The block size of baton and of vLLM.
const BLOCK_TOKENS: u32 = 16;
/// The burstiness of a Poisson process, as the help of --burstiness has it.
const NO_BURSTS: f64 = 1.0;
/// A million times of some twenty digits, with room.
const ARRIVAL_TIMES_BYTES_MAX: u64 = 32 << 20;

#[derive(Clone, Debug)]
pub(super) struct Traffic {
    pub trace: Trace,
    pub prompts: Prompts,
    pub pace: Pace,
    /// Requests that bring the prefixes into the cache before the run.
    pub prefixes: Option<Trace>,
    pub seed: u64,
    pub ignores_eos: bool,
    /// `None`: the times are those of the trace.
    pub request_rate: Option<f64>,
}

/// # Errors
/// The flags contradict each other, or the file cannot be read.
pub(super) fn traffic(args: &TrafficArgs, pace: &PaceArgs) -> anyhow::Result<Traffic> {
    check_dataset(args)?;
    check_scenario(pace)?;
    let seed = match args.cache {
        Cache::Cold => rand::random::<u32>().into(),
        Cache::AsItIs | Cache::Warm => args.seed,
    };
    let (trace, prompts, prefixes) = content(args)?;
    ensure!(
        args.cache != Cache::Warm || prefixes.is_some(),
        "--cache warm needs shared prefixes: --dataset-name prefix_repetition, or --random-prefix-len"
    );
    let has_own_times = args.dataset_name == Dataset::Trace;
    let (pace_of_run, arrivals, request_rate) = pace_and_arrivals(pace, has_own_times)?;
    ensure!(
        pace.burstiness == NO_BURSTS || matches!(arrivals, Some(Arrivals::Gamma { .. })),
        "--burstiness shapes arrivals at a rate, and this run has none: give --request-rate or a ramp, or leave it out"
    );
    let trace = match arrivals {
        Some(arrivals) => arrivals.apply(trace, args.seed)?,
        None => trace,
    };
    Ok(Traffic {
        trace,
        prompts,
        pace: pace_of_run,
        prefixes: prefixes.filter(|_| args.cache == Cache::Warm),
        seed,
        ignores_eos: !args.no_ignore_eos && (args.ignore_eos || args.dataset_name != Dataset::Custom),
        request_rate,
    })
}

/// Refuses flags of recorded files, of conversations and of cold caches where the dataset would pass them over: whoever gives one expects
/// that it counts. Lengths have defaults and are not checked.
fn check_dataset(args: &TrafficArgs) -> anyhow::Result<()> {
    let dataset = args.dataset_name;
    ensure!(
        args.dataset_path.is_none() || matches!(dataset, Dataset::Custom | Dataset::Trace),
        "--dataset-path is not read with this dataset: say with --dataset-name whether the file is a `trace` or has texts (`custom`)"
    );
    let of_traces = [
        ("--length-scale", args.length_scale != 1),
        ("--time-scale", args.time_scale != 1.0),
        ("--spread-steps-s", args.spread_steps_s.is_some()),
        ("--duration-s", args.duration_s.is_some()),
    ];
    if let Some((flag, _)) = of_traces.iter().find(|(_, is_given)| *is_given) {
        ensure!(
            dataset == Dataset::Trace,
            "{flag} changes a recorded trace: give it with --dataset-name trace, or leave it out"
        );
    }
    let of_conversations = [
        ("--turns", args.turns.is_some()),
        ("--think-time-ms", args.think_time_ms.is_some()),
    ];
    if let Some((flag, _)) = of_conversations.iter().find(|(_, is_given)| *is_given) {
        ensure!(
            dataset == Dataset::Conversations,
            "{flag} is for conversations: give it with --dataset-name conversations, or leave it out"
        );
    }
    ensure!(
        args.context_len.is_none() || matches!(dataset, Dataset::Trace | Dataset::Conversations),
        "--context-len is for recorded traces and for conversations: leave it out, or give shorter lengths"
    );
    ensure!(
        dataset != Dataset::Custom || args.cache != Cache::Cold,
        "--cache cold makes new prompts, and the texts of --dataset-name custom are given: restart the server instead"
    );
    Ok(())
}

/// A scenario says the pace, or a part of it. A flag that says another one would be passed over.
fn check_scenario(args: &PaceArgs) -> anyhow::Result<()> {
    let Some(scenario) = args.scenario else {
        return Ok(());
    };
    let has_ramp = args.ramp_up_strategy.is_some();
    match scenario {
        Scenario::Offline => ensure!(
            !has_ramp && args.users.is_none() && !args.request_rate.is_some_and(f64::is_finite),
            "the scenario offline sends all requests at once: leave out --request-rate, --users and --ramp-up-strategy"
        ),
        Scenario::SingleStream => ensure!(
            !has_ramp && args.users.is_none() && args.request_rate.is_none() && args.max_concurrency.is_none(),
            "the scenario single-stream has one user: leave out --request-rate, --users, --max-concurrency and --ramp-up-strategy"
        ),
        Scenario::Server | Scenario::Interactive => ensure!(
            args.users.is_none(),
            "this scenario has arrivals at a rate, and --users is a closed loop: give --request-rate instead"
        ),
    }
    Ok(())
}

/// The requests, what stands in them, and the requests that warm their prefixes.
fn content(args: &TrafficArgs) -> anyhow::Result<(Trace, Prompts, Option<Trace>)> {
    let drawn = match args.prompts {
        PromptForm::Ids => Prompts::TokenIds,
        PromptForm::Words => Prompts::Words,
    };
    let length = |tokens| Length {
        tokens,
        range_ratio: args.random_range_ratio,
    };
    let requests = args.num_prompts.unwrap_or(REQUESTS_DEFAULT);
    let output_len = args.random_output_len.unwrap_or(OUTPUT_TOKENS_DEFAULT);
    let shared = |prefixes, prefix_tokens, rest: u32, output: u32| SharedPrefixes {
        prefixes,
        prefix_tokens,
        block_tokens: BLOCK_TOKENS,
        rest: length(rest),
        output: length(output),
    };
    let shared = match args.dataset_name {
        Dataset::Random if args.random_prefix_len > 0 => {
            shared(1, args.random_prefix_len, args.random_input_len, output_len)
        }
        Dataset::Random => {
            let mix = Mix::one(length(args.random_input_len), length(output_len));
            return Ok((mix.trace(requests, args.seed)?, drawn, None));
        }
        Dataset::PrefixRepetition => shared(
            args.prefix_repetition_num_prefixes,
            args.prefix_repetition_prefix_len,
            args.prefix_repetition_suffix_len,
            args.prefix_repetition_output_len,
        ),
        Dataset::Conversations => return Ok((conversations(args, requests, length)?, drawn, None)),
        Dataset::Custom => {
            let path = path(args)?;
            let (name, mut file) = open(path)?;
            let mut set = datasets::read(&name, &mut file, &ReadLimits::default(), args.random_output_len)
                .with_context(|| path.display().to_string())?;
            set.trace.requests.truncate(args.num_prompts.unwrap_or(usize::MAX));
            return Ok((set.trace, Prompts::Given(Arc::from(set.texts)), None));
        }
        Dataset::Trace => {
            let trace = recorded(path(args)?, &scaling(args)?)?;
            return Ok((trace, drawn, None));
        }
    };
    Ok((shared.trace(requests, args.seed)?, drawn, Some(shared.warm_up()?)))
}

/// As many requests as were asked for: the last conversation has fewer turns where they do not come out even.
fn conversations(args: &TrafficArgs, requests: usize, length: impl Fn(u32) -> Length) -> anyhow::Result<Trace> {
    let turns = args.turns.unwrap_or(TURNS_DEFAULT);
    ensure!(turns > 0, "a conversation has at least one turn: raise --turns");
    let conversations = requests.div_ceil(turns as usize);
    let shape = Conversations {
        conversations: u32::try_from(conversations).context("too many conversations")?,
        turns,
        system_tokens: args.random_prefix_len,
        message: length(args.random_input_len),
        output: length(args.random_output_len.unwrap_or(OUTPUT_TOKENS_DEFAULT)),
        think_time: Duration::from_millis(args.think_time_ms.unwrap_or(THINK_TIME_MS_DEFAULT)),
        block_tokens: BLOCK_TOKENS,
        context_tokens_max: args.context_len,
    };
    let mut trace = shape.trace(args.seed)?;
    let (last, of_last) = (
        conversations as u64 - 1,
        requests - (conversations - 1) * turns as usize,
    );
    if of_last < turns as usize {
        let is_asked_for = |turn: Turn| turn.conversation != last || (turn.turn as usize) < of_last;
        trace
            .requests
            .retain(|request| request.conversation.is_none_or(is_asked_for));
        trace.name += &format!(", {of_last} of the last conversation's turns");
    }
    Ok(trace)
}

fn scaling(args: &TrafficArgs) -> anyhow::Result<Scaling> {
    let seconds = |value: Option<f64>, flag: &str| {
        let value = value.map(Duration::try_from_secs_f64).transpose();
        value.with_context(|| format!("{flag} is a number of seconds"))
    };
    let step = seconds(args.spread_steps_s, "--spread-steps-s")?;
    Ok(Scaling {
        length_divisor: args.length_scale,
        spread: step.map(|step| StepSpread { step, seed: args.seed }),
        rate_factor: args.time_scale,
        duration_max: seconds(args.duration_s, "--duration-s")?,
        requests_max: args.num_prompts,
        context_tokens_max: args.context_len,
    })
}

fn path(args: &TrafficArgs) -> anyhow::Result<&Path> {
    let path = args.dataset_path.as_deref();
    path.context("this dataset is a file: name it with --dataset-path")
}

/// The requests of a trace file.
///
/// # Errors
/// The file cannot be read, or cannot be scaled so.
pub(crate) fn recorded(path: &Path, scaling: &Scaling) -> anyhow::Result<Trace> {
    let (name, mut file) = open(path)?;
    let trace =
        workload::trace::read(&name, &mut file, &ReadLimits::default()).with_context(|| path.display().to_string())?;
    Ok(scaling.apply(&trace.begun_at_zero())?.trace)
}

/// The file's own name, for reports, and the file.
fn open(path: &Path) -> anyhow::Result<(String, File)> {
    let name = path
        .file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned();
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok((name, file))
}

/// The pace, the arrivals that replace the trace's own times, and the rate as the user gave it.
fn pace_and_arrivals(args: &PaceArgs, has_own_times: bool) -> anyhow::Result<(Pace, Option<Arrivals>, Option<f64>)> {
    let open = Pace::Open {
        max_concurrency: args.max_concurrency,
    };
    if let Some(path) = &args.arrival_times {
        return Ok((open, Some(Arrivals::Schedule(arrival_times(path)?)), None));
    }
    let all_at_once = (open, Some(Arrivals::AtOnce), Some(f64::INFINITY));
    let users = match (args.users, args.scenario, args.max_concurrency) {
        (None, Some(Scenario::SingleStream), _) => Some(1),
        (None, None, Some(max)) if args.request_rate.is_none() && args.ramp_up_strategy.is_none() && !has_own_times => {
            Some(max)
        }
        (users, _, _) => users,
    };
    if let Some(users) = users {
        return Ok((Pace::Closed { users }, Some(Arrivals::AtOnce), None));
    }
    if let Some(strategy) = args.ramp_up_strategy {
        let (Some(from), Some(to)) = (args.ramp_up_start_rps, args.ramp_up_end_rps) else {
            bail!("a ramp needs --ramp-up-start-rps and --ramp-up-end-rps");
        };
        let rate = match strategy {
            RampUp::Linear => Rate::Linear { from, to },
            RampUp::Exponential => Rate::Exponential { from, to },
        };
        let burstiness = args.burstiness;
        return Ok((open, Some(Arrivals::Gamma { rate, burstiness }), None));
    }
    match (args.request_rate, args.scenario) {
        (_, Some(Scenario::Offline)) => Ok(all_at_once),
        (None, Some(Scenario::Server | Scenario::Interactive)) if !has_own_times => {
            bail!("this scenario has Poisson arrivals: give --request-rate")
        }
        (None, _) if has_own_times => Ok((open, None, None)),
        (None, _) => Ok(all_at_once),
        (Some(rate), _) if rate == f64::INFINITY => Ok(all_at_once),
        (Some(rate), _) => {
            let arrivals = Arrivals::Gamma {
                rate: Rate::Fixed(rate),
                burstiness: args.burstiness,
            };
            Ok((open, Some(arrivals), Some(rate)))
        }
    }
}

/// Seconds from the start of the run, one a line.
fn arrival_times(path: &Path) -> anyhow::Result<Vec<Duration>> {
    let (name, file) = open(path)?;
    let mut text = String::new();
    let read = file.take(ARRIVAL_TIMES_BYTES_MAX + 1).read_to_string(&mut text);
    let length = read.with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(
        length as u64 <= ARRIVAL_TIMES_BYTES_MAX,
        "{name} is larger than {ARRIVAL_TIMES_BYTES_MAX} bytes: cut it"
    );
    let time = |(row, line): (usize, &str)| {
        let seconds = line.trim().parse::<f64>().ok().map(Duration::try_from_secs_f64);
        let time = seconds.and_then(Result::ok);
        time.with_context(|| format!("line {row} of {name} is no number of seconds"))
    };
    (1..).zip(text.lines()).map(time).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        traffic: TrafficArgs,
        #[command(flatten)]
        pace: PaceArgs,
    }

    #[test]
    fn requests_arrive_at_the_times_of_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("times.txt");
        let read = |times: &str| {
            std::fs::write(&file, times).unwrap();
            let words = ["run", "--num-prompts", "3", "--max-concurrency", "2"];
            let file = ["--arrival-times", file.to_str().unwrap()];
            let cli = Cli::try_parse_from([&words[..], &file].concat()).unwrap();
            traffic(&cli.traffic, &cli.pace)
        };
        let found = read("0\n0.5\n2.25\n9\n").unwrap();
        let requests = found.trace.requests.iter();
        let times: Vec<u128> = requests.map(|request| request.at.as_millis()).collect();
        assert_eq!(times, [0, 500, 2_250]);
        let max_concurrency = Some(2);
        assert_eq!(found.pace, Pace::Open { max_concurrency });
        for bad in ["0\n1\n", "0\n2\n1\n", "0\n\n1\n2\n", "0\n1\n-2\n", "0\n1\nnever\n"] {
            assert!(read(bad).is_err(), "{bad:?}");
        }
    }

    fn of(words: &str) -> anyhow::Result<Traffic> {
        let cli = Cli::try_parse_from(std::iter::once("run").chain(words.split_whitespace()))?;
        traffic(&cli.traffic, &cli.pace)
    }

    #[test]
    fn flags_that_would_be_passed_over_are_refused() {
        for words in [
            "--dataset-path trace.jsonl",
            "--duration-s 60",
            "--length-scale 32",
            "--time-scale 2",
            "--spread-steps-s 3",
            "--context-len 2048",
            "--turns 4",
            "--think-time-ms 500",
            "--dataset-name prefix_repetition --turns 4",
            "--dataset-name prefix_repetition --dataset-path texts.jsonl",
            "--ramp-up-start-rps 1 --ramp-up-end-rps 8",
            "--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 8 --request-rate 4",
            "--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 8 --users 4",
            "--scenario offline --request-rate 4",
            "--scenario offline --users 4",
            "--scenario single-stream --request-rate 4",
            "--scenario single-stream --max-concurrency 4",
            "--scenario server --users 4",
            "--users 4 --burstiness 0.3",
            "--max-concurrency 4 --burstiness 0.3",
            "--request-rate inf --burstiness 0.3",
        ] {
            assert!(of(words).is_err(), "{words}");
        }
        for words in [
            "--dataset-name conversations --context-len 100000",
            "--dataset-name conversations --turns 2 --think-time-ms 500",
            "--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 8",
            "--scenario offline --request-rate inf",
            "--scenario offline --max-concurrency 4",
            "--scenario server --request-rate 4 --max-concurrency 4",
            "--request-rate 4 --burstiness 0.3",
            "--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 8 --burstiness 0.3",
            "--users 4 --burstiness 1",
        ] {
            of(&format!("--num-prompts 4 {words}")).unwrap_or_else(|error| panic!("{words}: {error:#}"));
        }
    }

    #[test]
    fn as_many_turns_are_sent_as_requests_were_asked_for() {
        let turns = |words: &str| {
            let found = of(&format!("--dataset-name conversations --turns 4 --num-prompts {words}"));
            let requests = found.expect("conversations").trace.requests;
            let mut turns: Vec<(u64, u32)> = requests
                .iter()
                .filter_map(|request| request.conversation)
                .map(|turn| (turn.conversation, turn.turn))
                .collect();
            turns.sort_unstable();
            turns
        };
        let whole = |conversation: u64| (0..4).map(move |turn| (conversation, turn));
        let eight: Vec<_> = whole(0).chain(whole(1)).collect();
        assert_eq!(turns("8 --users 2"), eight);
        assert_eq!(turns("10 --request-rate 4"), [&eight[..], &[(2, 0), (2, 1)]].concat());
        assert_eq!(turns("1"), [(0, 0)]);
        assert!(of("--dataset-name conversations --num-prompts 0").is_err());
        let name = of("--dataset-name conversations --turns 4 --num-prompts 10")
            .expect("some")
            .trace
            .name;
        assert!(name.contains("2 of the last conversation's turns"), "{name}");
    }

    #[test]
    fn a_trace_that_begins_late_begins_with_the_run() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("middle.jsonl");
        let row =
            |ms: u64| format!("{{\"timestamp\":{ms},\"input_length\":10,\"output_length\":5,\"hash_ids\":[1]}}\n");
        let rows: String = [3_600_000, 3_601_000, 3_602_000].map(row).concat();
        std::fs::write(&file, rows).unwrap();
        let found = of(&format!(
            "--dataset-name trace --dataset-path {} --duration-s 2",
            file.display()
        ))
        .unwrap();
        let requests = found.trace.requests.iter();
        let times: Vec<u128> = requests.map(|request| request.at.as_millis()).collect();
        assert_eq!(times, [0, 1_000]);
    }

    #[test]
    fn texts_have_their_own_lengths_of_answers_unless_one_is_given_for_all() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("texts.jsonl");
        std::fs::write(
            &file,
            "{\"prompt\":\"a\",\"output_tokens\":7}\n{\"prompt\":\"b\",\"output_tokens\":9}\n",
        )
        .unwrap();
        let lengths = |words: &str| {
            let found = of(&format!(
                "--dataset-name custom --dataset-path {} {words}",
                file.display()
            ))
            .unwrap();
            let requests = found.trace.requests.iter();
            (
                found.ignores_eos,
                requests.map(|request| request.output_tokens).collect::<Vec<_>>(),
            )
        };
        assert_eq!(lengths(""), (false, vec![7, 9]));
        assert_eq!(lengths("--ignore-eos"), (true, vec![7, 9]));
        assert_eq!(lengths("--random-output-len 5"), (false, vec![5, 5]));
        let cold = of(&format!(
            "--dataset-name custom --dataset-path {} --cache cold",
            file.display()
        ));
        assert!(cold.is_err(), "the texts are the same in each run");
    }
}
