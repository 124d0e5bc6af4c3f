//! What a person sees: the progress of a run, and its figures in tables.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use workload::record::{LoopKind, Outcome, RequestRecord, Run, Usage};
use workload::summary::{Lag, Summary};

use super::args::{Metric, OutputArgs};
use super::metrics::{completed, request_goodput, samples};
use super::plan::Progress;
use crate::observe::table::{Cell, Table};
use crate::terminal::{Paint, Terminal};

const ERRORS_SHOWN: usize = 5;

/// A bar on stderr; `None` where nobody looks.
pub(super) fn bar(requests: usize, is_quiet: bool) -> Option<ProgressBar> {
    let is_wanted = !is_quiet && std::io::stderr().is_terminal();
    is_wanted.then(|| {
        let template = "{bar:30} {pos}/{len} requests ended, {msg}, {elapsed}";
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        ProgressBar::new(requests as u64).with_style(style)
    })
}

pub(super) fn show(bar: &ProgressBar, progress: Progress) {
    bar.set_position((progress.completed + progress.not_completed) as u64);
    bar.set_message(format!(
        "{} running, {} without a whole answer",
        progress.running(),
        progress.not_completed
    ));
}

pub(super) fn tables(run: &Run, summary: &Summary, output: &OutputArgs, terminal: Terminal) -> String {
    let mut text = format!("{}\n{}\n\n", heading(run), traffic(run));
    let mut metrics = vec!["metric", ">mean ms", ">std ms"];
    let percents: Vec<String> = output
        .metric_percentiles
        .iter()
        .map(|percent| format!(">p{percent} ms"))
        .collect();
    metrics.extend(percents.iter().map(String::as_str));
    metrics.push(">max ms");
    let mut table = Table::new(&metrics);
    for metric in &output.percentile_metrics {
        let samples = samples(run, *metric);
        let figure = |value: Option<f64>| Cell::new(value.map_or("-".to_owned(), |value| format!("{value:.2}")));
        let mut cells = vec![words(*metric).into(), figure(samples.mean()), figure(samples.std())];
        cells.extend(
            output
                .metric_percentiles
                .iter()
                .map(|percent| figure(samples.percentile(*percent))),
        );
        cells.push(figure(samples.percentile(100.0)));
        table.row(cells);
    }
    text.push_str(&table.render(terminal));
    text.push('\n');
    let mut table = Table::new(&["", ">value", "unit"]);
    for (name, value, unit) in figures(run, summary, output) {
        table.row(vec![name.into(), value.into(), unit.into()]);
    }
    text.push_str(&table.render(terminal));
    text.push_str(&failures(run));
    for note in notes(run) {
        text.push_str(&terminal.paint(&format!("{note}\n"), Paint::Warn));
    }
    text
}

fn words(metric: Metric) -> &'static str {
    match metric {
        Metric::Ttft => "time to first token",
        Metric::Tpot => "time per output token",
        Metric::Itl => "gap between tokens",
        Metric::E2el => "end to end",
    }
}

fn heading(run: &Run) -> String {
    let kind = match run.loop_kind {
        LoopKind::Open => format!("open loop, {:.2} requests/s offered", run.offered),
        LoopKind::Closed => format!("closed loop, {} users: a slow server gets fewer requests", run.offered),
        LoopKind::Simulated => "simulated".to_owned(),
    };
    format!("{}: {kind}", run.name)
}

fn traffic(run: &Run) -> String {
    let of = |key: &str| {
        run.environment
            .get(key)
            .and_then(|value| value.as_str())
            .unwrap_or("?")
            .to_owned()
    };
    format!("{}; model {}, {}", of("trace"), of("model"), of("prompts"))
}

