//! The 95 % interval of a ratio between two arms, out of repeats that are pairs.
//!
//! A pair is one repeat of both arms: they got the same trace. The ratio is candidate by baseline, each the mean over the
//! repeats. The error is counted on the scale (candidate - baseline) / (candidate + baseline): it is the same whichever arm
//! is the baseline, and an arm near zero does not make it explode, as it would a logarithm. Two sources are added in squares:
//! - Between the R repeats: the standard error of the mean of their linearised differences (what drawing the repeats again
//!   gives, with R - 1 for R in the variance), times the quantile of Student's t with R - 1 degrees of freedom. This part alone
//!   is the usual interval of paired repeats.
//! - Within them: the standard error when the requests are drawn again in circular blocks (Politis and Romano 1992), because
//!   neighbours share a queue; the same blocks in both arms and in all repeats, because they share the trace. Times the
//!   quantile of the normal distribution, because there are many blocks.
//!
//! So neither repeats that agree by chance nor one lucky trace make an interval narrow.

use std::collections::BTreeMap;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use statrs::distribution::{ContinuousCDF, Normal, StudentsT};

use super::metric::Observed;

/// Enough for a standard error (Efron and Tibshirani 1993, chapter 6: rarely more than 200).
pub(super) const RESAMPLES: usize = 200;
/// Of a 95 % interval to miss the truth.
pub(super) const CHANCE: f64 = 0.05;

/// What the pairs say of candidate by baseline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Means over the repeats.
    pub baseline: f64,
    pub candidate: f64,
    pub ratio: f64,
    pub low: f64,
    pub high: f64,
    /// The chance of a difference at least as large between equal arms.
    pub p: f64,
}

/// One repeat: the baseline and the candidate.
pub(crate) struct Pair {
    pub baseline: Observed,
    pub candidate: Observed,
}

/// Ends of an interval on the scale of differences are cut here: a ratio of 1 to 1,999.
const DIFFERENCE_MAX: f64 = 0.999;

/// `None`: fewer than two repeats, or one in which an arm has no such value (all of its requests failed).
pub(crate) fn interval(pairs: &[Pair], seed: u64) -> Option<Interval> {
    let repeats = pairs.len() as f64;
    if pairs.len() < 2 {
        return None;
    }
    let values: Vec<Means> = pairs
        .iter()
        .map(|pair| {
            Some(Means {
                baseline: pair.baseline.value()?,
                candidate: pair.candidate.value()?,
            })
        })
        .collect::<Option<_>>()?;
    let means = Means::of(&values);
    let influences: Vec<f64> = values.iter().map(|value| means.influence(value)).collect();
    let errors = Errors {
        student: StudentsT::new(0.0, 1.0, repeats - 1.0).ok()?,
        between: (variance(&influences) / repeats).sqrt(),
        within: variance_within(pairs, &mut StdRng::seed_from_u64(seed)).sqrt(),
    };
    let (difference, reach) = (means.difference(), errors.reach(CHANCE));
    let ratio = |difference: f64| {
        let difference = difference.clamp(-DIFFERENCE_MAX, DIFFERENCE_MAX);
        (1.0 + difference) / (1.0 - difference)
    };
    Some(Interval {
        baseline: means.baseline,
        candidate: means.candidate,
        ratio: ratio(difference),
        low: ratio(difference - reach),
        high: ratio(difference + reach),
        p: errors.chance(difference.abs()),
    })
}

/// A value of both arms. Neither is below zero.
struct Means {
    baseline: f64,
    candidate: f64,
}

impl Means {
    fn of(values: &[Means]) -> Self {
        let mean = |of: fn(&Means) -> f64| values.iter().map(of).sum::<f64>() / values.len() as f64;
        Self {
            baseline: mean(|value| value.baseline),
            candidate: mean(|value| value.candidate),
        }
    }
    /// From -1 (the candidate has nothing) to 1 (the baseline has nothing).
    fn difference(&self) -> f64 {
        let sum = self.candidate + self.baseline;
        if sum > 0.0 {
            (self.candidate - self.baseline) / sum
        } else {
            0.0
        }
    }
    /// How far one repeat moves the difference of the means: its first derivative.
    fn influence(&self, of: &Means) -> f64 {
        let sum = self.candidate + self.baseline;
        if sum > 0.0 {
            2.0 * (of.candidate * self.baseline - of.baseline * self.candidate) / sum.powi(2)
        } else {
            0.0
        }
    }
}

/// The two standard errors of a difference.
struct Errors {
    student: StudentsT,
    between: f64,
    within: f64,
}

impl Errors {
    /// How far from the estimate the interval reaches that misses the truth with this chance.
    fn reach(&self, chance: f64) -> f64 {
        let quantile = 1.0 - chance / 2.0;
        let between = self.student.inverse_cdf(quantile) * self.between;
        let within = Normal::standard().inverse_cdf(quantile) * self.within;
        between.hypot(within)
    }
    /// The chance at which the interval reaches this far: it falls as the distance grows, so halving finds it.
    fn chance(&self, distance: f64) -> f64 {
        if self.between == 0.0 && self.within == 0.0 {
            return if distance == 0.0 { 1.0 } else { 0.0 };
        }
        let (mut low, mut high) = (0.0, 1.0);
        // To a billionth.
        for _ in 0..30 {
            let middle = (low + high) / 2.0;
            if self.reach(middle) > distance {
                low = middle
            } else {
                high = middle
            }
        }
        high
    }
}

