//! A comparison as the sections look at it: shapes, then loads, then arms with their runs.

use crate::comparison::{Arm, Comparison, Resources, Shape, Slo};
use crate::record::{LoopKind, RequestRecord, Run};
use crate::statistics::Samples;
use crate::summary::Summary;
use crate::verdict::{ArmFrame, ArmInterval, Metric, load_index, loads, of_arm};

use super::text::tick;

/// Of the resampling behind the intervals: the same data give the same report.
const SEED: u64 = 1;
/// The headlines are about the highest load at which an arm kept this attainment.
const HEADLINE_ATTAINMENT: f64 = 0.9;

/// What was measured: it decides what the report may say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    Comparison,
    /// One run: nothing is compared, so there is no verdict and no fairness list.
    Run,
}

pub struct View<'a> {
    pub comparison: &'a Comparison,
    pub subject: Subject,
    /// Declared arms, then names that only runs have. The place in this list gives an arm its colour and marker.
    pub arms: Vec<&'a str>,
    pub shapes: Vec<ShapeView<'a>>,
}

pub struct ShapeView<'a> {
    pub shape: &'a Shape,
    /// By rising load: those of the verdict.
    pub loads: Vec<LoadView<'a>>,
    headline: usize,
}

pub struct LoadView<'a> {
    pub offered: f64,
    pub arms: Vec<ArmView<'a>>,
}

/// One arm at one load: all its repeats.
pub struct ArmView<'a> {
    pub arm: usize,
    pub name: &'a str,
    pub declared: Option<&'a Arm>,
    pub runs: Vec<(&'a Run, Summary)>,
    slo: &'a Slo,
}

impl<'a> View<'a> {
    pub fn new(comparison: &'a Comparison, subject: Subject) -> View<'a> {
        let mut arms: Vec<&str> = comparison.arms.iter().map(|arm| arm.name.as_str()).collect();
        for run in comparison.shapes.iter().flat_map(|shape| &shape.runs) {
            if !arms.contains(&run.arm.as_str()) {
                arms.push(&run.arm);
            }
        }
        let shapes = comparison
            .shapes
            .iter()
            .map(|shape| ShapeView::new(comparison, shape, &arms));
        View {
            comparison,
            subject,
            shapes: shapes.collect(),
            arms,
        }
    }

    /// A number above 0 that the environment of an arm's first run, or that of the comparison, has under a name.
    pub fn fact(&self, arm: &ArmView<'_>, name: &str) -> Option<f64> {
        let of_run = arm.runs.first().and_then(|(run, _)| run.environment.get(name));
        let fact = of_run.or_else(|| self.comparison.environment.get(name));
        fact.and_then(serde_json::Value::as_f64).filter(|value| *value > 0.0)
    }
}

impl<'a> ShapeView<'a> {
    fn new(comparison: &'a Comparison, shape: &'a Shape, arms: &[&'a str]) -> ShapeView<'a> {
        let known = loads(shape);
        let empty = |offered: &f64| LoadView {
            offered: *offered,
            arms: Vec::new(),
        };
        let mut loads: Vec<LoadView<'a>> = known.iter().map(empty).collect();
        for run in &shape.runs {
            let place = load_index(&known, run.run.offered);
            let Some(load) = place.and_then(|place| loads.get_mut(place)) else {
                continue;
            };
            let summary = Summary::of(&run.run, &comparison.slo);
            let index = arms.iter().position(|name| *name == run.arm).unwrap_or(0);
            match load.arms.iter_mut().find(|arm| arm.arm == index) {
                Some(arm) => arm.runs.push((&run.run, summary)),
                None => load.arms.push(ArmView {
                    arm: index,
                    name: &run.arm,
                    declared: comparison.arms.iter().find(|arm| arm.name == run.arm),
                    runs: vec![(&run.run, summary)],
                    slo: &comparison.slo,
                }),
            }
        }
        for load in &mut loads {
            load.arms.sort_by_key(|arm| arm.arm);
        }
        let headline = headline(&loads);
        ShapeView { shape, loads, headline }
    }

    /// The load that the headlines are about.
    pub fn headline(&self) -> Option<&LoadView<'a>> {
        self.loads.get(self.headline)
    }

    /// An arm at each load where it was measured.
    pub fn curve(&self, arm: usize) -> Vec<(f64, &ArmView<'a>)> {
        let at = |load: &'_ LoadView<'a>| load.offered;
        self.loads
            .iter()
            .filter_map(|load| Some((at(load), load.arms.iter().find(|view| view.arm == arm)?)))
            .collect()
    }
}

/// The highest load at which some arm still kept its limits: there the arms differ most. Otherwise the lowest one.
fn headline(loads: &[LoadView<'_>]) -> usize {
    let holds = |arm: &ArmView<'_>| arm.mean(|summary| summary.attainment.both) >= HEADLINE_ATTAINMENT;
    loads.iter().rposition(|load| load.arms.iter().any(holds)).unwrap_or(0)
}

impl LoadView<'_> {
    /// `core`, `GPU` or `arm`; arms that differ in it are told apart as `core or GPU`.
    pub fn unit(&self) -> &'static str {
        let mut words = self.arms.iter().map(|arm| arm.per().word());
        let first = words.next().unwrap_or("arm");
        if words.all(|word| word == first) {
            first
        } else {
            "core or GPU"
        }
    }
    /// `12 requests/s`, or `8 users` of a closed loop.
    pub fn words(&self) -> String {
        let is_closed = self
            .arms
            .iter()
            .flat_map(|arm| &arm.runs)
            .any(|(run, _)| run.loop_kind == LoopKind::Closed);
        match is_closed {
            true => format!("{} users (closed loop)", tick(self.offered)),
            false => format!("{} requests/s", tick(self.offered)),
        }
    }
}

/// What an arm's yield is divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Per {
    Gpu(u32),
    Core(u32),
    /// Its resources are not known.
    Arm,
}

