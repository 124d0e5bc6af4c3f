//! T7: nodes stand still for less than the failure timeout, for more, and for much more; what they do on waking hurts nobody.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use service_runtime::failpoints::FaultPoint;

use super::judged::{Judged, judge_all, rest};
use super::load::{self, Load, Rates, Terms};
use super::placements::{Moment, Placements, get};
use super::quantile;
use crate::fault_matrix::rig::{LEASE, Rig};
use crate::fault_matrix::verdict::Connection;
use crate::wait::wait_until;

/// T7's line, with a lease of two seconds.
pub const DETECTED_WITHIN: Duration = Duration::from_secs(3);
/// Under load a prefill node is in the middle of a transfer at once; under a light one the router may prefer the other, and
/// a busy machine answers late.
const REACHED_WITHIN: Duration = Duration::from_secs(20);
/// A node that runs answers its failpoint socket at once.
const ANSWER_WITHIN: Duration = Duration::from_secs(20);
const IN_TRANSFER: FaultPoint = FaultPoint::TransferHalf;
const LOOK_EVERY: Duration = Duration::from_millis(25);
/// A counter and the label that tells its values apart.
const FAILURES: (&str, &str) = ("baton_kv_transfer_failures_total", "reason");

/// What a run is made of.
#[derive(Clone, Debug)]
pub struct Plan {
    /// How long, and how often; prefill and decode nodes take turns.
    pub pauses: Vec<(Duration, usize)>,
    pub terms: Terms,
}

/// One pause.
#[derive(Clone, Debug)]
pub struct Pause {
    pub lasted: Duration,
    pub node: String,
    /// A prefill node that stood still in the middle of a transfer: the rest of it came late.
    pub is_in_transfer: bool,
    /// Until the coordinator said of the node that it is lost.
    pub lost_after: Option<Duration>,
    /// Until the last leg was given to it while it stood still.
    pub last_used: Option<Duration>,
}

/// What a run measured.
#[derive(Clone, Debug, Default)]
pub struct Pauses {
    pub rates: Rates,
    pub pauses: Vec<Pause>,
    /// Handoffs that prefill nodes began and did not see committed, by how they ended: who wakes hears of the cancel, meets
    /// the decode node's refusal or finds its own hold expired, whichever is first.
    pub cut_pushes: BTreeMap<String, f64>,
    /// Of these and of what decode nodes received, those that failed, by reason.
    pub failed_pushes: BTreeMap<String, f64>,
    pub failed_receipts: BTreeMap<String, f64>,
    /// Committed handoffs by transport.
    pub handoffs: BTreeMap<String, u64>,
    pub judged: Judged,
    pub violations: Vec<String>,
}

impl Pauses {
    /// One line for each length of pause, and one for all requests.
    pub fn summary(&self) -> String {
        let lengths: BTreeSet<Duration> = self.pauses.iter().map(|pause| pause.lasted).collect();
        let mut text = String::from(
            "| pause | n | in mid-transfer | lost | lost after p50 | p99 | last leg given after p50 | p99 |\n|---|---|---|---|---|---|---|---|\n",
        );
        for lasted in lengths {
            let of = || self.pauses.iter().filter(move |pause| pause.lasted == lasted);
            let lost: Vec<Duration> = of().filter_map(|pause| pause.lost_after).collect();
            let used: Vec<Duration> = of().map(|pause| pause.last_used.unwrap_or_default()).collect();
            let q = |of: &[Duration], q| format!("{:.2} s", quantile(of, q).as_secs_f64());
            let (n, times, cut) = (
                of().count(),
                lost.len(),
                of().filter(|pause| pause.is_in_transfer).count(),
            );
            let (lost50, lost99, used50, used99) = (q(&lost, 0.5), q(&lost, 0.99), q(&used, 0.5), q(&used, 0.99));
            let _ = writeln!(
                text,
                "| {lasted:?} | {n} | {cut} | {times} | {lost50} | {lost99} | {used50} | {used99} |"
            );
        }
        let _ = write!(
            text,
            "{:.1} requests/s offered; {}\nhandoffs by transport {:?}; not committed, on prefill nodes {:?}; that failed there {:?}, on decode nodes {:?}",
            self.rates.offered,
            self.judged.summary(),
            self.handoffs,
            self.cut_pushes,
            self.failed_pushes,
            self.failed_receipts
        );
        text
    }
}

