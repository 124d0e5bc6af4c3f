//! The flags of `baton bench run`. Those that `vllm bench serve` has too have its names and its meaning.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::bench::arguments::{ContractArgs, positive};
use crate::http::{self, TrustArgs};

const EXAMPLES: &str = "\
Examples:
  baton bench run --num-prompts 200 --request-rate 4 --random-input-len 512 --random-output-len 64
  baton bench run --base-url http://host:8000 --users 8 --num-prompts 200
  baton bench run --dataset-name trace --dataset-path conversation_trace.jsonl --length-scale 32 --time-scale 0.5
  baton bench run --dataset-name conversations --turns 4 --num-prompts 200 --request-rate 1
  baton bench run --dataset-name prefix_repetition --cache warm --request-rate 2 --num-prompts 100
  baton bench run --request-rate 4 --goodput ttft:300 itl:50 --save-result --run-json run.json --csv run.csv";

#[derive(Clone, Debug, Args)]
#[command(before_help = EXAMPLES)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(super) server: ServerArgs,
    #[command(flatten)]
    pub(super) traffic: TrafficArgs,
    #[command(flatten)]
    pub(super) pace: PaceArgs,
    #[command(flatten)]
    pub(super) output: OutputArgs,
    #[command(flatten, next_help_heading = "Contract")]
    pub(super) contract: ContractArgs,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub(super) struct ServerArgs {
    /// Address of the server, with or without /v1.
    #[arg(
        long = "url",
        visible_alias = "base-url",
        env = http::URL_VARIABLE,
        default_value = http::URL_DEFAULT,
        value_name = "URL"
    )]
    pub base_url: String,
    #[command(flatten)]
    pub trust: TrustArgs,
    /// What the server speaks: completions (openai, vllm) or chat.
    #[arg(long, value_enum, default_value_t = Backend::Openai)]
    pub backend: Backend,
    /// Path of the endpoint, if it is not that of the backend. `/v1/chat/completions` means chat.
    #[arg(long, value_name = "PATH")]
    pub endpoint: Option<String>,
    /// Name of the model [default: the first one of /v1/models].
    #[arg(long)]
    pub model: Option<String>,
    /// Accepted for `vllm bench serve` command lines and written into the result. Prompts are made without a tokenizer.
    #[arg(long)]
    pub tokenizer: Option<String>,
    /// Sent as `Authorization: Bearer KEY`.
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub api_key: Option<String>,
    /// One more header of each request, NAME=VALUE.
    #[arg(long, value_name = "NAME=VALUE", num_args = 1.., value_parser = pair)]
    pub header: Vec<(String, String)>,
    /// Measure the CPU of this process, NAME=PID [default: what listens on a port of this machine, and its family].
    #[arg(long, value_name = "NAME=PID", value_parser = pair)]
    pub server_pid: Vec<(String, String)>,
    /// Do not ask a coordinator of baton for its records after the run.
    #[arg(long)]
    pub no_server_records: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Backend {
    Openai,
    Vllm,
    OpenaiChat,
}

