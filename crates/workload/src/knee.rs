//! The knee: the last rate at which the SLO holds, found by doubling and then by bisection.
//!
//! A pure state machine. It says which rate to try next, and is told whether the SLO held there.

use serde::{Deserialize, Serialize};

use crate::summary::Summary;

/// How a knee is looked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KneePlan {
    /// The first rate to try, in requests a second.
    pub rate_first: f64,
    pub rate_min: f64,
    pub rate_max: f64,
    /// The search ends when the rate that failed is at most this share above the rate that held.
    pub tolerance: f64,
    /// At most so many runs in all.
    pub probes_max: usize,
}

impl KneePlan {
    /// Between an eighth and 64 times of a first guess, to 5 %, in at most 16 runs.
    pub fn around(rate_first: f64) -> Self {
        Self {
            rate_first,
            rate_min: rate_first / 8.0,
            rate_max: rate_first * 64.0,
            tolerance: 0.05,
            probes_max: 16,
        }
    }
}

/// One rate that was tried.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Probe {
    pub rate: f64,
    pub held: bool,
}

/// What a search found.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "found")]
pub enum Knee {
    /// The SLO held at `rate`, twice, and no longer at `failed_at`.
    At { rate: f64, failed_at: f64 },
    /// It held at the highest rate that the search may try.
    Above { rate: f64 },
    /// It did not hold at the lowest one.
    Below { rate: f64 },
    /// The runs were used up between these rates.
    Between { held: Option<f64>, failed_at: Option<f64> },
}

/// A search under way.
#[derive(Clone, Debug)]
pub struct KneeSearch {
    plan: KneePlan,
    probes: Vec<Probe>,
}

impl KneeSearch {
    pub fn new(plan: KneePlan) -> Self {
        Self {
            plan,
            probes: Vec::new(),
        }
    }
    pub fn probes(&self) -> &[Probe] {
        &self.probes
    }
    /// Tells whether the SLO held at the rate that `next` gave.
    pub fn record(&mut self, probe: Probe) {
        self.probes.push(probe);
    }
    /// The rate to try now, or what was found.
    ///
    /// The result is tried a second time. When it does not hold again, it counts as failed and the search goes on below it, so a
    /// lucky run moves the knee up no further than one step.
    pub fn next(&self) -> Result<f64, Knee> {
        let (held, failed_at) = self.bracket();
        let next = match (held, failed_at) {
            (None, None) => Ok(self.plan.rate_first),
            (Some(held), None) if held >= self.plan.rate_max => Err(Knee::Above { rate: held }),
            (Some(held), None) => Ok((held * 2.0).min(self.plan.rate_max)),
            (None, Some(failed)) if failed <= self.plan.rate_min => Err(Knee::Below { rate: failed }),
            (None, Some(failed)) => Ok((failed / 2.0).max(self.plan.rate_min)),
            (Some(held), Some(failed)) if failed > held * (1.0 + self.plan.tolerance) => Ok((held * failed).sqrt()),
            (Some(held), Some(_)) if self.times_held(held) < 2 => Ok(held),
            (Some(held), Some(failed)) => Err(Knee::At {
                rate: held,
                failed_at: failed,
            }),
        };
        match next {
            Ok(_) if self.probes.len() >= self.plan.probes_max => Err(Knee::Between { held, failed_at }),
            next => next,
        }
    }
    /// The highest rate that held below the lowest that failed, and that lowest one.
    fn bracket(&self) -> (Option<f64>, Option<f64>) {
        let failed = self
            .probes
            .iter()
            .filter(|probe| !probe.held)
            .map(|probe| probe.rate)
            .reduce(f64::min);
        let below = |rate: f64| failed.is_none_or(|failed| rate < failed);
        let held = self
            .probes
            .iter()
            .filter(|probe| probe.held && below(probe.rate))
            .map(|probe| probe.rate);
        (held.reduce(f64::max), failed)
    }
    fn times_held(&self, rate: f64) -> usize {
        self.probes
            .iter()
            .filter(|probe| probe.held && probe.rate == rate)
            .count()
    }
}

/// Whether the SLO held in a run: enough requests met both limits, and the client was not late.
pub fn held(summary: &Summary, attainment_min: f64) -> bool {
    summary.counts.measured > 0 && summary.lag.is_valid && summary.attainment.both >= attainment_min
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn search(plan: KneePlan, mut holds: impl FnMut(f64) -> bool) -> (Knee, usize) {
        let mut search = KneeSearch::new(plan);
        loop {
            match search.next() {
                Ok(rate) => {
                    let held = holds(rate);
                    search.record(Probe { rate, held });
                }
                Err(knee) => return (knee, search.probes().len()),
            }
        }
    }

    proptest! {
        #[test]
        fn a_known_knee_is_found_within_five_percent(knee in 0.2..50.0_f64) {
            let (found, probes) = search(KneePlan::around(1.0), |rate| rate <= knee);
            let Knee::At { rate, failed_at } = found else { panic!("{found:?}") };
            prop_assert!(rate <= knee && knee < failed_at && rate >= knee / 1.05, "{found:?}");
            prop_assert!(probes <= 16, "{probes} runs");
        }

        #[test]
        fn a_server_that_answers_by_chance_ends_the_search_all_the_same(seed in prop::collection::vec(any::<bool>(), 16)) {
            let mut answers = seed.into_iter();
            let (_, probes) = search(KneePlan::around(1.0), |_| answers.next().expect("16 answers"));
            prop_assert!(probes <= 16);
        }
    }

    #[test]
    fn the_ends_of_the_range_are_told() {
        assert_eq!(search(KneePlan::around(1.0), |_| true).0, Knee::Above { rate: 64.0 });
        assert_eq!(search(KneePlan::around(1.0), |_| false).0, Knee::Below { rate: 0.125 });
    }

    #[test]
    fn a_rate_that_held_once_by_luck_is_not_the_knee() {
        let mut lucky = true;
        let (found, _) = search(KneePlan::around(1.0), |rate| {
            rate <= 3.0 || (rate == 4.0 && std::mem::take(&mut lucky))
        });
        let Knee::At { rate, .. } = found else {
            panic!("{found:?}")
        };
        assert!((2.8..=3.0).contains(&rate), "{rate}");
    }

    #[test]
    fn when_the_runs_are_used_up_the_bracket_is_told() {
        let plan = KneePlan {
            probes_max: 3,
            ..KneePlan::around(1.0)
        };
        let (found, probes) = search(plan, |rate| rate <= 3.0);
        assert_eq!(probes, 3);
        assert_eq!(
            found,
            Knee::Between {
                held: Some(2.0),
                failed_at: Some(4.0)
            }
        );
    }
}
