//! The table of a measured engine, and the link out of another measurement.

use std::io::Write as _;

use anyhow::{Context, bail};
use serde::Deserialize;
use simulator::costs::{BATCHES, ByKind, CHUNKS, Costs, FitPoint, FitReport, LinkCosts, StepShape};

use crate::bench::load::environment::cpu_model;
use crate::observe::table::Table;
use crate::terminal::Terminal;

/// Points of the table with the largest errors.
const WORST_SHOWN: usize = 8;

#[derive(Debug, Deserialize)]
struct Transfer {
    bytes: u64,
    rows: Vec<TransferRow>,
}

#[derive(Debug, Deserialize)]
struct TransferRow {
    way: String,
    milliseconds_median: f64,
    gigabytes_per_second_median: f64,
}

/// The best transport in the output of `baton bench transfer --json`. What a transfer takes beyond its bytes is not told apart
/// there, so that a fifth of a millisecond stands for it: the message that ends a transfer, and its answer.
pub(super) fn link_of(text: &str) -> anyhow::Result<LinkCosts> {
    const LATENCY_SECONDS: f64 = 0.000_2;
    let transfer: Transfer =
        serde_json::from_str(text).context("this is no output of `baton bench transfer --json`")?;
    for (way, name, is_streamed) in [
        ("shm direct", "shm-direct", false),
        ("shm staged", "shm", false),
        ("grpc", "grpc", true),
    ] {
        let Some(row) = transfer.rows.iter().find(|row| row.way == way) else {
            continue;
        };
        let moving = row.milliseconds_median / 1e3 - LATENCY_SECONDS;
        let bytes_per_second = match moving > 0.0 {
            true => transfer.bytes as f64 / moving,
            false => row.gigabytes_per_second_median * 1e9,
        };
        return Ok(LinkCosts {
            name: name.to_owned(),
            latency_seconds: LATENCY_SECONDS,
            bytes_per_second,
            is_streamed,
        });
    }
    bail!("it has no row of a transport; run `baton bench transfer --json` without --ways")
}

/// The processor's name, as far as the system tells.
pub(super) fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let name = cpu_model().unwrap_or_else(|| "an unknown processor".to_owned());
    format!("{cores} cores of {name}")
}

fn words(shape: &StepShape) -> String {
    let mut words = Vec::new();
    if let Some(context) = shape.prefill_pairs.checked_div(shape.prefill_tokens) {
        words.push(format!("{} prompt tokens at {context}", shape.prefill_tokens));
    }
    if let Some(context) = shape.decode_context.checked_div(shape.decode_rows) {
        words.push(format!("{} sequences at {context}", shape.decode_rows));
    }
    if shape.draws == 0 {
        words.push("no draw".to_owned());
    }
    words.join(", ")
}

fn error(point: &FitPoint) -> f64 {
    point.fitted_seconds / point.measured_seconds - 1.0
}

pub(super) fn print(costs: &Costs, json: Option<&str>) -> anyhow::Result<()> {
    let mut out = crate::stdout::stdout();
    if let Some(json) = json {
        writeln!(out, "{json}")?;
        return Ok(());
    }
    let step = &costs.step;
    writeln!(out, "{}", costs.name)?;
    let mut table = Table::new(&["a step takes", ">each"]);
    for (what, seconds, scale, unit) in [
        ("in any case", step.fixed_seconds, 1e3, "ms"),
        (
            "for the output head, when a token is drawn",
            step.draw_seconds,
            1e3,
            "ms",
        ),
        ("for a prompt's token", step.prefill_token_seconds, 1e6, "us"),
        (
            "for a prompt's token and a position before it",
            step.prefill_pair_seconds,
            1e9,
            "ns",
        ),
        ("for a sequence that decodes", step.decode_row_seconds, 1e6, "us"),
        (
            "for a position of such a sequence",
            step.decode_context_token_seconds,
            1e9,
            "ns",
        ),
    ] {
        table.row(vec![what.into(), format!("{:.3} {unit}", seconds * scale).into()]);
    }
    let of_batch = step.batch_seconds.iter().zip(step.batch_context_token_seconds);
    for (batch, (seconds, of_position)) in BATCHES.iter().zip(of_batch) {
        let what = format!("more, for a batch of {batch} that only decodes");
        let more = format!("{:+.3} ms, {:+.0} ns a position", seconds * 1e3, of_position * 1e9);
        table.row(vec![what.into(), more.into()]);
    }
    for (chunk, seconds) in CHUNKS.iter().zip(step.chunk_seconds) {
        let what = format!("more, for {chunk} prompt tokens at once");
        table.row(vec![what.into(), format!("{:+.3} ms", seconds * 1e3).into()]);
    }
    out.write_all(table.render(Terminal::plain()).as_bytes())?;
    writeln!(
        out,
        "steps vary by {:.1} % (coefficient of variation)",
        step.variation * 100.0
    )?;
    for (others, slowdown) in (1..).zip(&costs.host.slowdown) {
        let ByKind { reading, computing } = slowdown;
        let nodes = if others == 1 { "node" } else { "nodes" };
        writeln!(
            out,
            "beside {others} other {nodes} with one decoding sequence each, decoding one or two sequences takes {:.2} times as long, \
             other steps {:.2} times; beside as many that compute prompts, {:.2} and {:.2} times",
            reading.reading, computing.reading, reading.computing, computing.computing
        )?;
    }
    if let Some(fit) = &costs.fit {
        print_fit(&mut out, fit)?;
    }
    writeln!(out, "{}", costs.accuracy_sentence())?;
    Ok(())
}

/// How good the fit is, and where it is worst.
fn print_fit(out: &mut dyn std::io::Write, fit: &FitReport) -> anyhow::Result<()> {
    writeln!(
        out,
        "the fit's error over {} kinds of steps: median {:.1} %, largest {:.1} %; the largest:",
        fit.points.len(),
        fit.error_median * 100.0,
        fit.error_max * 100.0
    )?;
    let mut points = fit.points.clone();
    points.sort_by(|a, b| error(b).abs().total_cmp(&error(a).abs()));
    let mut table = Table::new(&["step", ">measured ms", ">fitted ms", ">error"]);
    for point in points.iter().take(WORST_SHOWN) {
        table.row(vec![
            words(&point.shape).into(),
            format!("{:.3}", point.measured_seconds * 1e3).into(),
            format!("{:.3}", point.fitted_seconds * 1e3).into(),
            format!("{:+.1} %", error(point) * 100.0).into(),
        ]);
    }
    out.write_all(table.render(Terminal::plain()).as_bytes())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_transport_of_a_measurement_becomes_the_link() {
        let text = r#"{"bytes": 47185920, "rows": [
            {"way": "grpc", "milliseconds_median": 50.2, "gigabytes_per_second_median": 0.94},
            {"way": "shm direct", "milliseconds_median": 10.2, "gigabytes_per_second_median": 4.6}]}"#;
        let link = link_of(text).expect("a link");
        assert_eq!((link.name.as_str(), link.is_streamed), ("shm-direct", false));
        assert!((link.bytes_per_second / 4_718_592_000.0 - 1.0).abs() < 1e-9);
        assert!(link_of("{}").is_err());
        assert!(link_of(r#"{"bytes": 1, "rows": []}"#).is_err());
    }
}
