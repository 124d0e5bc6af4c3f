//! The coordinator stands still under running streams and goes on: what it missed meanwhile is no verdict on its nodes.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::future::join_all;
use serde_json::Value;
use service_runtime::failpoints::FaultPoint;
use tokio::task::JoinHandle;

use super::judged::rest;
use super::placements::get;
use crate::fault_matrix::campaign;
use crate::fault_matrix::client::{self, Manner, Seen};
use crate::fault_matrix::rig::{Rig, RigOptions, Timers};
use crate::fault_matrix::verdict::{Connection, Outcome, judge};
use crate::scrape::Scrape;
use crate::token_exact::{Answer, Case};
use crate::wait::wait_until;

const NAME: &str = "coordinator";
const OUTPUT_TOKENS: u32 = 200;
const PROMPT_TOKENS: std::ops::Range<usize> = 32..96;
/// A stream that has had so many is in mid-stream, and has nearly all of its tokens ahead of it.
const BEGUN_TOKENS: u64 = 8;
/// Of the pause, in per cent: so long do nodes take for all tokens of a stream, so that it still runs when the coordinator
/// goes on.
const SLOWED_TO_PERCENT: u32 = 150;
const WITHIN: Duration = Duration::from_secs(180);

/// Longer than the lease as shipped (5 s), shorter than what a node's keepalive may take.
pub const SHIPPED: Planned = Planned {
    lasts: Duration::from_secs(8),
    keeps: Keeps::Streams,
};
/// Longer than any connection need live.
pub const LONG: Planned = Planned {
    lasts: Duration::from_secs(20),
    keeps: Keeps::Nodes,
};

/// What a pause must not cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeps {
    /// Neither a node nor the place of a stream.
    Streams,
    /// No node. Streams may move, and each move is counted.
    Nodes,
}

/// One pause to make.
#[derive(Clone, Copy, Debug)]
pub struct Planned {
    pub lasts: Duration,
    pub keeps: Keeps,
}

/// What a run is made of.
#[derive(Clone, Debug)]
pub struct Plan {
    pub pauses: Vec<Planned>,
    /// That run during each pause.
    pub streams: usize,
    pub timers: Timers,
    pub seed: u64,
}

/// What one pause came to.
#[derive(Clone, Debug)]
pub struct Pause {
    pub planned: Planned,
    /// Streams that ended in the tokens of the undisturbed run.
    pub completed: usize,
    /// In mid-stream when the coordinator stopped.
    pub in_mid_stream: usize,
    /// Streams that were placed more than once, by their records.
    pub placed_again: usize,
    /// By the coordinator's counters.
    pub migrations: f64,
    pub nodes_lost: f64,
    /// Nodes that are another life than before, or not ready.
    pub nodes_changed: Vec<String>,
    /// After the last answer, until no node held a block.
    pub to_rest: Duration,
    pub violations: Vec<String>,
}

impl Pause {
    /// What was promised and did not hold.
    fn broken(&self, streams: usize) -> Vec<String> {
        let lasts = self.planned.lasts;
        let mut broken = self.violations.clone();
        if self.completed < streams || self.in_mid_stream < streams {
            let (completed, middle) = (self.completed, self.in_mid_stream);
            broken.push(format!(
                "{completed} of {streams} completed, {middle} were in mid-stream"
            ));
        }
        if self.nodes_lost > 0.0 || !self.nodes_changed.is_empty() {
            let (lost, changed) = (self.nodes_lost, &self.nodes_changed);
            broken.push(format!("{lost} nodes were lost, other than before are {changed:?}"));
        }
        let moves = (self.placed_again, self.migrations);
        if self.planned.keeps == Keeps::Streams && moves != (0, 0.0) {
            broken.push(format!(
                "{} streams were placed again, {} of them migrated",
                moves.0, moves.1
            ));
        }
        if self.migrations != self.placed_again as f64 {
            broken.push(format!("{} migrations counted, {} streams moved", moves.1, moves.0));
        }
        broken.into_iter().map(|what| format!("{lasts:?}: {what}")).collect()
    }
}

/// What a run measured.
#[derive(Clone, Debug, Default)]
pub struct CoordinatorPauses {
    pub streams: usize,
    pub pauses: Vec<Pause>,
    pub violations: Vec<String>,
}

