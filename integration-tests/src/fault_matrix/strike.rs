//! One cell of the matrix, carried out: requests run, the point is reached, the fault strikes, everything is judged.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::future::join_all;
use rand::Rng as _;
use rand::rngs::StdRng;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::aborts::{ABORTED_WITHIN, AbortWatch};
use super::cells::{Cell, FaultKind, Victim};
use super::client::{self, Manner, Seen, Terminal};
use super::readiness::{READY_WHILE_FAILING_MAX, ReadinessWatch};
use super::rig::{LEASE, Rig};
use super::verdict::{Outcome, judge};
use crate::chaos_proxy::Fault;
use crate::token_exact::{Answer, Case};

/// Requests of a cell: at least two on each node of two pools.
pub const REQUESTS_PER_CELL: usize = 6;
/// A whole answer takes two seconds here, a fault's worst detection ten, and the machine is shared.
const ENDED_WITHIN: Duration = Duration::from_secs(75);
/// The client of a `TestCluster` waits for 120 s: a request that it gives up would look like a broken connection.
const ENDED_WITHIN_MAX: Duration = Duration::from_secs(115);
const REACHED_WITHIN: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// SIGSTOP of TARGETS' matrix.
const PAUSE: Duration = Duration::from_secs(5);
/// Past the four seconds over which a pair judges its pace.
const LINK_FAULT: Duration = Duration::from_secs(6);
/// What a supervisor takes to start a dead process again.
pub const RESTART_AFTER: Duration = Duration::from_secs(1);
/// T4: "faults: at most two leases and a second".
pub const REST_WITHIN: Duration = Duration::from_secs(2 * LEASE.as_secs() + 1);

/// The requests of one cell with their fault-free answers.
#[derive(Clone, Copy, Debug)]
pub struct Workload<'a> {
    pub cases: &'a [Case],
    pub baseline: &'a [Answer],
    /// T14: probes beside them. They pass points too, so a cell may strike at one of theirs.
    pub is_probed: bool,
}

/// What a cell came to.
#[derive(Clone, Debug)]
pub struct CellReport {
    pub cell: Cell,
    pub outcomes: Vec<Outcome>,
    /// Codes of the explicit errors.
    pub errors: Vec<String>,
    /// In words; empty when everything was as promised.
    pub violations: Vec<String>,
    /// No request passed the point as often as it was to: nothing was tried.
    pub is_missed: bool,
    /// From the fault to the end of the last request.
    pub to_end: Option<Duration>,
    /// Of a node that was killed: from its death until a living node had ended a transfer with it, for each that was under way.
    pub to_aborts: Vec<Duration>,
    pub to_rest: Duration,
    /// Where there were probes: for how long it said ready while they failed.
    pub ready_while_failing: Option<Duration>,
    pub took: Duration,
}

impl CellReport {
    fn of(cell: Cell) -> Self {
        Self {
            cell,
            outcomes: Vec::new(),
            errors: Vec::new(),
            violations: Vec::new(),
            is_missed: false,
            to_end: None,
            to_aborts: Vec::new(),
            to_rest: Duration::ZERO,
            ready_while_failing: None,
            took: Duration::ZERO,
        }
    }
}

/// One request that runs.
struct Running {
    sent: Instant,
    leave: Option<oneshot::Sender<()>>,
    task: JoinHandle<Seen>,
}

