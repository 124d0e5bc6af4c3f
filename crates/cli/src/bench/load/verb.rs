//! The verb: flags to a plan, a run, and its results on the screen and in files.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::ValueEnum as _;
use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;
use workload::comparison::Slo;
use workload::record::Run;
use workload::summary::Summary;

use super::args::{Backend, Metric, RunArgs, Scenario};
use super::assemble::{CLIENT, RunWithTexts};
use super::metrics::accepted_tokens;
use super::plan::{Endpoint, LoadPlan, Observer, Pace, Server};
use super::result_json::{Labels, result};
use super::traffic::{Traffic, traffic};
use super::{csv_file, run_with_texts, screen};
use crate::bench::arguments::{ContractArgs, clause_lines, status};
use crate::bench::interrupt::{is_cut, until_interrupted};
use crate::date;
use crate::exit::{Exit, WithExit as _};
use crate::stdout::print_result;
use crate::terminal::{Terminal, say};

/// Members of each body. Servers do not agree on what a second one of the same name means: vLLM takes it, baton refuses the request.
const OWN_MEMBERS: [&str; 7] = [
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "stream",
    "stream_options",
    "ignore_eos",
];

pub(crate) fn verb(args: &RunArgs) -> anyhow::Result<Exit> {
    let mut args = args.clone();
    if args.pace.scenario == Some(Scenario::Interactive) && args.output.goodput.is_empty() {
        // MLPerf Inference, Llama-2-70B interactive.
        args.output.goodput = vec![(Metric::Ttft, 450.0), (Metric::Tpot, 40.0)];
    }
    check_folders(&args).exit(Exit::Usage)?;
    check_price(&args.contract).exit(Exit::Usage)?;
    let judge = args.contract.judge(chat())?;
    let traffic = traffic(&args.traffic, &args.pace).exit(Exit::Usage)?;
    let plan = plan(&args, &traffic).exit(Exit::Usage)?;
    let done = until_interrupted(async |stop| watched(&args, &plan, stop).await)?;
    let labels = Labels {
        backend: args.server.backend.name(),
        tokenizer: args.server.tokenizer.as_deref(),
        request_rate: traffic.request_rate,
        burstiness: args.pace.burstiness,
        max_concurrency: match plan.pace {
            Pace::Open { max_concurrency } => max_concurrency,
            Pace::Closed { users } => Some(users),
        },
        scenario: args
            .pace
            .scenario
            .and_then(|scenario| scenario.to_possible_value())
            .map(|value| value.get_name().to_owned()),
        date: date::digits(),
    };
    // A file that cannot be written must not take what was measured with it.
    let written = write_files(&args, &done, &labels);
    let summary = summary_of(&done.run, &args.output.goodput);
    let clauses = judge.clauses(&summary);
    if args.output.json {
        print_result(&format!("{}\n", result(&done.run, &done.texts, &args.output, &labels)))?;
        clause_lines(&clauses).lines().for_each(|line| say!("{line}"));
    } else {
        let text = screen::tables(&done.run, &summary, &args.output, Terminal::stdout());
        print_result(&(text + &clause_lines(&clauses)))?;
    }
    written?;
    let has_answer = done.run.records.iter().any(|record| record.is_completed());
    Ok(match (is_cut(&done.run), has_answer) {
        (true, _) => Exit::Interrupted,
        (false, true) => status(&clauses, &summary.lag),
        (false, false) => Exit::Failure,
    })
}

/// Shows the progress. `stop` ends the run early.
async fn watched(args: &RunArgs, plan: &LoadPlan, stop: CancellationToken) -> anyhow::Result<RunWithTexts> {
    let bar = screen::bar(plan.trace.requests.len(), args.output.disable_tqdm);
    let on_progress = |progress| bar.iter().for_each(|bar| screen::show(bar, progress));
    let observer = Observer {
        on_progress: Box::new(on_progress),
        stop,
    };
    let done = run_with_texts(plan, observer).await;
    bar.iter().for_each(indicatif::ProgressBar::finish_and_clear);
    let mut done = done?;
    done.run
        .environment
        .insert("hypothesis".to_owned(), json!(args.output.hypothesis));
    Ok(done)
}