/// # Errors
/// The rig broke.
pub async fn run(plan: &Plan, told: impl Fn(&Pause)) -> Result<Pauses> {
    let options = load::rig_options(plan.terms);
    let (cases, answers) = load::baseline(plan.terms).await?;
    let rig = Rig::start(&options).await?;
    let mut run = Pauses::default();
    let (load, rates) = Load::start(&rig, &cases, plan.terms).await;
    run.rates = rates;
    let nodes: Vec<String> = (0..2)
        .flat_map(|i| [format!("prefill-{i}"), format!("decode-{i}")])
        .collect();
    let lengths = plan
        .pauses
        .iter()
        .flat_map(|(lasts, times)| std::iter::repeat_n(*lasts, *times));
    for (i, lasts) in lengths.enumerate() {
        tokio::time::sleep(plan.terms.calm).await;
        let pause = pause(&rig, (&nodes[i % nodes.len()], lasts), &load).await?;
        told(&pause);
        run.pauses.push(pause);
    }
    let ended = load.stop().await?;
    rest(&rig, &mut run.violations).await;
    run.judged = judge_all(&ended, &answers, |_| Connection::Holds);
    run.violations.append(&mut run.judged.violations);
    run.cut_pushes = counted(&rig, "prefill", ("baton_handoffs_total", "outcome")).await?;
    run.cut_pushes.retain(|outcome, _| outcome != "handed_over");
    run.failed_pushes = counted(&rig, "prefill", FAILURES).await?;
    run.failed_receipts = counted(&rig, "decode", FAILURES).await?;
    run.violations.extend(rig.wrong_sums());
    run.handoffs = rig.handoffs().await?;
    run.violations.extend(rig.stop().await?.violations);
    for pause in &run.pauses {
        match pause.lost_after {
            Some(after) if pause.lasted < LEASE => run.violations.push(format!(
                "{} was evicted {after:?} into a pause of {:?}",
                pause.node, pause.lasted
            )),
            Some(after) if after > DETECTED_WITHIN => run
                .violations
                .push(format!("{} was missed only after {after:?}", pause.node)),
            None if pause.lasted > DETECTED_WITHIN => run
                .violations
                .push(format!("{} was not missed in {:?}", pause.node, pause.lasted)),
            _ => {}
        }
    }
    Ok(run)
}

/// A prefill node stops itself in the middle of a transfer: the rest of it is what comes late. A decode node is stopped
/// wherever it is, and so is a prefill node that has nothing to transfer.
async fn pause(rig: &Rig, (node, lasts): (&str, Duration), load: &Load) -> Result<Pause> {
    let is_in_transfer = node.starts_with(IN_TRANSFER.role()) && stops_itself(rig, node).await?;
    if !is_in_transfer {
        rig.pause(node);
    }
    let begun = Moment::now();
    let lost_after = watch(rig, (node, lasts), begun.instant).await?;
    let lasted = begun.instant.elapsed();
    rig.resume(node);
    rig.wait_until_whole().await?;
    load.wait_for_those_before(begun.instant + lasted).await?;
    let placements = Placements::of(rig, node, (begun, lasted)).await?;
    Ok(Pause {
        lasted: lasts,
        node: node.to_owned(),
        is_in_transfer,
        lost_after,
        last_used: placements.last(),
    })
}

/// False when it did not pass the point, which it will not do later either.
async fn stops_itself(rig: &Rig, node: &str) -> Result<bool> {
    let is_armed = rig.arm(node, (IN_TRANSFER, "1*return(stop)")).await;
    anyhow::ensure!(is_armed, "{node} cannot be armed");
    let stopped = wait_until("the point", REACHED_WITHIN, || {
        std::future::ready(if rig.is_paused(node) { Ok(()) } else { Err("not yet") })
    });
    if stopped.await.is_ok() {
        return Ok(true);
    }
    wait_until("the point unarmed, or passed after all", ANSWER_WITHIN, || async {
        match rig.arm(node, (IN_TRANSFER, "off")).await || rig.is_paused(node) {
            true => Ok(()),
            false => Err("no answer"),
        }
    })
    .await?;
    Ok(rig.is_paused(node))
}

/// Looks for `lasts` at what the coordinator says of the node.
async fn watch(rig: &Rig, (node, lasts): (&str, Duration), begun: Instant) -> Result<Option<Duration>> {
    let mut lost_after = None;
    while begun.elapsed() < lasts {
        if lost_after.is_none() && state(rig, node).await? == "lost" {
            lost_after = Some(begun.elapsed());
        }
        tokio::time::sleep(LOOK_EVERY.min(lasts.saturating_sub(begun.elapsed()))).await;
    }
    Ok(lost_after)
}

async fn state(rig: &Rig, node: &str) -> Result<String> {
    let page = get(rig, "/admin/cluster").await?;
    let mut nodes = page["nodes"].as_array().into_iter().flatten();
    let found = nodes.find(|found| found["name"] == node);
    let state = found.and_then(|found| found["state"].as_str());
    Ok(state.with_context(|| format!("{node} is not in {page}"))?.to_owned())
}

/// A counter of the nodes of a role since their start, by one of its labels.
async fn counted(rig: &Rig, role: &str, (name, label): (&str, &str)) -> Result<BTreeMap<String, f64>> {
    let mut by_label = BTreeMap::new();
    for node in rig.names(role) {
        let scrape = rig.cluster.node_metrics(&node).await?;
        for sample in scrape.matching(name, &[]).filter(|sample| sample.value > 0.0) {
            let value = sample.label(label).unwrap_or("?").to_owned();
            *by_label.entry(value).or_default() += sample.value;
        }
    }
    Ok(by_label)
}
