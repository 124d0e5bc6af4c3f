//! T12: etcd stands still, dies and comes back, with its data or without; nobody is turned away and nobody is evicted.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::judged::{Judged, judge_all, rest};
use super::load::{self, Load, Rates, Sent, Terms};
use super::placements::get;
use super::quantile;
use crate::etcd_process;
use crate::fault_matrix::rig::{Rig, RigOptions};
use crate::fault_matrix::verdict::{Connection, judge};

/// T12's line: two leases.
pub const MEMBERS_WITHIN: Duration = Duration::from_secs(2 * etcd_process::LEASE.as_secs());
/// When somebody is missing for longer than this, he does not come by himself.
const MEMBERS_LIMIT: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What happens to etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum How {
    /// SIGSTOP, then SIGCONT.
    Stopped,
    /// SIGKILL, then started with its data.
    Killed,
    /// SIGKILL, then started with nothing.
    Emptied,
}

impl How {
    pub const ALL: [Self; 3] = [Self::Stopped, Self::Killed, Self::Emptied];
}

/// What a run is made of: each way, for each length, so often.
#[derive(Clone, Debug)]
pub struct Plan {
    pub outages: Vec<(How, Duration)>,
    pub terms: Terms,
}

/// One outage.
#[derive(Clone, Debug)]
pub struct Outage {
    pub how: How,
    pub lasted: Duration,
    /// From the moment that etcd answers again until every member stands in it and the coordinator has seen that.
    pub to_members: Option<Duration>,
    /// Looks at which some node was not in service, although all live.
    pub evictions: usize,
    /// Requests that ran at some time of it, and how many of them did not end in the fault-free tokens.
    pub requests: usize,
    pub failed_requests: usize,
}

/// What a run measured.
#[derive(Clone, Debug, Default)]
pub struct Outages {
    pub rates: Rates,
    pub outages: Vec<Outage>,
    pub judged: Judged,
    pub violations: Vec<String>,
}

impl Outages {
    pub fn summary(&self) -> String {
        let mut rows: BTreeMap<(How, Duration), Vec<&Outage>> = BTreeMap::new();
        for outage in &self.outages {
            rows.entry((outage.how, outage.lasted)).or_default().push(outage);
        }
        let mut text = String::from(
            "| etcd | for | n | requests meanwhile | failed | false evictions | all members again p50 | max |\n|---|---|---|---|---|---|---|---|\n",
        );
        for ((how, lasted), of) in rows {
            let sum = |count: fn(&Outage) -> usize| of.iter().map(|outage| count(outage)).sum::<usize>();
            let again: Vec<Duration> = of.iter().filter_map(|outage| outage.to_members).collect();
            let (n, p50, max) = (of.len(), quantile(&again, 0.5), quantile(&again, 1.0));
            let (requests, failed) = (sum(|o| o.requests), sum(|o| o.failed_requests));
            let evictions = sum(|outage| outage.evictions);
            let _ = writeln!(
                text,
                "| {how:?} | {lasted:?} | {n} | {requests} | {failed} | {evictions} | {p50:.2?} | {max:.2?} |"
            );
        }
        let _ = write!(
            text,
            "{:.1} requests/s offered; {}",
            self.rates.offered,
            self.judged.summary()
        );
        text
    }

    /// What was promised and did not hold.
    pub fn broken(&self) -> Vec<String> {
        let mut broken = self.violations.clone();
        for outage in &self.outages {
            let of = format!("etcd {:?} for {:?}", outage.how, outage.lasted);
            if outage.evictions > 0 {
                broken.push(format!(
                    "{of}: at {} looks a live node was out of service",
                    outage.evictions
                ));
            }
            if outage.failed_requests > 0 {
                broken.push(format!("{of}: {} requests failed", outage.failed_requests));
            }
            match outage.to_members {
                Some(took) if took <= MEMBERS_WITHIN => {}
                took => broken.push(format!(
                    "{of}: all members again after {took:?}, the line is {MEMBERS_WITHIN:?}"
                )),
            }
        }
        if !self.judged.failed.is_empty() {
            broken.push(format!("requests ended by an error: {:?}", self.judged.failed));
        }
        broken
    }
}

