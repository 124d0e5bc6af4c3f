//! An axis: its range, its round ticks, and where a value lies on it.

use crate::report::text::tick;

/// Ticks that an axis of a small picture has room for.
const TICKS_MAX: usize = 7;

/// What is larger is no measurement; it lies at the end of the axis.
const SHOWN_MAX: f64 = 1e15;

pub struct Axis {
    /// What it shows, with its unit.
    pub label: String,
    low: f64,
    high: f64,
    is_log: bool,
    ticks: Vec<f64>,
}

impl Axis {
    /// From 0, or below it, to the next round number above the largest value.
    pub fn linear(label: impl Into<String>, values: impl IntoIterator<Item = f64>) -> Axis {
        let (low, high) = range(values);
        Axis::between(label, low.min(0.0), if high > 0.0 { high } else { 1.0 })
    }

    /// Around the values, without 0, where only their places beside each other matter.
    pub fn near(label: impl Into<String>, values: impl IntoIterator<Item = f64>) -> Axis {
        let (low, high) = range(values);
        if low > high {
            return Axis::linear(label, []);
        }
        let room = ((high - low) * 0.15).max(high.abs() * 0.01);
        Axis::between(label, (low - room).max(low.min(0.0)), high + room)
    }

    /// From `low` to `high`, rounded outwards.
    pub fn between(label: impl Into<String>, low: f64, high: f64) -> Axis {
        let step = round_step((high - low) / 5.0);
        let first = (low / step).floor();
        let last = (high / step - 1e-9).ceil().max(first + 1.0);
        let count = (last - first) as usize;
        Axis {
            label: label.into(),
            low: first * step,
            high: last * step,
            is_log: false,
            ticks: (0..=count).map(|n| (first + n as f64) * step).collect(),
        }
    }

    /// Powers of ten; values of 0 and below lie at its low end.
    pub fn log(label: impl Into<String>, values: impl IntoIterator<Item = f64>) -> Axis {
        let (low, high) = range(values.into_iter().filter(|value| *value > 0.0));
        let (low, high) = if low <= high {
            (low.max(1.0 / SHOWN_MAX), high)
        } else {
            (1.0, 10.0)
        };
        let steps = log_steps(low, high);
        let low = steps
            .iter()
            .rev()
            .find(|step| **step <= low * 1.000_001)
            .copied()
            .unwrap_or(low);
        let high = steps
            .iter()
            .find(|step| **step >= high * 0.999_999)
            .copied()
            .unwrap_or(high);
        let high = if high > low { high } else { low * 10.0 };
        let inside = |step: &f64| *step >= low * 0.999_999 && *step <= high * 1.000_001;
        let all: Vec<f64> = steps.into_iter().filter(inside).collect();
        let thin = |leading: &[u32]| -> Vec<f64> {
            all.iter()
                .copied()
                .filter(|step| leading.contains(&leading_tenths(*step)))
                .collect()
        };
        let ticks = [&[10, 15, 20, 30, 40, 50, 70][..], &[10, 20, 50], &[10, 50], &[10]]
            .into_iter()
            .map(thin)
            .find(|ticks| ticks.len() <= TICKS_MAX)
            .unwrap_or_else(|| every_nth(&thin(&[10])));
        Axis {
            label: label.into(),
            low,
            high,
            is_log: true,
            ticks,
        }
    }

    /// 0 at the low end, 1 at the high end; values outside lie at the ends.
    pub fn share(&self, value: f64) -> f64 {
        let share = if self.is_log {
            (value.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        share.clamp(0.0, 1.0)
    }

    pub fn contains(&self, value: f64) -> bool {
        value >= self.low && value <= self.high
    }

    /// The ticks and their words.
    pub fn ticks(&self) -> impl Iterator<Item = (f64, String)> {
        self.ticks.iter().map(|value| (*value, tick(*value)))
    }
}

fn range(values: impl IntoIterator<Item = f64>) -> (f64, f64) {
    values
        .into_iter()
        .filter(|value| value.abs() <= SHOWN_MAX)
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (low.min(value), high.max(value))
        })
}

/// The smallest of 1, 2, 2.5, 5 and 10 times a power of ten that is not below `step`.
fn round_step(step: f64) -> f64 {
    if !(step.is_finite() && step > 0.0) {
        return 1.0;
    }
    let power = 10_f64.powf(step.log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0]
        .into_iter()
        .map(|times| times * power)
        .find(|round| *round >= step * 0.999_999)
        .unwrap_or(step)
}

/// Round numbers, from below `low` to above `high`.
fn log_steps(low: f64, high: f64) -> Vec<f64> {
    let first = (low.log10().floor() as i32).clamp(-15, 15);
    let last = (high.log10().ceil() as i32).clamp(first + 1, 16);
    (first..=last)
        .flat_map(|power| [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0].map(|times| times * 10_f64.powi(power)))
        .collect()
}

/// The leading digits: 15 for 1.5, 150 and 0.15.
fn leading_tenths(value: f64) -> u32 {
    (value / 10_f64.powf((value * 1.000_001).log10().floor()) * 10.0).round() as u32
}

fn every_nth(ticks: &[f64]) -> Vec<f64> {
    ticks.iter().copied().step_by(ticks.len() / TICKS_MAX + 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(axis: &Axis) -> Vec<String> {
        axis.ticks().map(|(_, word)| word).collect()
    }

    #[test]
    fn ticks_are_round_and_cover_the_values() {
        assert_eq!(words(&Axis::linear("x", [0.3, 4.1])), ["0", "1", "2", "3", "4", "5"]);
        assert_eq!(
            words(&Axis::between("x", 0.0, 100.0)),
            ["0", "20", "40", "60", "80", "100"]
        );
        assert_eq!(words(&Axis::log("x", [12.0, 180.0])), ["10", "20", "50", "100", "200"]);
        assert_eq!(
            words(&Axis::log("x", [0.7, 20_000.0])),
            ["1", "10", "100", "1,000", "10,000"]
        );
    }

    #[test]
    fn every_value_has_a_place_on_every_axis() {
        let odd = [0.0, -5.0, 1e-300, 1e300, f64::NAN, f64::INFINITY, 3.0];
        for axis in [
            Axis::linear("x", odd),
            Axis::log("x", odd),
            Axis::linear("x", []),
            Axis::log("x", []),
        ] {
            for value in odd {
                let share = axis.share(value);
                assert!(
                    share.is_nan() == value.is_nan() || (0.0..=1.0).contains(&share),
                    "{value}: {share}"
                );
            }
            assert!((1..=40).contains(&axis.ticks().count()));
        }
        let axis = Axis::log("x", [7.0]);
        assert!(axis.contains(7.0) && axis.share(7.0) < 1.0);
    }
}
