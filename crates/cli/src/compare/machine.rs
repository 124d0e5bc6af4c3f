//! This machine and the clusters that run on it, each node on its own cores.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use workload::comparison::Resources;

use super::cores::Cores;
use super::point::Point;
use crate::bench::load::environment::cpu_model;
use crate::local_cluster::{LocalCluster, LocalClusterOptions};

/// KV memory of all nodes of an arm together.
const KV_MEMORY_MIB: u64 = 1024;
/// A cluster that is not ready by then never is: loading takes less than a second.
const START_WITHIN: Duration = Duration::from_secs(60);
/// Answers that still run are of no use any more.
const STOP_WITHIN: Duration = Duration::from_secs(3);

/// What every local arm has in common.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    pub executable: PathBuf,
    pub model: PathBuf,
    pub model_name: Option<String>,
    pub cores: Cores,
    pub engine: Option<String>,
    pub max_model_len: Option<u32>,
}

/// What must be equal for a stored sweep to be used again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MachineFacts {
    pub cpu: String,
    pub node_cores: u32,
    pub model_file: String,
    pub model_bytes: u64,
    pub engine: String,
}

impl Machine {
    pub fn node_cores(&self) -> u32 {
        self.cores.nodes.len() as u32
    }

    pub fn resources(&self) -> Resources {
        Resources {
            cores: self.node_cores(),
            gpus: 0,
            memory_bytes: KV_MEMORY_MIB << 20,
            price_per_hour: None,
            is_measured: true,
        }
    }

    pub fn facts(&self) -> MachineFacts {
        let file = self.model.file_name().map(|name| name.to_string_lossy().into_owned());
        MachineFacts {
            cpu: cpu_model().unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            node_cores: self.node_cores(),
            model_file: file.unwrap_or_default(),
            model_bytes: bytes_of(&self.model),
            engine: self.engine.clone().unwrap_or_else(|| "cpu".to_owned()),
        }
    }

    /// The names and values of a report.
    pub fn environment(&self) -> BTreeMap<String, Value> {
        let facts = self.facts();
        BTreeMap::from([
            ("cpu".to_owned(), facts.cpu.into()),
            ("node_cores".to_owned(), serde_json::json!(self.cores.nodes)),
            (
                "client_and_coordinator_cores".to_owned(),
                serde_json::json!(self.cores.others),
            ),
            ("model_file".to_owned(), facts.model_file.into()),
            ("model_bytes".to_owned(), facts.model_bytes.into()),
            ("engine".to_owned(), facts.engine.into()),
            ("kv_memory_mib".to_owned(), KV_MEMORY_MIB.into()),
        ])
    }

    /// Fresh processes for one run. Each node has its own cores and as many threads, and its share of the KV memory.
    ///
    /// # Errors
    /// The cluster does not start.
    pub async fn start(&self, point: &Point) -> anyhow::Result<LocalCluster> {
        let options = self.options(point)?;
        LocalCluster::start(options)
            .await
            .with_context(|| format!("the arm did not start: {}", point.words(self.node_cores())))
    }

    /// Lets the nodes of a run go. What still runs is given up.
    pub async fn stop(&self, cluster: &LocalCluster) {
        cluster.stop(STOP_WITHIN).await;
    }

    fn options(&self, point: &Point) -> anyhow::Result<LocalClusterOptions> {
        let topology = point.topology();
        let mut options = LocalClusterOptions::new(self.executable.clone(), topology, self.model.clone());
        options.start_within = START_WITHIN;
        let settings = &mut options.settings;
        settings.served_model_name.extend(self.model_name.clone());
        settings.engine.clone_from(&self.engine);
        settings.max_model_len = self.max_model_len;
        settings.max_num_seqs = Some(point.max_num_seqs);
        settings.mixed_step_tokens = point.mixed_step_tokens;
        settings.local_prefill_below_tokens = Some(point.local_prefill_below_tokens);
        let budget = |tokens: u32| vec![format!("--max-num-batched-tokens={tokens}").into()];
        options.prefill_flags = budget(point.prefill_max_num_batched_tokens);
        options.decode_flags = budget(point.max_num_batched_tokens);
        let share = KV_MEMORY_MIB / u64::from(topology.node_count().max(1));
        settings.kv_cache_memory = Some(format!("{share}MiB"));
        options.cores_by_name = self.cores.place(&point.cores_of_nodes(self.node_cores()))?;
        for (name, cores) in &options.cores_by_name {
            let threads = format!("--threads={}", cores.len());
            options.flags_by_name.insert(name.clone(), vec![threads.into()]);
        }
        options
            .cores_by_name
            .insert("coordinator".to_owned(), self.cores.others.clone());
        Ok(options)
    }
}

/// Of a file, or of the files of a folder.
fn bytes_of(path: &Path) -> u64 {
    let length = |path: &Path| std::fs::metadata(path).map_or(0, |facts| facts.len());
    match std::fs::read_dir(path) {
        Ok(entries) => entries.flatten().map(|entry| length(&entry.path())).sum(),
        Err(_) => length(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(cores: &[u32]) -> Machine {
        Machine {
            executable: "/bin/baton".into(),
            model: "/m.gguf".into(),
            model_name: None,
            cores: Cores::split(cores, None).expect("cores"),
            engine: Some("stand-in".to_owned()),
            max_model_len: None,
        }
    }

    #[test]
    fn nodes_have_own_cores_as_many_threads_and_equal_memory_in_all_arms() {
        let machine = machine(&[0, 1]);
        let split = machine.options(&Point::disaggregated(1)).expect("it fits");
        assert_eq!(split.cores_by_name["prefill-0"], [0]);
        assert_eq!(split.cores_by_name["decode-0"], [1]);
        assert_eq!(split.cores_by_name["coordinator"], [0, 1]);
        assert_eq!(split.flags_by_name["decode-0"], ["--threads=1"]);
        assert_eq!(split.settings.kv_cache_memory.as_deref(), Some("512MiB"));
        assert_eq!(split.prefill_flags, ["--max-num-batched-tokens=512"]);
        let whole = machine.options(&Point::co_located(1)).expect("it fits");
        assert_eq!(whole.cores_by_name["decode-0"], [0, 1]);
        assert_eq!(whole.flags_by_name["decode-0"], ["--threads=2"]);
        assert_eq!(whole.settings.kv_cache_memory.as_deref(), Some("1024MiB"));
        assert!(
            machine.options(&Point::co_located(3)).is_ok(),
            "a node may have no core of its own"
        );
    }
}
