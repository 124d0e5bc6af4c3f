//! `baton logs`: what the processes of a `baton up` on this machine have logged.

mod tail;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use serde_json::{Map, Value};

use crate::exit::{Exit, WithExit as _};
use crate::http;
use crate::observe::run_until_signal;
use crate::stdout::print;
use crate::terminal::{Terminal, say};
use crate::up::log_line;
use crate::up::run_folder::{self, SeenRun};
use tail::Tail;

const EXAMPLES: &str = "\
Examples:
  baton logs                          the last lines of every process of the `baton up` that runs here
  baton logs decode-0 --follow        one process, and what it says from now on
  baton logs -n 0 --follow            only what is new
  baton logs --json | jq -r 'select(.level == \"WARN\").message'

`baton up` keeps the last 16 MiB of each process's log until the cluster has ended well. After a failure the logs stay.
Of processes under systemd, Docker or Kubernetes ask journalctl, docker logs or kubectl logs.";

/// A person reads along.
const LOOK_EVERY: Duration = Duration::from_millis(200);

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct LogsArgs {
    /// Name of a process, as `baton up` lists it. Without it: all of them, in the order of time.
    #[arg(value_name = "PROCESS")]
    pub process: Option<String>,
    /// Go on with what is new, until Ctrl-C or the end of the cluster.
    #[arg(short, long)]
    pub follow: bool,
    /// So many of the last lines of each process.
    #[arg(short = 'n', long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub lines: u32,
    /// Where the API of the cluster is, if several run on this machine.
    #[arg(long, env = http::URL_VARIABLE, value_name = "URL", value_hint = clap::ValueHint::Url)]
    pub url: Option<String>,
    /// One JSON object a line: `process`, and the members of the event, or `line` for a line that is no event.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &LogsArgs) -> anyhow::Result<Exit> {
    let parent = run_folder::parent().context(
        "`baton up` has no place for logs: set HOME, XDG_CACHE_HOME or BATON_CACHE_DIR, or start it with --log-dir",
    )?;
    run_until_signal(logs(args, (&parent, Terminal::stdout()), print))
}

