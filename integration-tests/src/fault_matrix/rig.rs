//! A cluster that can be hurt: failpoints in every process, a faulty proxy before every decode node, short timers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use cli::local_cluster::{ClusterEvent, LocalClusterOptions, LocalMembership, Observer};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use service_runtime::failpoints::{FOLDER_VARIABLE, FaultPoint};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

use super::nodes::Nodes;
pub use super::options::{RigOptions, Timers};
use super::sums::{Sums, blocks};
use crate::chaos_proxy::{ChaosProxy, Fault};
use crate::cluster::TestCluster;
use crate::etcd_process::Etcd;
use crate::event_check;
use crate::wait::wait_until;

/// TARGETS' test value; the coordinator's default is 5 s.
pub const LEASE: Duration = Duration::from_secs(2);
/// A process that stands still does not answer; one that runs does at once.
const ARM_WITHIN: Duration = Duration::from_millis(500);
/// Loading the model, connecting every pair, twice over on a busy machine.
const WHOLE_WITHIN: Duration = Duration::from_secs(60);
/// The node that `RigOptions::prefill_proxy` is about.
const FRONTED: &str = "prefill-0";

const EVENT_LOG: &str = "events.jsonl";

#[derive(Debug)]
pub struct Rig {
    pub cluster: TestCluster,
    nodes: Nodes,
    proxies: Arc<BTreeMap<String, ChaosProxy>>,
    etcd: Option<Etcd>,
    folder: tempfile::TempDir,
    /// Killed and not started again.
    dead: BTreeSet<String>,
    /// What they had been doing has no end in the event log.
    dead_lives: BTreeSet<event_check::ProcessLife>,
    /// What dead coordinators told last.
    handoffs_before: BTreeMap<String, u64>,
    sums: Sums,
}

