//! What the processes of a cluster hold of the operating system and of their runtime: tasks, threads, descriptors, memory.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::cluster::{ProcessFacts, TestCluster};

/// A runtime keeps an idle thread of its blocking pool for 10 s, and an idle HTTP connection is noticed sooner.
const SETTLE: Duration = Duration::from_secs(20);

/// By process name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footprint(BTreeMap<String, Held>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub facts: ProcessFacts,
    /// Tasks alive in the process's async runtime.
    pub tasks: u64,
}

impl Footprint {
    pub async fn of(cluster: &TestCluster) -> Result<Self> {
        let mut held = BTreeMap::new();
        for process in cluster.cluster.processes() {
            let facts = ProcessFacts::of(process.pid).with_context(|| format!("{} is gone", process.name))?;
            let scrape = cluster.metrics_of(&process).await?;
            let tasks = scrape.sum("baton_runtime_tasks", &[]);
            let tasks = tasks.with_context(|| format!("{} does not expose baton_runtime_tasks", process.name))?;
            held.insert(
                process.name,
                Held {
                    facts,
                    tasks: tasks as u64,
                },
            );
        }
        Ok(Self(held))
    }

    /// By how much the memory of the process that grew most has grown since `earlier`, in MiB.
    pub fn memory_grown_mib(&self, earlier: &Self) -> Result<(String, u64)> {
        let grown = self.0.iter().map(|(name, now)| {
            let before = earlier.0.get(name).with_context(|| format!("{name} is new"))?;
            let kib = now.facts.memory_kib.saturating_sub(before.facts.memory_kib);
            Ok((name.clone(), kib >> 10))
        });
        let grown: Vec<(String, u64)> = grown.collect::<Result<_>>()?;
        let most = grown.into_iter().max_by_key(|(_, mib)| *mib);
        most.context("no process")
    }

    /// Waits until no process holds more tasks, threads or descriptors than it did in `self`, up to a settling time.
    pub async fn assert_not_grown(&self, cluster: &TestCluster) -> Result<()> {
        let deadline = tokio::time::Instant::now() + SETTLE;
        loop {
            let now = Footprint::of(cluster).await?;
            let grown: Vec<String> = self
                .0
                .iter()
                .filter_map(|(name, before)| {
                    let after = now.0.get(name)?;
                    let is_larger = after.facts.thread_count > before.facts.thread_count
                        || after.facts.descriptor_count > before.facts.descriptor_count
                        || after.tasks > before.tasks;
                    is_larger.then(|| format!("{name}: {before:?} -> {after:?}"))
                })
                .collect();
            if grown.is_empty() {
                ensure!(now.0.len() == self.0.len(), "a process is missing");
                return Ok(());
            }
            ensure!(
                tokio::time::Instant::now() < deadline,
                "still held after {SETTLE:?}: {grown:?}"
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}
