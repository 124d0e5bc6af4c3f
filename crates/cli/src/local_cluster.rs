//! A cluster on this machine: one process per node, started, watched and drained. `baton up` and the tests both use it.

mod before_start;
pub mod etcd;
mod events;
mod failure;
mod flags;
mod kind;
mod log_file;
mod membership;
mod memory;
mod options;
mod process;
mod ready;
mod secret;
mod specs;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use crate::http;
pub(crate) use before_start::Refused;
use etcd::LocalEtcd;
pub use events::{ClusterEvent, Observer};
pub use failure::{LocalClusterError, NodeExit};
pub use kind::ProcessKind;
pub(crate) use log_file::{path as log_path, path_before as log_path_before};
pub use membership::LocalMembership;
pub use options::{ClusterSettings, LocalClusterOptions};
use process::{Process, ProcessState};
pub use secret::ClusterSecret;
pub use specs::ProcessSpec;

/// etcd elects a leader within a second and restarts in a few. One that takes longer is not there.
const ETCD_ANSWERS_WITHIN: Duration = Duration::from_secs(5);
/// The time for a node to exit once the coordinator is gone. By then it has nothing left to finish.
const NODE_EXIT_WITHIN: Duration = Duration::from_secs(5);

/// One row of "what runs where".
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ProcessInfo {
    pub name: String,
    pub role: String,
    pub pid: u32,
    /// Its address: HTTP for the coordinator, gRPC and `/metrics` for a node.
    pub address: String,
}

/// A running cluster. Dropping it kills the processes that still run; [`LocalCluster::stop`] drains first.
#[derive(Debug)]
pub struct LocalCluster {
    options: LocalClusterOptions,
    processes: BTreeMap<String, Process>,
    /// The names in start order, for the table.
    order: Vec<String>,
    exits: mpsc::Receiver<String>,
    exits_sender: mpsc::Sender<String>,
    /// The addresses of each coordinator, the first coordinator first.
    base_urls: Vec<String>,
    control_addresses: Vec<String>,
    /// The etcd that was started for this cluster.
    etcd: Option<LocalEtcd>,
}

impl LocalCluster {
    /// Starts coordinator and nodes and waits until every node has announced ready, `/ready` answers 200 and every
    /// prefill node has a working link to every decode node.
    ///
    /// # Errors
    /// A process that could not be started or ended early (with its last lines), or not ready within
    /// `options.start_within`. Whatever had been started is killed.
    pub async fn start(mut options: LocalClusterOptions) -> Result<Self, LocalClusterError> {
        let deadline = Instant::now() + options.start_within;
        let etcd = match options.membership {
            LocalMembership::StartEtcd => {
                let etcd = LocalEtcd::start(&options.executable)
                    .await
                    .map_err(LocalClusterError::Start)?;
                options.observer.tell(&ClusterEvent::EtcdStarted {
                    address: etcd.address.clone(),
                    pid: etcd.pid,
                });
                options.membership = LocalMembership::Etcd(format!("etcd://{}/local", etcd.address));
                Some(etcd)
            }
            LocalMembership::Etcd(_) => {
                let within = ETCD_ANSWERS_WITHIN.min(options.start_within);
                if let Some(kind) = options.membership_in_use() {
                    options.membership.first_answer(&kind, within).await?;
                }
                None
            }
            LocalMembership::Embedded => None,
        };
        // One slot for each process and start. Restarts are few, and each exit is read or fits.
        let capacity = options.topology.node_count() as usize + options.coordinator_count as usize;
        let (exits_sender, exits) = mpsc::channel(capacity.saturating_mul(4));
        let mut cluster = Self {
            processes: BTreeMap::new(),
            order: Vec::new(),
            base_urls: Vec::new(),
            control_addresses: Vec::new(),
            etcd,
            options,
            exits,
            exits_sender,
        };
        for spec in cluster.options.coordinators() {
            let name = spec.name.clone();
            cluster.start_process(spec)?;
            let state = cluster
                .wait_for(&name, deadline, |state| state.listening.is_some())
                .await?;
            let (url, control) = cluster.addresses(state);
            cluster.base_urls.push(url);
            cluster.control_addresses.push(control);
        }
        for spec in cluster.options.nodes(&cluster.control_addresses.join(",")) {
            cluster.start_process(spec)?;
        }
        for name in cluster.order.clone() {
            cluster.wait_for(&name, deadline, |state| state.is_ready).await?;
        }
        for url in cluster.base_urls.clone() {
            cluster.wait_for_ready(&url, deadline).await?;
        }
        Ok(cluster)
    }

