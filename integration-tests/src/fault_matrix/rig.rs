//! A cluster that can be hurt: failpoints in every process, a faulty proxy before every decode node, short timers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cli::local_cluster::{ClusterEvent, LocalMembership, Observer};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use service_runtime::failpoints::{FOLDER_VARIABLE, FaultPoint};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

use super::sums::{Sums, blocks};
use crate::chaos_proxy::{ChaosProxy, Fault};
use crate::cluster::{TestCluster, options_of};
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

/// Of [`Timers::Short`].
const SHORT_COORDINATOR: [&str; 3] = [
    "--lease-ms=2000",
    "--accept-timeout-ms=6000",
    "--stream-silence-ms-max=8000",
];
const SHORT_PREFILL: [&str; 1] = ["--hold-ms-max=4000"];
const SHORT_DECODE: [&str; 1] = ["--reservation-ms-max=8000"];

/// The binary with failpoints: `$BATON_FAILPOINTS_BIN` (scripts/test names its own), else where `scripts/build-failpoints` puts it.
///
/// # Errors
/// It is not there; the error says how to make it.
pub fn executable() -> Result<PathBuf> {
    let beside = || {
        let own = std::env::current_exe().ok()?;
        Some(own.ancestors().nth(3)?.join("failpoints/baton"))
    };
    let path = std::env::var_os("BATON_FAILPOINTS_BIN")
        .map(PathBuf::from)
        .or_else(beside);
    let path = path.context("no path for the binary with failpoints")?;
    ensure!(
        path.is_file(),
        "{} is not there: run scripts/build-failpoints (scripts/test does without it)",
        path.display()
    );
    Ok(path)
}

/// How long the processes wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timers {
    /// So short that a fault's end is seen within the lease's order of magnitude ([`LEASE`]).
    Short,
    /// The processes' defaults.
    Shipped,
}

/// What a rig is made with: chunks short enough that a prompt has several, pools small enough that blocks are reused all
/// the time.
#[derive(Clone, Debug)]
pub struct RigOptions {
    pub timers: Timers,
    pub topology: String,
    pub kv_cache_memory: String,
    /// Sequences a node runs at a time; `None` leaves the nodes' default.
    pub max_num_seqs: Option<u32>,
    /// What every process gets for a drain; `None` leaves their defaults.
    pub drain_ms_max: Option<u64>,
    /// `grpc` where the link's faults are wanted: shared memory has no link. `shm` is written in place; `shm-staged` goes
    /// through a ring.
    pub transports: &'static str,
    pub seed: u64,
    /// Tokens of a step: the chunk of a prompt.
    pub chunk_tokens: u32,
    pub prefix_cache: bool,
    /// T14: the cells of a campaign have probes beside their requests.
    pub is_probed: bool,
    /// The matrix strikes six requests in a few seconds: the budget's ratio would turn most into errors, and what comes
    /// after a retry is what is to be judged.
    pub retries_free_per_minute: u64,
    /// Put a proxy between the coordinator and prefill-0, too.
    pub prefill_proxy: bool,
    /// The processes find each other by an etcd of the rig's own.
    pub has_etcd: bool,
    pub threads: u32,
    /// `None` is the real model's.
    pub engine: Option<&'static str>,
    /// Beside the rig's own.
    pub coordinator_flags: Vec<String>,
}

impl RigOptions {
    pub fn new(topology: &str, seed: u64) -> Self {
        Self {
            timers: Timers::Short,
            topology: topology.to_owned(),
            kv_cache_memory: "80MiB".to_owned(),
            max_num_seqs: None,
            drain_ms_max: None,
            transports: "grpc",
            seed,
            chunk_tokens: 128,
            prefix_cache: true,
            is_probed: false,
            retries_free_per_minute: 100_000,
            prefill_proxy: false,
            has_etcd: false,
            threads: 1,
            engine: None,
            coordinator_flags: Vec::new(),
        }
    }
}

