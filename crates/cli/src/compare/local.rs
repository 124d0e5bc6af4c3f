//! A comparison on this machine: costs, knee, tuning, measured runs, verdict. Each run has fresh processes on their own cores.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use workload::comparison::{Arm, ArmKind, Slo};

use super::args::{ArmName, CompareArgs};
use super::budget::{Counts, Deadline, TimePlan};
use super::cores::{self, Cores};
use super::costs::Costs;
use super::fairness::Conduct;
use super::finish::{Finished, finish};
use super::machine::Machine;
use super::measure::{Manner, Offered, ShapePlan, measure};
use super::order;
use super::point::{Point, sweep};
use super::prepare::{COST_RUNS, Cut, KNEE_PROBES, Preparation, first_point, rates, tuning_runs};
use super::progress::Shown;
use super::runner::{Place, Runner, Target, WARM_UP_REQUESTS};
use super::sender::Placement;
use super::traffic::{TYPICAL, Traffic};
use super::tuning::{ArmSweep, Sweeps};
use crate::date::today;
use crate::exit::{Exit, ExitError, WithExit};
use crate::model::{ResolvedModel, find, resolve, with_exit};
use crate::terminal::say;

const MODEL: &str = "smollm2-135m";
/// An answer that takes longer counts as failed.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// With a limit of time the answers may not delay the end of every run.
const REQUEST_TIMEOUT_QUICK: Duration = Duration::from_secs(12);

/// The loads of one shape: their names, and requests a second.
type Rates = Vec<(String, f64)>;

/// What the runs before the measured ones gave.
struct Prepared {
    sweeps: Sweeps,
    rates: Vec<Rates>,
    /// Those in which the client was late.
    late: Vec<String>,
}

/// What is known before anything runs.
struct Plan {
    machine: Machine,
    /// Only `--plan-only` goes on without the model. The path of the machine's model is then what the user called it.
    is_model_here: bool,
    arms: Vec<ArmName>,
    traffic: Vec<Traffic>,
    stored: Option<Sweeps>,
    time: TimePlan,
    slo: Slo,
}

pub(super) async fn compare(args: &CompareArgs, stop: CancellationToken) -> anyhow::Result<Exit> {
    let plan = Plan::make(args)?;
    say!("{}", plan.text(args));
    if args.plan_only {
        return Ok(Exit::Ok);
    }
    let counts = plan.time.counts;
    let mut runner = Runner {
        machine: Some(plan.machine.clone()),
        model: None,
        api_key: None,
        ca: None,
        deadline: Deadline::start(plan.time.limit),
        stop: stop.clone(),
        placement: Placement::default(),
        shown: Shown::new(counts.cost + counts.tuning + counts.knee + counts.measured),
    };
    let prepared = plan.prepare(args, &mut runner).await;
    let Prepared { sweeps, rates, late } = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            runner.shown.end();
            return match (stop.is_cancelled(), error.is::<Cut>()) {
                (true, _) => Err(ExitError::new(Exit::Interrupted, error).into()),
                (false, true) => Err(ExitError::new(Exit::NoVerdict, error).into()),
                (false, false) => Err(error),
            };
        }
    };
    if let Some(path) = &args.save_tuning {
        sweeps.write(path)?;
    }
    let points = plan.points(&sweeps, args)?;
    let targets: Vec<Target> = plan.targets(&points);
    let length = plan.time.measured_length(runner.deadline.left(), args.run_max());
    let manner = plan.manner(args, length);
    let shapes = plan.shapes(&rates, &sweeps, manner)?;
    let measured = measure(&mut runner, &targets, &shapes, manner).await;
    runner.shown.end();
    let finished = Finished {
        measured: measured?,
        arms: plan.arms_for_report(&points, &sweeps),
        conduct: plan.conduct(args, &sweeps, &runner, manner),
        streams: plan.streams(),
        environment: plan.environment(&sweeps, &late),
        took: runner.deadline.elapsed(),
    };
    finish(args, finished, &stop, &mut crate::stdout::stdout())
}

