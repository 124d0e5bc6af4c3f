//! The fairness list of a comparison: each field says what was done, and stays empty when it was not.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use workload::comparison::{Arm, ArmKind, ArmRun, Comparison, Fairness};
use workload::record::{LoopKind, Outcome, RequestRecord, RunPart};
use workload::statistics::Samples;
use workload::summary::{LAG_MS_P99_MAX, Lag};
use workload::verdict::{load_index, loads};

use super::facts::DECLARED;
use super::order;

/// Fewer repeats give no interval worth its name.
pub(super) const REPEATS_MIN: u32 = 3;

/// What was done that the records do not show.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Conduct {
    /// Each run had processes of its own.
    pub has_fresh_processes: bool,
    /// Why runs are missing, if any are.
    pub incomplete: Option<String>,
    /// How the arms were tuned, or who says that they were.
    pub tuned: Option<String>,
    /// Coordinator, tokenizer, HTTP path and policy.
    pub same_edge: Option<String>,
    pub seed: u64,
    pub client_placement: Option<String>,
    pub warm_up_requests: u32,
    pub warm_up: Duration,
    pub cool_down: Duration,
    /// Declared, where this program cannot measure it.
    pub pool_utilisation: Option<String>,
}

/// Fills the list from the runs and from what was done.
pub(super) fn assess(comparison: &Comparison, conduct: &Conduct) -> Fairness {
    let all: Vec<&ArmRun> = comparison.shapes.iter().flat_map(|shape| &shape.runs).collect();
    if all.is_empty() {
        return Fairness::default();
    }
    Fairness {
        equal_resources: equal_resources(&comparison.arms),
        every_arm_tuned: conduct.tuned.clone(),
        same_edge: conduct.same_edge.clone(),
        same_trace: same_trace(comparison, conduct.seed),
        open_loop_and_lag: open_loop_and_lag(&all),
        warm_up_excluded: warm_up_excluded(&all, conduct),
        order_and_repeats: order_and_repeats(comparison, conduct),
        outputs_equal: outputs_equal(comparison),
        failures_counted: Some(failures_counted(&all)),
        one_token_per_event: one_token_per_event(&all),
        several_shapes: several_shapes(comparison),
        client_placement: conduct.client_placement.clone(),
        transfer_share: transfer_share(comparison),
        pool_utilisation: pool_utilisation(comparison).or_else(|| conduct.pool_utilisation.clone()),
        verdict_per_shape: Some("one verdict for each shape, at each load, against one baseline".to_owned()),
    }
}

fn equal_resources(arms: &[Arm]) -> Option<String> {
    let first = &arms.first()?.resources;
    let is_equal = |arm: &Arm| {
        let own = &arm.resources;
        (own.cores, own.gpus, own.memory_bytes) == (first.cores, first.gpus, first.memory_bytes)
    };
    if !arms.iter().all(is_equal) {
        return None;
    }
    let split: Vec<String> = arms
        .iter()
        .map(|arm| format!("{} {}", arm.name, arm.topology))
        .collect();
    let memory = match first.is_measured {
        true => "KV memory".to_owned(),
        false => format!("memory ({DECLARED})"),
    };
    Some(format!(
        "each arm has {} cores, {} GPUs and {:.1} GiB of {memory}, split as: {}",
        first.cores,
        first.gpus,
        first.memory_bytes as f64 / f64::from(1 << 30),
        split.join(", ")
    ))
}

fn same_trace(comparison: &Comparison, seed: u64) -> Option<String> {
    // The lengths of the same request are equal in every run of a repeat, as the server counted them.
    for shape in &comparison.shapes {
        let loads = loads(shape);
        let mut known: BTreeMap<(Option<usize>, u32, &str), u32> = BTreeMap::new();
        for run in &shape.runs {
            let load = load_index(&loads, run.run.offered);
            for record in run.run.records.iter().filter(|record| record.is_completed()) {
                let key = (load, run.repeat, record.id.as_str());
                let value = record.prompt_tokens;
                if *known.entry(key).or_insert(value) != value {
                    return None;
                }
            }
        }
    }
    let hashes: Vec<&str> = comparison
        .shapes
        .iter()
        .map(|shape| shape.trace_hash.as_str())
        .collect();
    Some(format!(
        "one trace for all arms, seed {seed}, SHA-256 {}",
        hashes.join("; ")
    ))
}