impl Rig {
    /// With `$BATON_RIG_LOGS` every process's stderr is kept in that folder.
    ///
    /// # Errors
    /// What the cluster's start says.
    pub async fn start(rig: &RigOptions) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut options = rig.nodes.options(&rig.topology, folder.path())?;
        let proxies = Arc::new(proxies(rig, &mut options).await?);
        let targets = proxies.clone();
        options.observer = Observer::new(move |event| {
            if let ClusterEvent::Listening { name, address } = event
                && let Some(proxy) = targets.get(name)
            {
                proxy.set_target(address);
            }
        });
        rig.tell(&mut options);
        options.log_dir = std::env::var_os("BATON_RIG_LOGS").map(PathBuf::from);
        let log = folder.path().join(EVENT_LOG);
        options.environment.extend([
            (FOLDER_VARIABLE.to_owned(), folder.path().display().to_string()),
            ("BATON_EVENT_LOG".to_owned(), log.display().to_string()),
        ]);
        let etcd = match rig.has_etcd {
            true => Some(Etcd::start().await?),
            false => None,
        };
        if let Some(etcd) = &etcd {
            options.membership = LocalMembership::Etcd(etcd.address());
        }
        let cluster = TestCluster::start_with(options).await?;
        let sums = Sums::watch(&cluster);
        Ok(Self {
            cluster,
            nodes: rig.nodes,
            proxies,
            etcd,
            folder,
            dead: BTreeSet::new(),
            dead_lives: BTreeSet::new(),
            handoffs_before: BTreeMap::new(),
            sums,
        })
    }

    pub fn base_url(&self) -> &str {
        self.cluster.cluster.base_url()
    }

    pub fn nodes(&self) -> Nodes {
        self.nodes
    }

    /// Names of the running processes of a role.
    pub fn names(&self, role: &str) -> Vec<String> {
        let processes = self.cluster.cluster.processes().into_iter();
        let of_role = processes.filter(|process| process.role == role && !self.dead.contains(&process.name));
        of_role.map(|process| process.name).collect()
    }

    /// Arms a point of one process; false when the process does not answer, which one that stands still does not.
    pub async fn arm(&self, name: &str, (point, actions): (FaultPoint, &str)) -> bool {
        let path = self.folder.path().join(format!("{name}.sock"));
        let line = format!("{}={actions}\n", point.name());
        let armed = tokio::time::timeout(ARM_WITHIN, async {
            let mut stream = UnixStream::connect(path).await?;
            stream.write_all(line.as_bytes()).await?;
            let mut answer = String::new();
            BufReader::new(stream).read_line(&mut answer).await?;
            std::io::Result::Ok(answer == "ok\n")
        });
        matches!(armed.await, Ok(Ok(true)))
    }

    fn pid(&self, name: &str) -> Option<Pid> {
        let processes = self.cluster.cluster.processes();
        let pid = processes.iter().find(|process| process.name == name)?.pid;
        Pid::from_raw(i32::try_from(pid).ok()?)
    }

    fn signal(&self, name: &str, signal: Signal) {
        if let Some(pid) = self.pid(name) {
            // Gone is as good as told: whoever sent it looks at what the process does next.
            let _ = rustix::process::kill_process(pid, signal);
        }
    }
    pub fn pause(&self, name: &str) {
        self.signal(name, Signal::STOP);
    }
    pub fn resume(&self, name: &str) {
        self.signal(name, Signal::CONT);
    }

    /// Every thread of it stands still.
    pub fn is_paused(&self, name: &str) -> bool {
        let Some(pid) = self.pid(name) else { return false };
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
        let state = stat.rsplit(')').next().map(str::trim_start);
        state.is_some_and(|state| state.starts_with('T'))
    }

    pub async fn kill(&mut self, name: &str) -> Result<()> {
        if name == "coordinator" {
            // One that stands still tells nothing, and what it knew is lost.
            let told = tokio::time::timeout(ARM_WITHIN, self.handoffs()).await;
            if let Ok(Ok(told)) = told {
                self.handoffs_before = told;
            }
        }
        self.cluster.cluster.kill_node(name).await?;
        self.dead_lives.extend(event_check::last_life(&self.event_log(), name)?);
        self.gone(name);
        Ok(())
    }

    /// SIGTERM; returns how long it took to go and its exit code, none when a signal ended it. What it had been doing must
    /// have its end in the event log.
    ///
    /// # Errors
    /// It still runs after `within`.
    pub async fn terminate(&mut self, name: &str, within: Duration) -> Result<(Duration, Option<i32>)> {
        let asked = std::time::Instant::now();
        self.signal(name, Signal::TERM);
        let exit = self.cluster.cluster.wait_for_exit(name, within).await?;
        let took = asked.elapsed();
        self.gone(name);
        Ok((took, exit.status.code()))
    }

    fn gone(&mut self, name: &str) {
        self.dead.insert(name.to_owned());
        self.sums.forget(name);
    }

    /// Starts a process again that was killed or went, at once; a coordinator at the address it had. Returns when it says
    /// that it is ready, which is before everybody has found it again.
    pub async fn restart(&mut self, name: &str) -> Result<()> {
        self.cluster.cluster.restart_node(name).await?;
        self.dead.remove(name);
        self.sums.watch_too(&self.cluster, name);
        Ok(())
    }

    /// Process ids by name: a process that was started again has another.
    pub fn pids(&self) -> BTreeMap<String, u32> {
        let processes = self.cluster.cluster.processes().into_iter();
        processes.map(|process| (process.name, process.pid)).collect()
    }

    pub(super) fn event_log(&self) -> PathBuf {
        self.folder.path().join(EVENT_LOG)
    }

    pub fn has_coordinator(&self) -> bool {
        !self.dead.contains("coordinator")
    }

    /// # Errors
    /// The rig was made without one.
    pub fn etcd(&self) -> Result<&Etcd> {
        self.etcd.as_ref().context("this rig has no etcd")
    }

    /// # Errors
    /// As [`Rig::etcd`].
    pub fn etcd_mut(&mut self) -> Result<&mut Etcd> {
        self.etcd.as_mut().context("this rig has no etcd")
    }

    pub fn damage_links(&self, fault: Fault) {
        for proxy in self.proxies.values() {
            proxy.inject(fault);
        }
    }
    /// What is wrong on the way to one node: `decode-N` for its KV, `prefill-0` for its coordinator.
    pub fn damage(&self, node: &str, fault: Fault) {
        if let Some(proxy) = self.proxies.get(node) {
            proxy.inject(fault);
        }
    }

    pub fn heal_links(&self) {
        for proxy in self.proxies.values() {
            proxy.heal();
        }
    }
    /// Chunks of KV that arrived with a bit turned, since the start.
    pub fn flipped_chunks(&self) -> u64 {
        self.proxies.values().map(ChaosProxy::flipped).sum()
    }

    /// Waits until every pair works again.
    pub async fn wait_until_whole(&self) -> Result<()> {
        let wanted = self.names("prefill").len() * self.names("decode").len();
        wait_until("every pair usable", WHOLE_WITHIN, || async {
            let answer = self.cluster.http.get(self.cluster.url("/ready")).send().await;
            let ready: Value = answer
                .map_err(|e| e.to_string())?
                .json()
                .await
                .map_err(|e| e.to_string())?;
            match ready["usable_pairs"].as_u64() {
                Some(usable) if usable as usize >= wanted => Ok(()),
                _ => Err(ready.to_string()),
            }
        })
        .await
    }

    /// Whether no block of any node is held, by the nodes' own account; an error says which is.
    ///
    /// # Errors
    /// The first node that holds blocks, or does not answer.
    pub async fn is_at_rest(&self) -> Result<(), String> {
        let addresses = self.cluster.cluster.node_addresses();
        for name in self.names("prefill").into_iter().chain(self.names("decode")) {
            let address = addresses.get(&name).ok_or("no address")?;
            let report = blocks(&self.cluster.http, address).await;
            let report = report.map_err(|error| format!("{name}: {error:#}"))?;
            let busy = ["active", "reserved", "in_transfer", "quarantined"];
            let is_busy = busy.iter().any(|state| report["blocks"][*state] != 0);
            if is_busy || report["holders"].as_array().is_none_or(|holders| !holders.is_empty()) {
                return Err(format!("{name}: {report}"));
            }
        }
        Ok(())
    }

    /// Waits until no block of any node is held; says how long that took.
    pub async fn wait_for_rest(&self, within: Duration) -> Result<Duration> {
        let started = std::time::Instant::now();
        wait_until("every KV block at rest", within, || self.is_at_rest()).await?;
        Ok(started.elapsed())
    }

    /// Committed handoffs by transport, by the account of the coordinator and of those before it.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn handoffs(&self) -> Result<BTreeMap<String, u64>> {
        let mut by_transport = self.handoffs_before.clone();
        if !self.has_coordinator() {
            return Ok(by_transport);
        }
        let scrape = self.cluster.metrics().await.context("metrics")?;
        let committed = scrape.matching("baton_handoffs_total", &[("outcome", "committed")]);
        for sample in committed.filter(|sample| sample.value > 0.0) {
            let transport = sample.label("transport").unwrap_or("?").to_owned();
            *by_transport.entry(transport).or_default() += sample.value as u64;
        }
        Ok(by_transport)
    }

    /// What was wrong with the sums of the pools since the last call.
    pub fn wrong_sums(&self) -> Vec<String> {
        self.sums.take()
    }

    /// Stops everything and reads the event log of every process, the dead ones too, and what the drivers of GPUs tell.
    ///
    /// # Errors
    /// A process had to be killed, or there is no log.
    pub async fn stop(self) -> Result<event_check::Findings> {
        self.heal_links();
        self.sums.stop();
        let log = self.event_log();
        let mut in_order = self.pids();
        in_order.retain(|name, _| !self.dead.contains(name) && !name.starts_with("coordinator"));
        self.cluster.stop().await?;
        let mut findings = event_check::check_file_with_dead(&log, self.dead_lives)?;
        let wrong = self.nodes.wrong_on_gpus(self.folder.path(), &in_order)?;
        findings.violations.extend(wrong);
        Ok(findings)
    }
}

