//! When requests arrive: a pattern and a seed give times. The same pattern, count and seed give the same times everywhere.
//!
//! Burstiness, ramp-up and the exact mean rate are those of `vllm bench serve` (its function `get_request`), so
//! that the same flags mean the same load. The random numbers differ, of course.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rand::SeedableRng;
use rand_chacha::ChaCha12Rng;
use rand_distr::{Distribution, Gamma};

use crate::trace::{Trace, Turn};

/// The longest time that is made. A rate so low that requests arrive later is a mistake.
const SECONDS_MAX: f64 = 100.0 * 366.0 * 86_400.0;

#[derive(Clone, Debug, PartialEq)]
pub enum Arrivals {
    /// All at 0. A closed loop sends the next one when a user is free.
    AtOnce,
    /// Request n at n / rate, the first one at 0.
    Constant { rate: f64 },
    /// Gaps from a gamma distribution of shape `burstiness`: 1 is a Poisson process, below 1 is burstier, above 1 more even.
    /// The coefficient of variation of the gaps is 1 / sqrt(burstiness).
    Gamma { rate: Rate, burstiness: f64 },
    /// Times that are given, in order. There may be more of them than requests, not fewer.
    Schedule(Vec<Duration>),
}

/// Requests a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rate {
    /// The times are stretched a little, so that the last request arrives at count / rate: the offered load is exact.
    Fixed(f64),
    /// The rate of the first request and that of the last one; between them it grows by the same difference each request.
    Linear { from: f64, to: f64 },
    /// As `Linear`, but it grows by the same factor each request.
    Exponential { from: f64, to: f64 },
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ArrivalsError {
    #[error("{rate} is no rate: give requests a second, above 0")]
    Rate { rate: f64 },
    #[error("{burstiness} is no burstiness: give a number above 0. 1 is a Poisson process, below 1 is burstier")]
    Burstiness { burstiness: f64 },
    #[error("the last of {count} requests would arrive in more than 100 years: give a higher rate or fewer requests")]
    TooLate { count: usize },
    #[error("the schedule has {times} times for {count} requests: give more times or fewer requests")]
    ShortSchedule { times: usize, count: usize },
    #[error("time {index} of the schedule, counted from 0, is before the time in front of it: sort the schedule")]
    ScheduleOrder { index: usize },
}

impl Arrivals {
    pub fn poisson(rate: f64) -> Self {
        Self::Gamma {
            rate: Rate::Fixed(rate),
            burstiness: 1.0,
        }
    }

    /// The times of `count` requests, in order.
    pub fn times(&self, count: usize, seed: u64) -> Result<Vec<Duration>, ArrivalsError> {
        let late = ArrivalsError::TooLate { count };
        match self {
            Self::AtOnce => Ok(vec![Duration::ZERO; count]),
            Self::Constant { rate } => {
                let rate = positive(*rate).ok_or(ArrivalsError::Rate { rate: *rate })?;
                durations((0..count).map(|index| index as f64 / rate)).ok_or(late)
            }
            Self::Gamma { rate, burstiness } => {
                durations(gamma(*rate, *burstiness, count, seed)?.into_iter()).ok_or(late)
            }
            Self::Schedule(times) => scheduled(times, count),
        }
    }

    /// Gives the requests of `trace` their times and puts the pattern into its name. Later turns of a conversation keep their
    /// distance from the first turn of it that the trace has: a file that was cut out of a longer one may lack the turns before.
    pub fn apply(&self, trace: Trace, seed: u64) -> Result<Trace, ArrivalsError> {
        let mut known = BTreeSet::new();
        let mut is_first = |turn: Turn| known.insert(turn.conversation);
        let firsts = trace
            .requests
            .iter()
            .filter(|request| request.conversation.is_none_or(&mut is_first));
        let mut times = self.times(firsts.count(), seed)?.into_iter();
        let mut begun: BTreeMap<u64, (Duration, Duration)> = BTreeMap::new();
        let mut requests = trace.requests;
        for request in &mut requests {
            let before = request.at;
            let conversation = request.conversation.map(|turn| turn.conversation);
            let first = conversation.and_then(|conversation| begun.get(&conversation).copied());
            request.at = match first {
                Some((was, is)) => before.saturating_sub(was).saturating_add(is),
                None => times.next().expect("there is a time for each first turn"),
            };
            if let Some(conversation) = conversation {
                begun.entry(conversation).or_insert((before, request.at));
            }
        }
        // Stable: turns of one conversation that fall on one time stay in order.
        requests.sort_by_key(|request| request.at);
        Ok(Trace {
            name: format!("{}, {}, seed {seed}", trace.name, self.words()),
            requests,
            ..trace
        })
    }

