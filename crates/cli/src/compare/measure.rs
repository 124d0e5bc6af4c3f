//! The measured runs: every shape at every load, all arms in a balanced order.

use std::time::Duration;

use anyhow::ensure;
use workload::comparison::{ArmRun, Shape};
use workload::trace::Trace;
use workload::trace::own_format;
use workload::verdict::is_same_load;

use super::order;
use super::runner::{Load, Runner, Target};
use crate::bench::interrupt::is_cut;
use crate::bench::load::plan::{Pace, content_seed};
use crate::exit::{Exit, WithExit as _};

/// Shares of a run that do not count, at its begin and at its end.
const WARM_UP_SHARE: f64 = 0.1;
const COOL_DOWN_SHARE: f64 = 0.05;
/// Longer ones waste time in long runs.
const WARM_UP_MAX: Duration = Duration::from_secs(15);

/// One load of a shape: the same trace for every arm and repeat.
#[derive(Clone, Debug)]
pub(super) struct Offered {
    /// `low`, `knee`, or the rate.
    pub label: String,
    pub trace: Trace,
}

/// A shape that is to be measured.
#[derive(Clone, Debug)]
pub(super) struct ShapePlan {
    pub name: String,
    pub traffic: String,
    pub loads: Vec<Offered>,
}

/// How often, how long and with which prompts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Manner {
    pub repeats: u32,
    pub length: Duration,
    pub request_timeout: Duration,
    pub seed: u64,
    /// Clusters that are not started afresh must not know the prompts of an earlier round: another repeat, load or shape.
    pub has_new_prompts_each_round: bool,
    /// When the plan of time says that everything ends.
    pub planned: Duration,
}

impl Manner {
    pub fn warm_up(&self) -> Duration {
        self.length.mul_f64(WARM_UP_SHARE).min(WARM_UP_MAX)
    }

    pub fn cool_down(&self) -> Duration {
        self.length.mul_f64(COOL_DOWN_SHARE)
    }
}

/// What was measured, and why not everything was, if so.
#[derive(Debug)]
pub(super) struct Measured {
    pub shapes: Vec<Shape>,
    pub incomplete: Option<String>,
}

/// # Errors
/// Two loads would count as one; or a cluster does not start, or answers nothing, before anything was measured. Later the runs before it are
/// kept.
pub(super) async fn measure(
    runner: &mut Runner,
    targets: &[Target],
    plans: &[ShapePlan],
    manner: Manner,
) -> anyhow::Result<Measured> {
    plans
        .iter()
        .try_for_each(|plan| check_loads(plan, &manner))
        .exit(Exit::Usage)?;
    let rounds = order::rounds(targets.len(), manner.repeats);
    let count = plans.iter().map(|plan| plan.loads.len()).sum::<usize>() * targets.len() * rounds.len();
    let mut done = 0;
    // One repeat of all arms at one load of one shape.
    let mut round = 0_u64;
    let mut shapes = Vec::new();
    for plan in plans {
        let mut shape = begun(plan, manner.seed);
        for load in &plan.loads {
            for (repeat, row) in rounds.iter().enumerate() {
                for target in row.iter().filter_map(|index| targets.get(*index)) {
                    if let Some(why) = stopped(runner, manner.length) {
                        shapes.push(shape);
                        return Ok(Measured {
                            shapes,
                            incomplete: Some(format!("{why} after {done} of {count} measured runs")),
                        });
                    }
                    let left = manner.planned.saturating_sub(runner.deadline.elapsed());
                    let what = format!(
                        "{} at {} ({}), repeat {}",
                        target.name,
                        load.label,
                        plan.name,
                        repeat + 1
                    );
                    runner.shown.begin(&what, left);
                    let mut run = match runner.run(target, manner.load(&load.trace, round)).await {
                        Ok(run) => run,
                        Err(error) if done == 0 => return Err(error),
                        Err(error) => {
                            shapes.push(shape);
                            return Ok(Measured {
                                shapes,
                                incomplete: Some(format!("{error:#}, after {done} of {count} measured runs")),
                            });
                        }
                    };
                    if is_cut(&run) {
                        continue;
                    }
                    run.offered = offered(&load.trace, &manner);
                    run.environment.insert("load".to_owned(), load.label.clone().into());
                    done += 1;
                    shape.runs.push(ArmRun {
                        arm: target.name.clone(),
                        repeat: repeat as u32,
                        run,
                    });
                }
                round += 1;
            }
        }
        shapes.push(shape);
    }
    let incomplete = (done < count).then(|| format!("{done} of {count} measured runs are whole"));
    Ok(Measured { shapes, incomplete })
}

