//! Adds up what the cells came to: one table for people, one line for a test's output.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use super::strike::CellReport;
use super::verdict::Outcome;

/// Figures of a set of cells.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub cells: usize,
    pub outcomes: BTreeMap<Outcome, usize>,
    pub violations: Vec<String>,
    /// From the fault to the end of the last request.
    pub worst_end: Option<Duration>,
    /// From a node's death to the end of a transfer with it.
    pub worst_abort: Option<Duration>,
    pub worst_rest: Duration,
    pub worst_ready_while_failing: Option<Duration>,
}

impl Tally {
    pub fn add(&mut self, report: &CellReport) {
        self.cells += 1;
        for outcome in &report.outcomes {
            *self.outcomes.entry(*outcome).or_default() += 1;
        }
        let of_cell = report.violations.iter().map(|what| format!("{}: {what}", report.cell));
        self.violations.extend(of_cell);
        self.worst_end = self.worst_end.max(report.to_end);
        self.worst_abort = self.worst_abort.max(report.to_aborts.iter().max().copied());
        self.worst_rest = self.worst_rest.max(report.to_rest);
        self.worst_ready_while_failing = self.worst_ready_while_failing.max(report.ready_while_failing);
    }

    pub fn of(&self, outcome: Outcome) -> usize {
        self.outcomes.get(&outcome).copied().unwrap_or(0)
    }

    pub fn texts(&self) -> usize {
        self.outcomes.values().sum()
    }
}

/// A row for each victim and fault, and one for all.
pub fn table(reports: &[CellReport]) -> String {
    let mut rows: BTreeMap<(&str, &str), Tally> = BTreeMap::new();
    let mut all = Tally::default();
    for report in reports {
        let row = (report.cell.victim.name(), report.cell.fault.name());
        rows.entry(row).or_default().add(report);
        all.add(report);
    }
    let mut text = String::from(
        "| victim | fault | cells | requests | completed | explicit error | connection lost | left | violations | worst time to the last answer | worst time to abort | worst time to rest | ready while probes fail |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for ((victim, fault), tally) in &rows {
        row(&mut text, (victim, fault), tally);
    }
    row(&mut text, ("all", ""), &all);
    text
}

fn row(text: &mut String, (victim, fault): (&str, &str), tally: &Tally) {
    let _ = writeln!(
        text,
        "| {victim} | {fault} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {:.1} s | {} |",
        tally.cells,
        tally.texts(),
        tally.of(Outcome::Completed),
        tally.of(Outcome::Failed),
        tally.of(Outcome::ConnectionLost),
        tally.of(Outcome::Left),
        tally.violations.len(),
        seconds(tally.worst_end),
        seconds(tally.worst_abort),
        tally.worst_rest.as_secs_f64(),
        seconds(tally.worst_ready_while_failing),
    );
}

fn seconds(measured: Option<Duration>) -> String {
    measured.map_or_else(|| "-".to_owned(), |time| format!("{:.1} s", time.as_secs_f64()))
}
