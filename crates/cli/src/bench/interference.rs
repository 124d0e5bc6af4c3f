//! `baton bench interference`: what running streams feel of long prompts that arrive.

use std::time::Duration;

use clap::Args;
use serde::Serialize;
use tokio_util::sync::CancellationToken;
use workload::record::{RequestRecord, Run};
use workload::shapes::interference::Interference;
use workload::statistics::Samples;

use super::arguments::positive;
use super::interrupt::{is_cut, until_interrupted};
use super::load::plan::{LoadPlan, content_seed};
use super::measure::{End, measure};
use super::server::ServerArgs;
use crate::exit::{Exit, WithExit as _};
use crate::observe::table::{Cell, Table};
use crate::stdout::print_result;
use crate::terminal::{Paint, Terminal, say};

const EXAMPLES: &str = "\
Examples:
  baton bench interference                             8, 16, 32 and 64 streams, beside them prompts of 1,500 tokens
  baton bench interference --streams 4,8 --long-input-len 800 --stream-output-len 256
  baton bench interference --url http://127.0.0.1:8000 --beside http://127.0.0.1:8001   two servers, one table
Start the servers with `baton up --topology 2c` and `baton up --topology 1p1d` to compare co-located with disaggregated nodes,
one after the other where they would share cores.

Exit status: 0; 1 or 4 when a server fails meanwhile (the rows before are printed); 130 after Ctrl-C.";

#[derive(Clone, Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct InterferenceArgs {
    #[command(flatten)]
    server: ServerArgs,
    /// Another server that gets the same load afterwards; may be given several times.
    #[arg(long, value_name = "URL")]
    beside: Vec<String>,
    /// Running streams.
    #[arg(long, value_delimiter = ',', default_value = "8,16,32,64", value_name = "N,..", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    streams: Vec<u32>,
    #[arg(long, default_value_t = 32, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    stream_input_len: u32,
    /// Long enough to outlive the last long prompt; a warning says when it is not.
    #[arg(long, default_value_t = 512, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    stream_output_len: u32,
    #[arg(long, default_value_t = 1500, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    long_input_len: u32,
    /// How many long prompts arrive.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    long_prompts: u32,
    /// Seconds between them.
    #[arg(long, default_value_t = 1.0, value_name = "SECONDS", value_parser = positive)]
    long_every: f64,
    /// Seconds between the start of the last stream and the first long prompt.
    #[arg(long, default_value_t = 2.0, value_name = "SECONDS", value_parser = positive)]
    quiet: f64,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

/// One row: the gaps of the streams, before the first long prompt and beside the long prompts.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Row {
    url: String,
    streams: u32,
    quiet_itl_ms_p50: Option<f64>,
    quiet_itl_ms_p99: Option<f64>,
    itl_ms_p50: Option<f64>,
    itl_ms_p99: Option<f64>,
    itl_ms_max: Option<f64>,
    /// Median of the longest gaps beside each long prompt, from its arrival to its first token.
    longest_itl_ms_p50: Option<f64>,
    /// p99 by p50.
    ratio: Option<f64>,
    gaps: usize,
    long_ttft_ms_p50: Option<f64>,
    /// Streams that had ended when the last long prompt got its first token.
    streams_ended_early: usize,
    /// Streams and long prompts without a whole answer.
    not_completed: usize,
    /// Streams whose tokens came at once, so that their gaps are not known and not counted.
    held_back: usize,
    lag_ms_p99: f64,
}

pub fn run(args: &InterferenceArgs) -> anyhow::Result<Exit> {
    let (rows, end) = until_interrupted(async |stop: CancellationToken| {
        let send = async |plan: LoadPlan| measure(&plan, &stop).await;
        rows(args, send).await
    })?;
    print_result(&match args.json {
        true => format!("{}\n", serde_json::to_string_pretty(&rows)?),
        false => text(&rows, Terminal::stdout()),
    })?;
    match end {
        End::Whole => Ok(Exit::Ok),
        End::Cut => Ok(Exit::Interrupted),
        End::Broken(error) => Err(error),
    }
}