fn plan(args: &RunArgs, traffic: &Traffic) -> anyhow::Result<LoadPlan> {
    let mut plan = LoadPlan::new(&args.server.base_url, traffic.trace.clone());
    plan.server = server(args)?;
    plan.prompts = traffic.prompts.clone();
    plan.prefixes = traffic.prefixes.clone();
    plan.pace = traffic.pace;
    plan.seed = traffic.seed;
    plan.ignore_eos = traffic.ignores_eos;
    plan.warm_up_requests = args.pace.num_warmups;
    plan.warm_up = seconds(args.pace.warm_up_s, "--warm-up-s")?;
    plan.cool_down = seconds(args.pace.cool_down_s, "--cool-down-s")?;
    plan.cancel_rate = args.pace.cancel_rate;
    plan.request_timeout = seconds(args.pace.request_timeout_s, "--request-timeout-s")?;
    plan.reads_server_records = !args.server.no_server_records;
    plan.extra_body
        .insert("temperature".to_owned(), json!(args.traffic.temperature));
    if let Some(extra) = &args.traffic.extra_body {
        plan.extra_body.extend(extra_body(extra)?);
    }
    let shares = [args.pace.burstiness, args.traffic.time_scale, args.traffic.temperature];
    ensure!(
        shares.iter().all(|share| share.is_finite()),
        "a flag has a number that is not finite"
    );
    let percents = &args.output.metric_percentiles;
    ensure!(
        percents.iter().all(|percent| (0.0..=100.0).contains(percent)),
        "percentiles are 0 to 100"
    );
    Ok(plan)
}

fn extra_body(text: &str) -> anyhow::Result<Map<String, Value>> {
    let extra: Map<String, Value> = serde_json::from_str(text).context("--extra-body is no JSON object")?;
    if let Some(name) = OWN_MEMBERS.into_iter().find(|name| extra.contains_key(*name)) {
        bail!(
            "--extra-body has `{name}`, and each body has one already: leave it out. --model, --random-output-len, --ignore-eos and \
             --no-ignore-eos say such members"
        );
    }
    Ok(extra)
}

fn server(args: &RunArgs) -> anyhow::Result<Server> {
    let given = &args.server;
    let says_chat = given.endpoint.as_deref().is_some_and(|path| path.contains("chat"));
    let mut pids = BTreeMap::new();
    for (name, pid) in &given.server_pid {
        let pid: u32 = pid
            .parse()
            .with_context(|| format!("--server-pid {name}={pid}: the process id is no number"))?;
        let is_free = name != CLIENT && pids.insert(name.clone(), pid).is_none();
        ensure!(
            is_free,
            "--server-pid {name}={pid}: `{name}` is the name of another process already (`{CLIENT}` is this program): give it a name of its own"
        );
    }
    Ok(Server {
        endpoint: match (given.backend, says_chat) {
            (Backend::OpenaiChat, _) | (_, true) => Endpoint::Chat,
            (Backend::Openai | Backend::Vllm, false) => Endpoint::Completions,
        },
        path: given.endpoint.clone(),
        model: given.model.clone(),
        api_key: given.api_key.clone().filter(|key| !key.is_empty()),
        ca: given.trust.ca().map(Path::to_path_buf),
        headers: given.header.clone(),
        pids,
        ..Server::new(&given.base_url)
    })
}

fn seconds(value: f64, flag: &str) -> anyhow::Result<Duration> {
    Duration::try_from_secs_f64(value).with_context(|| format!("{flag} is a number of seconds"))
}

/// The limits by which requests are judged where the user gives none.
fn chat() -> Slo {
    Slo {
        name: "chat".to_owned(),
        ttft_ms_max: 300.0,
        itl_ms_max: 50.0,
    }
}

/// The summary, whose accepted tokens are those of the requests that kept all limits of `goodput`, or those of the chat profile without any.
fn summary_of(run: &Run, goodput: &[(Metric, f64)]) -> Summary {
    let mut summary = Summary::of(run, &chat());
    if !goodput.is_empty() {
        summary.accepted_tokens = accepted_tokens(run, goodput);
    }
    summary
}

/// Only a contract counts dollars here: the result has none.
///
/// # Errors
/// A price would be passed over.
fn check_price(args: &ContractArgs) -> anyhow::Result<()> {
    ensure!(
        args.price.is_none() || args.contract.is_some(),
        "--price is for the dollars of a contract: give --contract FILE as well, or leave it out"
    );
    Ok(())
}

/// The figures of a run would be lost if their file turned out to have no folder when the run has ended.
///
/// # Errors
/// A folder is not there.
fn check_folders(args: &RunArgs) -> anyhow::Result<()> {
    for (flag, file) in [("--run-json", &args.output.run_json), ("--csv", &args.output.csv)] {
        let Some((file, folder)) = file.as_deref().and_then(|file| Some((file, file.parent()?))) else {
            continue;
        };
        ensure!(
            // A file name alone has an empty parent, which is the working directory.
            Path::new(".").join(folder).is_dir(),
            "cannot write {flag} {}: there is no folder {}. Make it first",
            file.display(),
            folder.display()
        );
    }
    Ok(())
}

/// # Errors
/// A file cannot be written. The others are.
fn write_files(args: &RunArgs, done: &RunWithTexts, labels: &Labels<'_>) -> anyhow::Result<()> {
    let output = &args.output;
    let run_json = output.run_json.as_ref().map(|path| write_run(path, &done.run));
    let csv = output.csv.as_ref().map(|path| write_csv(path, &done.run));
    let written = [Some(write_result(args, done, labels)), run_json, csv];
    written.into_iter().flatten().collect()
}

