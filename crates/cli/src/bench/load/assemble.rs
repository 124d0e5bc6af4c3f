//! Makes the run's result from what the session collected: which requests count, and what was used meanwhile.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use workload::record::{LoopKind, RequestRecord, Run, RunPart, Usage};

use super::plan::{LoadPlan, Pace};
use super::session::Outcomes;

/// The name of this process among those that are measured.
pub(super) const CLIENT: &str = "client";

/// A run, and the text of each answer in the order of the records.
#[derive(Clone, Debug)]
pub(super) struct RunWithTexts {
    pub run: Run,
    pub texts: Vec<String>,
}

pub(super) fn assemble(plan: &LoadPlan, outcomes: Outcomes, environment: BTreeMap<String, Value>) -> RunWithTexts {
    let Outcomes {
        exchanged,
        processes,
        started_ns,
        is_interrupted,
        unfinished,
    } = outcomes;
    let (mut records, texts): (Vec<RequestRecord>, Vec<String>) = exchanged.into_iter().unzip();
    set_parts(&mut records, plan);
    let measured = || records.iter().filter(|record| record.part == RunPart::Measured);
    let first = measured().map(|record| record.scheduled).min().unwrap_or_default();
    let last = measured().map(|record| record.scheduled).max().unwrap_or_default();
    let ended = measured().map(|record| record.ended).max().unwrap_or_default();
    let duration = measured_part(plan, &records, first, ended);
    let offered = match plan.pace {
        Pace::Closed { users } => f64::from(users),
        Pace::Open { .. } => {
            // Requests that were all due at once were offered as fast as the server took them.
            let (gaps, time) = match (measured().count(), last - first) {
                (count, Duration::ZERO) => (count, duration),
                (count, time) => (count - 1, time),
            };
            gaps as f64 / time.as_secs_f64().max(f64::MIN_POSITIVE)
        }
    };
    let mut server = processes.used(first, ended);
    let client: Usage = server.remove(CLIENT).unwrap_or_default();
    let mut environment = environment;
    environment.insert("interrupted".to_owned(), json!(is_interrupted));
    environment.insert("started_monotonic_ns".to_owned(), json!(started_ns));
    environment.insert("unfinished".to_owned(), json!(unfinished));
    let run = Run {
        name: plan.name.clone(),
        loop_kind: match plan.pace {
            Pace::Open { .. } => LoopKind::Open,
            Pace::Closed { .. } => LoopKind::Closed,
        },
        offered,
        records,
        measured: duration,
        client,
        server,
        environment,
    };
    RunWithTexts { run, texts }
}

/// How long the measured part is. Where a warm-up or a cool-down bounds it, it reaches to that bound: the time before the first and
/// after the last request in it is part of the load that was offered.
fn measured_part(plan: &LoadPlan, records: &[RequestRecord], first: Duration, ended: Duration) -> Duration {
    let last = records.iter().map(|record| record.scheduled).max().unwrap_or_default();
    let from = match plan.warm_up {
        Duration::ZERO => first,
        warm_up => warm_up,
    };
    let to = match plan.cool_down {
        Duration::ZERO => ended,
        cool_down => ended.max(last.saturating_sub(cool_down)),
    };
    to.saturating_sub(from)
}

/// Warm-up and cool-down are told by the time at which a request was due.
fn set_parts(records: &mut [RequestRecord], plan: &LoadPlan) {
    let last = records.iter().map(|record| record.scheduled).max().unwrap_or_default();
    let cool_down_from = last.saturating_sub(plan.cool_down);
    for record in records {
        record.part = if record.scheduled < plan.warm_up {
            RunPart::WarmUp
        } else if !plan.cool_down.is_zero() && record.scheduled > cool_down_from {
            RunPart::CoolDown
        } else {
            RunPart::Measured
        };
    }
}