/// # Errors
/// The first row cannot be measured.
async fn rows(
    args: &InterferenceArgs,
    mut send: impl AsyncFnMut(LoadPlan) -> anyhow::Result<Run>,
) -> anyhow::Result<(Vec<Row>, End)> {
    let mut rows = Vec::new();
    for url in std::iter::once(&args.server.url).chain(&args.beside) {
        for (number, streams) in (0..).zip(args.streams.iter().copied()) {
            let shape = args.shape(streams);
            let server = ServerArgs {
                url: url.clone(),
                ..args.server.clone()
            };
            let mut plan = server.plan(shape.trace().exit(Exit::Usage)?);
            // Each server gets the same rows.
            plan.seed = content_seed(server.seed, number);
            let run = match send(plan).await {
                Ok(run) if is_cut(&run) => return Ok((rows, End::Cut)),
                Ok(run) => run,
                Err(error) if rows.is_empty() => return Err(error),
                Err(error) => {
                    let words = format!("{streams} streams at {url} could not be measured, so the table ends there");
                    return Ok((rows, End::Broken(error.context(words))));
                }
            };
            say!("{streams} streams at {url} are measured");
            rows.push(Row::of(url, &shape, &run));
        }
    }
    Ok((rows, End::Whole))
}

impl InterferenceArgs {
    fn shape(&self, streams: u32) -> Interference {
        let stream_every = Duration::from_millis(50);
        let seconds = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        Interference {
            streams,
            stream_prompt_tokens: self.stream_input_len,
            stream_output_tokens: self.stream_output_len,
            stream_every,
            long_prompts: self.long_prompts,
            long_prompt_tokens: self.long_input_len,
            // A few tokens: the prompt is what disturbs.
            long_output_tokens: 4,
            long_from: (stream_every * streams).saturating_add(seconds(self.quiet)),
            long_every: seconds(self.long_every),
        }
    }
}

impl Row {
    fn of(url: &str, shape: &Interference, run: &Run) -> Self {
        let (long, streams): (Vec<_>, Vec<_>) = run
            .records
            .iter()
            .partition(|record| record.scheduled >= shape.long_from);
        let all_run = streams
            .iter()
            .filter_map(|record| record.tokens.first())
            .max()
            .copied()
            .unwrap_or_default();
        let long_until = long
            .iter()
            .filter_map(|record| record.tokens.first())
            .max()
            .copied()
            .unwrap_or(shape.long_from);
        let held_back = |record: &&&RequestRecord| !record.are_gaps_known();
        let gaps = |counts: &dyn Fn(Duration, Duration) -> bool| {
            let known = streams.iter().filter(|record| record.are_gaps_known());
            let pairs = known.flat_map(|record| record.tokens.windows(2));
            let counted = pairs.filter(|pair| counts(pair[0], pair[1]));
            Samples::new(counted.map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3))
        };
        // The gap in which the first long prompt comes is not quiet.
        let quiet = gaps(&|_, end| end > all_run && end <= shape.long_from);
        let beside = gaps(&|begin, end| end > shape.long_from && begin < long_until);
        let longest = |prompt: &&RequestRecord| {
            let until = *prompt.tokens.first()?;
            gaps(&|begin, end| end > prompt.scheduled && begin < until).percentile(100.0)
        };
        let (p50, p99) = (beside.percentile(50.0), beside.percentile(99.0));
        let ended_early = |record: &&&RequestRecord| record.ended < long_until;
        Self {
            url: url.to_owned(),
            streams: shape.streams,
            quiet_itl_ms_p50: quiet.percentile(50.0),
            quiet_itl_ms_p99: quiet.percentile(99.0),
            itl_ms_p50: p50,
            itl_ms_p99: p99,
            itl_ms_max: beside.percentile(100.0),
            longest_itl_ms_p50: Samples::new(long.iter().filter_map(longest)).percentile(50.0),
            ratio: p50.zip(p99).filter(|(p50, _)| *p50 > 0.0).map(|(p50, p99)| p99 / p50),
            gaps: beside.count(),
            long_ttft_ms_p50: Samples::new(long.iter().filter_map(|record| record.ttft_ms())).percentile(50.0),
            streams_ended_early: streams.iter().filter(ended_early).count(),
            not_completed: run.records.iter().filter(|record| !record.is_completed()).count(),
            held_back: streams.iter().filter(held_back).count(),
            lag_ms_p99: workload::summary::Lag::of(run).ms_p99,
        }
    }
    fn notes(&self) -> String {
        let early = self.streams_ended_early;
        let is_late = self.lag_ms_p99 > workload::summary::LAG_MS_P99_MAX;
        let notes = [
            (early > 0).then(|| format!("{early} streams ended early: raise --stream-output-len")),
            (self.not_completed > 0).then(|| format!("{} requests without a whole answer", self.not_completed)),
            (self.held_back > 0).then(|| {
                let streams = self.held_back;
                format!("{streams} streams had their tokens at once: the server or a proxy holds tokens back, and their gaps are not counted")
            }),
            is_late.then(|| format!("invalid: the client sent late, p99 {:.1} ms", self.lag_ms_p99)),
        ];
        notes.into_iter().flatten().collect::<Vec<_>>().join("; ")
    }
}