/// Loads are told apart by the requests that count. Rates that differ may give nearly the same number of them, as when only the long prompts
/// among many streams follow the rate. Then the repeats of one would be taken for those of the other.
fn check_loads(plan: &ShapePlan, manner: &Manner) -> anyhow::Result<()> {
    let mut loads: Vec<(f64, &str)> = plan
        .loads
        .iter()
        .map(|load| (offered(&load.trace, manner), load.label.as_str()))
        .collect();
    loads.sort_by(|a, b| a.0.total_cmp(&b.0));
    for pair in loads.windows(2) {
        let [(low, one), (high, other)] = [pair[0], pair[1]];
        // A load without a request that counts has no verdict, for a reason of its own.
        ensure!(
            low <= 0.0 || !is_same_load(low, high),
            "{one} and {other} of {} send {low:.3} and {high:.3} requests a second in the part that counts, and would be taken for one load: give \
             --rates that are farther apart, or longer runs with --run-seconds",
            plan.name
        );
    }
    Ok(())
}

fn begun(plan: &ShapePlan, seed: u64) -> Shape {
    let hashes = plan
        .loads
        .iter()
        .map(|load| format!("{} at {}", own_format::hash(&load.trace), load.label));
    Shape {
        name: plan.name.clone(),
        traffic: plan.traffic.clone(),
        trace_hash: format!("{} (seed {seed})", hashes.collect::<Vec<_>>().join(", ")),
        runs: Vec::new(),
        contrasts: Vec::new(),
        verdict: String::new(),
    }
}

fn stopped(runner: &Runner, length: Duration) -> Option<&'static str> {
    if runner.stop.is_cancelled() {
        return Some("stopped by Ctrl-C");
    }
    (!runner.deadline.has_room_for(length)).then_some("the time was up")
}

impl Manner {
    fn load(&self, trace: &Trace, round: u64) -> Load {
        Load {
            trace: trace.clone(),
            pace: Pace::Open { max_concurrency: None },
            seed: match self.has_new_prompts_each_round {
                true => content_seed(self.seed, round),
                false => self.seed,
            },
            warm_up: self.warm_up(),
            cool_down: self.cool_down(),
            request_timeout: self.request_timeout,
        }
    }
}

/// Requests a second of the part that counts, out of the trace: the same number for every arm, although arms may be late.
fn offered(trace: &Trace, manner: &Manner) -> f64 {
    let last = trace.requests.last().map_or(Duration::ZERO, |request| request.at);
    let (from, to) = (manner.warm_up(), last.saturating_sub(manner.cool_down()));
    let counted = trace
        .requests
        .iter()
        .filter(|request| request.at >= from && request.at <= to);
    counted.count() as f64 / to.saturating_sub(from).as_secs_f64().max(1e-3)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::compare::traffic::{ShapeName, TYPICAL, Traffic};

    fn manner() -> Manner {
        Manner {
            repeats: 3,
            length: Duration::from_secs(40),
            request_timeout: Duration::from_secs(20),
            seed: 7,
            has_new_prompts_each_round: false,
            planned: Duration::from_secs(900),
        }
    }

    #[test]
    fn the_offered_load_is_that_of_the_part_that_counts() {
        let traffic = Traffic::named(ShapeName::Short, None, 2048).expect("made");
        let trace = traffic
            .trace(5.0, Duration::from_secs(40), 1, &TYPICAL)
            .expect("a trace");
        let rate = offered(&trace, &manner());
        assert!((3.0..7.0).contains(&rate), "{rate}");
        assert_eq!(rate.to_bits(), offered(&trace, &manner()).to_bits());
    }

    #[test]
    fn loads_that_would_count_as_one_are_refused() {
        let traffic = Traffic::named(ShapeName::Short, None, 2048).expect("made");
        let load = |label: &str, rate| Offered {
            label: label.to_owned(),
            trace: traffic
                .trace(rate, Duration::from_secs(40), 1, &TYPICAL)
                .expect("a trace"),
        };
        let checked = |loads: Vec<Offered>| {
            let plan = ShapePlan {
                name: "short".to_owned(),
                traffic: String::new(),
                loads,
            };
            check_loads(&plan, &manner()).map_err(|error| error.to_string())
        };
        assert_eq!(checked(vec![load("high", 10.0), load("low", 5.0)]), Ok(()));
        let error = checked(vec![load("a", 5.0), load("high", 10.0), load("b", 5.0)]).expect_err("one load twice");
        assert!(
            error.contains("a and b of short") && error.contains("--rates"),
            "{error}"
        );
    }

    #[test]
    fn prompts_are_new_in_each_round_only_where_caches_would_know_them() {
        let trace = Traffic::named(ShapeName::Short, None, 2048)
            .and_then(|traffic| traffic.trace(5.0, Duration::from_secs(4), 1, &TYPICAL))
            .expect("a trace");
        assert_eq!(manner().load(&trace, 2).seed, 7);
        let deployed = Manner {
            has_new_prompts_each_round: true,
            ..manner()
        };
        assert_eq!(deployed.load(&trace, 2).warm_up, Duration::from_secs(4));
        // Nor may two comparisons of the same clusters meet, whose seeds are neighbours.
        let trace = &trace;
        let seeds = |seed| (0..6).map(move |round| Manner { seed, ..deployed }.load(trace, round).seed);
        let all: BTreeSet<u64> = seeds(7).chain(seeds(8)).collect();
        assert_eq!(all.len(), 12);
    }
}