    /// `http://HOST:PORT` of the API, or `https://`, at the first coordinator.
    pub fn base_url(&self) -> &str {
        self.base_urls.first().map_or("", String::as_str)
    }

    /// The addresses of every coordinator's API.
    pub fn base_urls(&self) -> &[String] {
        &self.base_urls
    }

    /// host:port of the first coordinator, where further nodes join.
    pub fn control_address(&self) -> &str {
        self.control_addresses.first().map_or("", String::as_str)
    }

    /// The etcd that was started for this cluster.
    pub fn etcd(&self) -> Option<&LocalEtcd> {
        self.etcd.as_ref()
    }

    /// Name and address of every process that listens.
    pub fn node_addresses(&self) -> BTreeMap<String, String> {
        self.processes()
            .into_iter()
            .map(|info| (info.name, info.address))
            .collect()
    }

    /// Every process in start order, the coordinator first.
    pub fn processes(&self) -> Vec<ProcessInfo> {
        let info = |name: &String| {
            let process = self.processes.get(name)?;
            let listening = process.state.borrow().listening.clone()?;
            Some(ProcessInfo {
                name: name.clone(),
                role: process.spec.kind.to_string(),
                pid: process.pid,
                address: listening.http.or(listening.address).unwrap_or_default(),
            })
        };
        self.order.iter().filter_map(info).collect()
    }

    /// Waits until some process has exited without being asked to. Returns each such exit once.
    pub async fn next_exit(&mut self) -> NodeExit {
        loop {
            // The cluster holds a sender itself, so the channel never ends.
            if let Some(name) = self.exits.recv().await
                && let Some(exit) = self.exit_of(&name)
            {
                return exit;
            }
        }
    }

    /// Sends SIGKILL to one process. Returns once the process is gone.
    ///
    /// # Errors
    /// No process has that name.
    pub async fn kill_node(&self, name: &str) -> Result<(), LocalClusterError> {
        let process = self.process(name)?;
        process.kill();
        process.wait_for_exit().await;
        Ok(())
    }

    /// Asks one process to drain and exit, as SIGTERM would; returns at once.
    ///
    /// # Errors
    /// No process has that name.
    pub fn drain_node(&self, name: &str) -> Result<(), LocalClusterError> {
        self.process(name)?.drain();
        Ok(())
    }

    /// Waits until one process has exited by itself.
    ///
    /// # Errors
    /// No process has that name, or it still runs after `within`.
    pub async fn wait_for_exit(&self, name: &str, within: Duration) -> Result<NodeExit, LocalClusterError> {
        let process = self.process(name)?;
        // A process that is late has no status yet.
        let _ = tokio::time::timeout(within, process.wait_for_exit()).await;
        self.exit_of(name).ok_or_else(|| LocalClusterError::NotReady {
            within,
            waiting_for: format!("{name} to exit"),
        })
    }

    /// Starts an exited process again, with the same name and flags, and waits until it is ready. A coordinator that nodes
    /// do not find by etcd listens at the address of its last life.
    ///
    /// # Errors
    /// As [`LocalCluster::start`].
    pub async fn restart_node(&mut self, name: &str) -> Result<(), LocalClusterError> {
        let process = self.process(name)?;
        let mut spec = process.spec.clone();
        let is_found_by_etcd = matches!(self.options.membership, LocalMembership::Etcd(_));
        if let Some(listening) = process.state.borrow().listening.as_ref().filter(|_| !is_found_by_etcd) {
            spec.listen_again(listening);
        }
        process.kill();
        process.wait_for_exit().await;
        self.start_process(spec)?;
        let deadline = Instant::now() + self.options.start_within;
        let state = self.wait_for(name, deadline, |state| state.is_ready).await?;
        let is_coordinator =
            |known: &&String| self.processes.get(*known).map(|p| p.spec.kind) == Some(ProcessKind::Coordinator);
        let index = self.order.iter().filter(is_coordinator).position(|known| known == name);
        if let Some(index) = index {
            // With etcd it took any free port. Nodes learn the port from etcd.
            let (url, control) = self.addresses(state);
            self.base_urls[index] = url;
            self.control_addresses[index] = control;
        }
        Ok(())
    }