/// Carries out one cell on a whole cluster. Afterwards the cluster is whole again, unless its coordinator died.
///
/// # Errors
/// The rig itself failed: nothing was learned.
pub async fn strike(rig: &mut Rig, cell: Cell, work: Workload<'_>, random: &mut StdRng) -> Result<CellReport> {
    let started = Instant::now();
    let armed = arm(rig, cell, random).await;
    let watch = work.is_probed.then(|| ReadinessWatch::start(rig));
    let mut running: Vec<Running> = work.cases.iter().map(|case| send(rig, case)).collect();
    let mut report = CellReport::of(cell);
    let (mut struck, mut aborts) = (None, None);
    match cell.fault {
        FaultKind::LoseAck => {}
        _ => match wait_for_the_point(rig, &armed, &running).await {
            Some(stopped) => {
                struck = Some(Instant::now());
                aborts = act(rig, cell, (&stopped, &mut running), random).await?;
                disarm(rig, cell, &armed).await;
            }
            None => report.is_missed = true,
        },
    }
    let last = judged(running, work, &mut report).await?;
    report.to_end = struck.map(|struck| last.saturating_duration_since(struck));
    disarm(rig, cell, &armed).await;
    rig.heal_links();
    if let Some(watch) = watch {
        let (ready, failed) = watch.stop().await;
        report.ready_while_failing = Some(ready);
        if ready > READY_WHILE_FAILING_MAX {
            let what = format!("ready for {ready:.1?} while {failed} probes failed");
            report.violations.push(what);
        }
    }
    report.to_rest = match rig.wait_for_rest(REST_WITHIN).await {
        Ok(to_rest) => to_rest,
        Err(error) => {
            report.violations.push(format!("{error:#}"));
            REST_WITHIN
        }
    };
    if let Some(aborts) = aborts {
        report.to_aborts = aborts.finish().await?;
        let late = report.to_aborts.iter().filter(|after| **after > ABORTED_WITHIN);
        let late = late.map(|after| format!("a transfer with the dead node was ended only after {after:.1?}"));
        report.violations.extend(late);
    }
    report.violations.extend(rig.wrong_sums());
    if rig.has_coordinator() {
        rig.wait_until_whole().await?;
    }
    report.took = started.elapsed();
    Ok(report)
}

/// Waits for the end of every request and compares each with its fault-free answer; returns when the last one ended.
async fn judged(running: Vec<Running>, work: Workload<'_>, report: &mut CellReport) -> Result<Instant> {
    let mut last = Instant::now();
    let ends = running
        .into_iter()
        .map(|request| async move { (request.sent, request.task.await) });
    for (i, (sent, seen)) in join_all(ends).await.into_iter().enumerate() {
        let seen = seen.context("a client broke")?;
        let end = sent + seen.took;
        last = if i == 0 { end } else { last.max(end) };
        let errors = seen.terminals.iter().filter_map(|terminal| match terminal {
            Terminal::Error(code) => Some(code.clone()),
            Terminal::Finished(_) => None,
        });
        report.errors.extend(errors);
        match judge(report.cell.into(), &seen, &work.baseline[i]) {
            Ok(Outcome::Failed) if report.cell.victim == Victim::Etcd => {
                report.violations.push(format!(
                    "request {i} failed, and only etcd was away: {:?}",
                    seen.terminals
                ));
            }
            Ok(outcome) => report.outcomes.push(outcome),
            Err(what) => report.violations.push(format!(
                "request {i} after {:?}: {what}; {:?}",
                seen.took, seen.terminals
            )),
        }
    }
    Ok(last)
}

fn send(rig: &Rig, case: &Case) -> Running {
    let (leave, left) = oneshot::channel();
    let (client, url, case) = (rig.cluster.http.clone(), rig.base_url().to_owned(), case.clone());
    let manner = Manner {
        leave: left,
        ..Manner::staying(rig.nodes().patience(ENDED_WITHIN).min(ENDED_WITHIN_MAX))
    };
    Running {
        sent: Instant::now(),
        leave: Some(leave),
        task: tokio::spawn(async move { client::stream(&client, &url, &case, manner).await }),
    }
}

/// Arms the point on every process that may pass it; the first to do so stands still.
async fn arm(rig: &Rig, cell: Cell, random: &mut StdRng) -> Vec<String> {
    let names = rig.names(cell.point.role());
    let action = match cell.fault {
        FaultKind::LoseAck => "fault",
        _ => "stop",
    };
    let actions = format!("{}*off->1*return({action})", cell.passages(random));
    for name in &names {
        rig.arm(name, (cell.point, &actions)).await;
    }
    names
}

