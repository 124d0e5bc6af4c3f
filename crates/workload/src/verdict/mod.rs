//! Findings and verdicts of a comparison, from intervals; or why there is none.
//!
//! How often a verdict may be wrong is decided before the first run (`VerdictPlan`): one primary metric, on which the verdict
//! of a shape rests, for each candidate and load; secondary ones, which explain it. Of each of these two families, equal arms
//! show a difference in at most 5 % of comparisons (Holm 1979). A finding needs an effect of a relevant size, too.

mod interval;
mod metric;
mod of_arm;
mod refusal;
mod sentence;

use std::collections::BTreeMap;

pub use metric::Metric;
pub(crate) use of_arm::{ArmFrame, ArmInterval, of_arm};
pub use refusal::Refusal;

use crate::comparison::{Arm, ArmRun, Comparison, Contrast, Finding, Shape, Slo};
use crate::record::Run;
use crate::summary::counts;
use interval::{Interval, Pair, holm, interval};
use metric::Observed;
pub(crate) use metric::in_order;

/// Loads that differ by less are one load, in verdicts, reports and fairness lists alike: arms that got the same trace may count their
/// requests over slightly different times.
const SAME_LOAD_SHARE: f64 = 0.02;
/// An arm that leaves this share of requests more without an answer than the other cannot win in a latency: only its survivors count there.
const UNSERVED_SHARE_MORE_MAX: f64 = 0.01;

/// What is decided before the first run.
#[derive(Clone, Debug, PartialEq)]
pub struct VerdictPlan {
    /// The arm against which each of the others is judged.
    pub baseline: String,
    /// The metric on which the verdict rests.
    pub primary: Metric,
    pub secondary: Vec<Metric>,
    /// The smallest relevant size of an effect, as a share: 0.05 is 5 % more or less.
    pub relevant_share: f64,
    pub repeats_min: usize,
    /// Of the resampling.
    pub seed: u64,
}

impl VerdictPlan {
    /// Goodput per core decides; p99 TTFT, p99 ITL and output tokens/s per core explain. Effects below 5 % count for nothing.
    pub fn against(baseline: &str) -> Self {
        Self {
            baseline: baseline.to_owned(),
            primary: Metric::GoodputPerCore,
            secondary: vec![
                Metric::Ttft { percent: 99 },
                Metric::Itl { percent: 99 },
                Metric::OutputTokensPerCore,
            ],
            relevant_share: 0.05,
            repeats_min: 3,
            seed: 1,
        }
    }
}

/// Fills `contrasts` and `verdict` of each shape. A shape for which a verdict is forbidden gets no contrast, and its verdict says why.
///
/// The refusals come back as well, in the order of the shapes; those that hold for the whole comparison once for each shape.
pub fn conclude(comparison: &mut Comparison, plan: &VerdictPlan) -> Vec<Refusal> {
    let mut refused = Vec::new();
    let judged: Vec<(Vec<Contrast>, String)> = comparison
        .shapes
        .iter()
        .map(|shape| match judge(comparison, shape, plan) {
            Ok(judged) => judged,
            Err(refusals) => {
                let why: Vec<String> = refusals.iter().map(Refusal::to_string).collect();
                refused.extend(refusals);
                (Vec::new(), format!("No verdict: {}.", why.join("; ")))
            }
        })
        .collect();
    for (shape, (contrasts, verdict)) in comparison.shapes.iter_mut().zip(judged) {
        shape.contrasts = contrasts;
        shape.verdict = verdict;
    }
    refused
}