    /// Drains: the coordinator stops admitting and finishes running requests, then the nodes leave. A process that is not
    /// gone after `grace` (nodes: a few seconds more) is killed. Returns the names of the killed processes. No process is
    /// left afterwards.
    pub async fn stop(&self, grace: Duration) -> Vec<String> {
        let is_coordinator = |process: &&Process| process.spec.kind == ProcessKind::Coordinator;
        let (front, nodes): (Vec<&Process>, Vec<&Process>) = self.processes.values().partition(is_coordinator);
        let mut killed = drain_all(&front, grace).await;
        killed.extend(drain_all(&nodes, NODE_EXIT_WITHIN.min(grace)).await);
        killed
    }

    /// A client for the coordinators' API.
    ///
    /// # Errors
    /// The authority's file cannot be read.
    pub fn client(&self) -> anyhow::Result<http::Client> {
        http::client(self.base_url(), self.api_ca().as_deref())
    }

    /// The file of the authority of the API's certificate, where the API has one.
    pub(crate) fn api_ca(&self) -> Option<PathBuf> {
        let settings = &self.options.settings;
        let folder = settings.certs.as_ref().filter(|_| settings.api_tls)?;
        Some(folder.join("ca.crt"))
    }

    /// URL and membership address of a coordinator that listens.
    fn addresses(&self, state: ProcessState) -> (String, String) {
        let listening = state
            .listening
            .unwrap_or_else(|| service_runtime::announce::Listening::coordinator("", "", ""));
        let scheme = if self.options.settings.api_tls { "https" } else { "http" };
        let url = format!("{scheme}://{}", reached_here(listening.http.unwrap_or_default()));
        (url, listening.control.unwrap_or_default())
    }

    fn process(&self, name: &str) -> Result<&Process, LocalClusterError> {
        let missing = || LocalClusterError::NoSuchNode {
            name: name.to_owned(),
            names: self.order.join(", "),
        };
        self.processes.get(name).ok_or_else(missing)
    }

    fn start_process(&mut self, spec: ProcessSpec) -> Result<(), LocalClusterError> {
        let name = spec.name.clone();
        let process =
            Process::start(spec, &self.options, self.exits_sender.clone()).map_err(LocalClusterError::Start)?;
        if self.processes.insert(name.clone(), process).is_none() {
            self.order.push(name);
        }
        Ok(())
    }

    fn exit_of(&self, name: &str) -> Option<NodeExit> {
        self.processes.get(name)?.exit()
    }

    /// The first process in start order that ended, but for nodes that left after a drain.
    fn first_failure(&self) -> Option<NodeExit> {
        let mut exits = self.order.iter().filter_map(|name| self.exit_of(name));
        exits.find(|exit| !exit.has_left())
    }

    /// The first process in start order that ended by a signal or with an error, but for those that [`LocalCluster::stop`] has killed.
    pub(crate) fn first_bad_end(&self) -> Option<NodeExit> {
        bad_end(self.order.iter().filter_map(|name| self.exit_of(name)))
    }

    fn running_nodes(&self) -> usize {
        let is_node = |process: &&Process| process.spec.kind != ProcessKind::Coordinator;
        let nodes = self.processes.values().filter(is_node);
        nodes.filter(|node| node.exit_status().is_none()).count()
    }