fn open_loop_and_lag(runs: &[&ArmRun]) -> Option<String> {
    let worst = runs.iter().map(|run| Lag::of(&run.run).ms_p99).fold(0.0, f64::max);
    let is_open = runs.iter().all(|run| run.run.loop_kind == LoopKind::Open);
    (is_open && worst <= LAG_MS_P99_MAX).then(|| {
        format!(
            "open loop, arrivals as each shape says; latency counts from the scheduled time; the client's worst lag p99 of any run is {worst:.2} ms, at most {LAG_MS_P99_MAX} ms may be"
        )
    })
}

fn warm_up_excluded(runs: &[&ArmRun], conduct: &Conduct) -> Option<String> {
    let has = |run: &ArmRun, part| run.run.records.iter().any(|record| record.part == part);
    let is_done = conduct.warm_up_requests > 0 || runs.iter().all(|run| has(run, RunPart::WarmUp));
    let caches = match conduct.has_fresh_processes {
        true => "each run begins with an empty prefix cache",
        false => "the prompts of each repeat at each load are new, so the caches know none of them",
    };
    is_done.then(|| {
        format!(
            "{} requests before each run, and those due in the first {:.1} s and the last {:.1} s, do not count; {caches}",
            conduct.warm_up_requests,
            conduct.warm_up.as_secs_f64(),
            conduct.cool_down.as_secs_f64()
        )
    })
}

/// The order is that in which the runs are stored, which is the one in which they were made.
fn order_and_repeats(comparison: &Comparison, conduct: &Conduct) -> Option<String> {
    if conduct.incomplete.is_some() {
        return None;
    }
    let mut orders: BTreeSet<String> = BTreeSet::new();
    let mut repeats: Vec<usize> = Vec::new();
    for shape in &comparison.shapes {
        let loads = loads(shape);
        for load in 0..loads.len() {
            let is_here = |run: &&ArmRun| load_index(&loads, run.run.offered) == Some(load);
            let runs: Vec<&ArmRun> = shape.runs.iter().filter(is_here).collect();
            let rounds = order::real_rounds(&runs, &comparison.arms)?;
            if !order::is_balanced(&rounds) {
                return None;
            }
            orders.insert(order::letters(&rounds));
            repeats.push(rounds.len());
        }
    }
    let fewest = repeats.into_iter().min()?;
    let orders: Vec<String> = orders.into_iter().collect();
    let arms = comparison.arms.iter().enumerate();
    let arms: Vec<String> = arms
        .map(|(place, arm)| format!("{} is {}", order::letter(place), arm.name))
        .collect();
    let processes = match conduct.has_fresh_processes {
        true => "fresh processes for each run",
        false => "no fresh processes: the clusters were running already",
    };
    (fewest >= REPEATS_MIN as usize).then(|| {
        format!(
            "the arms ran in the order {}, where {}; at least {fewest} repeats of each arm at each load, {processes}; 95 % intervals from the repeats and from a bootstrap within them",
            orders.join(" or "),
            arms.join(", ")
        )
    })
}

/// A request of a comparison: its shape, load, repeat and id.
type RequestKey<'a> = (&'a str, Option<usize>, u32, &'a str);

/// Answers with the same id, load and repeat, completed in both arms. An answer that is cut off says nothing of the handoff.
fn outputs_equal(comparison: &Comparison) -> Option<String> {
    let mut known: BTreeMap<RequestKey<'_>, (u64, &str)> = BTreeMap::new();
    let (mut compared, mut differ) = (0_u64, 0_u64);
    let mut arms: BTreeSet<&str> = BTreeSet::new();
    for shape in &comparison.shapes {
        let loads = loads(shape);
        for run in &shape.runs {
            let load = load_index(&loads, run.run.offered);
            let answered = run.run.records.iter().filter(|record| record.is_completed());
            for (record, hash) in answered.filter_map(|record| Some((record, record.output_hash?))) {
                let key = (shape.name.as_str(), load, run.repeat, record.id.as_str());
                match known.get(&key) {
                    Some((other, arm)) => {
                        compared += 1;
                        differ += u64::from(*other != hash);
                        arms.extend([*arm, run.arm.as_str()]);
                    }
                    None => {
                        known.insert(key, (hash, run.arm.as_str()));
                    }
                }
            }
        }
    }
    // An arm without such an answer is not known to compute the same.
    let has_each_arm = comparison.arms.iter().all(|arm| arms.contains(arm.name.as_str()));
    (compared > 0 && differ == 0 && has_each_arm)
        .then(|| format!("greedy outputs compared by hash across arms: all {compared} pairs of answers are equal"))
}

