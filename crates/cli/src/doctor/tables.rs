//! The tables of the report: one row for each step, kernel, figure or check.

use std::collections::BTreeMap;

use super::kernel_group::{GroupReport, KernelCheck};
use super::step::{Amount, Figure, Outcome, StepReport};
use crate::observe::table::{Cell, Table};
use crate::terminal::Paint;

pub(super) fn steps(steps: &[StepReport]) -> Table {
    let mut table = Table::new(&["step", "outcome", ">seconds", "what was found"]);
    for step in steps {
        let (outcome, said) = match &step.outcome {
            Outcome::Right { said } => (Cell::new("right").paint(Paint::Good), said),
            Outcome::Measured { said } => (Cell::new("measured"), said),
            Outcome::Wrong { why } => (Cell::new("WRONG").paint(Paint::Bad), why),
            Outcome::NotRun { why } => (Cell::new("not run"), why),
        };
        let seconds = match step.seconds {
            0.0 => String::new(),
            seconds => format!("{seconds:.1}"),
        };
        table.row(vec![step.step.to_string().into(), outcome, seconds.into(), said.into()]);
    }
    table
}

/// One row for each kernel, with its worst figures.
pub(super) fn kernels(groups: &[GroupReport]) -> Table {
    let mut table = Table::new(&["group", "kernel", ">checks", ">largest error", ">NMSE", "verdict"]);
    for group in groups {
        let mut by_kernel: BTreeMap<&str, Vec<&KernelCheck>> = BTreeMap::new();
        for check in group.checks() {
            by_kernel.entry(&check.kernel).or_default().push(check);
        }
        for (kernel, checks) in by_kernel {
            let worst = |of: fn(&KernelCheck) -> Option<f64>| {
                let values: Option<Vec<f64>> = checks.iter().map(|check| of(check)).collect();
                Cell::new(error(values.map(|values| values.into_iter().fold(0.0, f64::max))))
            };
            table.row(vec![
                Cell::new(group.group),
                Cell::new(kernel),
                Cell::new(checks.len().to_string()),
                worst(|check| check.largest_error),
                worst(|check| check.nmse),
                verdict(checks.iter().all(|check| check.is_right)),
            ]);
        }
    }
    table
}

pub(super) fn figures(steps: &[StepReport]) -> Table {
    let mut table = Table::new(&["measured", ">median us", ">n", ">rate", ">floor us", "floor is"]);
    for figure in steps.iter().flat_map(|step| &step.figures) {
        let (floor, from) = match &figure.floor {
            Some(floor) => (format!("{:.1}", floor.us), floor.from.clone()),
            None => (String::new(), "no floor known".to_owned()),
        };
        table.row(vec![
            figure.what.as_str().into(),
            format!("{:.2}", figure.median_us).into(),
            figure.n.to_string().into(),
            rate(figure).into(),
            floor.into(),
            from.into(),
        ]);
    }
    table
}

pub(super) fn checks(steps: &[StepReport]) -> Table {
    let mut table = Table::new(&["step", "check", "verdict", "what was seen"]);
    for step in steps {
        for check in &step.checks {
            table.row(vec![
                step.step.to_string().into(),
                check.what.as_str().into(),
                verdict(check.is_right),
                check.said.as_str().into(),
            ]);
        }
    }
    table
}

fn verdict(is_right: bool) -> Cell {
    match is_right {
        true => Cell::new("right").paint(Paint::Good),
        false => Cell::new("WRONG").paint(Paint::Bad),
    }
}

/// Bytes or operations of one microsecond are a million in a second.
fn rate(figure: &Figure) -> String {
    match figure.amount {
        Amount::Bytes(bytes) => format!("{:.1} GB/s", bytes as f64 / figure.median_us / 1e3),
        Amount::Operations(operations) => format!("{:.1} TFLOP/s", operations as f64 / figure.median_us / 1e6),
        Amount::Launch => String::new(),
    }
}

pub(super) fn error(value: Option<f64>) -> String {
    match value {
        None => "not a number".to_owned(),
        Some(0.0) => "0".to_owned(),
        Some(value) => format!("{value:.1e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::step::{Check, Floor, Row};
    use crate::terminal::Terminal;

    #[test]
    fn a_step_that_was_not_run_is_not_printed_as_right() {
        let not_run = StepReport::not_run(Row::Model, "name a model with --model");
        let text = steps(&[not_run]).render(Terminal::plain());
        assert!(text.contains("not run") && text.contains("--model"), "{text}");
        assert!(!text.contains("right"), "{text}");
    }

    #[test]
    fn a_figure_stands_beside_its_floor_and_its_rate() {
        let figure = |amount, floor| Figure {
            what: "copy".to_owned(),
            median_us: 100.0,
            n: 11,
            amount,
            floor,
        };
        let floor = Floor {
            us: 80.0,
            from: "a reason".to_owned(),
        };
        let step = StepReport {
            figures: vec![
                figure(Amount::Bytes(300_000_000), Some(floor)),
                figure(Amount::Operations(20_000_000_000), None),
            ],
            ..StepReport::of_checks(Row::Machine, Vec::new())
        };
        let text = figures(&[step]).render(Terminal::plain());
        for part in ["3000.0 GB/s", "80.0", "a reason", "200.0 TFLOP/s", "no floor known"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }

    #[test]
    fn every_check_of_a_step_is_listed() {
        let check = |is_right| Check {
            what: "a byte".to_owned(),
            is_right,
            said: "seen".to_owned(),
        };
        let step = StepReport::of_checks(Row::CudaIpc, vec![check(true), check(false)]);
        let text = checks(&[step]).render(Terminal::plain());
        assert_eq!((text.matches("right").count(), text.matches("WRONG").count()), (1, 1));
    }
}