/// # Errors
/// The rig broke.
pub async fn run(plan: &Plan, told: impl Fn(&Outage)) -> Result<Outages> {
    let options = RigOptions {
        has_etcd: true,
        ..load::rig_options(plan.terms)
    };
    let (cases, answers) = load::baseline(plan.terms).await?;
    let mut rig = Rig::start(&options).await?;
    let mut run = Outages::default();
    let (load, rates) = Load::start(&rig, &cases, plan.terms).await;
    run.rates = rates;
    wait_for_members(&rig, Instant::now())
        .await
        .context("before any outage")?;
    let mut spans = Vec::new();
    for (how, lasts) in &plan.outages {
        tokio::time::sleep(plan.terms.calm).await;
        let begun = Instant::now();
        let outage = outage(&mut rig, (*how, *lasts)).await?;
        spans.push((begun, Instant::now()));
        told(&outage);
        run.outages.push(outage);
    }
    let ended = load.stop().await?;
    rest(&rig, &mut run.violations).await;
    for (outage, (begun, over)) in run.outages.iter_mut().zip(spans) {
        let meanwhile = |sent: &&Sent| sent.started <= over && sent.started + sent.seen.took >= begun;
        let is_good = |sent: &Sent| {
            let outcome = judge(Connection::Holds, &sent.seen, &answers[sent.which]);
            outcome == Ok(crate::fault_matrix::verdict::Outcome::Completed)
        };
        let of: Vec<&Sent> = ended.sent.iter().filter(meanwhile).collect();
        outage.requests = of.len();
        outage.failed_requests = of.iter().filter(|sent| !is_good(sent)).count();
    }
    run.judged = judge_all(&ended, &answers, |_| Connection::Holds);
    run.violations.append(&mut run.judged.violations);
    run.violations.extend(rig.wrong_sums());
    run.violations.extend(rig.stop().await?.violations);
    Ok(run)
}

async fn outage(rig: &mut Rig, (how, lasts): (How, Duration)) -> Result<Outage> {
    let etcd = rig.etcd_mut()?;
    match how {
        How::Stopped => etcd.pause(),
        How::Killed | How::Emptied => etcd.kill().await?,
    }
    let begun = Instant::now();
    let mut evictions = 0;
    while begun.elapsed() < lasts {
        evictions += usize::from(is_anybody_out(rig).await?);
        tokio::time::sleep(LOOK_EVERY).await;
    }
    let etcd = rig.etcd_mut()?;
    match how {
        How::Stopped => etcd.resume(),
        How::Killed | How::Emptied => etcd.restart(how == How::Killed)?,
    }
    etcd.wait_until_it_answers().await?;
    let back = Instant::now();
    let (to_members, out_meanwhile) = wait_for_members(rig, back).await?;
    Ok(Outage {
        how,
        lasted: lasts,
        to_members,
        evictions: evictions + out_meanwhile,
        requests: 0,
        failed_requests: 0,
    })
}

/// When everybody is registered again, and how often somebody was out of service meanwhile. Looks on for a lease after that:
/// what was believed lost would go then.
async fn wait_for_members(rig: &Rig, back: Instant) -> Result<(Option<Duration>, usize)> {
    let (mut evictions, mut to_members) = (0, None);
    let mut until = back + MEMBERS_LIMIT;
    while Instant::now() < until {
        evictions += usize::from(is_anybody_out(rig).await?);
        if to_members.is_none() && is_everybody_registered(rig).await? {
            to_members = Some(back.elapsed());
            until = Instant::now() + etcd_process::LEASE * 2;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Ok((to_members, evictions))
}

/// By etcd's own account, and by the coordinator's.
async fn is_everybody_registered(rig: &Rig) -> Result<bool> {
    let names: Vec<String> = ["prefill", "decode", "coordinator"]
        .iter()
        .flat_map(|role| rig.names(role))
        .collect();
    let Ok(keys) = rig.etcd()?.registered().await else {
        return Ok(false);
    };
    let seen = get(rig, "/admin/cluster").await?["membership"].take();
    let listed = seen["nodes"].as_array().map_or(0, Vec::len);
    let is_seen = seen["registered"] == true && seen["is_stale"] == false && listed + 1 == names.len();
    Ok(keys.len() >= names.len() && is_seen)
}

/// Every process lives: whoever is not ready was evicted.
async fn is_anybody_out(rig: &Rig) -> Result<bool> {
    let page = get(rig, "/admin/cluster").await?;
    let nodes = page["nodes"].as_array().context("no nodes")?;
    Ok(nodes.len() != 4 || nodes.iter().any(|node| node["state"] != "ready"))
}