fn failures_counted(runs: &[&ArmRun]) -> String {
    let measured = || {
        let records = runs.iter().flat_map(|run| &run.run.records);
        records.filter(|record| record.is_measured())
    };
    let count = |is: fn(&Outcome) -> bool| measured().filter(|record| is(&record.outcome)).count();
    format!(
        "{} failed, {} refused and {} cancelled of {} measured requests; none of them counts as good",
        count(|outcome| matches!(outcome, Outcome::Failed { .. })),
        count(|outcome| matches!(outcome, Outcome::Refused { .. })),
        count(|outcome| matches!(outcome, Outcome::Cancelled)),
        measured().count()
    )
}

fn one_token_per_event(runs: &[&ArmRun]) -> Option<String> {
    let answered = || {
        let records = runs.iter().flat_map(|run| &run.run.records);
        records.filter(|record| record.is_completed())
    };
    let is_one = |record: &RequestRecord| record.tokens.len() == record.output_tokens as usize;
    let count = answered().count();
    (count > 0 && answered().all(is_one)).then(|| {
        format!("each of {count} answers had as many events as output tokens; gaps are those that the client saw")
    })
}

/// The shapes that were measured. One is enough for a verdict on that shape, so the field says that it is the only one.
fn several_shapes(comparison: &Comparison) -> Option<String> {
    let measured = comparison.shapes.iter().filter(|shape| !shape.runs.is_empty());
    let names: Vec<&str> = measured.map(|shape| shape.name.as_str()).collect();
    match names.as_slice() {
        [] => None,
        [only] => Some(format!("one shape only: {only}; the verdict holds for it alone")),
        names => Some(format!("{} shapes: {}", names.len(), names.join("; "))),
    }
}

fn transfer_share(comparison: &Comparison) -> Option<String> {
    let hands_off = |arm: &&Arm| arm.kind != ArmKind::CoLocated;
    let arms: BTreeSet<&str> = comparison
        .arms
        .iter()
        .filter(hands_off)
        .map(|arm| arm.name.as_str())
        .collect();
    if arms.is_empty() {
        return Some("no arm hands KV off".to_owned());
    }
    let mut words = Vec::new();
    let mut is_told = false;
    for arm in arms {
        let runs = comparison
            .shapes
            .iter()
            .flat_map(|shape| &shape.runs)
            .filter(|run| run.arm == arm);
        let answered = runs
            .flat_map(|run| &run.run.records)
            .filter(|record| record.is_measured() && record.is_completed());
        let moved: Vec<(f64, f64, u64)> = answered
            .filter_map(|record| {
                let server = record.server.as_ref()?;
                Some((server.kv_transfer_ms?, record.ttft_ms()?, server.kv_bytes?))
            })
            .collect();
        if moved.is_empty() {
            words.push(format!("{arm}: no handoff was told"));
            continue;
        }
        is_told = true;
        let bytes: u64 = moved.iter().map(|(_, _, bytes)| bytes).sum();
        let shares = Samples::new(moved.iter().map(|(transfer, ttft, _)| transfer / ttft.max(1e-6)));
        words.push(format!(
            "{arm}: {} handoffs moved {:.1} MB of KV; a transfer took {:.1} % of its request's TTFT (median)",
            moved.len(),
            bytes as f64 / 1e6,
            shares.percentile(50.0).unwrap_or(0.0) * 100.0
        ));
    }
    // Clusters that tell nothing at all leave the field empty.
    is_told.then(|| words.join("; "))
}

/// Processor time of each node by its cores and the measured time, for each arm.
fn pool_utilisation(comparison: &Comparison) -> Option<String> {
    let mut words = Vec::new();
    for arm in &comparison.arms {
        let cores = arm.settings.get("cores").and_then(|cores| cores.as_object());
        let mut busy: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
        let runs = comparison
            .shapes
            .iter()
            .flat_map(|shape| &shape.runs)
            .filter(|run| run.arm == arm.name);
        for run in runs {
            for (name, usage) in &run.run.server {
                let Some(count) = cores.and_then(|cores| cores.get(name)).and_then(|count| count.as_f64()) else {
                    continue;
                };
                let sum = busy.entry(name).or_default();
                sum.0 += usage.cpu.as_secs_f64();
                sum.1 += run.run.measured.as_secs_f64() * count;
            }
        }
        if busy.is_empty() {
            return None;
        }
        let shares = busy
            .iter()
            .map(|(name, (cpu, time))| format!("{name} {:.0} %", cpu / time.max(1e-9) * 100.0));
        words.push(format!("{}: {}", arm.name, shares.collect::<Vec<_>>().join(", ")));
    }
    (!words.is_empty()).then(|| format!("processor time of each node by its cores: {}", words.join("; ")))
}

#[cfg(test)]
#[path = "fairness_tests.rs"]
mod tests;
