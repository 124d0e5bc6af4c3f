//! One arm's value of a metric over its repeats, with its own 95 % interval: for the reader of one arm. Findings rest on pairs
//! (`interval.rs`), whose intervals are narrower: both arms of a pair got the same requests.

use std::collections::BTreeMap;

use rand::SeedableRng;
use rand::rngs::StdRng;
use statrs::distribution::{ContinuousCDF, Normal, StudentsT};

use super::interval::{CHANCE, RESAMPLES, blocks, variance};
use super::metric::{Metric, Observed};
use crate::comparison::{Resources, Slo};
use crate::record::Run;

/// The mean over the repeats, and where it may lie.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ArmInterval {
    pub value: f64,
    pub low: f64,
    pub high: f64,
}

/// What an arm is judged with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ArmFrame<'a> {
    pub slo: &'a Slo,
    pub resources: &'a Resources,
    pub seed: u64,
}

/// `None`: no run, or one in which the metric has no value.
///
/// The two sources of error are those of `interval.rs`. With one run only the second one is known.
pub(crate) fn of_arm(metric: Metric, runs: &[&Run], frame: &ArmFrame<'_>) -> Option<ArmInterval> {
    let observed: Vec<Observed> = runs
        .iter()
        .map(|run| Observed::of(metric, run, frame.slo, frame.resources))
        .collect();
    let values: Vec<f64> = observed.iter().map(Observed::value).collect::<Option<_>>()?;
    if values.is_empty() {
        return None;
    }
    let (value, repeats) = (mean(&values), values.len() as f64);
    let mut random = StdRng::seed_from_u64(frame.seed);
    let again: Vec<f64> = (0..RESAMPLES)
        .filter_map(|_| resample(&observed, &mut random))
        .collect();
    let quantile = 1.0 - CHANCE / 2.0;
    let within = Normal::standard().inverse_cdf(quantile) * variance(&again).sqrt();
    let between = StudentsT::new(0.0, 1.0, repeats - 1.0).map_or(0.0, |student| {
        student.inverse_cdf(quantile) * (variance(&values) / repeats).sqrt()
    });
    // On the scale of logarithms, so that no end is below zero.
    let reach = if value > 0.0 {
        (between.hypot(within) / value).exp()
    } else {
        1.0
    };
    Some(ArmInterval {
        value,
        low: value / reach,
        high: value * reach,
    })
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The mean over the repeats when the requests are drawn again: the same ones in runs with equally many.
fn resample(observed: &[Observed], random: &mut StdRng) -> Option<f64> {
    let mut drawn: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    let values: Option<Vec<f64>> = observed
        .iter()
        .map(|one| {
            let times = drawn
                .entry(one.requests())
                .or_insert_with(|| blocks(one.requests(), random));
            one.weighted(times)
        })
        .collect();
    values.map(|values| mean(&values))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_kit::{later, request, run, slo};

    fn ttft(runs: &[&Run]) -> Option<ArmInterval> {
        let frame = ArmFrame {
            slo: &slo(100.0, 100.0),
            resources: &Resources::default(),
            seed: 1,
        };
        of_arm(Metric::Ttft { percent: 50 }, runs, &frame)
    }

    #[test]
    fn equal_requests_leave_no_doubt_and_unequal_ones_do() {
        let equal = run(
            "a",
            (0..20).map(|id| later(request(id, &[40, 50]), f64::from(id))).collect(),
        );
        let found = ttft(&[&equal, &equal]).expect("a value");
        assert!(
            (found.low - 40.0).abs() < 1e-9 && (found.high - 40.0).abs() < 1e-9,
            "{found:?}"
        );
        let spread = run("b", (0..20).map(|id| request(id, &[u64::from(id) + 10, 90])).collect());
        let found = ttft(&[&spread]).expect("a value");
        assert!(found.low < found.value && found.value < found.high, "{found:?}");
    }

    #[test]
    fn without_a_token_there_is_no_value() {
        assert_eq!(ttft(&[]), None);
        assert_eq!(ttft(&[&run("a", vec![request(1, &[])])]), None);
    }
}
