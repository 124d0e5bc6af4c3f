//! How long a comparison takes: planned before it starts, shown, and kept.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::ensure;

/// Start, readiness and drain of a cluster take about two seconds on two cores; the last answers of a run take the rest.
const AROUND_A_RUN: Duration = Duration::from_secs(6);
/// At the knee of one arm another one may be overloaded, and its last answers come late.
const AROUND_A_MEASURED_RUN: Duration = Duration::from_secs(8);
/// A run that has this much more is begun. It is cut if that was too little.
const AROUND_A_RUN_MIN: Duration = Duration::from_secs(4);
/// For the arithmetic and the files at the end.
const RESERVE: Duration = Duration::from_secs(15);
/// A run on which the costs of prefill and handoff are measured, one request after the other.
const COST_RUN: Duration = Duration::from_secs(12);
/// A point of a sweep is judged by this much load, and the knee by this much.
const TUNING_RUN: Duration = Duration::from_secs(10);
const KNEE_RUN: Duration = Duration::from_secs(12);
/// Of what is left this share is not given to measured runs, because the last answers of an overloaded arm take longer than planned.
/// Without it the last of 24 runs did not fit, and a comparison without one of its runs has no verdict.
const SLACK_SHARE: f64 = 0.05;
/// Shorter runs have too few requests to say anything.
const MEASURED_RUN_MIN: Duration = Duration::from_secs(10);

/// How many runs there are of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub cost: u32,
    pub tuning: u32,
    pub knee: u32,
    pub measured: u32,
}

/// How long the runs of each kind are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RunLengths {
    pub cost: Duration,
    pub tuning: Duration,
    pub knee: Duration,
    pub measured: Duration,
}

/// What is going to happen, and how long it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TimePlan {
    pub counts: Counts,
    pub lengths: RunLengths,
    /// The whole comparison must end by then.
    pub limit: Option<Duration>,
}

impl TimePlan {
    /// With a limit the measured runs get what the other parts leave, `measured_max` at most. Without one each takes
    /// `measured_max`.
    ///
    /// # Errors
    /// The limit leaves less than ten seconds for each measured run.
    pub fn new(counts: Counts, measured_max: Duration, limit: Option<Duration>) -> anyhow::Result<Self> {
        let shortest = measured_max.min(TUNING_RUN);
        let mut plan = Self {
            counts,
            lengths: RunLengths {
                cost: shortest.max(COST_RUN.min(measured_max)),
                tuning: shortest,
                knee: measured_max.min(KNEE_RUN),
                measured: Duration::ZERO,
            },
            limit,
        };
        let others = plan.total();
        plan.lengths.measured = match limit {
            None => measured_max,
            Some(limit) => {
                let each = limit.saturating_sub(others) / counts.measured.max(1);
                ensure!(
                    each >= MEASURED_RUN_MIN.min(measured_max),
                    "{} s are too short: {} measured runs would have {:.0} s each beside {:.0} s for everything else. \
                     Compare fewer shapes, arms or rates, give a stored sweep with --tuning, or raise --time-limit",
                    limit.as_secs(),
                    counts.measured,
                    each.as_secs_f64(),
                    others.as_secs_f64()
                );
                each.min(measured_max)
            }
        };
        Ok(plan)
    }

    pub fn total(&self) -> Duration {
        let sum: Duration = self.parts().iter().map(Part::total).sum();
        sum + RESERVE
    }

    /// How long each measured run may be when so much time is left: preparations may have been quicker or slower than planned.
    pub fn measured_length(&self, left: Option<Duration>, measured_max: Duration) -> Duration {
        let Some(left) = left else {
            return self.lengths.measured;
        };
        let left = left.mul_f64(1.0 - SLACK_SHARE);
        let each = (left / self.counts.measured.max(1)).saturating_sub(AROUND_A_MEASURED_RUN);
        each.max(MEASURED_RUN_MIN).min(measured_max)
    }

    fn parts(&self) -> [Part; 4] {
        let (counts, lengths) = (self.counts, self.lengths);
        let part = |what, runs, run| Part {
            what,
            runs,
            run,
            around: AROUND_A_RUN,
        };
        [
            part("measure what prefill and handoff cost", counts.cost, lengths.cost),
            part("find the knee", counts.knee, lengths.knee),
            part("tune the arms", counts.tuning, lengths.tuning),
            Part {
                around: AROUND_A_MEASURED_RUN,
                ..part("measure", counts.measured, lengths.measured)
            },
        ]
    }