fn judge(comparison: &Comparison, shape: &Shape, plan: &VerdictPlan) -> Result<(Vec<Contrast>, String), Vec<Refusal>> {
    let mut refusals = refusal::refusals(comparison, shape, &plan.baseline);
    let baseline = comparison.arms.iter().find(|arm| arm.name == plan.baseline);
    let Some(baseline) = baseline.filter(|_| refusals.is_empty()) else {
        return Err(refusals);
    };
    if comparison.arms.len() > 1 {
        refusals.extend(unusable_resources(plan, &comparison.arms));
    }
    let mut judged = Vec::new();
    for candidate in comparison.arms.iter().filter(|arm| arm.name != plan.baseline) {
        for load in loads(shape) {
            let runs = paired_runs(shape, load, [&baseline.name, &candidate.name]);
            if runs.len() < plan.repeats_min.max(2) {
                refusals.push(Refusal::TooFewRepeats {
                    shape: shape.name.clone(),
                    baseline: baseline.name.clone(),
                    arm: candidate.name.clone(),
                    load,
                    repeats: runs.len(),
                    repeats_min: plan.repeats_min.max(2),
                });
                continue;
            }
            let cell = Cell {
                load,
                arms: [baseline, candidate],
                runs,
                slo: &comparison.slo,
            };
            match cell.judged(plan) {
                Some(of_cell) => judged.extend(of_cell),
                None => refusals.push(Refusal::NothingMeasured {
                    shape: shape.name.clone(),
                    load,
                    arm: cell.arm_without(plan.primary).name.clone(),
                }),
            }
        }
    }
    if !refusals.is_empty() {
        return Err(refusals);
    }
    correct(&mut judged, plan);
    let verdict = sentence::verdict(comparison, shape, &judged, plan.relevant_share);
    Ok((judged.into_iter().map(|judged| judged.contrast).collect(), verdict))
}

/// Arms that do not say by what their yield is to be divided.
fn unusable_resources(plan: &VerdictPlan, arms: &[Arm]) -> Vec<Refusal> {
    let metrics = || std::iter::once(plan.primary).chain(plan.secondary.iter().copied());
    let needs = |names: [Metric; 2]| metrics().any(|metric| names.contains(&metric));
    let (cores, gpus) = (
        needs([Metric::GoodputPerCore, Metric::OutputTokensPerCore]),
        needs([Metric::GoodputPerGpu, Metric::OutputTokensPerGpu]),
    );
    let lacking = arms.iter().flat_map(|arm| {
        let lacks = [
            ("cores", cores && arm.resources.cores == 0),
            ("GPUs", gpus && arm.resources.gpus == 0),
        ];
        lacks
            .into_iter()
            .filter(|(_, lacks)| *lacks)
            .map(move |(resource, _)| (arm.name.clone(), resource))
    });
    lacking
        .map(|(arm, resource)| Refusal::NoResource { arm, resource })
        .collect()
}

/// The loads of a shape, rising; those that are nearly equal once.
pub fn loads(shape: &Shape) -> Vec<f64> {
    let mut offered: Vec<f64> = shape.runs.iter().map(|run| run.run.offered).collect();
    offered.sort_by(f64::total_cmp);
    offered.dedup_by(|next, kept| is_same_load(*kept, *next));
    offered
}

/// Whether two loads count as one.
pub fn is_same_load(load: f64, offered: f64) -> bool {
    (offered - load).abs() <= load.abs() * SAME_LOAD_SHARE
}

/// The place of an offered load among the loads of its shape. `None`: it is none of them.
pub fn load_index(loads: &[f64], offered: f64) -> Option<usize> {
    loads.iter().position(|load| is_same_load(*load, offered))
}

/// The runs of the repeats that both arms have at this load: the baseline's, then the candidate's.
fn paired_runs<'a>(shape: &'a Shape, load: f64, arms: [&str; 2]) -> Vec<[&'a Run; 2]> {
    let of = |name: &str| -> BTreeMap<u32, &'a ArmRun> {
        let runs = shape
            .runs
            .iter()
            .filter(|run| run.arm == name && is_same_load(load, run.run.offered));
        runs.map(|run| (run.repeat, run)).collect()
    };
    let (baseline, candidate) = (of(arms[0]), of(arms[1]));
    let both = baseline
        .iter()
        .filter_map(|(repeat, run)| Some([&run.run, &candidate.get(repeat)?.run]));
    both.collect()
}