    /// `Poisson arrivals, 4 requests/s`, for names of traces.
    pub fn words(&self) -> String {
        match self {
            Self::AtOnce => "all at once".to_owned(),
            Self::Constant { rate } => format!("evenly, {rate} requests/s"),
            Self::Gamma { rate, burstiness } => {
                let rate = match rate {
                    Rate::Fixed(rate) => format!("{rate}"),
                    Rate::Linear { from, to } => format!("{from} rising to {to}"),
                    Rate::Exponential { from, to } => format!("{from} rising exponentially to {to}"),
                };
                match *burstiness == 1.0 {
                    true => format!("Poisson arrivals, {rate} requests/s"),
                    false => format!("gamma arrivals of burstiness {burstiness}, {rate} requests/s"),
                }
            }
            Self::Schedule(_) => "at given times".to_owned(),
        }
    }
}

impl Rate {
    fn ends(self) -> [f64; 2] {
        match self {
            Self::Fixed(rate) => [rate, rate],
            Self::Linear { from, to } | Self::Exponential { from, to } => [from, to],
        }
    }

    /// `progress` is 0 at the first request and 1 at the last one.
    fn at(self, progress: f64) -> f64 {
        match self {
            Self::Fixed(rate) => rate,
            Self::Linear { from, to } => from + (to - from) * progress,
            Self::Exponential { from, to } => from * (to / from).powf(progress),
        }
    }
}

fn positive(number: f64) -> Option<f64> {
    (number.is_finite() && number > 0.0).then_some(number)
}

/// Seconds, in order. The first gap is before the first request.
fn gamma(rate: Rate, burstiness: f64, count: usize, seed: u64) -> Result<Vec<f64>, ArrivalsError> {
    for rate in rate.ends() {
        positive(rate).ok_or(ArrivalsError::Rate { rate })?;
    }
    // Mean 1, so that one distribution serves all rates.
    let gap = positive(burstiness)
        .and_then(|shape| Gamma::new(shape, shape.recip()).ok())
        .ok_or(ArrivalsError::Burstiness { burstiness })?;
    let mut random = ChaCha12Rng::seed_from_u64(seed);
    let steps = count.saturating_sub(1).max(1) as f64;
    let mut time = 0.0;
    let mut times: Vec<f64> = (0..count)
        .map(|index| {
            time += gap.sample(&mut random) / rate.at(index as f64 / steps);
            time
        })
        .collect();
    if let (Rate::Fixed(rate), true) = (rate, time > 0.0) {
        let stretch = count as f64 / rate / time;
        times.iter_mut().for_each(|time| *time *= stretch);
    }
    Ok(times)
}

fn durations(seconds: impl Iterator<Item = f64>) -> Option<Vec<Duration>> {
    seconds
        .map(|seconds| {
            let is_usable = seconds <= SECONDS_MAX;
            Duration::try_from_secs_f64(seconds).ok().filter(|_| is_usable)
        })
        .collect()
}