    /// One line for each part, and the sum.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for part in self.parts().into_iter().filter(|part| part.runs > 0) {
            let _ = writeln!(
                text,
                "  {}: {} runs of {:.0} s with {} s around each, {:.1} min",
                part.what,
                part.runs,
                part.run.as_secs_f64(),
                part.around.as_secs(),
                part.total().as_secs_f64() / 60.0
            );
        }
        let limit = match self.limit {
            Some(limit) => format!("at most {:.1} min", limit.as_secs_f64() / 60.0),
            None => "no limit".to_owned(),
        };
        let _ = writeln!(
            text,
            "  together: about {:.1} min; {limit}",
            self.total().as_secs_f64() / 60.0
        );
        text
    }
}

/// Runs of one kind.
#[derive(Clone, Copy, Debug)]
struct Part {
    what: &'static str,
    runs: u32,
    run: Duration,
    /// Start, warm-up, last answers and end of each.
    around: Duration,
}

impl Part {
    fn total(&self) -> Duration {
        (self.run + self.around) * self.runs
    }
}

/// The time that is left, asked before each run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    started: std::time::Instant,
    limit: Option<Duration>,
}

impl Deadline {
    pub fn start(limit: Option<Duration>) -> Self {
        Self {
            started: std::time::Instant::now(),
            limit,
        }
    }

    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// What is left before the results must be written. `None` without a limit.
    pub fn left(&self) -> Option<Duration> {
        self.limit
            .map(|limit| limit.saturating_sub(RESERVE).saturating_sub(self.elapsed()))
    }

    /// Whether another run of this length still fits.
    pub fn has_room_for(&self, run: Duration) -> bool {
        self.left().is_none_or(|left| left >= run + AROUND_A_RUN_MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUARTER: Duration = Duration::from_secs(15 * 60);
    const MINUTE: Duration = Duration::from_secs(60);

    fn quick() -> Counts {
        Counts {
            cost: 2,
            tuning: 15,
            knee: 4,
            measured: 18,
        }
    }

    #[test]
    fn the_default_quick_comparison_fits_a_quarter_of_an_hour() {
        let plan = TimePlan::new(quick(), MINUTE, Some(QUARTER)).expect("it fits");
        assert!(plan.total() <= QUARTER, "{:?}", plan.total());
        assert!(
            plan.total() + Duration::from_secs(20) > QUARTER,
            "the time is used: {:?}",
            plan.total()
        );
        assert!(plan.lengths.measured >= MEASURED_RUN_MIN);
        let planned = plan.lengths.measured;
        assert!(
            plan.measured_length(Some(QUARTER), MINUTE) > planned,
            "quick preparations give longer runs"
        );
        let each = plan.measured_length(Some(QUARTER), MINUTE) + AROUND_A_MEASURED_RUN;
        assert!(
            each * quick().measured <= QUARTER.mul_f64(0.951),
            "some time is left: {each:?}"
        );
        assert_eq!(plan.measured_length(Some(MINUTE), MINUTE), MEASURED_RUN_MIN);
        let text = plan.text();
        assert!(text.contains("18 runs") && text.contains("15.0 min"), "{text}");
    }

    #[test]
    fn too_much_for_the_limit_is_refused_with_what_to_change() {
        let counts = Counts {
            measured: 90,
            ..quick()
        };
        let error = TimePlan::new(counts, MINUTE, Some(QUARTER)).expect_err("too much");
        assert!(error.to_string().contains("--time-limit"), "{error}");
    }

    #[test]
    fn without_a_limit_each_run_has_the_length_that_was_asked_for() {
        let plan = TimePlan::new(quick(), MINUTE, None).expect("no limit");
        assert_eq!(plan.lengths.measured, MINUTE);
        let short = Duration::from_secs(2);
        let plan = TimePlan::new(quick(), short, None).expect("no limit");
        assert_eq!((plan.lengths.measured, plan.lengths.tuning), (short, short));
        assert_eq!(plan.measured_length(None, MINUTE), short);
        assert!(Deadline::start(None).has_room_for(QUARTER));
        assert!(!Deadline::start(Some(MINUTE)).has_room_for(MINUTE));
        assert!(Deadline::start(Some(QUARTER)).has_room_for(MINUTE));
    }
}
