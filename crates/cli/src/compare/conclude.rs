//! Makes the comparison out of what was measured: the fairness list, the contrasts and the verdict of each shape.

use workload::comparison::{Comparison, Contrast, Shape};
use workload::record::RequestRecord;
use workload::verdict::{self, Metric, Refusal, VerdictPlan};

use super::fairness::{self, Conduct, REPEATS_MIN};
use super::traffic::is_stream;

/// Why there is no verdict on a shape, as its sentence has it. Empty: there is one on each.
pub(super) type Refused = Vec<String>;

/// Fills fairness, contrasts and verdicts. `streams`: the names of shapes in which the gaps of the running streams decide.
pub(super) fn conclude(comparison: &mut Comparison, conduct: &Conduct, streams: &[String]) -> Refused {
    comparison.fairness = fairness::assess(comparison, conduct);
    let Some(baseline) = comparison.arms.first().map(|arm| arm.name.clone()) else {
        return vec!["there is no arm".to_owned()];
    };
    if comparison.shapes.iter().all(|shape| shape.runs.is_empty()) {
        return vec!["nothing was measured".to_owned()];
    }
    let mut plan = VerdictPlan::against(&baseline);
    plan.repeats_min = REPEATS_MIN as usize;
    if comparison.arms.iter().all(|arm| arm.resources.gpus > 0) {
        plan.primary = Metric::GoodputPerGpu;
        for metric in &mut plan.secondary {
            if *metric == Metric::OutputTokensPerCore {
                *metric = Metric::OutputTokensPerGpu;
            }
        }
    }
    let mut refused = Refused::new();
    // What holds for the whole comparison comes once for each shape.
    for why in verdict::conclude(comparison, &plan).iter().map(Refusal::to_string) {
        if !refused.contains(&why) {
            refused.push(why);
        }
    }
    for shape in &mut comparison.shapes {
        let own = refused.iter().map(String::as_str);
        let own: Vec<&str> = own.filter(|why| shape.verdict.contains(*why)).collect();
        if !own.is_empty() {
            shape.verdict = format!("No verdict: {}.", in_short(&own));
        }
    }
    if refused.is_empty() {
        for index in 0..comparison.shapes.len() {
            if streams.contains(&comparison.shapes[index].name) {
                refused.extend(put_streams_first(comparison, index, &plan));
            }
        }
    }
    if let Some(why) = &conduct.incomplete {
        refused.insert(0, format!("the comparison is incomplete: {why}"));
        for shape in &mut comparison.shapes {
            shape.contrasts.clear();
            shape.verdict = format!("No verdict: the comparison is incomplete: {why}.");
        }
    }
    if !refused.is_empty() {
        comparison.fairness.verdict_per_shape = None;
    } else if let [only] = comparison.shapes.as_mut_slice() {
        let words = format!(
            " Only the shape \"{}\" was measured: this holds for it alone.",
            only.name
        );
        only.verdict.push_str(&words);
    }
    refused
}

/// A client that was late in every run would fill a page.
fn in_short(refused: &[&str]) -> String {
    const SHOWN_MAX: usize = 3;
    let mut words = refused[..refused.len().min(SHOWN_MAX)].join("; ");
    if refused.len() > SHOWN_MAX {
        words.push_str(&format!("; and {} more reasons", refused.len() - SHOWN_MAX));
    }
    words
}

/// Judges the gaps of the running streams alone, and puts what follows in front of what all requests say. The verdict of such a shape rests
/// on them, so without theirs it has none.
fn put_streams_first(comparison: &mut Comparison, index: usize, plan: &VerdictPlan) -> Refused {
    let shape = &comparison.shapes[index];
    let mut streams = Comparison {
        shapes: vec![of_streams(shape)],
        ..without_shapes(comparison)
    };
    let plan = VerdictPlan {
        primary: Metric::Itl { percent: 99 },
        secondary: vec![Metric::Itl { percent: 50 }, Metric::Ttft { percent: 99 }],
        ..plan.clone()
    };
    let refused = verdict::conclude(&mut streams, &plan);
    let refused: Refused = refused
        .iter()
        .map(|why| format!("of the running streams, {why}"))
        .collect();
    let shape = &mut comparison.shapes[index];
    if !refused.is_empty() {
        let own: Vec<&str> = refused.iter().map(String::as_str).collect();
        shape.contrasts.clear();
        shape.verdict = format!("No verdict: {}.", in_short(&own));
        return refused;
    }
    let Some(judged) = streams.shapes.pop() else {
        return refused;
    };
    let named = judged.contrasts.into_iter().map(|contrast| Contrast {
        metric: format!("streams_{}", contrast.metric),
        ..contrast
    });
    shape.contrasts.splice(0..0, named);
    shape.verdict = format!("Running streams: {} All requests: {}", judged.verdict, shape.verdict);
    refused
}

fn of_streams(shape: &Shape) -> Shape {
    let mut streams = shape.clone();
    for run in &mut streams.runs {
        run.run.records.retain(|record: &RequestRecord| is_stream(record));
    }
    streams
}

/// The records are large, and only those of one shape are wanted.
fn without_shapes(comparison: &Comparison) -> Comparison {
    Comparison {
        date: comparison.date.clone(),
        command: comparison.command.clone(),
        hypothesis: None,
        slo: comparison.slo.clone(),
        arms: comparison.arms.clone(),
        shapes: Vec::new(),
        fairness: comparison.fairness.clone(),
        environment: comparison.environment.clone(),
    }
}

#[cfg(test)]
#[path = "conclude_tests.rs"]
mod tests;
