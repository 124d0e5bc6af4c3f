//! Numbers without a source of randomness: a mixing function, deviates made of it, and seconds as durations.

use std::time::Duration;

/// The finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// One number of a stream that is named by three others.
pub(crate) fn keyed(seed: u64, stream: u64, counter: u64) -> u64 {
    mix(mix(mix(seed) ^ stream) ^ counter)
}

/// In 0..1, never 0.
pub(crate) fn uniform(bits: u64) -> f64 {
    ((bits >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
}

/// A factor with mean 1 and this coefficient of variation: lognormal, as times are that are never negative and sometimes long.
pub(crate) fn factor(bits: u64, variation: f64) -> f64 {
    if variation <= 0.0 {
        return 1.0;
    }
    let sigma_squared = (variation * variation).ln_1p();
    // Box and Muller.
    let (u, v) = (uniform(bits), uniform(mix(bits)));
    let normal = (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos();
    (sigma_squared.sqrt() * normal - sigma_squared / 2.0).exp()
}

/// What is not a number, or below zero, is no time at all; what is longer than a century is a century.
pub(crate) fn seconds(seconds: f64) -> Duration {
    const CENTURY: f64 = 3.2e9;
    if seconds.is_nan() || seconds <= 0.0 {
        return Duration::ZERO;
    }
    Duration::from_secs_f64(seconds.min(CENTURY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_have_the_mean_and_the_variation_that_they_are_asked_for() {
        let values: Vec<f64> = (0..20_000).map(|i| factor(keyed(1, 2, i), 0.2)).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64;
        assert!((mean - 1.0).abs() < 0.01, "{mean}");
        assert!((variance.sqrt() - 0.2).abs() < 0.01, "{variance}");
        assert_eq!(factor(7, 0.0), 1.0);
    }

    #[test]
    fn no_time_is_negative_or_endless() {
        assert_eq!(seconds(f64::NAN), Duration::ZERO);
        assert_eq!(seconds(-1.0), Duration::ZERO);
        assert_eq!(seconds(0.25), Duration::from_millis(250));
        assert!(seconds(f64::INFINITY) < Duration::from_secs(4_000_000_000));
    }
}
