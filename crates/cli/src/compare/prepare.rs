//! What precedes the measured runs on this machine: the costs of prefill and handoff, the knee, and the sweep of each arm.

use std::time::Duration;

use anyhow::Context;
use workload::comparison::{ArmKind, Slo};
use workload::knee::{Knee, KneePlan, KneeSearch, Probe, held};
use workload::record::Run;
use workload::summary::Summary;

use super::budget::RunLengths;
use super::costs::{self, Costs};
use super::point::{self, Point, Sweep};
use super::runner::{Load, Place, Runner, Target};
use super::traffic::Traffic;
use super::tuning::{ArmSweep, Tried, best, name_of};
use crate::bench::interrupt::is_cut;
use crate::bench::load::plan::Pace;

/// A short search: the rate is then known to about a quarter.
pub(super) const KNEE_PROBES: u32 = 4;
const KNEE_TOLERANCE: f64 = 0.25;
/// Share of requests that must be good below the knee.
const KNEE_ATTAINMENT: f64 = 0.9;
/// Runs of the costs: one in which decode nodes compute every prompt, one in which they compute none.
pub(super) const COST_RUNS: u32 = 2;
/// Above every prompt.
const EVERY_PROMPT: u32 = 1 << 20;
/// An answer that takes longer than this in a short run tells enough.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The co-located arm begins with this step budget, because its knee with the default one is that of a node without chunks.
const FIRST_CHUNK: u32 = 128;

/// Runs of the preparation, in order.
#[derive(Debug)]
pub(super) struct Preparation<'a> {
    pub runner: &'a mut Runner,
    pub slo: &'a Slo,
    pub lengths: RunLengths,
    pub planned: Duration,
    pub seed: u64,
    /// Runs in which the client was late, so that they are no evidence.
    pub late: Vec<String>,
}

/// Ctrl-C, or no time was left.
#[derive(Debug, thiserror::Error)]
#[error("{why} before anything was measured")]
pub(super) struct Cut {
    pub why: &'static str,
}

