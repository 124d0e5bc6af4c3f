//! `baton bench slowest`: the slowest requests of a run, and what made each of them slow.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use coordinator::records::Page;
use coordinator::records::shape::{Detail, StageShape, Summary as Record};
use serde::Deserialize;
use serde_json::{Value, json};
use serving_core::request::Lane;
use tokio_util::sync::CancellationToken;
use workload::causes::{Usual, slowest};
use workload::record::{LoopKind, Outcome, RequestRecord, Run, RunPart, ServerRecord, Usage};

use super::interrupt::until_interrupted;
use super::load::server_records::server_record;
use crate::exit::{Exit, WithExit as _};
use crate::observe::UrlArgs;
use crate::observe::client::AdminClient;
use crate::observe::table::Table;
use crate::stdout::print_result;
use crate::terminal::Terminal;

const EXAMPLES: &str = "\
Examples:
  baton bench slowest                                  the ten slowest requests that the coordinator still knows
  baton bench slowest 5 --run sweep/point-03.json      of a run that a sweep or a matrix has kept
  baton bench slowest --json";

/// 50,000 requests of 128 tokens, as a sweep and a matrix write them: about 80 bytes a token. A token takes 16 bytes of memory.
const RUN_BYTES_MAX: u64 = 512 << 20;
/// Newest requests that show what is usual at a coordinator.
const USUAL_OF: usize = 100;

#[derive(Clone, Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct SlowestArgs {
    #[arg(default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    count: u16,
    /// A file with the records of a run, instead of a coordinator.
    #[arg(long, value_name = "FILE")]
    run: Option<PathBuf>,
    #[command(flatten)]
    url: UrlArgs,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &SlowestArgs) -> anyhow::Result<Exit> {
    let count = usize::from(args.count);
    let run = match &args.run {
        Some(path) => {
            let at = || format!("{} cannot be read as a run", path.display());
            read(path).with_context(at).exit(Exit::Usage)?
        }
        None => {
            let asked = async |stop: CancellationToken| unless_cut(ask(&args.url, count), &stop).await;
            match until_interrupted(asked)? {
                Some(run) => run,
                None => return Ok(Exit::Interrupted),
            }
        }
    };
    let usual = Usual::of(&run);
    let found: Vec<_> = slowest(&run, count)
        .into_iter()
        .map(|record| (record, usual.cause(record)))
        .collect();
    if args.json {
        let found: Vec<Value> = found
            .iter()
            .map(|(record, cause)| json!({"id": record.id, "e2e_ms": record.e2e_ms(), "ttft_ms": record.ttft_ms(), "prompt_tokens": record.prompt_tokens, "output_tokens": record.output_tokens, "cause": cause}))
            .collect();
        print_result(&format!("{}\n", serde_json::to_string_pretty(&found)?))?;
        return Ok(Exit::Ok);
    }
    let mut table = Table::new(&[
        ">#",
        "request",
        ">prompt",
        ">output",
        ">TTFT ms",
        ">e2e ms",
        "slow because",
    ]);
    for (rank, (record, cause)) in (1..).zip(&found) {
        table.row(vec![
            format!("{rank}").into(),
            record.id.as_str().into(),
            record.prompt_tokens.to_string().into(),
            record.output_tokens.to_string().into(),
            record
                .ttft_ms()
                .map_or("-".to_owned(), |ttft| format!("{ttft:.1}"))
                .into(),
            format!("{:.1}", record.e2e_ms()).into(),
            cause.words.as_str().into(),
        ]);
    }
    print_result(&format!(
        "{}{} of {} requests; the cause is the part that exceeds its usual length most\n",
        table.render(Terminal::stdout()),
        found.len(),
        run.records.len()
    ))?;
    Ok(Exit::Ok)
}

/// A run, alone or as the member `run` of an object. Its requests are wanted, and what says how many of them it had at a time; everything
/// else is passed over.
#[derive(Deserialize)]
struct RunFile {
    run: Option<KeptRun>,
    records: Option<Vec<RequestRecord>>,
    loop_kind: Option<LoopKind>,
    #[serde(default)]
    environment: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
struct KeptRun {
    records: Vec<RequestRecord>,
    loop_kind: Option<LoopKind>,
    #[serde(default)]
    environment: BTreeMap<String, Value>,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "it is larger than {bytes_max} bytes. Measure fewer requests (--num-prompts), or ask the coordinator: leave out --run"
)]
struct TooLarge {
    bytes_max: u64,
}

fn read(path: &Path) -> anyhow::Result<Run> {
    kept_run(File::open(path)?, RUN_BYTES_MAX)
}