impl CoordinatorPauses {
    /// One line for each pause.
    pub fn summary(&self) -> String {
        let line = |pause: &Pause| {
            format!(
                "{:?}: {} of {} streams completed, {} placed again, {} migrations counted, {} nodes lost, at rest {:.0?} after the last answer",
                pause.planned.lasts,
                pause.completed,
                self.streams,
                pause.placed_again,
                pause.migrations,
                pause.nodes_lost,
                pause.to_rest
            )
        };
        self.pauses.iter().map(line).collect::<Vec<_>>().join("\n")
    }

    /// What was promised and did not hold.
    pub fn broken(&self) -> Vec<String> {
        let of_pauses = self.pauses.iter().flat_map(|pause| pause.broken(self.streams));
        of_pauses.chain(self.violations.iter().cloned()).collect()
    }
}

/// # Errors
/// The rig broke.
pub async fn run(plan: &Plan, told: impl Fn(&Pause)) -> Result<CoordinatorPauses> {
    let options = RigOptions {
        timers: plan.timers,
        prefix_cache: false,
        retries_free_per_minute: 10,
        ..RigOptions::new("2p2d", plan.seed)
    };
    let lengths = (OUTPUT_TOKENS, plan.seed);
    let (cases, answers) = campaign::baseline_of_length(options.nodes, plan.streams, PROMPT_TOKENS, lengths).await?;
    let rig = Rig::start(&options).await?;
    let mut run = CoordinatorPauses {
        streams: plan.streams,
        ..CoordinatorPauses::default()
    };
    for planned in &plan.pauses {
        let pause = pause(&rig, *planned, (&cases, &answers)).await?;
        told(&pause);
        run.pauses.push(pause);
    }
    run.violations.extend(rig.wrong_sums());
    run.violations.extend(rig.stop().await?.violations);
    Ok(run)
}

async fn pause(rig: &Rig, planned: Planned, (cases, answers): (&[Case], &[Answer])) -> Result<Pause> {
    rig.wait_until_whole().await?;
    let before = (lives(rig).await?, Counts::of(rig).await?);
    let last = last_record(rig).await?;
    let sleep = planned.lasts * SLOWED_TO_PERCENT / 100 / OUTPUT_TOKENS;
    arm_decode_nodes(rig, &format!("sleep({})", sleep.as_millis())).await?;
    let running: Vec<JoinHandle<Seen>> = cases.iter().map(|case| send(rig, case)).collect();
    let in_mid_stream = wait_for_the_middle(rig, (cases.len(), last)).await?;
    rig.pause(NAME);
    tokio::time::sleep(planned.lasts).await;
    rig.resume(NAME);
    arm_decode_nodes(rig, "off").await?;
    let seen = join_all(running).await;
    let mut violations = Vec::new();
    let mut completed = 0;
    for (i, seen) in seen.into_iter().enumerate() {
        let seen = seen.context("a client broke")?;
        match judge(Connection::Holds, &seen, &answers[i]) {
            Ok(Outcome::Completed) => completed += 1,
            Ok(_) => violations.push(format!("stream {i} ended by {:?}", seen.terminals)),
            Err(what) => violations.push(format!("stream {i}: {what}")),
        }
    }
    let to_rest = rest(rig, &mut violations).await;
    rig.wait_until_whole().await?;
    let (after, counts) = (lives(rig).await?, Counts::of(rig).await?);
    let is_other = |(name, life): &(&String, &Life)| after.get(*name) != Some(life);
    Ok(Pause {
        planned,
        completed,
        in_mid_stream,
        placed_again: placed_again(rig, cases.len()).await?,
        migrations: counts.migrations - before.1.migrations,
        nodes_lost: counts.nodes_lost - before.1.nodes_lost,
        nodes_changed: before.0.iter().filter(is_other).map(|(name, _)| name.clone()).collect(),
        to_rest,
        violations,
    })
}

fn send(rig: &Rig, case: &Case) -> JoinHandle<Seen> {
    let (http, url, case) = (rig.cluster.http.clone(), rig.base_url().to_owned(), case.clone());
    tokio::spawn(async move { client::stream(&http, &url, &case, Manner::staying(WITHIN)).await })
}