fn write_result(args: &RunArgs, done: &RunWithTexts, labels: &Labels<'_>) -> anyhow::Result<()> {
    let output = &args.output;
    if !(output.save_result || output.save_detailed || output.append_result || output.result_filename.is_some()) {
        return Ok(());
    }
    let path = result_path(args, done, labels);
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let mut options = OpenOptions::new();
    options
        .create(true)
        .write(true)
        .append(output.append_result)
        .truncate(!output.append_result);
    let file = options
        .open(&path)
        .with_context(|| format!("cannot write {}", path.display()))?;
    let mut file = BufWriter::new(file);
    writeln!(file, "{}", result(&done.run, &done.texts, output, labels))
        .and_then(|()| file.flush())
        .with_context(|| format!("cannot write {}", path.display()))
}

fn write_run(path: &Path, run: &Run) -> anyhow::Result<()> {
    let mut file = create(path)?;
    serde_json::to_writer(&mut file, run).with_context(|| format!("cannot write {}", path.display()))?;
    file.flush().with_context(|| format!("cannot write {}", path.display()))
}

fn write_csv(path: &Path, run: &Run) -> anyhow::Result<()> {
    csv_file::write(run, create(path)?).with_context(|| format!("cannot write {}", path.display()))
}

fn create(path: &Path) -> anyhow::Result<BufWriter<File>> {
    let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(BufWriter::new(file))
}

/// The name that `vllm bench serve` gives its results.
fn result_path(args: &RunArgs, done: &RunWithTexts, labels: &Labels<'_>) -> PathBuf {
    let folder = args.output.result_dir.clone().unwrap_or_default();
    if let Some(name) = &args.output.result_filename {
        return folder.join(name);
    }
    let rate = match labels.request_rate {
        Some(rate) => format!("{rate}qps"),
        None => done.run.offered.to_string(),
    };
    let concurrency = labels
        .max_concurrency
        .map(|max| format!("-concurrency{max}"))
        .unwrap_or_default();
    let model = done
        .run
        .environment
        .get("model")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let model = model.rsplit('/').next().unwrap_or_default();
    let label = args.output.label.as_deref().unwrap_or(labels.backend);
    folder.join(format!("{label}-{rate}{concurrency}-{model}-{}.json", labels.date))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::test_kit::{record, run};

    /// Of one request, whose tokens come every 45 ms, and of one, whose tokens come every 60 ms.
    #[test]
    fn accepted_tokens_are_judged_by_the_limits_that_were_given() {
        let both = run("a", vec![record(0, &[100.0, 145.0, 190.0]), record(1, &[100.0, 160.0])]);
        let accepted = |goodput: &[(Metric, f64)]| summary_of(&both, goodput).accepted_tokens;
        assert_eq!(accepted(&[]), 3, "the chat profile");
        assert_eq!(accepted(&[(Metric::Tpot, 40.0)]), 0);
        assert_eq!(accepted(&[(Metric::Ttft, 450.0)]), 5, "nobody gave a limit of gaps");
        assert_eq!(accepted(&[(Metric::Ttft, 450.0), (Metric::Tpot, 50.0)]), 3);
        assert_eq!(accepted(&[(Metric::E2el, 170.0)]), 2);
    }

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: RunArgs,
    }

    #[test]
    fn each_process_of_the_server_has_a_name_of_its_own() {
        let pids = |named: &[&str]| {
            let flags = named.iter().flat_map(|named| ["--server-pid", named]);
            let words = std::iter::once("run").chain(flags);
            let cli = <Cli as clap::Parser>::try_parse_from(words).expect("usable words");
            server(&cli.args).map(|server| server.pids)
        };
        let two = pids(&["a=11", "b=12"]).expect("two processes");
        assert_eq!((two["a"], two["b"]), (11, 12));
        for bad in [["a=11", "a=12"], ["client=11", "b=12"], ["a=x", "b=12"]] {
            assert!(pids(&bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_price_without_a_contract_is_refused() {
        let args = |price, contract: Option<&str>| ContractArgs {
            price,
            contract: contract.map(PathBuf::from),
        };
        assert!(check_price(&args(Some(2.0), None)).is_err());
        for taken in [
            args(None, None),
            args(None, Some("c.toml")),
            args(Some(2.0), Some("c.toml")),
        ] {
            assert!(check_price(&taken).is_ok(), "{taken:?}");
        }
    }

    #[test]
    fn a_member_that_each_body_has_is_not_added_again() {
        let extra = extra_body("{\"top_p\":0.9,\"min_tokens\":8}").expect("two members");
        assert_eq!(extra.len(), 2);
        for name in OWN_MEMBERS {
            let error = extra_body(&json!({"top_p": 0.9, name: 1}).to_string()).expect_err("a second one");
            assert!(error.to_string().contains(&format!("`{name}`")), "{error}");
        }
        assert!(extra_body("[1]").is_err());
    }
}
