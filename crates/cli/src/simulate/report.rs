//! What a simulation says on the terminal, as JSON, and as CSV.

use std::fmt::Write as _;
use std::io::Write as _;
use std::time::Duration;

use serde::Serialize;
use simulator::Scenario;
use simulator::outcome::{NodeOutcome, Outcome, Totals};
use workload::record::{Outcome as Ended, RequestRecord, Run, RunPart};
use workload::statistics::Distribution;
use workload::summary::{Counts, Summary};

use crate::observe::table::Table;
use crate::terminal::Terminal;

/// Nodes of the table; of more, the busiest and the idlest are shown.
const NODES_SHOWN: usize = 12;

#[derive(Serialize)]
struct Printed<'a> {
    topology: String,
    trace: &'a str,
    seed: u64,
    simulation_error: String,
    summary: &'a Summary,
    totals: &'a Totals,
    nodes: &'a [NodeOutcome],
}

pub(super) fn print_json(scenario: &Scenario, (outcome, summary): (&Outcome, &Summary)) -> anyhow::Result<()> {
    let printed = Printed {
        topology: scenario.topology.to_string(),
        trace: &scenario.trace.name,
        seed: scenario.seed,
        simulation_error: scenario.costs.accuracy_sentence(),
        summary,
        totals: &outcome.totals,
        nodes: &outcome.nodes,
    };
    let mut out = crate::stdout::stdout();
    writeln!(out, "{}", serde_json::to_string(&printed)?)?;
    Ok(())
}

pub(super) fn print(
    scenario: &Scenario,
    (outcome, summary): (&Outcome, &Summary),
    took: Duration,
) -> anyhow::Result<()> {
    let mut out = crate::stdout::stdout();
    let (totals, counts) = (&outcome.totals, &summary.counts);
    writeln!(
        out,
        "simulated {} for {:.1} s of virtual time in {:.2} s ({} events): {}",
        scenario.topology,
        totals.virtual_time.as_secs_f64(),
        took.as_secs_f64(),
        totals.events,
        scenario.trace.name
    )?;
    writeln!(
        out,
        "costs: {}; {}",
        scenario.costs.name,
        scenario.costs.accuracy_sentence()
    )?;
    writeln!(
        out,
        "{} requests measured at {:.2}/s: {} completed, {} refused, {} failed",
        counts.measured, summary.offered, counts.completed, counts.refused, counts.failed
    )?;
    if let Some(why) = nothing_counts(counts) {
        writeln!(out, "{why}")?;
    }
    out.write_all(latencies(summary).render(Terminal::plain()).as_bytes())?;
    writeln!(
        out,
        "goodput {:.3} requests/s; {:.1} output tokens/s; {} handoffs; local prefills: {}; retries: {}; {} preemptions",
        summary.goodput_per_s,
        summary.throughput.output_tokens_per_s,
        totals.handoffs,
        counted(&totals.local_prefills),
        counted(&totals.retries),
        totals.preemptions
    )?;
    out.write_all(nodes(outcome).render(Terminal::plain()).as_bytes())?;
    if totals.blocks_left > 0 || totals.violations > 0 {
        writeln!(
            out,
            "this should not be: {} KV blocks are left, {} violations of the protocol; please report the command",
            totals.blocks_left, totals.violations
        )?;
    }
    Ok(())
}

/// Without it the figures below look like those of a cluster that serves nobody.
fn nothing_counts(counts: &Counts) -> Option<String> {
    let left_out = counts.warm_up + counts.cool_down;
    (counts.measured == 0)
        .then(|| format!("no request counts: --warm-up and --cool-down leave out all {left_out}; give shorter ones"))
}

fn latencies(summary: &Summary) -> Table {
    let mut table = Table::new(&["ms", ">p50", ">p90", ">p99", ">max", ">mean", ">n"]);
    let mut row = |name: &'static str, of: &Option<Distribution>| {
        if let Some(of) = of {
            let figures = [of.p50, of.p90, of.p99, of.max, of.mean].map(|ms| format!("{ms:.2}").into());
            let cells = [name.into()].into_iter().chain(figures);
            table.row(cells.chain([of.count.to_string().into()]).collect());
        }
    };
    row("TTFT", &summary.ttft_ms);
    row("TPOT", &summary.tpot_ms);
    row("ITL", &summary.itl_ms);
    row("e2e", &summary.e2e_ms);
    table
}