/// The coordinator's counters since its start.
#[derive(Clone, Copy, Debug)]
struct Counts {
    migrations: f64,
    nodes_lost: f64,
}

impl Counts {
    async fn of(rig: &Rig) -> Result<Self> {
        let scrape: Scrape = rig.cluster.metrics().await?;
        let sum = |name| scrape.sum(name, &[]).with_context(|| format!("no {name}"));
        Ok(Self {
            migrations: sum("baton_migrations_total")?,
            nodes_lost: sum("baton_nodes_lost_total")?,
        })
    }
}

/// A node's epoch and state.
type Life = (String, String);

async fn lives(rig: &Rig) -> Result<BTreeMap<String, Life>> {
    let page = get(rig, "/admin/cluster").await?;
    let nodes = page["nodes"].as_array().context("no nodes")?;
    let word = |node: &Value, field: &str| node[field].as_str().unwrap_or_default().to_owned();
    let life = |node| (word(node, "name"), (word(node, "epoch"), word(node, "state")));
    Ok(nodes.iter().map(life).collect())
}

async fn arm_decode_nodes(rig: &Rig, actions: &str) -> Result<()> {
    for name in rig.names("decode") {
        wait_until("a point armed", WITHIN, || async {
            match rig.arm(&name, (FaultPoint::MidDecode, actions)).await {
                true => Ok(()),
                false => Err("no answer"),
            }
        })
        .await?;
    }
    Ok(())
}

/// Waits until every stream has begun and says how many have and still run.
async fn wait_for_the_middle(rig: &Rig, (streams, before): (usize, u64)) -> Result<usize> {
    wait_until("the middle of the streams", WITHIN, || async {
        let page = get(rig, &format!("/admin/requests?limit={streams}")).await;
        let page = page.map_err(|error| format!("{error:#}"))?;
        let records = page["records"].as_array().cloned().unwrap_or_default();
        let of_now = records.iter().filter(|record| record["seq"].as_u64() > Some(before));
        let begun = of_now.filter(|record| record["output_tokens"].as_u64() >= Some(BEGUN_TOKENS));
        let (ended, running): (Vec<&Value>, Vec<&Value>) = begun.partition(|record| record["state"] == "ended");
        match ended.len() + running.len() {
            begun if begun == streams => Ok(running.len()),
            begun => Err(format!("{begun} of {streams} have begun")),
        }
    })
    .await
}

/// Its number: the streams of a pause come after it.
async fn last_record(rig: &Rig) -> Result<u64> {
    let page = get(rig, "/admin/requests?limit=1").await?;
    Ok(page["records"][0]["seq"].as_u64().unwrap_or(0))
}

async fn placed_again(rig: &Rig, streams: usize) -> Result<usize> {
    let page = get(rig, &format!("/admin/requests?limit={streams}")).await?;
    let records = page["records"].as_array().context("no records")?;
    let again = records.iter().filter(|record| record["attempts"].as_u64() > Some(1));
    Ok(again.count())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pause(keeps: Keeps, (migrations, nodes_lost): (usize, f64)) -> Pause {
        Pause {
            planned: Planned {
                lasts: Duration::from_secs(8),
                keeps,
            },
            completed: 6,
            in_mid_stream: 6,
            placed_again: migrations,
            migrations: migrations as f64,
            nodes_lost,
            nodes_changed: Vec::new(),
            to_rest: Duration::ZERO,
            violations: Vec::new(),
        }
    }

    #[test]
    fn a_long_pause_may_move_streams_and_none_may_lose_a_node() {
        assert_eq!(pause(Keeps::Streams, (0, 0.0)).broken(6), [""; 0]);
        assert_eq!(pause(Keeps::Nodes, (3, 0.0)).broken(6), [""; 0]);
        for broken in [
            pause(Keeps::Streams, (1, 0.0)),
            pause(Keeps::Nodes, (0, 1.0)),
            Pause {
                placed_again: 2,
                ..pause(Keeps::Nodes, (1, 0.0))
            },
            Pause {
                completed: 5,
                ..pause(Keeps::Nodes, (0, 0.0))
            },
        ] {
            assert_eq!(broken.broken(6).len(), 1, "{broken:?}");
        }
    }
}
