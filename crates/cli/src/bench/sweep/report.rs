//! What a sweep found: its table, its bend, its patterns, one next step, and warnings.

use std::collections::BTreeSet;

use serde::Serialize;
use workload::comparison::Slo;
use workload::diagnosis::{Diagnosis, NextStep, Observations, Shown, diagnose, next_step};
use workload::knee::{Knee, held};
use workload::lint::{Context, Warning, lint};
use workload::record::Run;
use workload::slowdown::Idle;

use super::plan::{Load, Setting};
use super::{Sweep, SweepArgs};
use crate::bench::arguments::{Judge, is_met};
use crate::bench::point::{Point, table};
use crate::exit::Exit;
use crate::stdout::print_result;
use crate::terminal::Terminal;

#[derive(Clone, Debug, Serialize)]
pub(super) struct SweepReport {
    hypothesis: Option<String>,
    slo: Slo,
    /// The share of requests that must meet both limits.
    attainment_min: f64,
    points: Vec<Point>,
    /// Of `--find-knee`.
    knee: Option<Knee>,
    /// Of `--find-knee`: the rate at which the client sent late, which ended the search.
    client_late_at: Option<f64>,
    /// For each shape whose SLO stops holding: the label of the last load at which it holds.
    bends: Vec<String>,
    diagnosis: Vec<Diagnosis>,
    /// With a contract.
    next_step: Option<NextStep>,
    warnings: Vec<Warning>,
    has_contract: bool,
}

impl SweepReport {
    pub fn of(args: &SweepArgs, judge: &Judge, sweep: &Sweep) -> Self {
        let alone = sweep.settings.iter().position(|setting| setting.load == Load::Users(1));
        let idle = alone.and_then(|at| Idle::of(&sweep.points[at].1));
        let with_slowdown = |(point, run): &(Point, Run)| Point {
            slowdown: idle.and_then(|idle| idle.slowdown(run)),
            ..point.clone()
        };
        let points: Vec<Point> = sweep.points.iter().map(with_slowdown).collect();
        let runs: Vec<_> = sweep.points.iter().map(|(_, run)| run).collect();
        let several = |name: &str, count: usize| (count > 1).then(|| name.to_owned());
        let knobs = [
            several("random_input_len", args.random_input_len.len()),
            several("random_output_len", args.random_output_len.len()),
            several("load", args.users.len().max(args.rates.len())),
        ];
        let context = Context {
            changed_settings: knobs.into_iter().flatten().collect::<BTreeSet<_>>(),
            has_prediction: args.hypothesis.is_some(),
        };
        let bends = match sweep.knee {
            Some(_) => Vec::new(),
            None => bends(&points, &sweep.settings, args.attainment),
        };
        let best = contract_point(sweep).map(|point| &point.contract);
        Self {
            hypothesis: args.hypothesis.clone(),
            slo: judge.slo.clone(),
            attainment_min: args.attainment,
            knee: sweep.knee,
            client_late_at: sweep.client_late_at,
            bends,
            diagnosis: diagnose(&observations(sweep), &judge.slo),
            next_step: best
                .filter(|clauses| !clauses.is_empty())
                .map(|clauses| next_step(clauses)),
            warnings: lint(&runs, &context),
            has_contract: judge.contract.is_some(),
            points,
        }
    }

    /// What the contract says: some load (the knee, where one was looked for) must meet it.
    pub fn status(&self) -> Exit {
        let best = |points: &mut dyn Iterator<Item = &Point>| {
            let statuses: Vec<Exit> = points.map(Point::status).collect();
            let of = |wanted: Exit| statuses.contains(&wanted).then_some(wanted);
            of(Exit::Ok).or(of(Exit::NoVerdict)).unwrap_or(Exit::NotMet)
        };
        match self.knee {
            _ if !self.has_contract => Exit::Ok,
            Some(Knee::At { rate, .. } | Knee::Above { rate }) => {
                best(&mut self.points.iter().filter(|point| point.is_at(rate)))
            }
            Some(_) => Exit::NotMet,
            None => best(&mut self.points.iter()),
        }
    }

    pub fn print(&self, as_json: bool) -> anyhow::Result<()> {
        print_result(&match as_json {
            true => format!("{}\n", serde_json::to_string_pretty(self)?),
            false => self.text(Terminal::stdout()),
        })
    }

