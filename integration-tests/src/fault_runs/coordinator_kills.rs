//! T11: the coordinator is killed under load and started again at its address; the nodes stay, and find it.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::judged::{Judged, judge_all, rest};
use super::load::{self, Load, Rates, Sent, Terms};
use super::placements::get;
use super::quantile;
use crate::fault_matrix::rig::{Rig, RigOptions};
use crate::fault_matrix::strike::RESTART_AFTER;
use crate::fault_matrix::verdict::Connection;

/// T11's line.
pub const FIRST_TOKEN_WITHIN: Duration = Duration::from_secs(3);
const NAME: &str = "coordinator";

/// What a run is made of.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub kills: usize,
    pub terms: Terms,
}

/// What a run measured.
#[derive(Clone, Debug, Default)]
pub struct CoordinatorKills {
    pub kills: usize,
    pub rates: Rates,
    /// For each kill: from the restart's begin to the first token that any client saw.
    pub to_first_token: Vec<Duration>,
    /// Of the prompt tokens of each of its lives, the share that a node still had in its prefix cache; `None` when none of
    /// its requests has ended. The first life begins with empty caches.
    pub hit_shares: Vec<Option<f64>>,
    /// Nodes that have another process id than before the first kill.
    pub node_restarts: usize,
    pub judged: Judged,
    /// After the last answer, until no node held a block or computed.
    pub to_rest: Duration,
    pub violations: Vec<String>,
}

impl CoordinatorKills {
    pub fn summary(&self) -> String {
        let (n, seconds) = (self.to_first_token.len(), |q| {
            quantile(&self.to_first_token, q).as_secs_f64()
        });
        let mut later: Vec<f64> = self.hit_shares.iter().skip(1).flatten().copied().collect();
        later.sort_by(f64::total_cmp);
        let percent = |share: Option<&f64>| share.map_or(0.0, |share| share * 100.0);
        format!(
            "{n} kills, {:.1} requests/s offered; {}\nprompt tokens found in prefix caches: {:.0} % in the first life, then least {:.0} %, median {:.0} %\nfirst new token after the restart began: p50 {:.2} s, p99 {:.2} s, max {:.2} s; {} nodes restarted; at rest {:.0?} after the last answer",
            self.rates.offered,
            self.judged.summary(),
            percent(self.hit_shares.first().and_then(Option::as_ref)),
            percent(later.first()),
            percent(later.get(later.len() / 2)),
            seconds(0.5),
            seconds(0.99),
            seconds(1.0),
            self.node_restarts,
            self.to_rest
        )
    }

    /// What was promised and did not hold.
    pub fn broken(&self) -> Vec<String> {
        let mut broken = self.violations.clone();
        if self.to_first_token.len() < self.kills {
            broken.push("after a restart no token came".to_owned());
        }
        let late = self.to_first_token.iter().filter(|after| **after > FIRST_TOKEN_WITHIN);
        broken.extend(late.map(|after| format!("the first new token came {after:?} after the restart began")));
        if self.node_restarts > 0 {
            broken.push(format!("{} nodes did not live through it", self.node_restarts));
        }
        if !self.judged.failed.is_empty() {
            broken.push(format!("requests ended by an error: {:?}", self.judged.failed));
        }
        broken
    }
}

/// # Errors
/// The rig broke.
pub async fn run(plan: Plan) -> Result<CoordinatorKills> {
    // Nodes keep their prefixes while the coordinator is away.
    let options = RigOptions {
        prefix_cache: true,
        ..load::rig_options(plan.terms)
    };
    let (cases, answers) = load::baseline(plan.terms).await?;
    let mut rig = Rig::start(&options).await?;
    let mut run = CoordinatorKills::default();
    let before = rig.pids();
    let (load, rates) = Load::start(&rig, &cases, plan.terms).await;
    run.rates = rates;
    run.kills = plan.kills;
    let (mut kills, mut restarts) = (Vec::new(), Vec::new());
    for _ in 0..plan.kills {
        tokio::time::sleep(plan.terms.calm).await;
        run.hit_shares.push(hit_share(&rig).await?);
        kills.push(Instant::now());
        rig.kill(NAME).await?;
        tokio::time::sleep(RESTART_AFTER).await;
        restarts.push(Instant::now());
        rig.restart(NAME).await?;
        rig.wait_until_whole().await?;
        load.wait_for_a_token_after(restarts[restarts.len() - 1]).await?;
    }
    let ended = load.stop().await?;
    run.hit_shares.push(hit_share(&rig).await?);
    run.to_rest = rest(&rig, &mut run.violations).await;
    run.to_first_token = restarts
        .iter()
        .filter_map(|at| first_token_after(*at, &ended.sent))
        .collect();
    let after = rig.pids();
    let is_other = |(name, pid): &(&String, &u32)| *name != NAME && after.get(*name) != Some(*pid);
    run.node_restarts = before.iter().filter(is_other).count();
    run.judged = judge_all(&ended, &answers, |sent| {
        match kills.iter().any(|kill| sent.ran_at(*kill)) {
            true => Connection::MayBreak,
            false => Connection::Holds,
        }
    });
    run.violations.append(&mut run.judged.violations);
    run.violations.extend(rig.wrong_sums());
    run.violations.extend(rig.stop().await?.violations);
    Ok(run)
}

/// By the records of this life of the coordinator; none when no request of it has ended.
async fn hit_share(rig: &Rig) -> Result<Option<f64>> {
    let page = get(rig, "/admin/requests?limit=1000").await?;
    let records = page["records"].as_array().context("no records")?;
    let ended = records.iter().filter(|record| record["outcome"] == "ok");
    let (mut hit, mut asked) = (0.0, 0.0);
    for record in ended {
        hit += record["cached_tokens"].as_f64().unwrap_or(0.0);
        asked += record["prompt_tokens"].as_f64().unwrap_or(0.0);
    }
    Ok((asked > 0.0).then(|| hit / asked))
}

/// Every stream of before is dead: any token that comes after the restart began is of a new one.
fn first_token_after(restart: Instant, sent: &[Sent]) -> Option<Duration> {
    let arrivals = sent.iter().flat_map(Sent::arrivals);
    let after = arrivals.filter(|at| *at >= restart).min()?;
    Some(after - restart)
}
