//! What the terminal shows of a comparison.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use workload::comparison::{Arm, Comparison, Shape};
use workload::statistics::Samples;
use workload::summary::Summary;

use super::conclude::Refused;
use crate::observe::table::Table;
use crate::terminal::Terminal;

/// The medians over the repeats of each arm at each load, the handoffs, the verdicts, and the fairness list where it has gaps.
pub(super) fn text(comparison: &Comparison, refused: &Refused) -> String {
    let mut text = String::new();
    for shape in &comparison.shapes {
        let _ = writeln!(text, "\n{} ({})\ntrace {}", shape.name, shape.traffic, shape.trace_hash);
        text.push_str(&table(comparison, shape).render(Terminal::plain()));
        let _ = writeln!(text, "{}", shape.verdict);
    }
    let missing = comparison.fairness.missing();
    if !missing.is_empty() {
        let _ = writeln!(text, "\nMissing in the fairness list: {}", missing.join(", "));
    }
    // Where a shape was measured, its sentence says why it has no verdict.
    for why in refused.iter().filter(|_| comparison.shapes.is_empty()) {
        let _ = writeln!(text, "No verdict: {why}");
    }
    text
}

fn table(comparison: &Comparison, shape: &Shape) -> Table {
    let mut table = Table::new(&[
        "arm",
        ">requests/s",
        ">runs",
        ">good/s",
        ">TTFT p50 ms",
        ">TTFT p99 ms",
        ">ITL p99 ms",
        ">not answered",
        ">handed off",
        ">prefilled locally",
    ]);
    for arm in &comparison.arms {
        for (load, runs) in by_load(comparison, shape, arm) {
            // A run in which nothing was answered has no times. The median of the other runs would be that of the better ones.
            let median = |of: fn(&Summary) -> Option<f64>| {
                let all: Option<Vec<f64>> = runs.iter().map(of).collect();
                let middle = all.and_then(|all| Samples::new(all).percentile(50.0));
                middle.map_or("-".to_owned(), |value| format!("{value:.2}"))
            };
            let sum = |of: fn(&Summary) -> usize| runs.iter().map(of).sum::<usize>().to_string();
            table.row(vec![
                arm.name.as_str().into(),
                format!("{:.2}", f64::from_bits(load)).into(),
                runs.len().to_string().into(),
                median(|run| Some(run.goodput_per_s)).into(),
                median(|run| Some(run.ttft_ms?.p50)).into(),
                median(|run| Some(run.ttft_ms?.p99)).into(),
                median(|run| Some(run.itl_ms?.p99)).into(),
                sum(|run| run.counts.measured - run.counts.completed).into(),
                sum(|run| run.handoffs.handed_off).into(),
                sum(|run| run.handoffs.local_prefill.values().sum()).into(),
            ]);
        }
    }
    table
}

/// The runs of an arm by load, rising. The rates are above 0, so their bits rise as they do.
fn by_load(comparison: &Comparison, shape: &Shape, arm: &Arm) -> BTreeMap<u64, Vec<Summary>> {
    let mut loads: BTreeMap<u64, Vec<Summary>> = BTreeMap::new();
    for run in shape.runs.iter().filter(|run| run.arm == arm.name) {
        let summary = Summary::of(&run.run, &comparison.slo);
        loads.entry(run.run.offered.to_bits()).or_default().push(summary);
    }
    loads
}

#[cfg(test)]
mod tests {
    use workload::record::Outcome;

    use super::*;
    use crate::compare::test_kit;

    #[test]
    fn an_arm_has_no_median_of_times_where_a_run_of_it_answered_nothing() {
        let mut comparison = test_kit::comparison();
        let mut of_split = comparison.shapes[0].runs.iter_mut().filter(|run| run.arm == "split");
        for record in &mut of_split.next().expect("its first repeat").run.records {
            record.outcome = Outcome::Refused { status: 429 };
        }
        let text = text(&comparison, &Refused::new());
        let row = |arm: &str| -> Vec<&str> {
            let line = text.lines().find(|line| line.trim_start().starts_with(arm));
            line.expect("its row").split_whitespace().collect()
        };
        assert_eq!(row("whole")[2..8], ["3", "1.00", "5.00", "5.00", "1.00", "0"]);
        assert_eq!(row("split")[2..8], ["3", "1.00", "-", "-", "-", "3"]);
    }
}