async fn logs(
    args: &LogsArgs,
    (parent, terminal): (&Path, Terminal),
    mut show: impl FnMut(&str) -> anyhow::Result<()>,
) -> anyhow::Result<Exit> {
    let cluster = chosen(run_folder::all(parent), args.url.as_deref())?;
    if !cluster.is_running {
        say!("no cluster runs; these are the last lines of the one that failed last");
    }
    let mut tails = tails(&cluster, args.process.as_deref(), &[])?;
    let mut lines = Vec::new();
    for tail in &mut tails {
        let last = tail
            .last_lines(args.lines as usize)
            .with_context(|| cannot_read(tail))?;
        lines.extend(last.into_iter().map(|line| (tail.name.clone(), line)));
    }
    in_order_of_time(&mut lines);
    let is_single = args.process.is_some();
    show(&text(&lines, terminal, (args.json, is_single)))?;
    if !args.follow {
        return Ok(Exit::Ok);
    }
    loop {
        // Asked before the files are read, so that the last words of the last process are seen.
        let is_running = run_folder::is_running(&cluster.folder);
        if !is_single {
            let known: Vec<String> = tails.iter().map(|tail| tail.name.clone()).collect();
            tails.extend(self::tails(&cluster, None, &known).unwrap_or_default());
        }
        for tail in &mut tails {
            let new = tail.new_lines().with_context(|| cannot_read(tail))?;
            let new: Vec<_> = new.into_iter().map(|line| (tail.name.clone(), line)).collect();
            show(&text(&new, terminal, (args.json, is_single)))?;
        }
        if !is_running {
            say!("the cluster has ended");
            return Ok(Exit::Ok);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn cannot_read(tail: &Tail) -> String {
    format!("the log of {} cannot be read", tail.name)
}

/// The cluster that is meant: the one at `url`, the one that runs, or the one that failed last. `runs` has the newest first.
fn chosen(mut runs: Vec<SeenRun>, url: Option<&str>) -> anyhow::Result<SeenRun> {
    if let Some(url) = url.filter(|url| !url.is_empty()) {
        let wanted = same_address(url);
        runs.retain(|run| run.facts.url.as_deref().is_some_and(|own| same_address(own) == wanted));
        if runs.is_empty() {
            bail!(
                "no `baton up` of this user on this machine has its API at {url}: leave out --url and {} (a cluster that never \
                 got ready has no address), or look on the machine that has it",
                http::URL_VARIABLE
            );
        }
    }
    let running = runs.iter().filter(|run| run.is_running).count();
    if running > 1 {
        let urls = runs.iter().filter(|run| run.is_running);
        let urls = urls.map(|run| run.facts.url.as_deref().unwrap_or("one that is still starting"));
        let urls: Vec<&str> = urls.collect();
        return Err(anyhow::anyhow!(
            "{running} clusters run on this machine: say with --url which one is meant ({})",
            urls.join(", ")
        ))
        .exit(Exit::Usage);
    }
    let at = runs.iter().position(|run| run.is_running).unwrap_or(0);
    match runs.into_iter().nth(at) {
        Some(run) => Ok(run),
        None => bail!("no `baton up` of this user runs on this machine, and none has left logs; start one: baton up"),
    }
}

fn same_address(url: &str) -> String {
    let mut url = http::base_url(url);
    for every_name in ["://localhost", "://0.0.0.0", "://[::]", "://[::1]"] {
        url = url.replacen(every_name, "://127.0.0.1", 1);
    }
    url
}

/// The logs of the cluster that are not among the known ones: of one process, or of all.
fn tails(cluster: &SeenRun, process: Option<&str>, known: &[String]) -> anyhow::Result<Vec<Tail>> {
    let names = cluster.facts.processes();
    if let Some(process) = process.filter(|process| !names.iter().any(|name| name == process)) {
        let known = match names.is_empty() {
            true => "none of any process yet".to_owned(),
            false => names.join(", "),
        };
        return Err(anyhow::anyhow!(
            "there is no log of a process `{process}`; there are: {known}"
        ))
        .exit(Exit::Usage);
    }
    let wanted = names
        .into_iter()
        .filter(|name| process.is_none_or(|process| process == name));
    let new = wanted.filter(|name| !known.contains(name));
    let facts = &cluster.facts;
    Ok(new.map(|name| Tail::new(&facts.logs, name, facts.started())).collect())
}

/// The processes of the cluster that runs here, for the completion of the command line.
pub(crate) fn known_processes(url: Option<&str>) -> Vec<String> {
    let runs = run_folder::parent().map(|parent| run_folder::all(&parent));
    let cluster = chosen(runs.unwrap_or_default(), url);
    cluster.map(|cluster| cluster.facts.processes()).unwrap_or_default()
}

/// Sorts lines of several processes. A line without a time belongs to the one before it in its own log.
fn in_order_of_time(lines: &mut Vec<(String, String)>) {
    let mut last: Option<(String, String)> = None;
    let mut timed: Vec<(String, (String, String))> = Vec::with_capacity(lines.len());
    for (process, line) in lines.drain(..) {
        let before = last.take().filter(|(of, _)| *of == process).map(|(_, time)| time);
        let time = time_of(&line).or(before).unwrap_or_default();
        last = Some((process.clone(), time.clone()));
        timed.push((time, (process, line)));
    }
    // The sort is stable: lines of one process stay in their order.
    timed.sort_by(|(a, _), (b, _)| a.cmp(b));
    lines.extend(timed.into_iter().map(|(_, line)| line));
}

/// `2026-11-21T14:03:22.123456Z`, which sorts as text.
fn time_of(line: &str) -> Option<String> {
    let event: Map<String, Value> = serde_json::from_str(line).ok()?;
    Some(event.get("timestamp")?.as_str()?.to_owned())
}

fn text(lines: &[(String, String)], terminal: Terminal, (is_json, is_single): (bool, bool)) -> String {
    let shown = lines.iter().map(|(process, line)| match (is_json, is_single) {
        (true, _) => format!("{}\n", json(process, line)),
        (false, true) => format!("{}\n", log_line::for_people(line, terminal)),
        (false, false) => {
            let name = terminal.name(&format!("{process:>11} |"));
            format!("{name} {}\n", log_line::for_people(line, terminal))
        }
    });
    shown.collect()
}

fn json(process: &str, line: &str) -> Value {
    let mut object = Map::from_iter([("process".to_owned(), Value::from(process))]);
    match serde_json::from_str::<Map<String, Value>>(line) {
        Ok(event) => object.extend(event),
        Err(_) => {
            object.insert("line".to_owned(), Value::from(line));
        }
    }
    Value::Object(object)
}

#[cfg(test)]
mod tests;