fn nodes(outcome: &Outcome) -> Table {
    let mut table = Table::new(&[
        "node",
        "role",
        ">busy",
        ">steps",
        ">tokens computed",
        ">KV MB sent",
        ">KV blocks max",
    ]);
    let time = outcome.totals.virtual_time.as_secs_f64().max(1e-9);
    let mut shown: Vec<&NodeOutcome> = outcome.nodes.iter().collect();
    if shown.len() > NODES_SHOWN {
        shown.sort_by(|a, b| b.busy.cmp(&a.busy).then_with(|| a.name.cmp(&b.name)));
        shown.drain(NODES_SHOWN / 2..shown.len() - NODES_SHOWN / 2);
    }
    for node in shown {
        table.row(vec![
            node.name.as_str().into(),
            node.role.as_str().into(),
            format!("{:.0} %", node.busy.as_secs_f64() / time * 100.0).into(),
            node.steps.to_string().into(),
            node.computed_tokens.to_string().into(),
            format!("{:.1}", node.kv_bytes_sent as f64 / 1e6).into(),
            node.kv_blocks_used_max.to_string().into(),
        ]);
    }
    table
}

fn counted(counts: &std::collections::BTreeMap<String, u64>) -> String {
    if counts.is_empty() {
        return "none".to_owned();
    }
    let words: Vec<String> = counts.iter().map(|(what, count)| format!("{count} {what}")).collect();
    words.join(", ")
}

/// Columns have no commas and no quotes: ids, numbers and closed words.
pub(super) fn csv(run: &Run) -> String {
    let mut text = String::from(
        "id,part,prompt_tokens,cached_tokens,output_tokens,scheduled_s,ttft_ms,itl_ms_max,e2e_ms,outcome,prefill_node,decode_node,kv_bytes\n",
    );
    for record in &run.records {
        line(&mut text, record);
    }
    text
}

fn line(text: &mut String, record: &RequestRecord) {
    let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
    let since = |at: Duration| ms(at.saturating_sub(record.scheduled));
    let ttft = record
        .tokens
        .first()
        .map_or(String::new(), |first| format!("{:.3}", since(*first)));
    let gaps = record.tokens.windows(2).map(|pair| ms(pair[1].saturating_sub(pair[0])));
    let part = match record.part {
        RunPart::WarmUp => "warm_up",
        RunPart::Measured => "measured",
        RunPart::CoolDown => "cool_down",
    };
    let outcome = match &record.outcome {
        Ended::Completed => "completed".to_owned(),
        Ended::Refused { status } => format!("refused {status}"),
        Ended::Failed { error } => format!("failed {error}"),
        Ended::Cancelled => "cancelled".to_owned(),
    };
    let server = record.server.as_ref();
    let or_empty = |name: Option<&String>| name.cloned().unwrap_or_default();
    let _ = writeln!(
        text,
        "{},{part},{},{},{},{:.6},{ttft},{:.3},{:.3},{outcome},{},{},{}",
        record.id,
        record.prompt_tokens,
        record.cached_tokens.unwrap_or(0),
        record.output_tokens,
        record.scheduled.as_secs_f64(),
        gaps.fold(0.0, f64::max),
        since(record.ended),
        or_empty(server.and_then(|server| server.prefill_node.as_ref())),
        or_empty(server.and_then(|server| server.decode_node.as_ref())),
        server.and_then(|server| server.kv_bytes).unwrap_or(0),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_simulation_in_which_no_request_counts_says_why() {
        let mut counts = Counts {
            warm_up: 7,
            cool_down: 2,
            ..Counts::default()
        };
        let why = nothing_counts(&counts).expect("nothing was measured");
        assert!(why.contains("--warm-up") && why.contains("all 9"), "{why}");
        counts.measured = 1;
        assert_eq!(nothing_counts(&counts), None);
    }
}
