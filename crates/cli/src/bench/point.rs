//! One measured point: what was offered, what came back, and its line in a table.

use serde::Serialize;
use workload::contract::Clause;
use workload::record::{LoopKind, Run};
use workload::saturation::OverSaturation;
use workload::statistics::Distribution;
use workload::summary::{PerResource, Summary};

use super::arguments::{Judge, is_met, status};
use crate::exit::Exit;
use crate::observe::table::{Cell, Table};
use crate::terminal::{Paint, Terminal};

/// A run in figures, with the judgements that were asked for.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Point {
    /// `rate 4.0`, `users 5`, `row D cold`.
    pub label: String,
    pub summary: Summary,
    pub per_resource: PerResource,
    pub over_saturation: Option<OverSaturation>,
    /// End-to-end time by that on an idle server, where a run with one user was measured as well.
    pub slowdown: Option<Distribution>,
    /// Empty without a contract.
    pub contract: Vec<Clause>,
}

impl Point {
    pub fn of(label: String, run: &Run, judge: &Judge) -> Self {
        let summary = Summary::of(run, &judge.slo);
        Self {
            label,
            per_resource: judge.per_resource(&summary),
            over_saturation: match run.loop_kind {
                LoopKind::Closed => None,
                _ => OverSaturation::of(run),
            },
            slowdown: None,
            contract: judge.clauses(&summary),
            summary,
        }
    }
    /// What the contract says of it.
    pub fn status(&self) -> Exit {
        status(&self.contract, &self.summary.lag)
    }
    /// What a reader must know of it beside its figures.
    fn notes(&self, mark: &str) -> String {
        let counts = self.summary.counts;
        let unserved = counts.measured - counts.completed;
        let lag = &self.summary.lag;
        let notes = [
            (!mark.is_empty()).then(|| mark.to_owned()),
            (unserved > 0).then(|| format!("{unserved} of {} without a whole answer", counts.measured)),
            (!lag.is_valid).then(|| format!("invalid: the client sent late, p99 {:.1} ms", lag.ms_p99)),
            self.over_saturation.is_some().then(|| "over-saturated".to_owned()),
            (!is_met(&self.contract)).then(|| "contract not met".to_owned()),
        ];
        notes.into_iter().flatten().collect::<Vec<_>>().join("; ")
    }
}

/// A table of points. `marks` has a word for some of the labels.
pub(super) fn table(points: &[Point], marks: impl Fn(&Point) -> &'static str, terminal: Terminal) -> String {
    let mut table = Table::new(&[
        "load",
        ">n",
        ">TTFT p50 ms",
        ">p99",
        ">TPOT p50 ms",
        ">ITL p99 ms",
        ">E2E p99 ms",
        ">req/s",
        ">in tok/s",
        ">out tok/s",
        ">goodput/s",
        ">SLO met",
        ">slowdown p99",
        "notes",
    ]);
    for point in points {
        let Summary {
            ttft_ms,
            tpot_ms,
            itl_ms,
            e2e_ms,
            throughput,
            ..
        } = &point.summary;
        let at = |times: &Option<Distribution>, of: fn(&Distribution) -> f64| -> Cell {
            times
                .as_ref()
                .map_or("-".to_owned(), |times| format!("{:.1}", of(times)))
                .into()
        };
        let attained = point.summary.attainment.both;
        let paint = if attained >= 0.99 { Paint::Good } else { Paint::Warn };
        table.row(vec![
            point.label.as_str().into(),
            point.summary.counts.measured.to_string().into(),
            at(ttft_ms, |times| times.p50),
            at(ttft_ms, |times| times.p99),
            at(tpot_ms, |times| times.p50),
            at(itl_ms, |times| times.p99),
            at(e2e_ms, |times| times.p99),
            format!("{:.2}", throughput.requests_per_s).into(),
            format!("{:.1}", throughput.input_tokens_per_s).into(),
            format!("{:.1}", throughput.output_tokens_per_s).into(),
            format!("{:.2}", point.summary.goodput_per_s).into(),
            Cell::new(format!("{:.0} %", attained * 100.0)).paint(paint),
            at(&point.slowdown, |times| times.p99),
            point.notes(marks(point)).into(),
        ]);
    }
    table.render(terminal)
}
