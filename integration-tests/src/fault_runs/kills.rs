//! T6: under 70 % of what the cluster can do, prefill and decode nodes are killed in turn; only what ran there pays.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::judged::{Judged, judge_all, rest};
use super::load::{self, Load, Rates, Sent, Terms};
use super::placements::{Moment, Placements};
use super::quantile;
use crate::fault_matrix::rig::Rig;
use crate::fault_matrix::strike::RESTART_AFTER;
use crate::fault_matrix::verdict::Connection;

/// T6's lines.
pub const SUCCESS_SHARE_MIN: f64 = 0.99;
pub const PLACED_WITHIN: Duration = Duration::from_secs(1);

/// What a run is made of.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Of a prefill node and of a decode node, so many each.
    pub kills_each: usize,
    pub terms: Terms,
}

/// What a run measured.
#[derive(Clone, Debug, Default)]
pub struct Kills {
    pub kills: usize,
    pub rates: Rates,
    pub judged: Judged,
    /// From a request's start to its end: of those that had to be placed again, and of all others.
    pub struck: Vec<Duration>,
    pub unstruck: Vec<Duration>,
    /// For each kill: until the last leg was given to the dead node. Zero when none was.
    pub last_placements: Vec<Duration>,
    pub placed_on_dead: usize,
    /// From the restart's begin until every pair works again.
    pub to_whole: Vec<Duration>,
    pub commits: usize,
    /// The commits by transport.
    pub handoffs: BTreeMap<String, u64>,
    pub violations: Vec<String>,
}

impl Kills {
    pub fn summary(&self) -> String {
        let ms = |of: &[Duration], q| quantile(of, q).as_millis();
        let added = self.added();
        format!(
            "{} kills, {:.1} requests/s offered of {:.1}; {}\n{} requests struck: p50 {} ms, p99 {} ms from start to end, the others p50 {} ms, p99 {} ms; added p50 {} ms, p99 {} ms\n{} legs given to a dead node, the last p50 {} ms, p99 {} ms, max {} ms after the kill\nwhole again p50 {} ms, p99 {} ms after the start; {} committed handoffs, by transport {:?}",
            self.kills,
            self.rates.offered,
            self.rates.capacity,
            self.judged.summary(),
            self.struck.len(),
            ms(&self.struck, 0.5),
            ms(&self.struck, 0.99),
            ms(&self.unstruck, 0.5),
            ms(&self.unstruck, 0.99),
            ms(&added, 0.5),
            ms(&added, 0.99),
            self.placed_on_dead,
            ms(&self.last_placements, 0.5),
            ms(&self.last_placements, 0.99),
            ms(&self.last_placements, 1.0),
            ms(&self.to_whole, 0.5),
            ms(&self.to_whole, 0.99),
            self.commits,
            self.handoffs,
        )
    }

    /// What was promised and did not hold.
    pub fn broken(&self) -> Vec<String> {
        let mut broken = self.violations.clone();
        let share = self.judged.success_share();
        if share < SUCCESS_SHARE_MIN {
            broken.push(format!("only {share:.4} of the requests were answered"));
        }
        let last = quantile(&self.last_placements, 1.0);
        if last > PLACED_WITHIN {
            broken.push(format!("a dead node was given work {last:?} after its death"));
        }
        broken
    }

    /// How much longer than the median of the others the struck ones took.
    pub fn added(&self) -> Vec<Duration> {
        let usual = quantile(&self.unstruck, 0.5);
        self.struck.iter().map(|took| took.saturating_sub(usual)).collect()
    }
}

/// # Errors
/// The rig broke.
pub async fn run(plan: Plan, told: impl Fn(&str, &Placements)) -> Result<Kills> {
    let options = load::rig_options(plan.terms);
    let (cases, answers) = load::baseline(plan.terms).await?;
    let mut rig = Rig::start(&options).await?;
    let mut run = Kills::default();
    let (load, rates) = Load::start(&rig, &cases, plan.terms).await;
    run.rates = rates;
    let mut retried = BTreeSet::new();
    for i in 0..plan.kills_each * 2 {
        tokio::time::sleep(plan.terms.calm).await;
        let role = ["prefill", "decode"][i % 2];
        let names = rig.names(role);
        let victim = names[(i / 2) % names.len()].clone();
        let placements = kill(&mut rig, (&victim, &load), &mut run).await?;
        told(&victim, &placements);
        run.kills += 1;
        run.placed_on_dead += placements.after.len();
        run.last_placements.push(placements.last().unwrap_or_default());
        retried.extend(placements.retried);
    }
    let ended = load.stop().await?;
    rest(&rig, &mut run.violations).await;
    run.judged = judge_all(&ended, &answers, |_| Connection::Holds);
    for Sent { seen, .. } in &ended.sent {
        let is_struck = seen.request_id.as_ref().is_some_and(|id| retried.contains(id));
        let of = if is_struck { &mut run.struck } else { &mut run.unstruck };
        of.push(seen.took);
    }
    run.violations.append(&mut run.judged.violations);
    run.violations.extend(rig.wrong_sums());
    run.handoffs = rig.handoffs().await?;
    let findings = rig.stop().await?;
    run.commits = findings.commits;
    run.violations.extend(findings.violations);
    Ok(run)
}

/// One death and one start, as a supervisor would do it, until the node serves again.
async fn kill(rig: &mut Rig, (victim, load): (&str, &Load), run: &mut Kills) -> Result<Placements> {
    let killed = Moment::now();
    rig.kill(victim).await?;
    tokio::time::sleep(RESTART_AFTER).await;
    let (restarted, dead_for) = (Instant::now(), killed.instant.elapsed());
    rig.restart(victim).await?;
    rig.wait_until_whole().await?;
    run.to_whole.push(restarted.elapsed());
    load.wait_for_those_before(restarted).await?;
    Placements::of(rig, victim, (killed, dead_for)).await
}