fn kept_run(input: impl Read, bytes_max: u64) -> anyhow::Result<Run> {
    // One byte more than allowed, so that a file of the allowed size can be told from a larger one.
    let mut input = BufReader::new(input.take(bytes_max.saturating_add(1)));
    let file: Result<RunFile, _> = serde_json::from_reader(&mut input);
    if input.get_ref().limit() == 0 {
        return Err(TooLarge { bytes_max }.into());
    }
    let file = file?;
    let alone = file.records.map(|records| KeptRun {
        records,
        loop_kind: file.loop_kind,
        environment: file.environment,
    });
    let kept = file.run.or(alone);
    let kept = kept.context("it has no `records`, and no `run` that has some")?;
    let mut run = run_of(kept.records);
    run.loop_kind = kept.loop_kind.unwrap_or(run.loop_kind);
    run.environment = kept.environment;
    Ok(run)
}

fn run_of(records: Vec<RequestRecord>) -> Run {
    Run {
        name: String::new(),
        loop_kind: LoopKind::Open,
        offered: 0.0,
        records,
        measured: Duration::ZERO,
        client: Usage::default(),
        server: BTreeMap::new(),
        environment: BTreeMap::new(),
    }
}

/// `None` after Ctrl-C: a part of the requests does not show what is usual.
async fn unless_cut<T>(
    work: impl Future<Output = anyhow::Result<T>>,
    stop: &CancellationToken,
) -> anyhow::Result<Option<T>> {
    tokio::select! {
        done = work => done.map(Some),
        () = stop.cancelled() => Ok(None),
    }
}

/// The slowest requests that a coordinator keeps, and its newest ones, which show what is usual.
async fn ask(url: &UrlArgs, count: usize) -> anyhow::Result<Run> {
    let client = AdminClient::new(url)?;
    let mut records: BTreeMap<u64, RequestRecord> = BTreeMap::new();
    let newest = [("limit", USUAL_OF.to_string()), ("outcome", "ok".to_owned())];
    let slow = [
        ("limit", count.to_string()),
        ("outcome", "ok".to_owned()),
        ("slowest", "true".to_owned()),
    ];
    for query in [&newest[..], &slow[..]] {
        let page: Page = client.read(&["admin", "requests"], query).await?;
        for found in page
            .records
            .into_iter()
            .filter(|found| !records.contains_key(&found.seq))
            .collect::<Vec<_>>()
        {
            let seq = found.seq.to_string();
            // A record may be forgotten between the two questions.
            let Some(detail) = client.find(&["admin", "requests", &seq], &[]).await? else {
                continue;
            };
            let detail: Detail = crate::observe::client::parse(&["admin", "requests"], &detail)?;
            records.insert(found.seq, record_of(&detail));
        }
    }
    Ok(run_of(records.into_values().collect()))
}

/// A request as the coordinator saw it. Its tokens are put where their mean gap puts them, with the longest gap last: a record
/// does not keep the time of each.
fn record_of(detail: &Detail) -> RequestRecord {
    let Record {
        ttft_ms,
        tpot_ms,
        itl_max_ms,
        e2e_ms,
        serving,
        id,
        ..
    } = &detail.summary;
    let ms = |ms: f64| Duration::try_from_secs_f64(ms.max(0.0) / 1e3).unwrap_or_default();
    let gaps = serving.output_tokens.saturating_sub(1);
    let (first, gap) = (ttft_ms.unwrap_or(*e2e_ms), tpot_ms.unwrap_or(0.0));
    let longest = itl_max_ms.unwrap_or(gap).min(gap * f64::from(gaps));
    let others = gaps.saturating_sub(1);
    let other = if others > 0 {
        (gap * f64::from(gaps) - longest) / f64::from(others)
    } else {
        0.0
    };
    let before_last = (0..=others).map(|token| first + other * f64::from(token));
    let last = (gaps > 0).then(|| first + gap * f64::from(gaps));
    let tokens: Vec<Duration> = before_last.chain(last).map(ms).collect();
    let error_ms = detail.clocks.iter().map(|clock| clock.error_ms).fold(0.0, f64::max);
    RequestRecord {
        id: id.clone(),
        part: RunPart::Measured,
        lane: Lane::Interactive,
        prompt_tokens: serving.prompt_tokens,
        cached_tokens: Some(serving.cached_tokens),
        output_tokens: serving.output_tokens,
        scheduled: Duration::ZERO,
        sent: Duration::ZERO,
        ended: ms(*e2e_ms),
        tokens,
        outcome: Outcome::Completed,
        output_hash: None,
        server: Some(ServerRecord {
            stages: detail
                .stages
                .iter()
                .map(|stage| (stage.stage.to_string(), for_sure(stage, error_ms)))
                .collect(),
            ..server_record(serving)
        }),
    }
}

