//! Whether a run asked for more than the server can do: concurrency and TTFT both grew all the time.
//!
//! The rule is GuideLLM's: both slopes must be positive beyond chance. Neighbouring requests share a queue, so their times are no
//! independent samples. The slopes are therefore those of the means of ten stretches of the run.

use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, StudentsT};

use crate::record::{RequestRecord, Run};
use crate::times::ms;
use crate::verdict::in_order;

const STRETCHES: usize = 10;
/// Fewer requests have too few in a stretch.
const REQUESTS_MIN: usize = 5 * STRETCHES;
/// One-sided, for each of the two slopes.
const CHANCE: f64 = 0.025;
/// A slope that is certain and small is no overload: both must grow by this factor from the first stretch to the last.
const GROWTH_MIN: f64 = 1.5;

/// How much a run that was over-saturated grew, from its first tenth to its last one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OverSaturation {
    pub concurrency_first: f64,
    pub concurrency_last: f64,
    pub ttft_ms_first: f64,
    pub ttft_ms_last: f64,
}

impl OverSaturation {
    /// `None`: the run did not grow, or fewer than 50 of its requests got a token.
    pub fn of(run: &Run) -> Option<Self> {
        let due: Vec<&RequestRecord> = in_order(run);
        let mut ended: Vec<f64> = due.iter().map(|record| ms(record.ended)).collect();
        ended.sort_unstable_by(f64::total_cmp);
        let points: Vec<[f64; 3]> = due
            .iter()
            .enumerate()
            .filter_map(|(before, record)| {
                let at = ms(record.scheduled);
                let gone = ended.partition_point(|end| *end <= at);
                Some([at, (before + 1).saturating_sub(gone) as f64, record.ttft_ms()?])
            })
            .collect();
        if points.len() < REQUESTS_MIN {
            return None;
        }
        let stretches: Vec<[f64; 3]> = (0..STRETCHES).map(|stretch| means(&points, stretch)).collect();
        let grew = |column: usize| grows(&stretches, column);
        let (first, last) = (stretches[0], stretches[STRETCHES - 1]);
        (grew(1) && grew(2)).then_some(Self {
            concurrency_first: first[1],
            concurrency_last: last[1],
            ttft_ms_first: first[2],
            ttft_ms_last: last[2],
        })
    }
}

fn means(points: &[[f64; 3]], stretch: usize) -> [f64; 3] {
    let part = &points[stretch * points.len() / STRETCHES..(stretch + 1) * points.len() / STRETCHES];
    [0, 1, 2].map(|column| part.iter().map(|point| point[column]).sum::<f64>() / part.len() as f64)
}

/// Whether the slope of a column over time is positive beyond chance, and its line grows by a relevant factor.
fn grows(stretches: &[[f64; 3]], column: usize) -> bool {
    let count = stretches.len() as f64;
    let mean = |column: usize| stretches.iter().map(|row| row[column]).sum::<f64>() / count;
    let (time, value) = (mean(0), mean(column));
    let spread: f64 = stretches.iter().map(|row| (row[0] - time).powi(2)).sum();
    let common: f64 = stretches
        .iter()
        .map(|row| (row[0] - time) * (row[column] - value))
        .sum();
    if spread <= 0.0 {
        return false;
    }
    let slope = common / spread;
    let at = |row: &[f64; 3]| value + slope * (row[0] - time);
    let rest: f64 = stretches.iter().map(|row| (row[column] - at(row)).powi(2)).sum();
    let error = (rest / (count - 2.0) / spread).sqrt();
    let limit =
        StudentsT::new(0.0, 1.0, count - 2.0).map_or(f64::INFINITY, |student| student.inverse_cdf(1.0 - CHANCE));
    let (first, last) = (at(&stretches[0]), at(&stretches[stretches.len() - 1]));
    slope > limit * error && last > GROWTH_MIN * first.max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_kit::{later, request, run};
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    /// A queue with one server: a request every 100 ms on average, each of which takes `service_ms`.
    fn queue(service_ms: f64, seed: u64) -> Run {
        let mut random = StdRng::seed_from_u64(seed);
        let (mut now, mut free) = (0.0_f64, 0.0_f64);
        let records = (0..200).map(|id| {
            now += -100.0 * (1.0 - random.random::<f64>()).ln();
            free = free.max(now) + service_ms;
            later(request(id, &[(free - now) as u64]), now)
        });
        run("queue", records.collect())
    }

    #[test]
    fn a_server_that_gets_more_than_it_can_do_is_over_saturated() {
        for seed in 0..20 {
            let over = OverSaturation::of(&queue(200.0, seed)).expect("twice too much");
            assert!(over.concurrency_last > over.concurrency_first && over.ttft_ms_last > over.ttft_ms_first);
        }
    }

    #[test]
    fn a_server_that_keeps_up_is_not() {
        let found = (0..100)
            .filter(|seed| OverSaturation::of(&queue(50.0, *seed)).is_some())
            .count();
        assert!(found <= 2, "{found} of 100 runs at half load");
    }

    #[test]
    fn a_few_requests_say_nothing() {
        let mut short = queue(200.0, 1);
        short.records.truncate(49);
        assert_eq!(OverSaturation::of(&short), None);
    }
}