impl Preparation<'_> {
    async fn run(&mut self, what: &str, point: Point, load: Load) -> anyhow::Result<Run> {
        let left = self.planned.saturating_sub(self.runner.deadline.elapsed());
        self.runner.shown.begin(what, left);
        let target = Target {
            name: what.to_owned(),
            place: Place::Here(point),
        };
        let run = self.runner.run(&target, load).await?;
        if self.runner.stop.is_cancelled() {
            return Err(Cut {
                why: "stopped by Ctrl-C",
            }
            .into());
        }
        if is_cut(&run) {
            return Err(Cut { why: "the time was up" }.into());
        }
        Ok(run)
    }

    /// # Errors
    /// A cluster does not start, or too little was answered.
    pub async fn costs(&mut self, prefill_cores: u32) -> anyhow::Result<Costs> {
        let split = Point::disaggregated(prefill_cores);
        let local = Point {
            local_prefill_below_tokens: EVERY_PROMPT,
            ..split
        };
        let load = || Load {
            trace: costs::trace(),
            pace: Pace::Closed { users: 1 },
            seed: self.seed,
            warm_up: Duration::ZERO,
            cool_down: Duration::ZERO,
            request_timeout: TIMEOUT,
        };
        let (one, other) = (load(), load());
        let local = self.run("costs of a local prefill", local, one).await?;
        let handed_off = self.run("costs of a handoff", split, other).await?;
        let costs = Costs::of(&local, &handed_off)?;
        self.runner.shown.say(&format!("costs: {}", costs.words()));
        Ok(costs)
    }

    fn load(&self, traffic: &Traffic, rate: f64, length: Duration, costs: &Costs) -> anyhow::Result<Load> {
        Ok(Load {
            trace: traffic.trace(rate, length, self.seed, costs)?,
            pace: Pace::Open { max_concurrency: None },
            seed: self.seed,
            warm_up: length.mul_f64(0.15),
            cool_down: Duration::ZERO,
            request_timeout: TIMEOUT,
        })
    }

    /// The highest rate at which nine of ten requests are good, to about a quarter. Where the client was late in every run it is the
    /// rate at which the search began.
    ///
    /// # Errors
    /// A cluster does not start or answers nothing.
    pub async fn knee(&mut self, traffic: &Traffic, point: Point, costs: &Costs) -> anyhow::Result<f64> {
        let cores = self.runner.machine.as_ref().map_or(1, |machine| machine.node_cores());
        let guess = traffic.rate_guess(costs, cores);
        let mut probing = Probing::around(guess);
        loop {
            let rate = match probing.next() {
                Ok(rate) => rate,
                Err(knee) => {
                    let rate = rate_of(knee, guess);
                    self.runner.shown.say(&format!(
                        "knee of {} co-located: about {rate:.2} requests/s",
                        traffic.name
                    ));
                    return Ok(rate);
                }
            };
            let load = self.load(traffic, rate, self.lengths.knee, costs)?;
            let what = format!("knee of {}: {rate:.2} requests/s", traffic.name);
            let run = self.run(&what, point, load).await?;
            if !probing.note(rate, &Summary::of(&run, self.slo)) {
                self.note_late(what);
            }
        }
    }

    fn note_late(&mut self, what: String) {
        let line = format!("{what}: the client was late, so this run is no evidence");
        self.runner.shown.say(&line);
        self.late.push(what);
    }

    /// Measures each point of the sweep on the same trace and chooses one.
    ///
    /// # Errors
    /// A cluster does not start or answers nothing.
    pub async fn tune(
        &mut self,
        kind: ArmKind,
        sweep: &Sweep,
        (traffic, rate): (&Traffic, f64),
        costs: &Costs,
    ) -> anyhow::Result<ArmSweep> {
        let load = self.load(traffic, rate, self.lengths.tuning, costs)?;
        let cores = self.runner.machine.as_ref().map_or(1, |machine| machine.node_cores());
        let mut tried = Vec::new();
        for point in &sweep.first {
            tried.push(self.try_point(kind, *point, load.clone()).await?);
        }
        let first = best(&tried, self.slo).context("a sweep has points")?;
        let base = tried[first].point;
        for max_num_seqs in &sweep.max_num_seqs {
            let point = Point {
                max_num_seqs: *max_num_seqs,
                ..base
            };
            tried.push(self.try_point(kind, point, load.clone()).await?);
        }
        let chosen = best(&tried, self.slo).context("a sweep has points")?;
        let words = tried[chosen].point.words(cores);
        self.runner.shown.say(&format!("tuned {}: {words}", name_of(kind)));
        Ok(ArmSweep { kind, tried, chosen })
    }

    async fn try_point(&mut self, kind: ArmKind, point: Point, load: Load) -> anyhow::Result<Tried> {
        let cores = self.runner.machine.as_ref().map_or(1, |machine| machine.node_cores());
        let what = format!("tune {}: {}", name_of(kind), point.words(cores));
        let run = self.run(&what, point, load).await?;
        let tried = Tried::of(point, &run, self.slo);
        if tried.is_client_late {
            self.note_late(what);
        }
        Ok(tried)
    }
}

/// The search of a knee in a fixed number of runs.
#[derive(Debug)]
struct Probing {
    plan: KneePlan,
    probes: Vec<Probe>,
}

impl Probing {
    fn around(rate_first: f64) -> Self {
        Self {
            plan: KneePlan {
                tolerance: KNEE_TOLERANCE,
                probes_max: KNEE_PROBES as usize,
                ..KneePlan::around(rate_first)
            },
            probes: Vec::new(),
        }
    }

    /// The next rate to try, or what the probes show of the knee.
    fn next(&self) -> Result<f64, Knee> {
        let mut search = KneeSearch::new(self.plan);
        self.probes.iter().for_each(|probe| search.record(*probe));
        search.next()
    }

    /// False: the client was late. Such a run is no probe, so the same rate is next; but it has used up one of the runs.
    fn note(&mut self, rate: f64, summary: &Summary) -> bool {
        if summary.lag.is_valid {
            let held = held(summary, KNEE_ATTAINMENT);
            self.probes.push(Probe { rate, held });
        } else {
            self.plan.probes_max = self.plan.probes_max.saturating_sub(1);
        }
        summary.lag.is_valid
    }
}