/// No process is blamed for what the error of the nodes' clocks explains.
fn for_sure(stage: &StageShape, clock_error_ms: f64) -> f64 {
    match &*stage.stage {
        "dispatch" | "first_token_return" => (stage.ms - clock_error_ms).max(0.0),
        _ => stage.ms,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use coordinator::records::shape::{ClockShape, Serving};
    use workload::causes::CauseKind;

    #[tokio::test]
    async fn ctrl_c_ends_the_questions() {
        let stop = CancellationToken::new();
        let answered = unless_cut(async { Ok(3) }, &stop).await;
        assert_eq!(answered.expect("an answer"), Some(3));
        stop.cancel();
        let unanswered = unless_cut(std::future::pending::<anyhow::Result<u32>>(), &stop).await;
        assert_eq!(unanswered.expect("no failure"), None);
    }

    #[test]
    fn a_way_that_is_no_longer_than_the_clocks_error_counts_for_nothing() {
        let stage = |stage: &'static str, ms| StageShape {
            stage: stage.into(),
            ms,
            ..StageShape::default()
        };
        let mut detail = detail(20.0, 10.0, 10.0);
        detail
            .stages
            .extend([stage("dispatch", 5.0), stage("first_token_return", 2.0)]);
        detail.clocks.push(ClockShape {
            error_ms: 3.0,
            ..ClockShape::default()
        });
        let server = record_of(&detail).server.expect("a server's record");
        let of = |name: &str| server.stages.iter().find(|(stage, _)| stage == name).map(|(_, ms)| *ms);
        assert_eq!((of("dispatch"), of("first_token_return")), (Some(2.0), Some(0.0)));
    }

    fn detail(queue_ms: f64, itl_max_ms: f64, tpot_ms: f64) -> Detail {
        let ttft = 100.0 + queue_ms;
        Detail {
            stages: [("queue", queue_ms), ("prefill_forward", 100.0)]
                .map(|(stage, ms)| StageShape {
                    stage: stage.into(),
                    ms,
                    ..StageShape::default()
                })
                .to_vec(),
            summary: Record {
                ttft_ms: Some(ttft),
                tpot_ms: Some(tpot_ms),
                itl_max_ms: Some(itl_max_ms),
                e2e_ms: ttft + 10.0 * tpot_ms,
                serving: Serving {
                    prompt_tokens: 50,
                    output_tokens: 11,
                    ..Serving::default()
                },
                ..Record::default()
            },
            ..Detail::default()
        }
    }

    #[test]
    fn a_coordinators_record_keeps_its_times_and_gives_its_cause() {
        let mut records: Vec<RequestRecord> = (0..20).map(|_| record_of(&detail(5.0, 12.0, 10.0))).collect();
        let usual = &records[0];
        assert_eq!(usual.tokens.len(), 11);
        assert!((usual.tpot_ms().unwrap() - 10.0).abs() < 1e-3 && (usual.e2e_ms() - 205.0).abs() < 1e-3);
        assert!((usual.gaps_ms().fold(0.0, f64::max) - 12.0).abs() < 1e-3);
        records.push(RequestRecord {
            id: "queued".to_owned(),
            ..record_of(&detail(500.0, 12.0, 10.0))
        });
        records.push(RequestRecord {
            id: "stalled".to_owned(),
            ..record_of(&detail(5.0, 300.0, 40.0))
        });
        let run = run_of(records);
        let usual = Usual::of(&run);
        let causes: Vec<(&str, CauseKind)> = slowest(&run, 2)
            .into_iter()
            .map(|record| (record.id.as_str(), usual.cause(record).kind))
            .collect();
        assert_eq!(
            causes,
            [("queued", CauseKind::Queue), ("stalled", CauseKind::SlowTokens)]
        );
    }

    fn read_json(value: Value) -> anyhow::Result<Run> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("run.json");
        std::fs::write(&file, value.to_string())?;
        read(&file)
    }

    #[test]
    fn a_run_is_read_alone_or_within_an_object_and_other_files_are_refused() {
        let mut run = run_of(vec![record_of(&detail(5.0, 12.0, 10.0))]);
        // It says that a request may have waited for a place.
        run.environment.insert("max_concurrency".to_owned(), json!(3));
        assert_eq!(read_json(json!(run)).unwrap(), run);
        assert_eq!(read_json(json!({"row": "A", "run": run})).unwrap(), run);
        run.loop_kind = LoopKind::Closed;
        assert_eq!(read_json(json!(run)).unwrap(), run);
        assert!(read_json(json!({"records": 3})).is_err());
        assert!(read_json(json!({"row": "A"})).is_err());
        assert!(read(Path::new("/no/such/file")).is_err());
    }

    #[test]
    fn a_file_is_read_up_to_its_limit_and_a_larger_one_is_refused() {
        let text = json!(run_of(Vec::new())).to_string();
        let length = text.len() as u64;
        assert!(kept_run(text.as_bytes(), length).unwrap().records.is_empty());
        let error = kept_run(text.as_bytes(), length - 1).unwrap_err();
        assert!(error.downcast_ref::<TooLarge>().is_some(), "{error}");
    }
}
