//! What forbids a verdict: fields of the fairness list that are missing, a client that was late, outputs that differ.

use std::collections::BTreeMap;

use crate::comparison::{ArmRun, Comparison, Fairness, Shape};
use crate::record::RequestRecord;
use crate::summary::{LAG_MS_P99_MAX, Lag};

use super::{load_index, loads};

/// Why no verdict is given. Each names what to do.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refusal {
    #[error("the fairness list lacks {}: the comparison must say each of them", .fields.join(", "))]
    FairnessMissing { fields: Vec<&'static str> },
    #[error(
        "the client was late in repeat {repeat} of {arm} of shape {shape}: p99 of its lag is {lag_ms_p99:.1} ms, at most {LAG_MS_P99_MAX} ms may be; \
         give it a core of its own or a lower rate"
    )]
    ClientLate {
        shape: String,
        arm: String,
        repeat: u32,
        lag_ms_p99: f64,
    },
    #[error(
        "{differ} of {compared} answers of {arm} differ from those of {baseline} in shape {shape}: greedy decoding must give the same \
         tokens in both, so one of them computes something else"
    )]
    OutputsDiffer {
        shape: String,
        baseline: String,
        arm: String,
        differ: usize,
        compared: usize,
    },
    #[error(
        "{arm} has {repeats} repeats together with {baseline} at {load} in shape {shape}; at least {repeats_min} are needed"
    )]
    TooFewRepeats {
        shape: String,
        baseline: String,
        arm: String,
        load: f64,
        repeats: usize,
        repeats_min: usize,
    },
    #[error(
        "nothing was measured of {arm} at {load} in shape {shape}: in some run no request counts, or none was answered; give a longer run or a \
         higher rate"
    )]
    NothingMeasured { shape: String, load: f64, arm: String },
    #[error("the comparison has no arm {arm}, against which the others are to be judged")]
    NoBaseline { arm: String },
    #[error(
        "{arm} declares no {resource}, by which its goodput is to be divided: name them, or compare goodput as a whole"
    )]
    NoResource { arm: String, resource: &'static str },
}

impl Fairness {
    /// Names of the fields that nobody filled, in the order of the list.
    pub fn missing(&self) -> Vec<&'static str> {
        let fields = [
            ("equal_resources", &self.equal_resources),
            ("every_arm_tuned", &self.every_arm_tuned),
            ("same_edge", &self.same_edge),
            ("same_trace", &self.same_trace),
            ("open_loop_and_lag", &self.open_loop_and_lag),
            ("warm_up_excluded", &self.warm_up_excluded),
            ("order_and_repeats", &self.order_and_repeats),
            ("outputs_equal", &self.outputs_equal),
            ("failures_counted", &self.failures_counted),
            ("one_token_per_event", &self.one_token_per_event),
            ("several_shapes", &self.several_shapes),
            ("client_placement", &self.client_placement),
            ("transfer_share", &self.transfer_share),
            ("pool_utilisation", &self.pool_utilisation),
            ("verdict_per_shape", &self.verdict_per_shape),
        ];
        let is_missing = |text: &Option<String>| text.as_ref().is_none_or(|text| text.trim().is_empty());
        fields
            .into_iter()
            .filter(|(_, text)| is_missing(text))
            .map(|(name, _)| name)
            .collect()
    }
}

/// What forbids a verdict on this shape, whatever its figures are.
pub(crate) fn refusals(comparison: &Comparison, shape: &Shape, baseline: &str) -> Vec<Refusal> {
    let mut found = Vec::new();
    let fields = comparison.fairness.missing();
    if !fields.is_empty() {
        found.push(Refusal::FairnessMissing { fields });
    }
    if !comparison.arms.iter().any(|arm| arm.name == baseline) {
        found.push(Refusal::NoBaseline {
            arm: baseline.to_owned(),
        });
    }
    for run in &shape.runs {
        let lag = Lag::of(&run.run);
        if !lag.is_valid {
            found.push(Refusal::ClientLate {
                shape: shape.name.clone(),
                arm: run.arm.clone(),
                repeat: run.repeat,
                lag_ms_p99: lag.ms_p99,
            });
        }
    }
    for arm in comparison.arms.iter().filter(|arm| arm.name != baseline) {
        let (differ, compared) = differing_outputs(shape, baseline, &arm.name);
        if differ > 0 {
            found.push(Refusal::OutputsDiffer {
                shape: shape.name.clone(),
                baseline: baseline.to_owned(),
                arm: arm.name.clone(),
                differ,
                compared,
            });
        }
    }
    found
}

/// Requests of both arms with the same id in the same repeat at the same load, both completed and both hashed: how many differ, of how many.
fn differing_outputs(shape: &Shape, baseline: &str, arm: &str) -> (usize, usize) {
    let loads = loads(shape);
    let of = |name: &str| -> BTreeMap<(Option<usize>, u32, String), u64> {
        let runs = shape.runs.iter().filter(|run| run.arm == name);
        let placed = runs.map(|run| (load_index(&loads, run.run.offered), run));
        placed.flat_map(|(load, run)| hashes(load, run)).collect()
    };
    let (baseline, arm) = (of(baseline), of(arm));
    let both = baseline.iter().filter_map(|(key, hash)| Some((hash, arm.get(key)?)));
    both.fold((0, 0), |(differ, compared), (a, b)| {
        (differ + usize::from(a != b), compared + 1)
    })
}

fn hashes(load: Option<usize>, run: &ArmRun) -> impl Iterator<Item = ((Option<usize>, u32, String), u64)> + '_ {
    let completed = |record: &&RequestRecord| record.is_measured() && record.is_completed();
    run.run.records.iter().filter(completed).filter_map(move |record| {
        let key = (load, run.repeat, record.id.clone());
        Some((key, record.output_hash?))
    })
}