impl Per {
    pub fn of(resources: Option<&Resources>) -> Per {
        match resources {
            Some(resources) if resources.gpus > 0 => Per::Gpu(resources.gpus),
            Some(resources) if resources.cores > 0 => Per::Core(resources.cores),
            _ => Per::Arm,
        }
    }
    pub fn count(self) -> f64 {
        match self {
            Per::Gpu(count) | Per::Core(count) => f64::from(count),
            Per::Arm => 1.0,
        }
    }
    pub fn word(self) -> &'static str {
        match self {
            Per::Gpu(_) => "GPU",
            Per::Core(_) => "core",
            Per::Arm => "arm",
        }
    }
}

impl<'a> ArmView<'a> {
    pub fn per(&self) -> Per {
        Per::of(self.declared.map(|arm| &arm.resources))
    }
    /// Measured requests of all repeats.
    pub fn measured(&self) -> impl Iterator<Item = &'a RequestRecord> {
        self.runs
            .iter()
            .flat_map(|(run, _)| &run.records)
            .filter(|record| record.is_measured())
    }
    pub fn completed(&self) -> impl Iterator<Item = &'a RequestRecord> {
        self.measured().filter(|record| record.is_completed())
    }
    pub fn ttft_ms(&self) -> Samples {
        Samples::new(self.completed().filter_map(RequestRecord::ttft_ms))
    }
    pub fn tpot_ms(&self) -> Samples {
        Samples::new(self.completed().filter_map(RequestRecord::tpot_ms))
    }
    pub fn itl_ms(&self) -> Samples {
        Samples::new(self.completed().flat_map(RequestRecord::gaps_ms))
    }
    /// The mean over the repeats.
    pub fn mean(&self, of: impl Fn(&Summary) -> f64) -> f64 {
        self.runs.iter().map(|(_, summary)| of(summary)).sum::<f64>() / self.runs.len().max(1) as f64
    }
    pub fn sum(&self, of: impl Fn(&Summary) -> usize) -> usize {
        self.runs.iter().map(|(_, summary)| of(summary)).sum()
    }
    /// The mean over the repeats, as the contrasts have it. `None`: a repeat has no such time, because nothing of it was answered. The mean of
    /// the others would be that of the better ones.
    pub fn ttft_p99(&self) -> Option<f64> {
        self.mean_of(|summary| summary.ttft_ms.map(|ttft| ttft.p99))
    }
    pub fn itl_p99(&self) -> Option<f64> {
        self.mean_of(|summary| summary.itl_ms.map(|itl| itl.p99))
    }
    fn mean_of(&self, of: impl Fn(&Summary) -> Option<f64>) -> Option<f64> {
        let values: Vec<f64> = self
            .runs
            .iter()
            .map(|(_, summary)| of(summary))
            .collect::<Option<_>>()?;
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    }
    /// A metric over all repeats, with its interval.
    pub fn interval(&self, metric: Metric) -> Option<ArmInterval> {
        let runs: Vec<&Run> = self.runs.iter().map(|(run, _)| *run).collect();
        let nothing = Resources::default();
        let frame = ArmFrame {
            slo: self.slo,
            resources: self.declared.map_or(&nothing, |arm| &arm.resources),
            seed: SEED,
        };
        of_arm(metric, &runs, &frame)
    }
    pub fn output_per(&self) -> f64 {
        self.mean(|summary| summary.throughput.output_tokens_per_s) / self.per().count()
    }
    pub fn goodput_per(&self) -> f64 {
        self.mean(|summary| summary.goodput_per_s) / self.per().count()
    }
}
