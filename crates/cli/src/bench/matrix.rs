//! `baton bench matrix`: six shapes of traffic, cold and warm, as a folder of results that others can read.

mod files;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use workload::arrivals::Arrivals;
use workload::prediction::Prediction;
use workload::record::Run;
use workload::shapes::named::MatrixRow;
use workload::trace::Trace;

use super::arguments::{Judge, JudgeArgs, positive};
use super::interrupt::{is_cut, until_interrupted};
use super::load::plan::{LoadPlan, Pace};
use super::measure::{End, measure};
use super::point::{Point, table};
use super::server::ServerArgs;
use crate::exit::{Exit, WithExit as _};
use crate::http;
use crate::stdout::print_result;
use crate::terminal::{Terminal, say};

const EXAMPLES: &str = "\
Examples:
  baton bench matrix                                   rows A to F, cold and warm, into ./matrix
  baton bench matrix --rows A,B,D --cache cold --context 1024
  baton bench matrix --contract contract.toml --hypothesis 'row B is bound by prefill'
  baton bench matrix --weights-bytes 16e9 --memory-bandwidth 600e9   with predicted beside measured

The rows (prompt/answer tokens, scaled down together when the context is shorter):
  A 256/128, 1 user      B 2048/128, 1 user      C 256/1024, 1 user
  D 2048/1024, 8 users   E 4096/256, 16 users, a shared prefix   F a mix of A to D at --rate
A cold row has prompts that no server has seen. Before a warm row its prompts (row E: its prefix) are sent once.

Exit status: 0; 3 when a row does not meet the contract; 5 when the contract cannot be judged, because the client sent late;
1 or 4 when the server fails meanwhile (the rows before are printed and kept); 130 after Ctrl-C.";

/// As the help of --rate has it.
const RATE_DEFAULT: f64 = 1.0;
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct MatrixArgs {
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    judge: JudgeArgs,
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "a,b,c,d,e,f",
        value_name = "ROW,..",
        ignore_case = true
    )]
    rows: Vec<RowArg>,
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "cold,warm",
        value_name = "cold|warm,.."
    )]
    cache: Vec<Cache>,
    /// Requests of each row.
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    num_prompts: u32,
    /// Requests a second of row F [default: 1]. Only with row F: the other rows have users, who wait for their answers.
    #[arg(long, value_name = "RATE", value_parser = positive)]
    rate: Option<f64>,
    /// Tokens of prompt and answer together, at most [default: max_model_len of /v1/models].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(32..))]
    context: Option<u32>,
    /// Bytes of the weights that each token reads, for predicted beside measured.
    #[arg(long, value_name = "BYTES", value_parser = positive, requires = "memory_bandwidth")]
    weights_bytes: Option<f64>,
    /// Bytes a second of the memory that holds them.
    #[arg(long, value_name = "BYTES/S", value_parser = positive, requires = "weights_bytes")]
    memory_bandwidth: Option<f64>,
    /// What you expect, stored with the result.
    #[arg(long, value_name = "TEXT")]
    hypothesis: Option<String>,
    /// The folder of the results: the hardware, the flags of the server, row-*.json, and an interpretation.
    #[arg(long, default_value = "matrix", value_name = "DIR")]
    out: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RowArg {
    A,
    B,
    C,
    D,
    E,
    F,
}

impl RowArg {
    fn row(self) -> MatrixRow {
        match self {
            Self::A => MatrixRow::A,
            Self::B => MatrixRow::B,
            Self::C => MatrixRow::C,
            Self::D => MatrixRow::D,
            Self::E => MatrixRow::E,
            Self::F => MatrixRow::F,
        }
    }
    fn letter(self) -> String {
        format!("{self:?}")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Cache {
    Cold,
    Warm,
}

impl Cache {
    fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Warm => "warm",
        }
    }
}

/// One row that was measured.
struct Measured {
    row: RowArg,
    cache: Cache,
    point: Point,
    run: Run,
}

pub fn run(args: &MatrixArgs) -> anyhow::Result<Exit> {
    let judge = args.judge.read()?;
    check(args).exit(Exit::Usage)?;
    let (measured, end) = until_interrupted(async |stop| rows(args, &judge, stop).await)?;
    let points: Vec<Point> = measured.iter().map(|measured| measured.point.clone()).collect();
    // A file that cannot be written must not take what was measured with it.
    let written = files::write(args, &judge, &measured);
    print_result(&table(&points, |_| "", Terminal::stdout()))?;
    written?;
    print_result(&format!(
        "{} has hardware.md, server-flags.md, row-*.json and interpretation.md\n",
        args.out.display()
    ))?;
    match end {
        End::Whole => Ok(judged(&points)),
        End::Cut => Ok(Exit::Interrupted),
        End::Broken(error) => Err(error),
    }
}