impl Plan {
    fn make(args: &CompareArgs) -> anyhow::Result<Self> {
        // A model may take minutes to fetch. What is wrong with the traffic is said before.
        let traffic = args.traffic()?;
        let (model, is_model_here) = model(args)?;
        let executable =
            std::env::current_exe().context("cannot find this program's own file to start the nodes from")?;
        let machine = Machine {
            executable,
            model: model.path,
            model_name: model.name,
            cores: Cores::split(&cores::available()?, args.node_cores).exit(Exit::Usage)?,
            engine: args.engine.clone(),
            max_model_len: Some(args.max_model_len),
        };
        let arms = args.arm_names();
        if arms.len() < 2 {
            let error = anyhow::anyhow!("a comparison needs two arms; --arms co-located,disaggregated names them");
            return Err(ExitError::new(Exit::Usage, error).into());
        }
        let kinds = kinds(&arms);
        let stored = match &args.tuning {
            Some(path) => Some(Sweeps::read(path, &machine.facts(), &kinds)?),
            None => None,
        };
        let cores = machine.node_cores();
        let has_rates = !args.rates.is_empty();
        let loads = |traffic: &Traffic| {
            if has_rates {
                args.rates.len() as u32
            } else {
                traffic.loads()
            }
        };
        let all_loads: u32 = traffic.iter().map(loads).sum();
        let searched = traffic
            .iter()
            .filter(|traffic| !has_rates && !traffic.has_streams())
            .count();
        let counts = Counts {
            cost: match needs_costs(args, &kinds) && cores > 1 {
                true => COST_RUNS,
                false => 0,
            },
            tuning: match args.untuned || stored.is_some() {
                true => 0,
                false => tuning_runs(&kinds, cores).exit(Exit::Usage)?,
            },
            knee: KNEE_PROBES * searched as u32,
            measured: all_loads * arms.len() as u32 * args.repeats,
        };
        let time = TimePlan::new(counts, args.run_max(), args.limit()).exit(Exit::Usage)?;
        Ok(Self {
            machine,
            is_model_here,
            arms,
            traffic,
            stored,
            time,
            slo: args.slo(),
        })
    }

    fn text(&self, args: &CompareArgs) -> String {
        let names: Vec<String> = names(&self.arms);
        let shapes: Vec<&str> = self.traffic.iter().map(|traffic| traffic.name.as_str()).collect();
        let tuning = match &self.stored {
            Some(stored) => format!("\n  tuning: the stored sweep of {}, of {}", stored.date, stored.traffic),
            None => String::new(),
        };
        let fetch = match self.is_model_here {
            true => "",
            false => ", which is not on this machine: it is fetched before the runs",
        };
        format!(
            "baton compare: {} on {} cores ({}{fetch})\n  shapes: {}\n  order: {}, {} repeats, fresh processes for each run{tuning}\n{}",
            names.join(", "),
            self.machine.node_cores(),
            self.machine.model.display(),
            shapes.join("; "),
            order::words(self.arms.len(), args.repeats),
            args.repeats,
            self.time.text().trim_end()
        )
    }

    /// Everything before the measured runs.
    async fn prepare(&self, args: &CompareArgs, runner: &mut Runner) -> anyhow::Result<Prepared> {
        let cores = self.machine.node_cores();
        let mut preparation = Preparation {
            runner,
            slo: &self.slo,
            lengths: self.time.lengths,
            planned: self.time.total(),
            seed: args.seed,
            late: Vec::new(),
        };
        let stored_costs = self.stored.as_ref().and_then(|stored| stored.costs);
        let costs = match stored_costs {
            Some(costs) => costs,
            None if self.time.counts.cost > 0 => preparation.costs(cores / 2).await?,
            None => TYPICAL,
        };
        let mut sweeps = self.stored.clone();
        let mut all_rates = Vec::new();
        for traffic in &self.traffic {
            let start = sweeps
                .as_ref()
                .and_then(|sweeps| sweeps.arm(ArmKind::CoLocated)?.chosen());
            let rates = match args.rates.as_slice() {
                [] => match traffic.fixed_load(&costs, cores) {
                    Some(load) => vec![load],
                    None => {
                        let point = start.unwrap_or_else(|| first_point(cores));
                        let knee = preparation.knee(traffic, point, &costs).await?;
                        rates(knee).map(|(label, rate)| (label.to_owned(), rate)).to_vec()
                    }
                },
                given => given.iter().map(|rate| (format!("{rate} requests/s"), *rate)).collect(),
            };
            if sweeps.is_none() {
                let highest = rates.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
                let kinds = if args.untuned { Vec::new() } else { kinds(&self.arms) };
                let load = (traffic, highest);
                sweeps = Some(self.tune(&mut preparation, &kinds, load, costs).await?);
            }
            all_rates.push(rates);
        }
        Ok(Prepared {
            sweeps: sweeps.context("there is no shape")?,
            rates: all_rates,
            late: preparation.late,
        })
    }