/// Where the knee is searched: the co-located arm, half tuned.
pub(super) fn first_point(cores: u32) -> Point {
    Point {
        max_num_batched_tokens: FIRST_CHUNK,
        ..Point::co_located(cores)
    }
}

/// How many runs the tuning of these kinds takes.
///
/// # Errors
/// An arm needs more cores than there are.
pub(super) fn tuning_runs(kinds: &[ArmKind], cores: u32) -> anyhow::Result<u32> {
    let mut runs = 0;
    for kind in kinds {
        runs += point::sweep(*kind, cores, 0)?.len() as u32;
    }
    Ok(runs)
}

fn rate_of(knee: Knee, guess: f64) -> f64 {
    match knee {
        Knee::At { rate, .. } | Knee::Above { rate } | Knee::Below { rate } => rate,
        Knee::Between { held: Some(held), .. } => held,
        Knee::Between {
            failed_at: Some(failed),
            ..
        } => failed / 2.0,
        // A search without a probe: the client was late in each run.
        Knee::Between { .. } => guess,
    }
}

/// The two rates that are measured when none are given: far below the knee and at it.
pub(super) fn rates(knee: f64) -> [(&'static str, f64); 2] {
    [("half the knee", knee / 2.0), ("the knee", knee)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::test_kit;

    #[test]
    fn a_run_of_a_late_client_is_no_probe_and_uses_up_one_of_the_runs() {
        let slo = test_kit::comparison().slo;
        let mut run = test_kit::run("a", (0..9).map(|index| test_kit::record(index, &[20.0])).collect());
        // Requests that are all due at once cannot be late.
        run.records[0].scheduled = Duration::from_millis(1);
        let on_time = Summary::of(&run, &slo);
        run.records
            .iter_mut()
            .for_each(|record| record.sent = Duration::from_millis(10));
        let late = Summary::of(&run, &slo);

        let mut probing = Probing::around(2.0);
        assert!(!probing.note(2.0, &late));
        assert_eq!(probing.next(), Ok(2.0), "the same rate again");
        for rate in [2.0, 4.0, 8.0] {
            assert_eq!(probing.next(), Ok(rate));
            assert!(probing.note(rate, &on_time));
        }
        let held = Some(8.0);
        assert_eq!(probing.next(), Err(Knee::Between { held, failed_at: None }));
    }

    #[test]
    fn a_client_that_is_always_late_ends_the_search() {
        let mut run = test_kit::run("a", vec![test_kit::record(0, &[20.0]), test_kit::record(1, &[20.0])]);
        run.records[0].scheduled = Duration::from_millis(1);
        run.records[0].sent = Duration::from_millis(11);
        run.records[1].sent = Duration::from_millis(10);
        let late = Summary::of(&run, &test_kit::comparison().slo);
        let mut probing = Probing::around(2.0);
        for _ in 0..KNEE_PROBES {
            assert_eq!(probing.next(), Ok(2.0));
            probing.note(2.0, &late);
        }
        let knee = probing.next().expect_err("no run is left");
        assert_eq!(rate_of(knee, 2.0), 2.0);
    }

    #[test]
    fn every_end_of_a_search_is_a_rate() {
        let at = Knee::At {
            rate: 2.0,
            failed_at: 2.5,
        };
        assert_eq!(rate_of(at, 7.0), 2.0);
        let between = |held, failed_at| rate_of(Knee::Between { held, failed_at }, 7.0);
        assert_eq!(between(Some(3.0), Some(4.0)), 3.0);
        assert_eq!(between(None, Some(4.0)), 2.0);
        assert_eq!(between(Some(8.0), None), 8.0);
        assert_eq!(between(None, None), 7.0);
        assert_eq!(rates(4.0)[0].1, 2.0);
    }

    #[test]
    fn the_sweeps_of_two_cores_fit_a_quarter_of_an_hour() {
        let kinds = [ArmKind::CoLocated, ArmKind::Disaggregated, ArmKind::Conditional];
        assert!(tuning_runs(&kinds, 2).expect("two cores") <= 15);
        assert!(tuning_runs(&kinds, 1).is_err());
    }
}
