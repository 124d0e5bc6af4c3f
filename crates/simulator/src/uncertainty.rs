//! Costs are measured, and another measurement would give others. What is said of a change has to hold for those, too.

use crate::arithmetic::{factor, keyed};
use crate::costs::{BATCHES, CHUNKS, Costs, StepCosts, StepShape};

/// Half of the errors of a normal distribution are below this share of its standard deviation.
const MEDIAN_OF_ERRORS: f64 = 0.674_5;
/// The streams of draws for chunks and for batches.
const OF_CHUNKS: u64 = 0;
const OF_BATCHES: u64 = 1;

impl Costs {
    /// What half of all simulated figures are off by at least, as a share: against real runs where that was measured, else what a
    /// step is off by in the fit. 0 for costs that were typed in.
    pub fn typical_error(&self) -> f64 {
        let of_fit = || self.fit.as_ref().map_or(0.0, |fit| fit.error_median);
        self.accuracy
            .as_ref()
            .map_or_else(of_fit, |accuracy| accuracy.error_median())
    }

    /// These costs as another measurement may have given them: each size of chunk and of batch takes longer or shorter by a share of its
    /// own, of which half are as large as the typical error. What all steps have in common moves both sides of a comparison alike, and stays.
    #[must_use]
    pub fn measured_again(&self, seed: u64) -> Self {
        let (mut again, variation) = (self.clone(), self.typical_error() / MEDIAN_OF_ERRORS);
        let more = |stream: u64, place: usize, seconds: f64| {
            let bits = keyed(seed, stream, place as u64);
            seconds * (factor(bits, variation) - 1.0)
        };
        for (place, chunk) in CHUNKS.into_iter().enumerate() {
            again.step.chunk_seconds[place] += more(OF_CHUNKS, place, self.step.seconds_of_chunk(chunk));
        }
        for (place, batch) in BATCHES.into_iter().enumerate() {
            again.step.batch_seconds[place] += more(OF_BATCHES, place, self.step.seconds(&StepShape::of_batch(batch)));
        }
        again
    }
}

impl StepCosts {
    /// A step with so many prompt tokens, without what they attend to.
    fn seconds_of_chunk(&self, tokens: u64) -> f64 {
        self.seconds(&StepShape {
            prefill_tokens: tokens,
            ..StepShape::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::FitReport;
    use crate::costs::tests::costs;

    #[test]
    fn each_size_moves_by_a_share_of_its_own_and_half_of_them_are_as_large_as_the_error() {
        let error_median = 0.05;
        let fit = FitReport {
            error_median,
            error_max: error_median,
            points: Vec::new(),
        };
        let costs = Costs {
            fit: Some(fit),
            ..costs()
        };
        let share =
            |again: &Costs, chunk| again.step.seconds_of_chunk(chunk) / costs.step.seconds_of_chunk(chunk) - 1.0;
        let mut is_large = 0;
        for seed in 0..2_000 {
            let again = costs.measured_again(seed);
            assert_eq!(again.check(), Ok(()));
            assert_ne!(share(&again, 16), share(&again, 512));
            is_large += u32::from(share(&again, 512).abs() >= error_median);
        }
        assert!((900..1_100).contains(&is_large), "{is_large}");
    }

    #[test]
    fn costs_without_an_error_stay_as_they_are() {
        let costs = costs();
        assert_eq!(costs.measured_again(7), costs);
    }
}