fn text(rows: &[Row], terminal: Terminal) -> String {
    let mut table = Table::new(&[
        "server",
        ">streams",
        ">quiet p50 ms",
        ">quiet p99",
        ">ITL P50 ms",
        ">ITL P99",
        ">ITL max",
        ">longest p50",
        ">ratio",
        ">long TTFT p50",
        "notes",
    ]);
    for row in rows {
        let ms = |value: Option<f64>| -> Cell { value.map_or("-".to_owned(), |value| format!("{value:.1}")).into() };
        table.row(vec![
            row.url.as_str().into(),
            row.streams.to_string().into(),
            ms(row.quiet_itl_ms_p50),
            ms(row.quiet_itl_ms_p99),
            ms(row.itl_ms_p50),
            ms(row.itl_ms_p99),
            ms(row.itl_ms_max),
            ms(row.longest_itl_ms_p50),
            ms(row.ratio),
            ms(row.long_ttft_ms_p50),
            Cell::new(row.notes()).paint(Paint::Warn),
        ]);
    }
    let words = "ITL: gaps of the streams from the first long prompt to the first token of the last one. quiet: before them. longest: the longest\ngap beside each long prompt. ratio: P99 by P50.\n";
    table.render(terminal) + words
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::collections::BTreeMap;
    use workload::record::{LoopKind, Outcome, RunPart, Usage};

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: InterferenceArgs,
    }

    fn args(streams: &str) -> InterferenceArgs {
        let parsed = Cli::try_parse_from(["interference", "--long-prompts", "5", "--streams", streams]);
        parsed.expect("usable words").args
    }

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn record(at: u64, tokens: Vec<Duration>) -> RequestRecord {
        RequestRecord {
            id: format!("r-{at}"),
            part: RunPart::Measured,
            lane: serving_core::request::Lane::Interactive,
            prompt_tokens: 1,
            cached_tokens: None,
            output_tokens: tokens.len() as u32,
            scheduled: ms(at),
            sent: ms(at),
            ended: *tokens.last().expect("tokens"),
            tokens,
            outcome: Outcome::Completed,
            output_hash: None,
            server: None,
        }
    }

    fn run_of(records: Vec<RequestRecord>) -> Run {
        Run {
            name: "a".to_owned(),
            loop_kind: LoopKind::Open,
            offered: 1.0,
            records,
            measured: ms(2000),
            client: Usage::default(),
            server: BTreeMap::new(),
            environment: BTreeMap::new(),
        }
    }

    /// A server that dies of four streams.
    async fn mortal(plan: LoadPlan) -> anyhow::Result<Run> {
        anyhow::ensure!(plan.trace.requests.len() < 4 + 5, "no server answers");
        Ok(run_of(Vec::new()))
    }

    #[tokio::test]
    async fn a_server_that_dies_takes_no_row_with_it() {
        let (kept, end) = rows(&args("2,4,8"), mortal).await.expect("a row");
        assert_eq!(kept.iter().map(|row| row.streams).collect::<Vec<_>>(), [2]);
        let End::Broken(error) = end else {
            panic!("the server has died");
        };
        let words = format!("{error:#}");
        assert!(
            words.contains("4 streams") && words.contains("no server answers"),
            "{words}"
        );
        assert!(rows(&args("4,2"), mortal).await.is_err(), "nothing was measured");
    }

    #[tokio::test]
    async fn each_row_has_prompts_of_its_own_and_each_server_the_same_rows() {
        let words = ["interference", "--streams", "2,4", "--beside", "http://b"];
        let args = Cli::try_parse_from(words).expect("usable words").args;
        let mut seeds = Vec::new();
        let send = async |plan: LoadPlan| {
            seeds.push(plan.seed);
            anyhow::Ok(run_of(Vec::new()))
        };
        rows(&args, send).await.expect("rows");
        assert_ne!(seeds[0], seeds[1]);
        assert_eq!(seeds[..2], seeds[2..]);
    }

    /// Two streams with a token each 10 ms. A long prompt comes at 1,000 ms and stops both for 200 ms. One that comes at 1,500 ms stops nobody.
    #[test]
    fn gaps_beside_long_prompts_are_told_from_quiet_ones() {
        let shape = Interference {
            streams: 2,
            stream_prompt_tokens: 1,
            stream_output_tokens: 200,
            stream_every: ms(50),
            long_prompts: 2,
            long_prompt_tokens: 1000,
            long_output_tokens: 1,
            long_from: ms(1000),
            long_every: ms(1000),
        };
        let stream = |at: u64| {
            let before = (at + 10..=1000).step_by(10).map(ms);
            record(at, before.chain((1200..2000).step_by(10).map(ms)).collect())
        };
        let long = [record(1000, vec![ms(1210)]), record(1500, vec![ms(1520)])];
        let records = [vec![stream(0), stream(50)], long.to_vec()].concat();
        let run = run_of(records);
        let row = Row::of("http://a", &shape, &run);
        assert_eq!((row.quiet_itl_ms_p50, row.quiet_itl_ms_p99), (Some(10.0), Some(10.0)));
        assert_eq!((row.itl_ms_max, row.longest_itl_ms_p50), (Some(200.0), Some(105.0)));
        assert_eq!(row.gaps, 2 * (1 + 32));
        assert_eq!(row.long_ttft_ms_p50, Some(115.0));
        assert_eq!((row.streams_ended_early, row.not_completed), (0, 0));
        let lines = text(std::slice::from_ref(&row), Terminal::plain());
        for heading in ["streams", "ITL P50 ms", "ITL P99", "longest p50", "ratio"] {
            assert!(lines.contains(heading), "{lines}");
        }
        let mut at_once = run.clone();
        at_once.records[0].tokens = vec![ms(1900); 64];
        let half = Row::of("http://a", &shape, &at_once);
        assert_eq!((half.held_back, half.gaps, half.itl_ms_p50), (1, 1 + 32, Some(10.0)));
        assert!(text(&[half], Terminal::plain()).contains("holds tokens back"));
        let short = Row {
            streams_ended_early: 2,
            ..row
        };
        assert!(text(&[short], Terminal::plain()).contains("raise --stream-output-len"));
    }
}