    async fn tune(
        &self,
        preparation: &mut Preparation<'_>,
        kinds: &[ArmKind],
        (traffic, rate): (&Traffic, f64),
        costs: Costs,
    ) -> anyhow::Result<Sweeps> {
        let mut arms = Vec::new();
        for kind in kinds {
            let sweep = sweep(*kind, self.machine.node_cores(), costs.threshold_tokens())?;
            arms.push(preparation.tune(*kind, &sweep, (traffic, rate), &costs).await?);
        }
        Ok(Sweeps {
            date: today(),
            machine: self.machine.facts(),
            traffic: traffic.name.clone(),
            rate,
            slo: self.slo.clone(),
            // Typical costs are no measurement.
            costs: (costs.requests > 0).then_some(costs),
            arms,
        })
    }

    fn shapes(&self, rates: &[Rates], sweeps: &Sweeps, manner: Manner) -> anyhow::Result<Vec<ShapePlan>> {
        let costs = sweeps.costs.unwrap_or(TYPICAL);
        let offered = |traffic: &Traffic, (label, rate): &(String, f64)| {
            Ok(Offered {
                label: label.clone(),
                trace: traffic.trace(*rate, manner.length, manner.seed, &costs)?,
            })
        };
        let shape = |(traffic, rates): (&Traffic, &Rates)| {
            Ok(ShapePlan {
                name: traffic.name.clone(),
                traffic: traffic.words(&costs),
                loads: rates
                    .iter()
                    .map(|rate| offered(traffic, rate))
                    .collect::<anyhow::Result<_>>()?,
            })
        };
        self.traffic.iter().zip(rates).map(shape).collect()
    }

    /// The chosen point of each arm, with its name.
    fn points(&self, sweeps: &Sweeps, args: &CompareArgs) -> anyhow::Result<Vec<(String, ArmName, Point)>> {
        let of = |(name, arm): (String, &ArmName)| {
            let chosen = sweeps.arm(arm.kind()).and_then(|sweep| sweep.chosen());
            let untuned = args.untuned.then(|| {
                let threshold = sweeps.costs.map_or(0, |costs| costs.threshold_tokens());
                Point::default_of(arm.kind(), self.machine.node_cores(), threshold)
            });
            let mut point = chosen
                .or(untuned)
                .with_context(|| format!("no point was chosen for {name}"))?;
            if *arm == ArmName::NoChunking {
                // A whole prompt in one step, also beside streams.
                point.max_num_batched_tokens = args.max_model_len;
                point.mixed_step_tokens = Some(args.max_model_len);
            }
            Ok((name, *arm, point))
        };
        names(&self.arms).into_iter().zip(&self.arms).map(of).collect()
    }

    fn targets(&self, points: &[(String, ArmName, Point)]) -> Vec<Target> {
        let target = |(name, _, point): &(String, ArmName, Point)| Target {
            name: name.clone(),
            place: Place::Here(*point),
        };
        points.iter().map(target).collect()
    }

    fn arms_for_report(&self, points: &[(String, ArmName, Point)], sweeps: &Sweeps) -> Vec<Arm> {
        let cores = self.machine.node_cores();
        let arm = |(name, arm, point): &(String, ArmName, Point)| Arm {
            name: name.clone(),
            kind: arm.kind(),
            topology: point.topology().to_string(),
            settings: point.settings(cores),
            resources: self.machine.resources(),
            tuning: match (arm, sweeps.arm(arm.kind())) {
                (ArmName::NoChunking, _) | (_, None) => Vec::new(),
                (_, Some(sweep)) => sweep.for_report(cores),
            },
        };
        points.iter().map(arm).collect()
    }

    fn manner(&self, args: &CompareArgs, length: Duration) -> Manner {
        Manner {
            repeats: args.repeats,
            length,
            request_timeout: match self.time.limit {
                Some(_) => REQUEST_TIMEOUT_QUICK,
                None => REQUEST_TIMEOUT,
            },
            seed: args.seed,
            has_new_prompts_each_round: false,
            planned: self.time.total(),
        }
    }