async fn wait_for_the_point(rig: &Rig, armed: &[String], running: &[Running]) -> Option<String> {
    let (started, within) = (Instant::now(), rig.nodes().patience(REACHED_WITHIN));
    loop {
        if let Some(stopped) = armed.iter().find(|name| rig.is_paused(name)) {
            return Some(stopped.clone());
        }
        if started.elapsed() > within || running.iter().all(|request| request.task.is_finished()) {
            return None;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// No further passage stops anything; what stands still goes on.
async fn disarm(rig: &Rig, cell: Cell, armed: &[String]) {
    for name in armed {
        if !rig.arm(name, (cell.point, "off")).await {
            rig.resume(name);
            rig.arm(name, (cell.point, "off")).await;
        }
    }
}

/// The fault, at the point: `stopped` stands still there and goes on afterwards, unless it is the victim. A death of a node on a GPU
/// is watched.
async fn act(
    rig: &mut Rig,
    cell: Cell,
    (stopped, running): (&str, &mut [Running]),
    random: &mut StdRng,
) -> Result<Option<AbortWatch>> {
    match cell.fault {
        FaultKind::Kill if cell.victim == Victim::Etcd => {
            rig.etcd_mut()?.kill().await?;
            rig.resume(stopped);
            tokio::time::sleep(RESTART_AFTER).await;
            rig.etcd_mut()?.restart(true)?;
            rig.etcd()?.wait_until_it_answers().await?;
        }
        FaultKind::Pause if cell.victim == Victim::Etcd => {
            rig.etcd()?.pause();
            rig.resume(stopped);
            tokio::time::sleep(PAUSE).await;
            rig.etcd()?.resume();
        }
        FaultKind::Kill => {
            let victim = victim(rig, cell, stopped, random);
            return kill(rig, cell, (&victim, stopped)).await;
        }
        FaultKind::Pause => {
            let victim = victim(rig, cell, stopped, random);
            rig.pause(&victim);
            if victim != stopped {
                rig.resume(stopped);
            }
            tokio::time::sleep(PAUSE).await;
            rig.resume(&victim);
        }
        FaultKind::Leave => {
            if let Some(leave) = running.first_mut().and_then(|request| request.leave.take()) {
                // Finished already: it has nothing to leave.
                let _ = leave.send(());
            }
            rig.resume(stopped);
        }
        FaultKind::LoseAck => {}
        FaultKind::Reset
        | FaultKind::Blackhole
        | FaultKind::Slow
        | FaultKind::Flip
        | FaultKind::Cut
        | FaultKind::HalfClose => damage(rig, cell.fault, stopped, random).await,
    }
    Ok(None)
}

/// A death, and a new life of the node a moment later.
async fn kill(rig: &mut Rig, cell: Cell, (victim, stopped): (&str, &str)) -> Result<Option<AbortWatch>> {
    let is_node = matches!(cell.victim, Victim::Prefill | Victim::Decode);
    let watch = match is_node && rig.nodes().gpu.is_some() {
        true => Some(AbortWatch::start(&rig.event_log(), victim)?),
        false => None,
    };
    rig.kill(victim).await?;
    rig.resume(stopped);
    if cell.victim != Victim::Coordinator {
        tokio::time::sleep(RESTART_AFTER).await;
        rig.restart(victim).await?;
    }
    Ok(watch)
}

async fn damage(rig: &Rig, fault: FaultKind, stopped: &str, random: &mut StdRng) {
    let (fault, lasts) = match fault {
        FaultKind::Blackhole => (Fault::Blackhole, Some(LINK_FAULT)),
        FaultKind::Slow => {
            let bytes_per_second = 1024;
            (Fault::Rate { bytes_per_second }, Some(LINK_FAULT))
        }
        FaultKind::Flip => (Fault::FlipBits { chunks: 4 }, None),
        FaultKind::Cut => {
            let bytes = random.random_range(1..400_000);
            (Fault::CutAfter { bytes }, None)
        }
        FaultKind::HalfClose => (Fault::HalfClose, None),
        _ => (Fault::Reset, None),
    };
    rig.damage_links(fault);
    rig.resume(stopped);
    if let Some(lasts) = lasts {
        tokio::time::sleep(lasts).await;
        rig.heal_links();
    }
}

/// The process at the point when it has the victim's role, else one of that role.
fn victim(rig: &Rig, cell: Cell, stopped: &str, random: &mut StdRng) -> String {
    if cell.point.role() == cell.victim.name() {
        return stopped.to_owned();
    }
    let names = rig.names(cell.victim.name());
    match names.is_empty() {
        true => stopped.to_owned(),
        false => names[random.random_range(0..names.len())].clone(),
    }
}
