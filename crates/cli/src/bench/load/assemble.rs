//! Makes the run's result from what the session collected: which requests count, and what was used meanwhile.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use workload::parts::LeftOut;
use workload::record::{LoopKind, RequestRecord, Run, Usage};

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
    let left_out = LeftOut {
        warm_up: plan.warm_up,
        cool_down: plan.cool_down,
    };
    left_out.set_parts(&mut records);
    let measured = || records.iter().filter(|record| record.is_measured());
    let first = measured().map(|record| record.scheduled).min().unwrap_or_default();
    let last = measured().map(|record| record.scheduled).max().unwrap_or_default();
    let (from, to) = left_out.measured_part(&records);
    let duration = to.saturating_sub(from);
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
    let mut server = processes.used(from, to);
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

#[cfg(test)]
mod tests {
    use serving_core::request::Lane;
    use workload::record::{Outcome, RunPart};
    use workload::trace::Trace;

    use super::super::processes::Processes;
    use super::*;

    fn record(at_s: u64) -> RequestRecord {
        let at = Duration::from_secs(at_s);
        RequestRecord {
            id: format!("r-{at_s}"),
            part: RunPart::Measured,
            lane: Lane::Interactive,
            prompt_tokens: 1,
            cached_tokens: None,
            output_tokens: 1,
            scheduled: at,
            sent: at,
            tokens: vec![at + Duration::from_secs(1)],
            ended: at + Duration::from_secs(1),
            outcome: Outcome::Completed,
            output_hash: None,
            server: None,
        }
    }

    /// An answer of the warm-up keeps the server busy until the first measured request is due.
    #[test]
    fn processor_time_is_that_of_the_whole_measured_part() {
        let trace = Trace {
            name: "test".to_owned(),
            block_tokens: 0,
            requests: Vec::new(),
        };
        let mut plan = LoadPlan::new("http://127.0.0.1:1", trace);
        plan.warm_up = Duration::from_secs(1);
        let outcomes = Outcomes {
            exchanged: vec![(record(0), String::new()), (record(3), String::new())],
            processes: Processes::always_busy("node", Duration::from_secs(8)),
            started_ns: 0,
            is_interrupted: false,
            unfinished: 0,
        };
        let run = assemble(&plan, outcomes, BTreeMap::new()).run;
        let three = Duration::from_secs(3);
        assert_eq!((run.measured, run.server["node"].cpu), (three, three));
    }
}