/// The variance of the difference when the requests are drawn again in blocks.
///
/// A block has the square root of the number of requests, as batch means have (Flegal and Jones 2010): long enough to hold one
/// another's queue, and short enough to leave many blocks. A resample in which an arm has no value is left out.
fn variance_within(pairs: &[Pair], random: &mut StdRng) -> f64 {
    let resampled: Vec<f64> = (0..RESAMPLES).filter_map(|_| resample(pairs, random)).collect();
    variance(&resampled)
}

fn resample(pairs: &[Pair], random: &mut StdRng) -> Option<f64> {
    // Runs with another number of requests share no blocks.
    let mut drawn: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    let mut value = |observed: &Observed| {
        let count = observed.requests();
        observed.weighted(drawn.entry(count).or_insert_with(|| blocks(count, random)))
    };
    let values: Option<Vec<Means>> = pairs
        .iter()
        .map(|pair| {
            Some(Means {
                baseline: value(&pair.baseline)?,
                candidate: value(&pair.candidate)?,
            })
        })
        .collect();
    Some(Means::of(&values?).difference())
}

/// How often each of `count` requests was drawn, in blocks that go round.
pub(super) fn blocks(count: usize, random: &mut StdRng) -> Vec<u32> {
    let mut times = vec![0; count];
    let length = (count as f64).sqrt().ceil() as usize;
    let mut drawn = 0;
    while drawn < count {
        let start = random.random_range(0..count);
        for step in 0..length.min(count - drawn) {
            times[(start + step) % count] += 1;
        }
        drawn += length;
    }
    times
}

/// Divided by n - 1. 0 for fewer than two values.
pub(super) fn variance(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (values.len() - 1) as f64
}

/// Which of the hypotheses with these chances are rejected at 5 % for all of them together (Holm 1979).
pub(crate) fn holm(chances: &[f64]) -> Vec<bool> {
    let mut order: Vec<usize> = (0..chances.len()).collect();
    order.sort_by(|a, b| chances[*a].total_cmp(&chances[*b]));
    let mut rejected = vec![false; chances.len()];
    for (place, index) in order.into_iter().enumerate() {
        if chances[index] > CHANCE / (chances.len() - place) as f64 {
            break;
        }
        rejected[index] = true;
    }
    rejected
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn blocks_draw_as_many_requests_as_there_are(count in 1_usize..500, seed in any::<u64>()) {
            let times = blocks(count, &mut StdRng::seed_from_u64(seed));
            prop_assert_eq!(times.iter().sum::<u32>() as usize, count);
        }
    }

    #[test]
    fn blocks_of_no_requests_are_none() {
        assert!(blocks(0, &mut StdRng::seed_from_u64(1)).is_empty());
    }

    #[test]
    fn the_chance_is_that_of_the_interval_which_ends_there() {
        let errors = Errors {
            student: StudentsT::new(0.0, 1.0, 2.0).unwrap(),
            between: 0.1,
            within: 0.05,
        };
        for chance in [0.5, 0.05, 0.01] {
            assert!((errors.chance(errors.reach(chance)) - chance).abs() < 1e-6);
        }
        // Quantiles of tables: 4.3027 of t with 2 degrees of freedom, 1.95996 of the normal distribution.
        assert!((errors.reach(0.05) - 0.43027_f64.hypot(0.097998)).abs() < 1e-5);
        let exact = Errors {
            between: 0.0,
            within: 0.0,
            ..errors
        };
        assert_eq!((exact.chance(0.0), exact.chance(0.1)), (1.0, 0.0));
    }

    #[test]
    fn quantiles_of_students_t_are_those_of_scipy() {
        #[derive(serde::Deserialize)]
        struct Golden {
            quantiles: Vec<Quantile>,
        }
        #[derive(serde::Deserialize)]
        struct Quantile {
            degrees: f64,
            chance: f64,
            quantile: f64,
        }
        let golden: Golden = serde_json::from_str(include_str!("../../tests/data/statistics.json")).unwrap();
        for Quantile {
            degrees,
            chance,
            quantile,
        } in golden.quantiles
        {
            let found = StudentsT::new(0.0, 1.0, degrees).unwrap().inverse_cdf(chance);
            assert!(
                (found - quantile).abs() < 1e-6 * quantile,
                "{degrees} degrees, {chance}: {found} is not {quantile}"
            );
        }
    }

    #[test]
    fn holm_stops_at_the_first_chance_that_is_too_large() {
        assert_eq!(holm(&[0.01, 0.04, 0.03]), [true, false, false]);
        assert_eq!(holm(&[0.04]), [true]);
        assert_eq!(holm(&[0.01, 0.02, 0.04]), [true, true, true]);
        assert_eq!(holm(&[]), Vec::<bool>::new());
    }
}