fn figures(run: &Run, summary: &Summary, output: &OutputArgs) -> Vec<(String, String, &'static str)> {
    let count = |name: &str, count: usize| (name.to_owned(), count.to_string(), "requests");
    let (counts, rates) = (&summary.counts, &summary.throughput);
    let mut figures = vec![
        ("measured".to_owned(), format!("{:.2}", summary.duration_s), "s"),
        count("completed", counts.completed),
        count("refused (429, 503)", counts.refused),
        count("failed", counts.failed),
        count("cancelled by the client", counts.cancelled),
    ];
    if counts.warm_up + counts.cool_down > 0 {
        figures.push(count(
            "warm-up and cool-down, not counted",
            counts.warm_up + counts.cool_down,
        ));
    }
    let rate = |name: &str, value: f64, unit| (name.to_owned(), format!("{value:.2}"), unit);
    figures.push(rate("request throughput", rates.requests_per_s, "requests/s"));
    if !output.goodput.is_empty() {
        let limits: Vec<String> = output
            .goodput
            .iter()
            .map(|(metric, limit)| format!("{} {limit} ms", metric.name()))
            .collect();
        let name = format!("goodput ({})", limits.join(", "));
        figures.push(rate(&name, request_goodput(run, &output.goodput), "requests/s"));
    }
    figures.push(rate("prompt tokens", rates.input_tokens_per_s, "tokens/s"));
    figures.push(rate("output tokens", rates.output_tokens_per_s, "tokens/s"));
    figures.push(rate("prompt and output tokens", rates.total_tokens_per_s, "tokens/s"));
    figures.push(rate("longest gap of all streams", summary.stalls.gap_ms_max, "ms"));
    let lag = Lag::of(run);
    figures.push((
        "client lag p50, p99, max".to_owned(),
        format!("{:.2}, {:.2}, {:.2}", lag.ms_p50, lag.ms_p99, lag.ms_max),
        "ms",
    ));
    figures.push(cpu("client", run.client, run.measured));
    figures.extend(run.server.iter().map(|(name, usage)| cpu(name, *usage, run.measured)));
    figures
}

fn cpu(name: &str, usage: Usage, measured: Duration) -> (String, String, &'static str) {
    let cores = usage.cpu.as_secs_f64() / measured.as_secs_f64().max(f64::MIN_POSITIVE);
    let name = format!("CPU of {name} ({} MiB)", usage.memory_bytes_max >> 20);
    (name, format!("{cores:.2}"), "cores")
}

/// The first errors, in the server's words.
fn failures(run: &Run) -> String {
    let failed = run.records.iter().filter_map(|record| match &record.outcome {
        Outcome::Failed { error } => Some(format!("{}: {error}\n", record.id)),
        _ => None,
    });
    failed.take(ERRORS_SHOWN).collect()
}

/// What makes the figures say less than they seem to.
fn notes(run: &Run) -> Vec<String> {
    let mut notes = Vec::new();
    if !run.records.is_empty() && !run.records.iter().any(RequestRecord::is_measured) {
        notes.push(format!(
            "No request counts: --warm-up-s and --cool-down-s leave out all {}. Give shorter ones, or a longer run.",
            run.records.len()
        ));
    }
    let lag = Lag::of(run);
    if !lag.is_valid {
        notes.push(format!(
            "INVALID: the client sent {:.1} ms late at p99 (limit {} ms). It measures itself: give it a core of its own, or less load.",
            lag.ms_p99,
            workload::summary::LAG_MS_P99_MAX
        ));
    }
    if run.environment.get("interrupted").is_some_and(|value| value == true) {
        let left = run.environment.get("unfinished").cloned().unwrap_or_default();
        notes.push(format!(
            "Stopped early: {left} requests were still running and are left out."
        ));
    }
    let (events, tokens) = completed(run).fold((0, 0), |(events, tokens), record| {
        (events + record.tokens.len(), tokens + record.output_tokens as usize)
    });
    let held_back = completed(run).filter(|record| !record.are_gaps_known()).count();
    if held_back > 0 {
        notes.push(format!("{held_back} answers came at once: the server or a proxy holds tokens back. Their gaps and TPOT are not known, so they keep no limit of either."));
    }
    if events < tokens {
        notes.push(format!("{tokens} tokens came in {events} events: the server sends several at once, which hides gaps between tokens."));
    } else if events > tokens {
        notes.push(format!("{events} events held {tokens} tokens: the server also sends events without a token, and gaps are counted to them."));
    }
    notes
}

#[cfg(test)]
mod tests {
    use workload::record::RunPart;

    use super::*;
    use crate::compare::test_kit::{record, run};

    /// Without it the figures look like those of a server that answers nobody.
    #[test]
    fn a_run_in_which_no_request_counts_says_why() {
        let mut short = run("a", vec![record(0, &[5.0, 9.0]), record(1, &[5.0, 9.0])]);
        let says_why = |run: &Run| notes(run).iter().any(|note| note.contains("--warm-up-s"));
        short.records[0].part = RunPart::WarmUp;
        assert!(!says_why(&short));
        short.records[1].part = RunPart::CoolDown;
        assert!(says_why(&short));
        short.records.clear();
        assert!(!says_why(&short), "nothing was left out");
    }
}