/// Two arms at one load of one shape.
struct Cell<'a> {
    load: f64,
    /// The baseline and the candidate, here and in `runs`.
    arms: [&'a Arm; 2],
    runs: Vec<[&'a Run; 2]>,
    slo: &'a Slo,
}

/// A contrast, with what is needed to correct it and to write its sentence.
struct Judged {
    contrast: Contrast,
    metric: Metric,
    is_primary: bool,
    p: f64,
    /// The share of the candidate's requests that got no whole answer, less that of the baseline.
    unserved_more: f64,
}

impl Cell<'_> {
    /// The primary metric, and each secondary one that has a value in every run. `None`: the primary one has no value in some run.
    fn judged(&self, plan: &VerdictPlan) -> Option<Vec<Judged>> {
        let unserved = |arm: usize| -> f64 {
            let shares = self.runs.iter().map(|runs| counts(runs[arm]).unserved_share());
            shares.sum::<f64>() / self.runs.len() as f64
        };
        let unserved_more = unserved(1) - unserved(0);
        let metrics = std::iter::once((plan.primary, true)).chain(plan.secondary.iter().map(|metric| (*metric, false)));
        let judged = metrics.filter_map(|(metric, is_primary)| {
            let found = self.interval(metric, plan.seed)?;
            Some(Judged {
                contrast: self.contrast(metric, &found),
                metric,
                is_primary,
                p: found.p,
                unserved_more,
            })
        });
        let judged: Vec<Judged> = judged.collect();
        judged.iter().any(|judged| judged.is_primary).then_some(judged)
    }
    fn observed(&self, metric: Metric, runs: &[&Run; 2], arm: usize) -> Observed {
        Observed::of(metric, runs[arm], self.slo, &self.arms[arm].resources)
    }
    fn interval(&self, metric: Metric, seed: u64) -> Option<Interval> {
        let pairs: Vec<Pair> = self
            .runs
            .iter()
            .map(|runs| Pair {
                baseline: self.observed(metric, runs, 0),
                candidate: self.observed(metric, runs, 1),
            })
            .collect();
        interval(&pairs, seed)
    }
    /// The arm with a run in which the metric has no value: the baseline, if it is both.
    fn arm_without(&self, metric: Metric) -> &Arm {
        let is_baseline = self
            .runs
            .iter()
            .any(|runs| self.observed(metric, runs, 0).value().is_none());
        self.arms[usize::from(!is_baseline)]
    }
    fn contrast(&self, metric: Metric, found: &Interval) -> Contrast {
        Contrast {
            metric: metric.name(),
            load: self.load,
            baseline: self.arms[0].name.clone(),
            candidate: self.arms[1].name.clone(),
            baseline_value: found.baseline,
            candidate_value: found.candidate,
            ratio: found.ratio,
            ratio_low: found.low,
            ratio_high: found.high,
            finding: Finding::NoDifferenceShown,
        }
    }
}

/// Gives each contrast its finding, the primary ones as one family and the others as a second one.
fn correct(judged: &mut [Judged], plan: &VerdictPlan) {
    for is_primary in [true, false] {
        let family = |judged: &&mut Judged| judged.is_primary == is_primary;
        let chances: Vec<f64> = judged.iter_mut().filter(family).map(|judged| judged.p).collect();
        let shown = holm(&chances);
        for (judged, shown) in judged.iter_mut().filter(family).zip(shown) {
            judged.contrast.finding = if shown {
                judged.finding(plan)
            } else {
                Finding::NoDifferenceShown
            };
        }
    }
}

impl Judged {
    /// What a difference that is not chance means.
    fn finding(&self, plan: &VerdictPlan) -> Finding {
        let ratio = self.contrast.ratio;
        if ratio.max(1.0 / ratio) < 1.0 + plan.relevant_share {
            return Finding::NoDifferenceShown;
        }
        let wins = (ratio > 1.0) == self.metric.is_yield();
        let is_latency = !self.metric.is_yield();
        let winner_unserved_more = if wins { self.unserved_more } else { -self.unserved_more };
        match wins {
            _ if is_latency && winner_unserved_more > UNSERVED_SHARE_MORE_MAX => Finding::NoDifferenceShown,
            true => Finding::Wins,
            false => Finding::Loses,
        }
    }
}

#[cfg(test)]
#[path = "verdict_tests.rs"]
mod tests;