/// A proxy before each decode node, and before a prefill node if that is wanted.
async fn proxies(rig: &RigOptions, options: &mut LocalClusterOptions) -> Result<BTreeMap<String, ChaosProxy>> {
    let mut proxies = BTreeMap::new();
    for index in 0..count_of(&rig.topology, 'd') {
        let name = format!("decode-{index}");
        let proxy = ChaosProxy::start(rig.seed.wrapping_add(index)).await?;
        let advertise = format!("--kv-advertise={}", proxy.address());
        options.flags_by_name.insert(name.clone(), vec![advertise.into()]);
        proxies.insert(name, proxy);
    }
    if rig.prefill_proxy {
        let proxy = ChaosProxy::start(rig.seed).await?;
        let advertise = format!("--advertise={}", proxy.address());
        options.flags_by_name.insert(FRONTED.to_owned(), vec![advertise.into()]);
        proxies.insert(FRONTED.to_owned(), proxy);
    }
    Ok(proxies)
}

/// `2p3d` has three of `d`.
fn count_of(topology: &str, letter: char) -> u64 {
    let end = topology.find(letter).unwrap_or(0);
    let digits = topology[..end].rsplit(|c: char| !c.is_ascii_digit()).next();
    digits.and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_counted_by_their_letter() {
        assert_eq!(
            [count_of("2p3d", 'p'), count_of("2p3d", 'd'), count_of("12p1d", 'p')],
            [2, 3, 12]
        );
        assert_eq!(count_of("2c", 'd'), 0);
    }
}
