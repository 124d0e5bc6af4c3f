//! The folder of a matrix: where it was measured, the records of each row, and what they say.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::{Value, json};
use workload::diagnosis::{Observations, Shown, diagnose, next_step};
use workload::lint::{Context, lint};
use workload::summary::Summary;

use super::{Cache, MatrixArgs, Measured, RowArg};
use crate::bench::arguments::{Judge, is_met};
use crate::bench::load::environment;
use crate::bench::measure::{write_json, write_text};
use crate::bench::point::{Point, table};
use crate::terminal::Terminal;

/// Facts of the server and of what was sent. All others are the machine's.
const SERVER: [&str; 17] = [
    "url",
    "endpoint",
    "model",
    "models",
    "server_software",
    "trace",
    "requests",
    "prompts",
    "loop",
    "max_concurrency",
    "warm_up_requests",
    "warm_up_s",
    "cool_down_s",
    "ignore_eos",
    "request_timeout_s",
    "sampling",
    "processes",
];

pub(super) fn write(args: &MatrixArgs, judge: &Judge, measured: &[Measured]) -> anyhow::Result<()> {
    let folder = &args.out;
    let facts = measured
        .first()
        .map_or_else(environment::machine, |first| first.run.environment.clone());
    let (server, machine): (BTreeMap<_, _>, BTreeMap<_, _>) =
        facts.into_iter().partition(|(name, _)| SERVER.contains(&name.as_str()));
    write_text(folder, "hardware.md", &facts_page("Hardware and client", &machine))?;
    write_text(
        folder,
        "server-flags.md",
        &(facts_page("Server", &server) + &command_lines(&server)),
    )?;
    for Measured { row, cache, point, run } in measured {
        let content = json!({
            "row": row.row().name(), "cache": cache.name(), "hypothesis": args.hypothesis, "slo": judge.slo,
            "point": point, "run": run,
        });
        write_json(folder, &format!("row-{}-{}.json", row.letter(), cache.name()), &content)?;
    }
    write_text(folder, "interpretation.md", &interpretation(args, judge, measured))
}

fn facts_page(title: &str, facts: &BTreeMap<String, Value>) -> String {
    let mut page = format!("# {title}\n\n| fact | value |\n|---|---|\n");
    for (name, value) in facts {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        // A bar or a line break would end the cell.
        let text = text.replace('|', "\\|").replace(['\n', '\r'], " ");
        let _ = writeln!(page, "| {name} | {text} |");
    }
    page
}

/// The command line of each of the server's processes that runs on this machine.
fn command_lines(server: &BTreeMap<String, Value>) -> String {
    let processes = server.get("processes").and_then(Value::as_object);
    let mut page = "\n## Command lines\n\n".to_owned();
    let mut found = 0;
    for (name, pid) in processes.into_iter().flatten().filter(|(name, _)| *name != "client") {
        let pid = pid.as_u64().and_then(|pid| u32::try_from(pid).ok());
        let Some(line) = pid.and_then(environment::command_line) else {
            continue;
        };
        let _ = writeln!(page, "- {name}: `{}`", line.replace('`', "'"));
        found += 1;
    }
    if found == 0 {
        page.push_str("The server's processes are not on this machine, or not readable by this user.\n");
    }
    page
}

fn interpretation(args: &MatrixArgs, judge: &Judge, measured: &[Measured]) -> String {
    let points: Vec<Point> = measured.iter().map(|measured| measured.point.clone()).collect();
    let mut page = "# Interpretation\n\n".to_owned();
    if let Some(hypothesis) = &args.hypothesis {
        let _ = writeln!(page, "Hypothesis, written before: {hypothesis}\n");
    }
    let (ttft, itl) = (judge.slo.ttft_ms_max, judge.slo.itl_ms_max);
    let _ = writeln!(
        page,
        "SLO {}: TTFT at most {ttft} ms, p99 of a request's gaps at most {itl} ms.\n",
        judge.slo.name
    );
    let _ = writeln!(page, "```\n{}```\n", table(&points, |_| "", Terminal::plain()));
    page.push_str("## Cache\n\n| row | cache | prompt tokens from the cache |\n|---|---|---|\n");
    for Measured { row, cache, point, .. } in measured {
        let share = point.summary.cached_share;
        let share = share.map_or("the server does not tell".to_owned(), |share| {
            format!("{:.1} %", share * 100.0)
        });
        let _ = writeln!(page, "| {} | {} | {share} |", row.row().name(), cache.name());
    }
    page.push_str("\n## Diagnosis\n\n| pattern | shown | evidence | first response |\n|---|---|---|---|\n");
    let of = |row: RowArg, cache: Cache| -> Option<&Summary> {
        let found = measured
            .iter()
            .find(|measured| measured.row == row && measured.cache == cache);
        found.map(|measured| &measured.point.summary)
    };
    for row in diagnose(&observations(args, of), &judge.slo) {
        let shown = match row.shown {
            Shown::Shown => "yes",
            Shown::NotShown => "no",
            Shown::NotMeasured => "not measured",
        };
        let _ = writeln!(
            page,
            "| {:?} | {shown} | {} | {} |",
            row.pattern, row.evidence, row.first_response
        );
    }
    page.push_str(&contract_words(measured));
    let runs: Vec<_> = measured.iter().map(|measured| &measured.run).collect();
    let has_prediction = args.hypothesis.is_some() || args.prediction().is_some();
    page.push_str("\n## Warnings\n\n");
    for warning in lint(
        &runs,
        &Context {
            has_prediction,
            ..Context::default()
        },
    ) {
        let _ = writeln!(page, "- {warning}");
    }
    page.push_str("\nWhat the words mean: docs/reference/statistics.md of baton.\n");
    page
}

/// Rows B and D have prompts of the same length, with one and with eight users.
fn observations<'a>(args: &MatrixArgs, of: impl Fn(RowArg, Cache) -> Option<&'a Summary>) -> Observations<'a> {
    let (a, b) = (of(RowArg::A, Cache::Cold), of(RowArg::B, Cache::Cold));
    let length = |summary: &Summary| {
        let tokens = summary.throughput.input_tokens_per_s / summary.throughput.requests_per_s;
        Some((tokens, summary.ttft_ms?.p50))
    };
    Observations {
        alone: a,
        by_prompt: a.into_iter().chain(b).filter_map(length).collect(),
        by_load: b.into_iter().chain(of(RowArg::D, Cache::Cold)).collect(),
        cold_and_warm: of(RowArg::E, Cache::Cold)
            .zip(of(RowArg::E, Cache::Warm))
            .map(|(cold, warm)| [cold, warm]),
        prediction: args.prediction(),
    }
}

fn contract_words(measured: &[Measured]) -> String {
    let judged = || measured.iter().filter(|measured| !measured.point.contract.is_empty());
    if judged().next().is_none() {
        return String::new();
    }
    let mut page = "\n## Contract\n\n| row | limit | measured | met |\n|---|---|---|---|\n".to_owned();
    for Measured { point, .. } in judged() {
        for clause in &point.contract {
            let measured = clause
                .measured
                .map_or("not measured".to_owned(), |measured| format!("{measured:.3}"));
            let met = if clause.is_met { "yes" } else { "no" };
            let _ = writeln!(
                page,
                "| {} | {} {} | {measured} | {met} |",
                point.label, clause.name, clause.limit
            );
        }
    }
    let worst = judged()
        .find(|measured| !is_met(&measured.point.contract))
        .or(judged().next());
    let step = worst.map(|measured| next_step(&measured.point.contract).words());
    let _ = writeln!(page, "\nNext step: {}", step.unwrap_or_default());
    page
}
