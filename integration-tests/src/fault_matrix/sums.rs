//! Looks at every pool all the time: its states add up to its size, whatever happens, and no handle was dropped.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use serde_json::Value;

use crate::cluster::TestCluster;

/// How often the sum of every pool is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// One life of a node: where it listens, and the size of its pool once it has answered.
#[derive(Clone, Debug)]
struct Pool {
    address: String,
    size: Option<u64>,
}

/// Watches until it is dropped.
#[derive(Debug)]
pub(super) struct Sums {
    pools: Arc<Mutex<BTreeMap<String, Pool>>>,
    wrong: Arc<Mutex<Vec<String>>>,
    looking: tokio::task::AbortHandle,
}

impl Sums {
    pub fn watch(cluster: &TestCluster) -> Self {
        let (pools, wrong) = (Arc::<Mutex<BTreeMap<String, Pool>>>::default(), Arc::default());
        let look = look_for_ever(cluster.http.clone(), pools.clone(), Arc::clone(&wrong));
        let sums = Self {
            pools,
            wrong,
            looking: tokio::spawn(look).abort_handle(),
        };
        for name in cluster.cluster.node_addresses().keys() {
            sums.watch_too(cluster, name);
        }
        sums
    }

    /// A node's next life has another address.
    pub fn watch_too(&self, cluster: &TestCluster, name: &str) {
        let address = cluster.cluster.node_addresses().remove(name);
        if let Some(address) = address.filter(|_| name != "coordinator") {
            lock(&self.pools).insert(name.to_owned(), Pool { address, size: None });
        }
    }

    pub fn forget(&self, name: &str) {
        lock(&self.pools).remove(name);
    }

    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.wrong))
    }

    pub fn stop(&self) {
        self.looking.abort();
    }
}

async fn look_for_ever(
    http: reqwest::Client,
    pools: Arc<Mutex<BTreeMap<String, Pool>>>,
    wrong: Arc<Mutex<Vec<String>>>,
) {
    loop {
        let now: Vec<(String, Pool)> = lock(&pools).clone().into_iter().collect();
        for (name, pool) in now {
            // A process that stands still does not answer.
            let Ok(Ok(report)) = tokio::time::timeout(LOOK_EVERY, blocks(&http, &pool.address)).await else {
                continue;
            };
            let counts = report["blocks"].as_object().into_iter().flatten();
            let sum: u64 = counts.filter_map(|(_, count)| count.as_u64()).sum();
            // The next life of a node that was started again meanwhile keeps its own size.
            if let Some(known) = lock(&pools)
                .get_mut(&name)
                .filter(|known| known.address == pool.address)
            {
                known.size.get_or_insert(sum);
            }
            let size = pool.size.unwrap_or(sum);
            if sum != size || report["dropped_handles_total"] != 0 {
                lock(&wrong).push(format!("{name}: a pool of {size} has {report}"));
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// A node's own account of its blocks.
pub(super) async fn blocks(http: &reqwest::Client, address: &str) -> Result<Value> {
    let answer = http.get(format!("http://{address}/admin/blocks")).send().await?;
    Ok(answer.error_for_status()?.json().await?)
}

impl Drop for Sums {
    fn drop(&mut self) {
        self.stop();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