    fn conduct(&self, args: &CompareArgs, sweeps: &Sweeps, runner: &Runner, manner: Manner) -> Conduct {
        let mut tuned = sweeps.words(self.stored.is_some());
        if self.arms.contains(&ArmName::NoChunking) {
            tuned.push_str("; no-chunking is the tuned co-located arm with a step budget for whole prompts, and is not tuned itself");
        }
        // A point that was chosen by the figures of a late client is not tuned.
        let is_tuned = kinds(&self.arms)
            .into_iter()
            .all(|kind| sweeps.arm(kind).is_some_and(ArmSweep::is_evidence));
        let cores = &self.machine.cores;
        let shared = match cores.are_shared() {
            true => "which the nodes use too, because the machine has no others",
            false => "which no node uses",
        };
        Conduct {
            has_fresh_processes: true,
            incomplete: None,
            tuned: (!args.untuned && is_tuned).then_some(tuned),
            same_edge: Some(format!(
                "one binary (baton {}) with the same coordinator, tokenizer, HTTP path and routing policy in all arms",
                crate::version::VERSION
            )),
            seed: args.seed,
            client_placement: Some(format!(
                "client and coordinator on the cores {:?}, {shared}; {}; each node is pinned to its own cores",
                cores.others,
                runner.placement.words()
            )),
            warm_up_requests: WARM_UP_REQUESTS,
            warm_up: manner.warm_up(),
            cool_down: manner.cool_down(),
            pool_utilisation: None,
        }
    }

    fn streams(&self) -> Vec<String> {
        let with_streams = self.traffic.iter().filter(|traffic| traffic.has_streams());
        with_streams.map(|traffic| traffic.name.clone()).collect()
    }

    fn environment(&self, sweeps: &Sweeps, late: &[String]) -> BTreeMap<String, serde_json::Value> {
        let mut environment = self.machine.environment();
        environment.insert("plan".to_owned(), json!(self.time.text()));
        environment.insert("costs".to_owned(), json!(sweeps.costs));
        environment.insert("threshold".to_owned(), json!(sweeps.costs.map(|costs| costs.words())));
        environment.insert("tuned_on".to_owned(), json!(sweeps.date));
        if !late.is_empty() {
            environment.insert("client_was_late_in".to_owned(), json!(late));
        }
        environment
    }
}

/// The model of the nodes, and whether it is on this machine. It is fetched if it is not, except for `--plan-only`, which runs nothing.
///
/// # Errors
/// There is no such model, it cannot be fetched, or a stored sweep cannot be compared with a model that is not here.
fn model(args: &CompareArgs) -> anyhow::Result<(ResolvedModel, bool)> {
    let asked = args.model.as_deref().unwrap_or(MODEL);
    if !args.plan_only {
        return Ok((resolve(asked).map_err(with_exit)?, true));
    }
    let found = find(asked).map_err(with_exit)?;
    if found.is_none() && args.tuning.is_some() {
        let error = anyhow::anyhow!(
            "{asked} is not on this machine, so nobody knows whether the sweep of --tuning is of this model: run `baton model pull {asked}` first, or leave out --tuning"
        );
        return Err(ExitError::new(Exit::Usage, error).into());
    }
    let is_here = found.is_some();
    let path = found.map_or_else(|| PathBuf::from(asked), |found| found.path);
    Ok((ResolvedModel { path, name: None }, is_here))
}

/// The threshold of a conditional arm comes from them, and without given rates the search of the knee begins there.
fn needs_costs(args: &CompareArgs, kinds: &[ArmKind]) -> bool {
    args.tuning.is_none() && (args.rates.is_empty() || kinds.contains(&ArmKind::Conditional))
}

/// The kinds that have to be tuned, each once.
fn kinds(arms: &[ArmName]) -> Vec<ArmKind> {
    let all = [ArmKind::CoLocated, ArmKind::Disaggregated, ArmKind::Conditional];
    let is_there = |kind: &ArmKind| arms.iter().any(|arm| arm.kind() == *kind);
    all.into_iter().filter(is_there).collect()
}

/// `co-located`, `disaggregated`; the second of two equal arms is `co-located-2`.
fn names(arms: &[ArmName]) -> Vec<String> {
    let mut seen: BTreeMap<&str, u32> = BTreeMap::new();
    let name = |arm: &ArmName| {
        let count = seen.entry(arm.name()).or_default();
        *count += 1;
        match count {
            1 => arm.name().to_owned(),
            count => format!("{}-{count}", arm.name()),
        }
    };
    arms.iter().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_arms_have_different_names_and_are_tuned_once() {
        let arms = [
            ArmName::CoLocated,
            ArmName::NoChunking,
            ArmName::CoLocated,
            ArmName::Conditional,
        ];
        assert_eq!(
            names(&arms),
            ["co-located", "no-chunking", "co-located-2", "conditional"]
        );
        assert_eq!(kinds(&arms), [ArmKind::CoLocated, ArmKind::Conditional]);
    }
}
