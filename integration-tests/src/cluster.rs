//! A cluster for one test: real processes, few clusters on the machine at a time, block accounts that can be asserted.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use cli::local_cluster::{LocalCluster, LocalClusterOptions, ProcessInfo};
use serde_json::Value;

use crate::MODEL;
use crate::scrape::Scrape;
use crate::wait::wait_until;

/// Longest single answer of any test: 64 tokens of the real model on one slow core, with room.
const ANSWER_WITHIN: Duration = Duration::from_secs(120);
/// What a drain of an idle cluster may take; a test that leaves requests running passes its own.
const STOP_WITHIN: Duration = Duration::from_secs(20);

/// States a block may only be in while some request needs it.
const BUSY_STATES: [&str; 4] = ["active", "reserved", "in_transfer", "quarantined"];

/// A running cluster. It keeps the machine until it is dropped, as [`lock_machine`] says.
#[derive(Debug)]
pub struct TestCluster {
    pub cluster: LocalCluster,
    pub http: reqwest::Client,
    _machine: File,
}

/// The `baton` binary under test: `$BATON_BIN`, else beside the folder of this test's own executable.
pub fn baton_executable() -> anyhow::Result<PathBuf> {
    let beside = || {
        let own = std::env::current_exe().ok()?;
        Some(own.parent()?.parent()?.join("baton"))
    };
    let path = std::env::var_os("BATON_BIN")
        .map(PathBuf::from)
        .or_else(beside)
        .context("no path for baton")?;
    ensure!(
        path.is_file(),
        "{} is not there: run `cargo build --release`, or scripts/test",
        path.display()
    );
    Ok(path)
}

/// The real model: `$BATON_TEST_MODEL`, else where `baton model pull` puts it.
pub fn model_path() -> anyhow::Result<PathBuf> {
    const IN_CACHE: &str = "baton/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf";
    let cache = || match std::env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()) {
        Some(cache) => Some(PathBuf::from(cache)),
        None => std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")),
    };
    let path = match std::env::var_os("BATON_TEST_MODEL") {
        Some(path) => PathBuf::from(path),
        None => cache()
            .context("neither XDG_CACHE_HOME nor HOME is set")?
            .join(IN_CACHE),
    };
    ensure!(
        path.is_file(),
        "{} is not there: run scripts/test, or `baton model pull smollm2-135m`",
        path.display()
    );
    Ok(path)
}

/// Options for `topology` (`1p1d`, `2c`) with the binary and the model under test, everything else at its default.
pub fn options(topology: &str) -> anyhow::Result<LocalClusterOptions> {
    options_of(baton_executable()?, topology)
}

/// The same with another binary.
pub fn options_of(executable: PathBuf, topology: &str) -> anyhow::Result<LocalClusterOptions> {
    let mut options = LocalClusterOptions::new(executable, topology.parse()?, model_path()?);
    // As `baton up` does for a model of its catalogue; the file's own name would differ.
    options.settings.served_model_name = vec![MODEL.to_owned()];
    Ok(options)
}

/// Waits for the machine and keeps it until the file is dropped, across test processes. Tests under nextest do not keep it from each
/// other, those of another run neither: `.config/nextest.toml` says which run beside each other.
///
/// # Errors
/// The lock file cannot be made.
pub async fn lock_machine() -> anyhow::Result<File> {
    let locked = tokio::task::spawn_blocking(|| -> std::io::Result<File> {
        let file = File::create(std::env::temp_dir().join("baton-integration-tests.lock"))?;
        match std::env::var_os("NEXTEST") {
            Some(_) => file.lock_shared()?,
            None => file.lock()?,
        }
        Ok(file)
    });
    locked.await?.context("cannot lock the machine for this test")
}

impl TestCluster {
    /// # Errors
    /// What [`options`] and [`LocalCluster::start`] say.
    pub async fn start(topology: &str) -> anyhow::Result<Self> {
        Self::start_with(options(topology)?).await
    }

    /// Waits its turn first: other clusters could fail its time limits on a small machine.
    ///
    /// # Errors
    /// What [`LocalCluster::start`] says.
    pub async fn start_with(options: LocalClusterOptions) -> anyhow::Result<Self> {
        let machine = lock_machine().await?;
        let cluster = LocalCluster::start(options)
            .await
            .context("the cluster did not start")?;
        // A request may find the last one's connection not back in the pool yet and dial another: kept, a node would seem to
        // hold one connection more than before.
        let http = reqwest::Client::builder()
            .timeout(ANSWER_WITHIN)
            .pool_max_idle_per_host(1)
            .build()?;
        Ok(Self {
            cluster,
            http,
            _machine: machine,
        })
    }