/// The records of the second of two equal rows would be written over those of the first. A rate that no row has would be passed over.
fn check(args: &MatrixArgs) -> anyhow::Result<()> {
    anyhow::ensure!(
        args.rate.is_none() || args.rows.contains(&RowArg::F),
        "--rate is for row F, and --rows does not name it: leave --rate out, or add F to --rows"
    );
    let rows: Vec<String> = args.rows.iter().map(|row| row.letter()).collect();
    let caches: Vec<String> = args.cache.iter().map(|cache| cache.name().to_owned()).collect();
    for (flag, names) in [("--rows", rows), ("--cache", caches)] {
        let twice = names.iter().enumerate().find(|(at, name)| names[..*at].contains(*name));
        if let Some((_, name)) = twice {
            anyhow::bail!("{flag} names {name} twice: name it once. More --num-prompts measure it longer");
        }
    }
    Ok(())
}

/// Every row must meet the contract.
fn judged(points: &[Point]) -> Exit {
    let of = |wanted: Exit| points.iter().any(|point| point.status() == wanted).then_some(wanted);
    of(Exit::NotMet).or(of(Exit::NoVerdict)).unwrap_or(Exit::Ok)
}

/// # Errors
/// The first row cannot be measured.
async fn rows(args: &MatrixArgs, judge: &Judge, stop: CancellationToken) -> anyhow::Result<(Vec<Measured>, End)> {
    let context = match args.context {
        Some(context) => context,
        None => context_of(&args.server).await?,
    };
    let mut measured = Vec::new();
    for row in args.rows.iter().copied() {
        for cache in args.cache.iter().copied() {
            let label = format!("row {} {}", row.letter(), cache.name());
            let run = match one(args, (row, cache), context, &stop).await {
                Ok(Some(run)) => run,
                Ok(None) => return Ok((measured, End::Cut)),
                Err(error) if measured.is_empty() => return Err(error),
                Err(error) => {
                    let error = error.context(format!("{label} could not be measured, so the matrix ends there"));
                    return Ok((measured, End::Broken(error)));
                }
            };
            say!("{label} is measured");
            measured.push(Measured {
                row,
                cache,
                point: Point::of(label, &run, judge),
                run,
            });
        }
    }
    Ok((measured, End::Whole))
}

/// `None` when Ctrl-C cut it short.
async fn one(
    args: &MatrixArgs,
    (row, cache): (RowArg, Cache),
    context: u32,
    stop: &CancellationToken,
) -> anyhow::Result<Option<Run>> {
    let seed = args.server.seed;
    let traces = row.row().traces(context, args.num_prompts as usize, seed);
    let (mut trace, before) = traces.exit(Exit::Usage)?;
    let before = before.unwrap_or_else(|| trace.clone());
    // Prompts that a server may have from the last time would not be cold.
    let content: u64 = rand::random();
    if cache == Cache::Cold {
        trace
            .requests
            .iter_mut()
            .for_each(|request| request.prefix_blocks.clear());
    }
    let plan = |trace: Trace, pace: Pace| -> LoadPlan {
        let mut plan = args.server.plan(trace);
        plan.seed = content;
        plan.pace = pace;
        plan.name = format!("row {} {}", row.letter(), cache.name());
        plan
    };
    if cache == Cache::Warm {
        let sent = measure(&plan(before, Pace::Closed { users: 1 }), stop).await?;
        if is_cut(&sent) {
            return Ok(None);
        }
    }
    let plan = match row.row().users() {
        Some(users) => plan(trace, Pace::Closed { users }),
        None => {
            let trace = Arrivals::poisson(args.rate.unwrap_or(RATE_DEFAULT))
                .apply(trace, seed)
                .exit(Exit::Usage)?;
            plan(trace, Pace::Open { max_concurrency: None })
        }
    };
    let run = measure(&plan, stop).await?;
    Ok((!is_cut(&run)).then_some(run))
}

/// # Errors
/// Nobody answers, or the server does not tell.
async fn context_of(server: &ServerArgs) -> anyhow::Result<u32> {
    let base = http::base_url(&server.url);
    let mut request = http::client(&base, server.trust.ca())?
        .get(format!("{base}/v1/models"))
        .timeout(ANSWER_WITHIN);
    if let Some(key) = &server.api_key {
        request = request.bearer_auth(key);
    }
    let answer = request.send().await.map_err(|error| http::unreachable(&base, error))?;
    let models: Value = http::checked(answer).await?.json().await.unwrap_or_default();
    let all = models["data"].as_array().map(Vec::as_slice).unwrap_or_default();
    let asked = |model: &&Value| server.model.as_deref().is_none_or(|name| model["id"] == name);
    let length = all.iter().find(asked).and_then(|model| model["max_model_len"].as_u64());
    length
        .and_then(|length| u32::try_from(length).ok())
        .with_context(|| {
            format!(
                "{base}/v1/models does not tell max_model_len; say how long prompt and answer may be with --context"
            )
        })
        .exit(Exit::Usage)
}

impl MatrixArgs {
    fn prediction(&self) -> Option<Prediction> {
        Prediction::decode(self.weights_bytes?, self.memory_bandwidth?)
    }
}
