//! How a rig is made: its nodes, its timers, and what its processes are told.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use cli::local_cluster::LocalClusterOptions;

use super::nodes::Nodes;

/// The binary with failpoints: `$BATON_FAILPOINTS_BIN` (scripts/test names its own), else where `scripts/build-failpoints` puts it.
///
/// # Errors
/// It is not there; the error says how to make it.
pub(super) fn executable() -> Result<PathBuf> {
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
    /// So short that a fault's end is seen within the lease's order of magnitude ([`super::rig::LEASE`]).
    Short,
    /// The processes' defaults.
    Shipped,
}

/// What a rig is made with: chunks short enough that a prompt has several, pools small enough that blocks are reused all
/// the time.
#[derive(Clone, Debug)]
pub struct RigOptions {
    pub nodes: Nodes,
    pub timers: Timers,
    pub topology: String,
    pub kv_cache_memory: String,
    /// Sequences a node runs at a time; `None` leaves the nodes' default.
    pub max_num_seqs: Option<u32>,
    /// What every process gets for a drain; `None` leaves their defaults.
    pub drain_ms_max: Option<u64>,
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
        Self::of(Nodes::ON_PROCESSORS, topology, seed)
    }

    pub fn of(nodes: Nodes, topology: &str, seed: u64) -> Self {
        Self {
            nodes,
            timers: Timers::Short,
            topology: topology.to_owned(),
            kv_cache_memory: nodes.pool().to_owned(),
            max_num_seqs: None,
            drain_ms_max: None,
            seed,
            chunk_tokens: nodes.tokens(128),
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

    /// Adds what the processes are told to the options of their cluster.
    pub(super) fn tell(&self, options: &mut LocalClusterOptions) {
        let settings = &mut options.settings;
        settings.threads_per_node = Some(self.threads);
        settings.kv_cache_memory = Some(self.kv_cache_memory.clone());
        settings.max_num_seqs = self.max_num_seqs;
        settings.max_num_batched_tokens = Some(self.chunk_tokens);
        settings.prefix_cache = Some(self.prefix_cache);
        settings.engine = self.engine.map(str::to_owned);
        if self.timers == Timers::Short {
            let short = self.nodes.short_timers();
            options.coordinator_flags = short.coordinator.map(OsString::from).to_vec();
            options.prefill_flags = vec![OsString::from(short.prefill)];
            options.decode_flags = vec![OsString::from(short.decode)];
        }
        let more = self.coordinator_flags.iter().map(OsString::from);
        options.coordinator_flags.extend(more);
        let retries = format!("--retries-free-per-minute={}", self.retries_free_per_minute);
        options.coordinator_flags.push(retries.into());
        let transports = OsString::from(self.nodes.flag());
        options.prefill_flags.push(transports.clone());
        options.decode_flags.push(transports);
        if let Some(ms) = self.drain_ms_max {
            let drain = || OsString::from(format!("--drain-ms-max={ms}"));
            options.coordinator_flags.push(drain());
            options.prefill_flags.push(drain());
            options.decode_flags.push(drain());
        }
        if self.nodes.transports == "shm-staged" {
            // Without the secret that `up` draws nobody writes in place.
            let no_secret = ("BATON_SHM_DIRECT_SECRET".to_owned(), String::new());
            options.environment.push(no_secret);
        }
    }
}
