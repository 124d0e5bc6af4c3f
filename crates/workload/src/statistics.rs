//! Percentiles, means and distributions: one definition of each for all tables and plots.
//!
//! A percentile is interpolated linearly between the two nearest samples (definition 7 of Hyndman and Fan 1996). That is
//! numpy's default, and so what `vllm bench serve` prints. The standard deviation divides by n, as numpy's default does.

use serde::{Deserialize, Serialize};

/// Sorted samples without NaN.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// Samples that are not finite are left out: a clock cannot give them.
    pub fn new(values: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        sorted.sort_unstable_by(f64::total_cmp);
        Self(sorted)
    }
    pub fn count(&self) -> usize {
        self.0.len()
    }
    /// `percent` from 0 to 100; values outside are taken as the nearest end. `None` without samples.
    pub fn percentile(&self, percent: f64) -> Option<f64> {
        let last = self.0.len().checked_sub(1)?;
        let (below, above, share) = rank(last as u64, percent);
        let (below, above) = (self.0[below as usize], self.0[above as usize]);
        Some(below + (above - below) * share)
    }
    pub fn mean(&self) -> Option<f64> {
        let count = self.0.len() as f64;
        (!self.0.is_empty()).then(|| self.0.iter().sum::<f64>() / count)
    }
    /// The standard deviation of the samples as a whole population (divides by n).
    pub fn std(&self) -> Option<f64> {
        let mean = self.mean()?;
        let sum: f64 = self.0.iter().map(|value| (value - mean).powi(2)).sum();
        Some((sum / self.0.len() as f64).sqrt())
    }
    pub fn distribution(&self) -> Option<Distribution> {
        Some(Distribution {
            count: self.0.len(),
            mean: self.mean()?,
            std: self.std()?,
            p50: self.percentile(50.0)?,
            p90: self.percentile(90.0)?,
            p95: self.percentile(95.0)?,
            p99: self.percentile(99.0)?,
            max: *self.0.last()?,
        })
    }
}

/// The two samples between which a percentile lies, and where between them. `last` is the index of the largest sample.
pub(crate) fn rank(last: u64, percent: f64) -> (u64, u64, f64) {
    let place = last as f64 * (percent.clamp(0.0, 100.0) / 100.0);
    let below = place.floor();
    ((below as u64).min(last), (place.ceil() as u64).min(last), place - below)
}

/// What a table shows of many values, in the unit of its field's name.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    pub count: usize,
    pub mean: f64,
    pub std: f64,
    pub p50: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    pub max: f64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn without_samples_nothing_is_known() {
        let none = Samples::new([f64::NAN, f64::INFINITY]);
        assert_eq!(none.percentile(50.0), None);
        assert_eq!(none.distribution(), None);
    }

    #[test]
    fn a_percentile_lies_between_its_two_nearest_samples() {
        let four = Samples::new([4.0, 1.0, 3.0, 2.0]);
        assert_eq!(four.percentile(50.0), Some(2.5));
        assert_eq!(four.percentile(99.0), Some(3.0 + 0.97));
        assert_eq!(four.percentile(0.0), Some(1.0));
        assert_eq!(four.percentile(250.0), Some(4.0));
    }

    proptest! {
        #[test]
        fn percentiles_grow_and_stay_within_the_samples(values in prop::collection::vec(0.0..1e6_f64, 1..200), a in 0.0..100.0_f64, b in 0.0..100.0_f64) {
            let samples = Samples::new(values.iter().copied());
            let (low, high) = (samples.percentile(a.min(b)).unwrap(), samples.percentile(a.max(b)).unwrap());
            prop_assert!(low <= high);
            prop_assert!(samples.percentile(0.0).unwrap() <= low && high <= samples.percentile(100.0).unwrap());
        }
    }
}