    /// Waits until `is_reached` holds for one process, unless any process ends first.
    async fn wait_for(
        &mut self,
        name: &str,
        deadline: Instant,
        is_reached: impl FnMut(&ProcessState) -> bool,
    ) -> Result<ProcessState, LocalClusterError> {
        let mut state = self.process(name)?.state.clone();
        let reached = timeout_at(deadline, state.wait_for(is_reached));
        // Somebody may drain a node while others still start. `next_exit` tells of it once the cluster has started.
        let (exits, processes, mut left) = (&mut self.exits, &self.processes, Vec::new());
        let failed = async {
            loop {
                // Exits of an earlier life of a restarted process do not count.
                let exited = exits.recv().await;
                let Some(exit) = exited.and_then(|exited| processes.get(&exited)?.exit()) else {
                    continue;
                };
                if exit.name == name || !exit.has_left() {
                    return exit;
                }
                left.push(exit.name);
            }
        };
        let outcome = tokio::select! {
            reached = reached => Ok(reached.map(|state| state.map(|state| state.clone()))),
            exit = failed => Err(exit),
        };
        for name in left {
            // The channel had room for them before.
            let _ = self.exits_sender.try_send(name);
        }
        match outcome {
            Ok(Ok(Ok(state))) => Ok(state),
            Ok(Err(_)) => Err(LocalClusterError::NotReady {
                within: self.options.start_within,
                waiting_for: format!("{name} has not said that it is ready"),
            }),
            Err(exit) => Err(LocalClusterError::Exited(exit)),
            Ok(Ok(Err(_))) => Err(self.exit_of(name).map_or_else(
                || LocalClusterError::Start(anyhow::anyhow!("{name} could not be watched")),
                LocalClusterError::Exited,
            )),
        }
    }
}

fn bad_end(mut exits: impl Iterator<Item = NodeExit>) -> Option<NodeExit> {
    exits.find(|exit| !exit.status.success() && !exit.is_killed)
}

/// Where a process of this machine reaches a port that listens on `bound`. A certificate names no unspecified address.
fn reached_here(bound: String) -> String {
    let Ok(mut address) = bound.parse::<SocketAddr>() else {
        return bound;
    };
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    address.to_string()
}

async fn drain_all(processes: &[&Process], grace: Duration) -> Vec<String> {
    let deadline = Instant::now() + grace;
    for process in processes {
        process.drain();
    }
    let mut killed = Vec::new();
    for process in processes {
        if timeout_at(deadline, process.wait_for_exit()).await.is_err() {
            process.kill();
            process.wait_for_exit().await;
            if process.state.borrow().is_killed {
                killed.push(process.spec.name.clone());
            }
        }
    }
    killed
}

impl Drop for LocalCluster {
    fn drop(&mut self) {
        for process in self.processes.values() {
            process.kill();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::ExitStatus;

    use super::*;

    #[test]
    fn a_process_that_died_is_told_from_one_that_was_killed_because_it_did_not_end() {
        // The kernel's form: a signal as it is, a status in the second byte.
        let exit = |(name, status): (&str, i32), killed: &[&str]| NodeExit {
            name: name.to_owned(),
            kind: ProcessKind::Decode,
            pid: 1,
            status: ExitStatus::from_raw(status),
            is_killed: killed.contains(&name),
            last_lines: Vec::new(),
        };
        let exits = [("decode-0", 0), ("decode-1", 9), ("decode-2", 6), ("decode-3", 1 << 8)];
        let first = |killed: &[&str]| bad_end(exits.iter().map(|ended| exit(*ended, killed))).map(|exit| exit.name);
        assert_eq!(first(&[]).as_deref(), Some("decode-1"));
        assert_eq!(first(&["decode-1"]).as_deref(), Some("decode-2"));
        assert_eq!(first(&["decode-1", "decode-2"]).as_deref(), Some("decode-3"));
        assert_eq!(first(&["decode-1", "decode-2", "decode-3"]), None);
    }

    #[test]
    fn a_port_on_every_address_is_asked_on_loopback() {
        for (bound, asked) in [
            ("0.0.0.0:8000", "127.0.0.1:8000"),
            ("[::]:8000", "[::1]:8000"),
            ("10.0.0.1:8000", "10.0.0.1:8000"),
            ("", ""),
        ] {
            assert_eq!(reached_here(bound.to_owned()), asked);
        }
    }
}