impl Backend {
    pub(super) fn name(self) -> &'static str {
        match self {
            Backend::Openai => "openai",
            Backend::Vllm => "vllm",
            Backend::OpenaiChat => "openai-chat",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum Dataset {
    /// Random lengths; no prompt shares anything with another one, but for --random-prefix-len.
    Random,
    /// Prompts that begin with one of a few prefixes.
    PrefixRepetition,
    /// Several turns; the real answers become part of the next prompt (chat), or drawn ones (completions).
    Conversations,
    /// Texts: JSON lines with a `prompt` each.
    #[value(alias = "sharegpt")]
    Custom,
    /// A recorded trace: Mooncake, Azure, or baton's own format.
    #[value(alias = "timed_trace")]
    Trace,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum PromptForm {
    Ids,
    Words,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Cache {
    /// Prompts follow from the seed, so a run that is repeated finds those of the run before in the cache.
    AsItIs,
    /// Prompts differ from those of every earlier run (not with custom, whose texts are given).
    Cold,
    /// Each prefix is sent once before the run (prefix_repetition and --random-prefix-len).
    Warm,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Traffic")]
pub(super) struct TrafficArgs {
    #[arg(long, value_enum, default_value_t = Dataset::Random)]
    pub dataset_name: Dataset,
    /// The file of `custom` or `trace`.
    #[arg(long, value_name = "FILE")]
    pub dataset_path: Option<PathBuf>,
    /// Requests to send [default: 1000]; of a file, at most as many [default: all of it].
    #[arg(long, value_name = "N")]
    pub num_prompts: Option<usize>,
    /// Tokens of a prompt (of conversations: of a message).
    #[arg(long, alias = "input-len", default_value_t = 1024, value_name = "TOKENS")]
    pub random_input_len: u32,
    /// Tokens of an answer [default: 128]. With `custom` it counts for every text.
    #[arg(long, alias = "output-len", value_name = "TOKENS")]
    pub random_output_len: Option<u32>,
    /// Lengths are drawn evenly from LEN x (1 - RATIO) to LEN x (1 + RATIO).
    #[arg(long, default_value_t = 0.0, value_name = "RATIO")]
    pub random_range_ratio: f64,
    /// Tokens before each prompt that all prompts share (of conversations: the system prompt).
    #[arg(long, default_value_t = 0, value_name = "TOKENS")]
    pub random_prefix_len: u32,
    #[arg(long, default_value_t = 256, value_name = "TOKENS")]
    pub prefix_repetition_prefix_len: u32,
    #[arg(long, default_value_t = 256, value_name = "TOKENS")]
    pub prefix_repetition_suffix_len: u32,
    #[arg(long, default_value_t = 10, value_name = "N")]
    pub prefix_repetition_num_prefixes: u32,
    #[arg(long, default_value_t = 128, value_name = "TOKENS")]
    pub prefix_repetition_output_len: u32,
    /// Turns of each conversation [default: 4]. Only with conversations.
    #[arg(long, value_name = "N")]
    pub turns: Option<u32>,
    /// Mean time between an answer and the next message [default: 1000]. Only with conversations.
    #[arg(long, value_name = "MS")]
    pub think_time_ms: Option<u64>,
    /// Divides the lengths and blocks of a trace.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub length_scale: u32,
    /// Sends a trace so many times as fast as it was.
    #[arg(long, default_value_t = 1.0, value_name = "FACTOR")]
    pub time_scale: f64,
    /// Spreads the requests of each step of a trace over this time (3 for the Mooncake traces).
    #[arg(long, value_name = "S")]
    pub spread_steps_s: Option<f64>,
    /// Cuts a trace to this time, after scaling.
    #[arg(long, value_name = "S")]
    pub duration_s: Option<f64>,
    /// Shortens what does not fit the model's context.
    #[arg(long, value_name = "TOKENS")]
    pub context_len: Option<u32>,
    /// What stands in made prompts: token ids, exact, or words, about one token each (the chat endpoint always gets words).
    #[arg(long, value_enum, default_value_t = PromptForm::Ids)]
    pub prompts: PromptForm,
    #[arg(long, value_enum, default_value_t = Cache::AsItIs)]
    pub cache: Cache,
    /// Ask for exactly as many tokens as the dataset says. It is on for all but `custom`.
    #[arg(long)]
    pub ignore_eos: bool,
    /// Let answers end where the model ends them.
    #[arg(long, conflicts_with = "ignore_eos")]
    pub no_ignore_eos: bool,
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f64,
    /// More members of each body, as a JSON object. Those that each body has already, such as `max_tokens`, are refused.
    #[arg(long, value_name = "JSON")]
    pub extra_body: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum RampUp {
    Linear,
    Exponential,
}

/// The scenarios of MLPerf Inference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Scenario {
    /// All requests at once: throughput.
    Offline,
    /// Poisson arrivals at --request-rate.
    Server,
    /// As server, with the limits 450 ms TTFT and 40 ms TPOT.
    Interactive,
    /// One user: each request when the answer before has ended.
    SingleStream,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Pace")]
pub(super) struct PaceArgs {
    /// Requests a second, or `inf`: all at once, as without this flag. A trace has its own times unless a rate is given.
    #[arg(long, value_name = "RATE")]
    pub request_rate: Option<f64>,
    /// Shape of the gamma distribution of the gaps: 1 is Poisson, less is burstier.
    #[arg(long, default_value_t = 1.0)]
    pub burstiness: f64,
    /// At most so many requests at once. Without a rate this is a closed loop.
    #[arg(long, value_name = "N")]
    pub max_concurrency: Option<u32>,
    /// A closed loop: so many users, who each wait for their answer.
    #[arg(long, value_name = "N", conflicts_with_all = ["max_concurrency", "request_rate"])]
    pub users: Option<u32>,
    #[arg(
        long,
        value_enum,
        requires_all = ["ramp_up_start_rps", "ramp_up_end_rps"],
        conflicts_with_all = ["request_rate", "users"]
    )]
    pub ramp_up_strategy: Option<RampUp>,
    #[arg(long, value_name = "RATE", requires = "ramp_up_strategy")]
    pub ramp_up_start_rps: Option<f64>,
    #[arg(long, value_name = "RATE", requires = "ramp_up_strategy")]
    pub ramp_up_end_rps: Option<f64>,
    /// Send request n at the n-th time of this file: seconds from the start, one a line, in order.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["request_rate", "users", "ramp_up_strategy", "scenario"])]
    pub arrival_times: Option<PathBuf>,
    #[arg(long, value_enum)]
    pub scenario: Option<Scenario>,
    /// Requests before the run, which do not count.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub num_warmups: u32,
    /// Requests that are due in this time from the start do not count.
    #[arg(long, default_value_t = 0.0, value_name = "S")]
    pub warm_up_s: f64,
    /// Requests that are due in this time before the last one do not count.
    #[arg(long, default_value_t = 0.0, value_name = "S")]
    pub cool_down_s: f64,
    /// Share of the requests that the client gives up after a random number of their tokens.
    #[arg(long, default_value_t = 0.0, value_name = "SHARE")]
    pub cancel_rate: f64,
    /// A request that has not ended by then has failed.
    #[arg(long, default_value_t = 21_600.0, value_name = "S")]
    pub request_timeout_s: f64,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Output")]
pub(super) struct OutputArgs {
    /// Which metrics get percentiles.
    #[arg(long, value_delimiter = ',', default_value = "ttft,tpot,itl,e2el")]
    pub percentile_metrics: Vec<Metric>,
    #[arg(long, value_delimiter = ',', default_value = "50,95,99")]
    pub metric_percentiles: Vec<f64>,
    /// Limits in ms that a good request keeps: ttft, tpot, itl (p99 of its own gaps), e2el. A contract in dollars counts the tokens of good
    /// requests; without limits here it takes those of the chat profile, ttft:300 itl:50.
    #[arg(long, value_name = "METRIC:MS", num_args = 1.., value_parser = limit)]
    pub goodput: Vec<(Metric, f64)>,
    /// Write the result as `vllm bench serve` does.
    #[arg(long)]
    pub save_result: bool,
    /// With each request's times, texts and errors.
    #[arg(long)]
    pub save_detailed: bool,
    /// Add the result to the file as one more line.
    #[arg(long)]
    pub append_result: bool,
    #[arg(long, value_name = "FOLDER")]
    pub result_dir: Option<PathBuf>,
    #[arg(long, value_name = "FILE")]
    pub result_filename: Option<PathBuf>,
    /// KEY=VALUE pairs for the result.
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., value_parser = pair)]
    pub metadata: Vec<(String, String)>,
    /// Name of the result [default: the backend].
    #[arg(long)]
    pub label: Option<String>,
    /// Write everything that was measured: each request with the times of its tokens, CPU, environment.
    #[arg(long, value_name = "FILE")]
    pub run_json: Option<PathBuf>,
    /// Write a line for each request.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// What you expect to see, stored with the result.
    #[arg(long, value_name = "TEXT")]
    pub hypothesis: Option<String>,
    /// Print the result as JSON instead of a table.
    #[arg(long)]
    pub json: bool,
    /// No progress bar.
    #[arg(long, alias = "quiet")]
    pub disable_tqdm: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(super) enum Metric {
    Ttft,
    Tpot,
    Itl,
    E2el,
}

impl Metric {
    pub(super) const ALL: [Metric; 4] = [Metric::Ttft, Metric::Tpot, Metric::Itl, Metric::E2el];

    pub(super) fn name(self) -> &'static str {
        match self {
            Metric::Ttft => "ttft",
            Metric::Tpot => "tpot",
            Metric::Itl => "itl",
            Metric::E2el => "e2el",
        }
    }
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE")?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

fn limit(text: &str) -> Result<(Metric, f64), String> {
    let (metric, limit) = text.split_once(':').ok_or("write METRIC:MS, as in ttft:300")?;
    let metric = Metric::from_str(metric, true).map_err(|_| "the metrics are ttft, tpot, itl and e2el")?;
    Ok((metric, positive(limit)?))
}