fn scheduled(times: &[Duration], count: usize) -> Result<Vec<Duration>, ArrivalsError> {
    if let Some(index) = times.windows(2).position(|pair| pair[0] > pair[1]) {
        return Err(ArrivalsError::ScheduleOrder { index: index + 1 });
    }
    match times.get(..count) {
        Some(times) => Ok(times.to_vec()),
        None => Err(ArrivalsError::ShortSchedule {
            times: times.len(),
            count,
        }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::trace::TraceRequest;

    fn request(at_s: u64, turn: Option<u32>) -> TraceRequest {
        TraceRequest {
            at: Duration::from_secs(at_s),
            prompt_tokens: 1,
            output_tokens: 1,
            prefix_blocks: Vec::new(),
            lane: serving_core::request::Lane::Interactive,
            conversation: turn.map(|turn| Turn {
                conversation: 1,
                turn,
                think_time: Duration::ZERO,
            }),
        }
    }

    fn times_of(arrivals: &Arrivals, requests: Vec<TraceRequest>) -> Vec<Duration> {
        let trace = Trace {
            name: "test".to_owned(),
            block_tokens: 0,
            requests,
        };
        let trace = arrivals.apply(trace, 0).expect("there are times enough");
        trace.requests.iter().map(|request| request.at).collect()
    }

    fn gaps(times: &[Duration]) -> Vec<f64> {
        let seconds = || times.iter().map(Duration::as_secs_f64);
        std::iter::once(0.0)
            .chain(seconds())
            .zip(seconds())
            .map(|(earlier, later)| later - earlier)
            .collect()
    }

    fn variation(gaps: &[f64]) -> f64 {
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        (gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64).sqrt() / mean
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// The mean gap is exact, and the gaps vary as the gamma distribution of the burstiness does. The coefficient of
        /// variation c of n gaps has a standard error of c sqrt((1 + c c) / 2 n); six of them are allowed.
        #[test]
        fn gaps_have_their_mean_and_variation(seed in any::<u64>(), rate in 0.01_f64..1_000.0, burstiness in 0.3_f64..8.0) {
            let count = 4_000;
            let arrivals = Arrivals::Gamma { rate: Rate::Fixed(rate), burstiness };
            let times = arrivals.times(count, seed).expect("the pattern is possible");
            prop_assert_eq!(&times, &arrivals.times(count, seed).expect("and again"));
            prop_assert!(times.windows(2).all(|pair| pair[0] <= pair[1]));
            let last = times[count - 1].as_secs_f64();
            prop_assert!((last * rate / count as f64 - 1.0).abs() < 1e-6);
            let expected = burstiness.sqrt().recip();
            let error = expected * ((1.0 + expected * expected) / (2 * count) as f64).sqrt();
            let found = variation(&gaps(&times));
            prop_assert!((found - expected).abs() < 6.0 * error, "{found}, expected {expected} +- {error}");
        }

        /// The gaps at the start, in the middle and at the end are those of the growing rate.
        #[test]
        fn a_ramp_begins_and_ends_at_its_rates(seed in any::<u64>(), is_linear in any::<bool>()) {
            let (from, to, count) = (2.0, 50.0, 20_000);
            let rate = match is_linear {
                true => Rate::Linear { from, to },
                false => Rate::Exponential { from, to },
            };
            let times = Arrivals::Gamma { rate, burstiness: 4.0 }.times(count, seed).expect("the pattern is possible");
            let gaps = gaps(&times);
            for part in [0..2_000, 9_000..11_000, 18_000..20_000] {
                let rate = |index: usize| match is_linear {
                    true => 2.0 + 48.0 * index as f64 / 19_999.0,
                    false => 2.0 * 25_f64.powf(index as f64 / 19_999.0),
                };
                let expected: f64 = part.clone().map(|index| rate(index).recip()).sum();
                let found = gaps[part].iter().sum::<f64>();
                // Six standard errors of 2,000 gaps that vary by 0.5.
                prop_assert!((found / expected - 1.0).abs() < 0.07, "{found}, expected {expected}");
            }
        }
    }

    /// A trace whose times were divided by a tiny factor has such a turn; who sends it refuses it by name.
    #[test]
    fn a_turn_at_the_end_of_time_is_no_overflow() {
        let mut last = request(0, Some(1));
        last.at = Duration::MAX;
        let late = Arrivals::Schedule(vec![Duration::from_secs(3)]);
        let times = times_of(&late, vec![request(0, Some(0)), last]);
        assert_eq!(times, [Duration::from_secs(3), Duration::MAX]);
    }

    #[test]
    fn a_conversation_whose_first_turns_were_cut_off_begins_with_the_first_that_is_there() {
        let requests = vec![request(1_000, Some(2)), request(1_005, None), request(1_010, Some(3))];
        let times = times_of(&Arrivals::Constant { rate: 1.0 }, requests);
        assert_eq!(times, [0, 1, 10].map(Duration::from_secs));
    }

    /// Reports cite seeds: another version of a library must not change what a seed means.
    #[test]
    fn a_seed_keeps_its_times() {
        let times = Arrivals::poisson(10.0).times(4, 1).expect("the pattern is possible");
        let micros: Vec<u128> = times.iter().map(Duration::as_micros).collect();
        assert_eq!(micros, [195_601, 360_221, 387_488, 400_000]);
    }

    #[test]
    fn patterns_without_chance_are_exact() {
        let milliseconds = |arrivals: Arrivals| -> Vec<u128> {
            let times = arrivals.times(4, 0).expect("the pattern is possible");
            times.iter().map(Duration::as_millis).collect()
        };
        assert_eq!(milliseconds(Arrivals::AtOnce), [0, 0, 0, 0]);
        assert_eq!(milliseconds(Arrivals::Constant { rate: 4.0 }), [0, 250, 500, 750]);
        let schedule = [1, 1, 5, 9, 100].map(Duration::from_millis).to_vec();
        assert_eq!(milliseconds(Arrivals::Schedule(schedule)), [1, 1, 5, 9]);
    }

    #[test]
    fn impossible_patterns_are_refused() {
        let refused = |arrivals: Arrivals| arrivals.times(3, 0).expect_err("it is impossible");
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(matches!(
                refused(Arrivals::Constant { rate }),
                ArrivalsError::Rate { .. }
            ));
            assert!(matches!(refused(Arrivals::poisson(rate)), ArrivalsError::Rate { .. }));
        }
        let burstiness = |burstiness| Arrivals::Gamma {
            rate: Rate::Fixed(1.0),
            burstiness,
        };
        assert!(matches!(refused(burstiness(0.0)), ArrivalsError::Burstiness { .. }));
        assert!(matches!(
            refused(burstiness(f64::INFINITY)),
            ArrivalsError::Burstiness { .. }
        ));
        assert_eq!(refused(Arrivals::poisson(1e-12)), ArrivalsError::TooLate { count: 3 });
        let short = Arrivals::Schedule(vec![Duration::ZERO; 2]);
        assert_eq!(refused(short), ArrivalsError::ShortSchedule { times: 2, count: 3 });
        let back = Arrivals::Schedule([2, 1, 3].map(Duration::from_secs).to_vec());
        assert_eq!(refused(back), ArrivalsError::ScheduleOrder { index: 1 });
    }
}