    fn text(&self, terminal: Terminal) -> String {
        let mark = |point: &Point| match self.knee {
            Some(Knee::At { rate, .. }) if point.is_at(rate) => "<- the knee",
            _ if self.bends.contains(&point.label) => "<- the SLO holds up to here",
            _ => "",
        };
        let mut lines = vec![table(&self.points, mark, terminal)];
        let slo = &self.slo;
        lines.push(format!(
            "SLO {}: TTFT at most {} ms and p99 of a request's gaps at most {} ms, for {:.1} % of requests.",
            slo.name,
            slo.ttft_ms_max,
            slo.itl_ms_max,
            self.attainment_min * 100.0
        ));
        lines.extend(self.knee.map(knee_words));
        lines.extend(self.client_late_at.map(|rate| {
            format!(
                "Knee: not found. The client sent late at {rate:.3} requests/s, so it would be the client's own knee. \
                 Give the client a core of its own, or begin at a lower rate."
            )
        }));
        lines.extend(
            self.hypothesis
                .as_ref()
                .map(|hypothesis| format!("Hypothesis: {hypothesis}")),
        );
        for row in self.diagnosis.iter().filter(|row| row.shown == Shown::Shown) {
            lines.push(format!("{:?}: {}. {}", row.pattern, row.evidence, row.first_response));
        }
        lines.extend(self.next_step.as_ref().map(|step| format!("Next: {}", step.words())));
        lines.extend(self.warnings.iter().map(|warning| format!("Warning: {warning}.")));
        lines.join("\n") + "\n"
    }
}

impl Point {
    fn is_at(&self, rate: f64) -> bool {
        // Lengths may stand behind the rate.
        self.label.starts_with(&format!("{rate:.3} req/s"))
    }
}

/// The last load at which the SLO holds, for each shape in which it fails at a higher one. Above a load that failed no other load
/// counts, whatever the order in which they were measured. A point whose client sent late says nothing about the server.
fn bends(points: &[Point], settings: &[Setting], attainment_min: f64) -> Vec<String> {
    // As in the search for the knee: a queue that grows all the time breaks the limits of a longer run.
    let holds = |point: &Point| held(&point.summary, attainment_min) && point.over_saturation.is_none();
    let mut measured: Vec<(&Setting, bool, &str)> = settings
        .iter()
        .zip(points)
        .filter(|(_, point)| point.summary.lag.is_valid)
        .map(|(setting, point)| (setting, holds(point), point.label.as_str()))
        .collect();
    // Of a load that was measured twice the run that failed counts, so it comes first.
    measured.sort_by(|(one, one_held, _), (other, other_held, _)| {
        let shapes = one.shape().cmp(&other.shape());
        let loads = one.load.amount().total_cmp(&other.load.amount());
        shapes.then(loads).then(one_held.cmp(other_held))
    });
    let of_shapes = measured.chunk_by(|(one, ..), (other, ..)| one.is_same_shape(other));
    let bend = |of_shape: &[(&Setting, bool, &str)]| {
        let failed = of_shape.iter().position(|(_, held, _)| !held)?;
        let (_, _, label) = of_shape[..failed].last()?;
        Some((*label).to_owned())
    };
    of_shapes.filter_map(bend).collect()
}

/// The point by which a next step is chosen: the last one at which the contract is met, or else the first one.
fn contract_point(sweep: &Sweep) -> Option<&Point> {
    let points = || sweep.points.iter().map(|(point, _)| point);
    points().rfind(|point| is_met(&point.contract)).or(points().next())
}

fn knee_words(knee: Knee) -> String {
    match knee {
        Knee::At { rate, failed_at } => {
            format!("Knee: the SLO holds at {rate:.3} requests/s, twice, and not at {failed_at:.3}.")
        }
        Knee::Above { rate } => format!("Knee: above {rate:.3} requests/s, the highest rate that was tried."),
        Knee::Below { rate } => format!("Knee: below {rate:.3} requests/s, the lowest rate that was tried."),
        Knee::Between { held, failed_at } => {
            let words = |rate: Option<f64>| rate.map_or("none".to_owned(), |rate| format!("{rate:.3} requests/s"));
            format!(
                "Knee: not found in the runs allowed. The SLO held at {}, failed at {}.",
                words(held),
                words(failed_at)
            )
        }
    }
}

/// A sweep over lengths shows prefill; one over loads shows queues and batching; one user shows decode.
fn observations(sweep: &Sweep) -> Observations<'_> {
    let pairs = || {
        sweep
            .points
            .iter()
            .map(|(point, _)| &point.summary)
            .zip(&sweep.settings)
    };
    let Some((_, first)) = pairs().next() else {
        return Observations::default();
    };
    let mut by_load: Vec<_> = pairs().filter(|(_, setting)| setting.is_same_shape(first)).collect();
    by_load.sort_by(|a, b| a.0.offered.total_cmp(&b.0.offered));
    let is_alone = |load: Load| load == Load::Users(1);
    let by_prompt = pairs().filter(|(_, setting)| setting.load == first.load && is_alone(setting.load));
    Observations {
        alone: pairs()
            .find(|(_, setting)| is_alone(setting.load))
            .map(|(summary, _)| summary),
        by_prompt: by_prompt
            .filter_map(|(summary, setting)| Some((f64::from(setting.prompt_tokens), summary.ttft_ms?.p50)))
            .collect(),
        by_load: by_load.into_iter().map(|(summary, _)| summary).collect(),
        ..Observations::default()
    }
}
