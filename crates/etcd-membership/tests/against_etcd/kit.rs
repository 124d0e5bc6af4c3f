//! What the tests share: entries, waiting with a limit, and a witness that sees every view.

use std::collections::BTreeMap;
use std::time::Duration;

use etcd_membership::{
    CoordinatorEntry, Directory, DirectoryConfig, EtcdAddress, NodeEntry, Registration, RegistrationConfig,
    RegistrationHealth, View,
};
use serving_core::compatibility::CompatibilityHash;
use serving_core::ids::{NodeEpoch, NodeId, NodeName};
use serving_core::node::{NodeCapacity, NodeRecord, NodeRole, NodeState};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// etcd's shortest with its default election time-out.
pub const TTL: Duration = Duration::from_secs(2);
/// For what takes a few leases at worst, on a loaded machine.
pub const LIMIT: Duration = Duration::from_secs(15);
const POLL: Duration = Duration::from_millis(20);

pub fn coordinator(name: &str, epoch: u64) -> CoordinatorEntry {
    CoordinatorEntry {
        id: id(name, epoch),
        control_address: "127.0.0.1:7000".into(),
        http_address: "127.0.0.1:8000".into(),
        version: "0.1.0".into(),
        state: NodeState::Ready,
    }
}

pub fn node(name: &str, epoch: u64) -> NodeEntry {
    NodeEntry::from(NodeRecord {
        id: id(name, epoch),
        role: NodeRole::Decode,
        is_co_located: false,
        address: "127.0.0.1:7100".into(),
        kv_address: "127.0.0.1:7100".into(),
        compatibility: CompatibilityHash([7; 32]).into(),
        transports: vec!["grpc".into()],
        version: "0.1.0".into(),
        capacity: NodeCapacity {
            kv_blocks: 100,
            block_tokens: 16,
            max_sequences: 8,
            max_batch_tokens: 512,
            max_model_tokens: 2048,
            block_bytes: 1 << 16,
        },
        model_name: "smollm2-135m".into(),
        state: NodeState::Joining,
        roles: Vec::new(),
    })
}

fn id(name: &str, epoch: u64) -> NodeId {
    NodeId {
        name: NodeName::new(name),
        epoch: NodeEpoch(epoch),
    }
}

pub fn parse(address: &str) -> EtcdAddress {
    address.parse().unwrap_or_else(|error| panic!("{address}: {error}"))
}

pub fn register(address: &str, name: &str, epoch: u64) -> Registration<CoordinatorEntry> {
    let config = RegistrationConfig { lease_ttl: TTL };
    Registration::start(parse(address), config, coordinator(name, epoch)).expect("a good entry")
}

pub fn directory(address: &str) -> Directory<CoordinatorEntry> {
    Directory::start(parse(address), DirectoryConfig::for_lease(TTL))
}

/// Asks until there is an answer; fails loudly at the limit.
pub async fn within<T, F: Future<Output = Option<T>>>(limit: Duration, what: &str, mut ask: impl FnMut() -> F) -> T {
    let asking = async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(POLL).await;
        }
    };
    tokio::time::timeout(limit, asking)
        .await
        .unwrap_or_else(|_| panic!("not within {limit:?}: {what}"))
}

/// Waits for a watched value to be as wanted.
pub async fn see<T: Clone + std::fmt::Debug>(
    watched: &mut watch::Receiver<T>,
    what: &str,
    is_wanted: impl FnMut(&T) -> bool,
) -> T {
    let seen = tokio::time::timeout(LIMIT, watched.wait_for(is_wanted))
        .await
        .map(|seen| seen.map(|seen| seen.clone()));
    match seen {
        Ok(seen) => seen.expect("the task lives"),
        Err(_) => panic!("not within {LIMIT:?}: {what}; last seen: {:?}", *watched.borrow()),
    }
}

pub async fn registered<T>(registration: &Registration<T>)
where
    T: etcd_membership::Entry,
{
    let is_registered = |health: &RegistrationHealth| matches!(health, RegistrationHealth::Registered { .. });
    see(&mut registration.health(), "registered", is_registered).await;
}

pub fn names<T>(view: &View<T>) -> Vec<&str> {
    view.members.keys().map(String::as_str).collect()
}

/// All is well: exactly these, none of them vanished, and etcd answers.
pub fn is_whole<T>(view: &View<T>, wanted: &[&str]) -> bool {
    names(view) == wanted && view.vanished.is_empty() && !view.is_stale && view.trouble.is_none()
}

/// Sees every view, and how few members there ever were.
pub struct Witness {
    task: JoinHandle<()>,
    seen: watch::Receiver<Seen>,
}

#[derive(Clone, Debug)]
pub struct Seen {
    pub members_min: usize,
    pub vanished_max: usize,
    pub was_stale: bool,
    pub troubles: BTreeMap<String, u32>,
}

impl Witness {
    /// Call it once the view is whole.
    pub fn watch(directory: &Directory<CoordinatorEntry>) -> Self {
        let mut views = directory.view();
        let (told, seen) = watch::channel(Seen {
            members_min: usize::MAX,
            vanished_max: 0,
            was_stale: false,
            troubles: BTreeMap::new(),
        });
        let task = tokio::spawn(async move {
            loop {
                let view = views.borrow_and_update().clone();
                told.send_modify(|seen| {
                    seen.members_min = seen.members_min.min(view.members.len());
                    seen.vanished_max = seen.vanished_max.max(view.vanished.len());
                    seen.was_stale |= view.is_stale;
                    if let Some(trouble) = &view.trouble {
                        *seen.troubles.entry(trouble.to_string()).or_default() += 1;
                    }
                });
                if views.changed().await.is_err() {
                    return;
                }
            }
        });
        Self { task, seen }
    }

    pub fn seen(&self) -> Seen {
        self.seen.borrow().clone()
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.task.abort();
    }
}