#[derive(Debug)]
pub struct Rig {
    pub cluster: TestCluster,
    proxies: Arc<BTreeMap<String, ChaosProxy>>,
    etcd: Option<Etcd>,
    folder: tempfile::TempDir,
    /// Killed and not started again.
    dead: BTreeSet<String>,
    /// What they had been doing has no end in the event log.
    dead_lives: BTreeSet<event_check::ProcessLife>,
    sums: Sums,
}

impl Rig {
    /// With `$BATON_RIG_LOGS` every process's stderr is kept in that folder.
    ///
    /// # Errors
    /// What the cluster's start says.
    pub async fn start(rig: &RigOptions) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut options = options_of(executable()?, &rig.topology)?;
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
        let proxies = Arc::new(proxies);
        let targets = proxies.clone();
        options.observer = Observer::new(move |event| {
            if let ClusterEvent::Listening { name, address } = event
                && let Some(proxy) = targets.get(name)
            {
                proxy.set_target(address);
            }
        });
        options.settings.threads_per_node = Some(rig.threads);
        options.settings.kv_cache_memory = Some(rig.kv_cache_memory.clone());
        options.settings.max_num_seqs = rig.max_num_seqs;
        options.settings.max_num_batched_tokens = Some(rig.chunk_tokens);
        options.settings.prefix_cache = Some(rig.prefix_cache);
        if rig.timers == Timers::Short {
            options.coordinator_flags = SHORT_COORDINATOR.map(Into::into).to_vec();
            options.prefill_flags = SHORT_PREFILL.map(Into::into).to_vec();
            options.decode_flags = SHORT_DECODE.map(Into::into).to_vec();
        }
        options.settings.engine = rig.engine.map(str::to_owned);
        let more = rig.coordinator_flags.iter().map(Into::into);
        options.coordinator_flags.extend(more);
        let retries = format!("--retries-free-per-minute={}", rig.retries_free_per_minute);
        options.coordinator_flags.push(retries.into());
        let kind = rig.transports.trim_end_matches("-staged");
        let transports = format!("--transports={kind}");
        options.prefill_flags.push(transports.clone().into());
        options.decode_flags.push(transports.into());
        if let Some(ms) = rig.drain_ms_max {
            let drain = || format!("--drain-ms-max={ms}").into();
            options.coordinator_flags.push(drain());
            options.prefill_flags.push(drain());
            options.decode_flags.push(drain());
        }
        options.log_dir = std::env::var_os("BATON_RIG_LOGS").map(PathBuf::from);
        let log = folder.path().join(EVENT_LOG);
        options.environment = vec![
            (FOLDER_VARIABLE.to_owned(), folder.path().display().to_string()),
            ("BATON_EVENT_LOG".to_owned(), log.display().to_string()),
        ];
        if kind != rig.transports {
            // Without the secret that `up` draws nobody writes in place.
            let no_secret = ("BATON_SHM_DIRECT_SECRET".to_owned(), String::new());
            options.environment.push(no_secret);
        }
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
            proxies,
            etcd,
            folder,
            dead: BTreeSet::new(),
            dead_lives: BTreeSet::new(),
            sums,
        })
    }

    pub fn base_url(&self) -> &str {
        self.cluster.cluster.base_url()
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

    fn event_log(&self) -> PathBuf {
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

    /// What was wrong with the sums of the pools since the last call.
    pub fn wrong_sums(&self) -> Vec<String> {
        self.sums.take()
    }

    /// Stops everything and reads the event log of every process, the dead ones too.
    ///
    /// # Errors
    /// A process had to be killed, or there is no log.
    pub async fn stop(self) -> Result<event_check::Findings> {
        self.heal_links();
        self.sums.stop();
        let log = self.event_log();
        self.cluster.stop().await?;
        event_check::check_file_with_dead(&log, self.dead_lives)
    }
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