    /// `path` starts with a slash.
    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.cluster.base_url())
    }

    /// Posts JSON and reads JSON.
    ///
    /// # Errors
    /// Anything but a 2xx answer, with its body.
    pub async fn post(&self, path: &str, body: &Value) -> anyhow::Result<Value> {
        let answer = self.http.post(self.url(path)).json(body).send().await?;
        let status = answer.status();
        let text = answer.text().await?;
        ensure!(status.is_success(), "{path} answers {status}: {text}");
        serde_json::from_str(&text).with_context(|| format!("{path} answers no JSON: {text}"))
    }

    /// The page that `baton status` draws, at one of the coordinators.
    ///
    /// # Errors
    /// No answer, or no JSON.
    pub async fn cluster_page(&self, base_url: &str) -> anyhow::Result<Value> {
        let answer = self.http.get(format!("{base_url}/admin/cluster")).send().await?;
        Ok(answer.error_for_status()?.json().await?)
    }

    /// The coordinator's metrics, which include every node's blocks.
    ///
    /// # Errors
    /// No answer, or text that is no metrics.
    pub async fn metrics(&self) -> anyhow::Result<Scrape> {
        self.scrape(&self.url("/metrics")).await
    }

    /// A node's own metrics.
    ///
    /// # Errors
    /// No such node, no answer, or text that is no metrics.
    pub async fn node_metrics(&self, name: &str) -> anyhow::Result<Scrape> {
        let addresses = self.cluster.node_addresses();
        let address = addresses
            .get(name)
            .with_context(|| format!("no process is called {name}"))?;
        self.scrape(&format!("http://{address}/metrics")).await
    }

    /// Any process's own metrics, the coordinator's too.
    ///
    /// # Errors
    /// As [`TestCluster::node_metrics`].
    pub async fn metrics_of(&self, process: &ProcessInfo) -> anyhow::Result<Scrape> {
        match process.role.as_str() {
            "coordinator" => self.metrics().await,
            _ => self.node_metrics(&process.name).await,
        }
    }

    async fn scrape(&self, url: &str) -> anyhow::Result<Scrape> {
        let answer = self.http.get(url).send().await?.error_for_status()?;
        Scrape::parse(&answer.text().await?)
    }

    /// Asserts that `within` this time every node, by its own account and by the coordinator's, has no block that is
    /// active, reserved, in transfer or quarantined.
    ///
    /// # Errors
    /// The blocks that were still busy at the deadline.
    pub async fn assert_blocks_at_rest(&self, within: Duration) -> anyhow::Result<()> {
        wait_until("every KV block at rest", within, || async {
            let mut busy = BTreeMap::new();
            let front = self.metrics().await.map_err(|error| format!("{error:#}"))?;
            for process in self
                .cluster
                .processes()
                .iter()
                .filter(|process| process.role != "coordinator")
            {
                let own = self
                    .node_metrics(&process.name)
                    .await
                    .map_err(|error| format!("{error:#}"))?;
                for state in BUSY_STATES {
                    let name = process.name.as_str();
                    let of_front = front.sum("baton_kv_blocks", &[("node", name), ("state", state)]);
                    let of_node = own.sum("baton_kv_blocks", &[("state", state)]);
                    for (account, count) in [("coordinator", of_front), ("node", of_node)] {
                        // A series that is missing must not pass for zero.
                        if count != Some(0.0) {
                            busy.insert(format!("{name} {state} by the {account}'s account"), count);
                        }
                    }
                }
            }
            if busy.is_empty() {
                Ok(())
            } else {
                Err(format!("{busy:?}"))
            }
        })
        .await
    }

    /// Drains and checks that every process went by itself and none is left.
    ///
    /// # Errors
    /// A process had to be killed.
    pub async fn stop(self) -> anyhow::Result<()> {
        let pids: Vec<u32> = self.cluster.processes().iter().map(|process| process.pid).collect();
        let killed = self.cluster.stop(STOP_WITHIN).await;
        ensure!(
            killed.is_empty(),
            "did not drain within {STOP_WITHIN:?} and were killed: {killed:?}"
        );
        let left: Vec<u32> = pids.into_iter().filter(|pid| ProcessFacts::of(*pid).is_ok()).collect();
        ensure!(left.is_empty(), "processes left over: {left:?}");
        Ok(())
    }
}

/// `RssAnon` of a `/proc/PID/status`.
fn resident_kib(status: &str) -> u64 {
    let value = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = value.and_then(|value| value.trim().trim_end_matches(" kB").parse().ok());
    kib.unwrap_or_default()
}

/// What a process holds, from `/proc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessFacts {
    pub thread_count: usize,
    pub descriptor_count: usize,
    /// Memory of its own, in use: not what it shares with another process, such as a pool it writes in place.
    pub memory_kib: u64,
}

/// Time all threads of a process, ended ones too, have run on a core.
///
/// # Errors
/// The process is gone.
pub fn cpu_time(pid: u32) -> std::io::Result<Duration> {
    /// `sysconf(_SC_CLK_TCK)` is 100 on every Linux there is (proc(5), user_hz).
    const TICKS_PER_SECOND: u64 = 100;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // Fields 14 and 15, utime and stime; the name before them may hold spaces.
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks: u64 = after_name
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum();
    Ok(Duration::from_millis(ticks * 1000 / TICKS_PER_SECOND))
}

impl ProcessFacts {
    /// # Errors
    /// The process is gone.
    pub fn of(pid: u32) -> std::io::Result<Self> {
        // An orphan that its new parent has not reaped yet is gone as well; containers often have nobody who reaps.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        if stat
            .rsplit(')')
            .next()
            .is_some_and(|rest| rest.trim_start().starts_with('Z'))
        {
            return Err(std::io::Error::from(std::io::ErrorKind::NotFound));
        }
        let count = |folder: &str| std::fs::read_dir(format!("/proc/{pid}/{folder}")).map(Iterator::count);
        Ok(Self {
            thread_count: count("task")?,
            descriptor_count: count("fd")?,
            memory_kib: resident_kib(&std::fs::read_to_string(format!("/proc/{pid}/status"))?),
        })
    }
}
