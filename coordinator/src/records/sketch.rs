//! Durations, counted in buckets that grow with them. The size is fixed, two sketches can be added, and a quantile is at most
//! 7 % off.

use std::time::Duration;

/// Buckets of each doubling. A bucket is at most an eighth as wide as its lower edge, so its middle is at most a sixteenth
/// off.
const PER_DOUBLING: u32 = 8;
const BITS_OF_BUCKET: u32 = PER_DOUBLING.ilog2();
/// A longer duration counts as one of 2^30 microseconds, which are 18 minutes. A request may take ten by default.
const BITS_MAX: u32 = 30;
const MICROS_MAX: u32 = (1 << BITS_MAX) - 1;
const BUCKETS: usize = ((BITS_MAX - BITS_OF_BUCKET + 1) * PER_DOUBLING) as usize;

#[derive(Clone, Debug)]
pub(super) struct Sketch([u32; BUCKETS]);

impl Default for Sketch {
    fn default() -> Self {
        Self([0; BUCKETS])
    }
}

fn bucket_of(duration: Duration) -> usize {
    let micros = u32::try_from(duration.as_micros()).unwrap_or(u32::MAX).min(MICROS_MAX);
    // The first buckets are a microsecond wide.
    let shift = micros.max(PER_DOUBLING).ilog2() - BITS_OF_BUCKET;
    (shift * PER_DOUBLING + (micros >> shift)) as usize
}

/// The middle of a bucket, in milliseconds with four decimals.
fn middle_ms(bucket: u32) -> f64 {
    let shift = (bucket / PER_DOUBLING).saturating_sub(1);
    let low = (bucket - shift * PER_DOUBLING) << shift;
    let micros = f64::from(low) + f64::from(1_u32 << shift) / 2.0;
    (micros * 10.0).round() / 1e4
}

impl Sketch {
    pub(super) fn add(&mut self, duration: Duration) {
        if let Some(count) = self.0.get_mut(bucket_of(duration)) {
            *count = count.saturating_add(1);
        }
    }

    pub(super) fn add_all(&mut self, other: &Self) {
        for (count, more) in self.0.iter_mut().zip(&other.0) {
            *count = count.saturating_add(*more);
        }
    }

    pub(super) fn count(&self) -> u64 {
        self.0.iter().map(|count| u64::from(*count)).sum()
    }

    /// The duration that `per_mille` of the counted ones do not exceed (nearest rank), in milliseconds. `None` without any.
    pub(super) fn quantile_ms(&self, per_mille: u64) -> Option<f64> {
        let rank = (self.count() * per_mille).div_ceil(1000).max(1);
        let mut seen = 0;
        for (bucket, count) in (0..).zip(&self.0) {
            seen += u64::from(*count);
            if seen >= rank {
                return Some(middle_ms(bucket));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_is_told_to_seven_percent_from_the_shortest_to_the_longest() {
        for exponent in 0..BITS_MAX {
            for micros in [
                1_u32 << exponent,
                (1 << exponent) + ((1 << exponent) >> 1),
                (2 << exponent) - 1,
            ] {
                let mut sketch = Sketch::default();
                sketch.add(Duration::from_micros(u64::from(micros)));
                let told = sketch.quantile_ms(500).expect("one is counted") * 1e3;
                let error = (told - f64::from(micros)).abs();
                assert!(error <= (f64::from(micros) * 0.07).max(0.51), "{told} for {micros}");
            }
        }
        let mut sketch = Sketch::default();
        sketch.add(Duration::MAX);
        assert!(sketch.quantile_ms(990).is_some_and(|ms| ms > 1e6));
    }

    #[test]
    fn quantiles_are_of_all_that_was_added() {
        let mut sketch = Sketch::default();
        assert_eq!((sketch.quantile_ms(500), sketch.count()), (None, 0));
        let mut slow = Sketch::default();
        for _ in 0..98 {
            sketch.add(Duration::from_millis(10));
        }
        for _ in 0..2 {
            slow.add(Duration::from_secs(1));
        }
        sketch.add_all(&slow);
        assert_eq!(sketch.count(), 100);
        assert!(sketch.quantile_ms(500).is_some_and(|ms| (9.3..10.7).contains(&ms)));
        assert!(sketch.quantile_ms(990).is_some_and(|ms| (930.0..1070.0).contains(&ms)));
    }
}
