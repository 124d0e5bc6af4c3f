//! Runs one arm once: fresh processes, the load, and away with the processes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;
use tokio_util::sync::CancellationToken;
use workload::record::Run;
use workload::trace::Trace;

use super::budget::Deadline;
use super::machine::Machine;
use super::point::Point;
use super::progress::Shown;
use super::sender::{self, Placement};
use crate::bench::load::plan::{LoadPlan, Pace};

/// Requests before the load, so that connections, links and memory are there.
pub(super) const WARM_UP_REQUESTS: u32 = 4;

/// Where an arm is.
#[derive(Clone, Debug)]
pub(super) enum Place {
    /// On this machine, started for each run.
    Here(Point),
    /// Somebody else's cluster.
    There { url: String },
}

/// An arm as it is run.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub name: String,
    pub place: Place,
}

/// What is sent in one run.
#[derive(Clone, Debug)]
pub(super) struct Load {
    pub trace: Trace,
    pub pace: Pace,
    /// The seed of the prompts' content.
    pub seed: u64,
    pub warm_up: Duration,
    pub cool_down: Duration,
    /// An answer that has not ended by then counts as failed.
    pub request_timeout: Duration,
}

/// What all runs share.
#[derive(Debug)]
pub(super) struct Runner {
    pub machine: Option<Machine>,
    pub model: Option<String>,
    pub api_key: Option<String>,
    pub ca: Option<PathBuf>,
    pub deadline: Deadline,
    pub stop: CancellationToken,
    pub placement: Placement,
    pub shown: Shown,
}

impl Runner {
    /// # Errors
    /// The cluster does not start, or no request of the warm-up is answered.
    pub async fn run(&mut self, target: &Target, load: Load) -> anyhow::Result<Run> {
        match (&target.place, self.machine.clone()) {
            (Place::There { url }, _) => {
                let plan = self.plan(target, url, load);
                self.send(plan, None).await
            }
            (Place::Here(point), Some(machine)) => {
                let cluster = machine.start(point).await?;
                let mut plan = self.plan(target, cluster.base_url(), load);
                let processes = cluster.processes();
                plan.server.pids = processes
                    .into_iter()
                    .map(|process| (process.name, process.pid))
                    .collect();
                let run = self.send(plan, Some(machine.cores.others.clone())).await;
                machine.stop(&cluster).await;
                run
            }
            (Place::Here(_), None) => anyhow::bail!("{} is no deployed cluster", target.name),
        }
    }

    fn plan(&self, target: &Target, url: &str, load: Load) -> LoadPlan {
        let mut plan = LoadPlan::new(url, load.trace);
        plan.name.clone_from(&target.name);
        plan.server.model.clone_from(&self.model);
        plan.server.api_key.clone_from(&self.api_key);
        plan.server.ca.clone_from(&self.ca);
        plan.pace = load.pace;
        plan.seed = load.seed;
        plan.warm_up_requests = WARM_UP_REQUESTS;
        plan.warm_up = load.warm_up;
        plan.cool_down = load.cool_down;
        plan.request_timeout = load.request_timeout;
        plan
    }

    async fn send(&mut self, plan: LoadPlan, cores: Option<Vec<u32>>) -> anyhow::Result<Run> {
        let stop = self.stop.child_token();
        let overrun = stop.clone();
        // The plan of time leaves room for every run. This is for a machine that became slower meanwhile.
        let limit = self.deadline.left();
        let guard = tokio::spawn(async move {
            if let Some(limit) = limit {
                tokio::time::sleep(limit).await;
                overrun.cancel();
            }
        });
        let shown = self.shown.clone();
        let sent = sender::send(plan, cores, stop, move |progress| shown.during(progress)).await;
        guard.abort();
        let (mut run, placement) = sent?;
        self.placement = placement;
        number_by_place(&mut run);
        Ok(run)
    }
}

/// Ids have a random part, so that no server takes two runs for one. Here the same request of the trace needs the same id in every
/// arm: its place in the trace.
fn number_by_place(run: &mut Run) {
    let mut prefixes = BTreeMap::new();
    for record in &mut run.records {
        if let Some((prefix, place)) = record.id.rsplit_once('-') {
            *prefixes.entry(prefix.to_owned()).or_insert(0) += 1;
            record.id = format!("request-{place}");
        }
    }
    run.environment
        .insert("request_id_prefixes".to_owned(), json!(prefixes));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::test_kit;

    #[test]
    fn the_same_request_has_the_same_id_in_every_run() {
        let mut run = test_kit::run("a", vec![test_kit::record(3, &[1.0])]);
        run.records[0].id = "bench-0badcafe-17".to_owned();
        number_by_place(&mut run);
        assert_eq!(run.records[0].id, "request-17");
        assert_eq!(run.environment["request_id_prefixes"]["bench-0badcafe"], 1);
    }
}
