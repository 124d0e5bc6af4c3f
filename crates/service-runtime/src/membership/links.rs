//! A node's links to its coordinators, as the list or etcd names them, and the node's own entry in etcd.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use etcd_membership::{
    BadRecord, CoordinatorEntry, Directory, DirectoryConfig, EtcdAddress, NodeEntry, Registration, RegistrationConfig,
    RegistrationHealth, View,
};
use identity::Identity;
use proto::messages::Peer;
use serving_core::kv::prefix_log::PrefixLog;
use serving_core::node::{NodeRecord, NodeStatus};
use serving_core::scheduler::permit_shares::ShareId;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, Interval, MissedTickBehavior};

use super::link::Link;
use super::shared::Shared;
use super::{CoordinatorsAt, JoinConfig, LEAVE_TIME_LIMIT, LostReason, MembershipEvent};
use crate::metrics::membership::MembershipGauges;
use crate::shutdown::Shutdown;

/// How often links are reviewed whose coordinators are no longer registered. Such a link is kept while its stream is open.
const REVIEW_INTERVAL: Duration = Duration::from_secs(1);
/// At most so many of the coordinators that etcd names are dialled. A cluster has a few. The folder in etcd may have 10,000 entries, and each
/// would cost a task and a dial every few seconds.
const COORDINATORS_MAX: usize = 64;

fn reviews() -> Interval {
    let mut reviews = tokio::time::interval_at(Instant::now() + REVIEW_INTERVAL, REVIEW_INTERVAL);
    reviews.set_missed_tick_behavior(MissedTickBehavior::Delay);
    reviews
}

/// The running links, by the coordinator's address.
struct Running {
    id: ShareId,
    leave: Shutdown,
    is_welcome: watch::Receiver<bool>,
}

/// The node's entry in etcd, and the entries of the coordinators.
struct Registry {
    address: EtcdAddress,
    registration: Registration<NodeEntry>,
    health: watch::Receiver<RegistrationHealth>,
    _directory: Directory<CoordinatorEntry>,
    coordinators: watch::Receiver<View<CoordinatorEntry>>,
}

impl Registry {
    fn start(address: EtcdAddress, record: NodeRecord) -> Result<Self, BadRecord> {
        let lease_ttl = address.lease_ttl();
        let registration = Registration::start(
            address.clone(),
            RegistrationConfig { lease_ttl },
            NodeEntry::from(record),
        )?;
        let directory = Directory::start(address.clone(), DirectoryConfig::for_lease(lease_ttl));
        Ok(Self {
            address,
            health: registration.health(),
            registration,
            coordinators: directory.view(),
            _directory: directory,
        })
    }
}

/// The event that woke the task.
enum Woken {
    Leave,
    Status,
    Coordinators,
    Health,
    Review,
    /// A link's task has ended.
    LinkEnded(Result<(), JoinError>),
}

pub(super) struct Links {
    record: NodeRecord,
    status: watch::Receiver<NodeStatus>,
    prefixes: watch::Receiver<PrefixLog>,
    events: mpsc::Sender<MembershipEvent>,
    gauges: MembershipGauges,
    identity: Identity,
    shared: Arc<Shared>,
    registry: Option<Registry>,
    running: BTreeMap<String, Running>,
    /// Registered coordinators that found no room in `running`.
    left_out: usize,
    tasks: JoinSet<()>,
    next_id: u64,
    /// It runs on while statuses change, which under load they do with every step.
    review: Interval,
}

impl Links {
    pub(super) fn new(
        config: JoinConfig,
        status: watch::Receiver<NodeStatus>,
        (events, peers): (mpsc::Sender<MembershipEvent>, watch::Sender<Vec<Peer>>),
    ) -> Result<Self, BadRecord> {
        let mut links = Self {
            record: config.record.clone(),
            status,
            prefixes: config.prefixes,
            events,
            gauges: config.gauges,
            identity: config.identity,
            shared: Arc::new(Shared::new(peers)),
            registry: None,
            running: BTreeMap::new(),
            left_out: 0,
            tasks: JoinSet::new(),
            next_id: 0,
            review: reviews(),
        };
        match config.coordinators {
            CoordinatorsAt::Fixed(addresses) => addresses.into_iter().for_each(|address| links.dial(address)),
            CoordinatorsAt::Etcd(address) => links.registry = Some(Registry::start(address, config.record)?),
        }
        Ok(links)
    }

    pub(super) async fn keep(mut self, leave: Shutdown) {
        self.follow_registry().await;
        loop {
            match self.woken(&leave).await {
                Woken::Leave => return self.leave().await,
                Woken::Status => {
                    let state = self.status.borrow_and_update().state;
                    if let Some(registry) = &self.registry {
                        registry.registration.update(state);
                    }
                }
                Woken::Coordinators | Woken::Health | Woken::Review => self.follow_registry().await,
                Woken::LinkEnded(Err(error)) if error.is_panic() => {
                    // Nobody would dial that coordinator again. The node ends, as after any panic of its membership.
                    tracing::error!(%error, "the stream to a coordinator has panicked; the membership ends");
                    std::panic::resume_unwind(error.into_panic());
                }
                Woken::LinkEnded(_) => {}
            }
        }
    }

    async fn woken(&mut self, leave: &Shutdown) -> Woken {
        let Some(registry) = &mut self.registry else {
            return tokio::select! {
                () = leave.requested() => Woken::Leave,
                Some(ended) = self.tasks.join_next() => Woken::LinkEnded(ended),
            };
        };
        tokio::select! {
            () = leave.requested() => Woken::Leave,
            Some(ended) = self.tasks.join_next() => Woken::LinkEnded(ended),
            Ok(()) = self.status.changed() => Woken::Status,
            Ok(()) = registry.coordinators.changed() => Woken::Coordinators,
            Ok(()) = registry.health.changed() => Woken::Health,
            _ = self.review.tick() => Woken::Review,
        }
    }

    /// Dials registered coordinators, at most [`COORDINATORS_MAX`] in all, drops each one that is neither registered nor connected, and
    /// reports the state of etcd.
    async fn follow_registry(&mut self) {
        let Some(registry) = &mut self.registry else {
            return;
        };
        let view = registry.coordinators.borrow_and_update().clone();
        let health = registry.health.borrow_and_update().clone();
        let etcd = registry.address.to_string();
        self.gauges.set(&health, view.is_stale);
        if let RegistrationHealth::Fenced { by_epoch } = health {
            let _ = self.events.send(MembershipEvent::Fenced { by_epoch }).await;
        }
        let registered: BTreeSet<String> = view
            .members
            .values()
            .map(|entry| entry.control_address.clone())
            .collect();
        let is_over =
            |(address, running): &(&String, &Running)| !registered.contains(*address) && !*running.is_welcome.borrow();
        let over: Vec<String> = self
            .running
            .iter()
            .filter(is_over)
            .map(|(address, _)| address.clone())
            .collect();
        for address in over {
            if let Some(running) = self.running.remove(&address) {
                tracing::info!(coordinator = %address, "no longer registered in etcd and not there; letting go of it");
                running.leave.request();
                self.shared.forget(running.id);
            }
        }
        self.dial_registered(registered);
        if self.running.is_empty() {
            let why = view.trouble.map_or(String::new(), |trouble| format!(" ({trouble})"));
            let reason = LostReason::NoneRegistered(format!(" in {etcd}{why}"));
            // The queue is full: the node has enough to read, and the next review reports it again.
            let _ = self
                .events
                .try_send(MembershipEvent::ConnectionLost { address: etcd, reason });
        }
    }

    /// Dials the registered coordinators for which there is room. Those that are left out get the places of coordinators that go.
    fn dial_registered(&mut self, registered: BTreeSet<String>) {
        let mut left_out = 0;
        for address in registered {
            if self.running.contains_key(&address) {
                continue;
            }
            if self.running.len() < COORDINATORS_MAX {
                self.dial(address);
            } else {
                left_out += 1;
            }
        }
        if left_out > 0 && self.left_out == 0 {
            tracing::warn!(
                left_out,
                most = COORDINATORS_MAX,
                "etcd names more coordinators than a node dials, and some are left out; give each cluster its own name in the address of \
                 etcd, and delete entries of coordinators that do not run (`etcdctl del`)"
            );
        }
        self.left_out = left_out;
    }

    fn dial(&mut self, address: String) {
        if self.running.contains_key(&address) {
            return;
        }
        let (id, leave) = (ShareId(self.next_id), Shutdown::new());
        self.next_id += 1;
        let (welcome_in, is_welcome) = watch::channel(false);
        let link = Link {
            id,
            address: address.clone(),
            record: self.record.clone(),
            status: self.status.clone(),
            prefixes: self.prefixes.clone(),
            events: self.events.clone(),
            leave: leave.clone(),
            shared: self.shared.clone(),
            identity: self.identity.clone(),
            is_welcome: welcome_in,
        };
        self.tasks.spawn(link.keep());
        self.running.insert(address, Running { id, leave, is_welcome });
    }

    async fn leave(mut self) {
        for running in self.running.values() {
            running.leave.request();
        }
        let all = async { while self.tasks.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(LEAVE_TIME_LIMIT, all).await;
        if let Some(registry) = self.registry.take() {
            registry.registration.leave().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use serving_core::ids::{NodeEpoch, NodeId, NodeName};
    use serving_core::node::NodeState;

    use super::super::tests::{record, status};
    use super::*;

    /// As after a registration, with a coordinator registered for each of these ports and no more news. No etcd is there.
    fn registry_of(ports: Range<u16>) -> Registry {
        let address: EtcdAddress = "etcd://127.0.0.1:1/baton".parse().unwrap();
        let coordinator = |port: u16| CoordinatorEntry {
            id: NodeId {
                name: NodeName::new(&format!("c-{port}")),
                epoch: NodeEpoch(1),
            },
            control_address: format!("127.0.0.1:{port}"),
            http_address: "127.0.0.1:1".to_owned(),
            version: "1".to_owned(),
            state: NodeState::Ready,
        };
        let view = View {
            members: ports.map(|port| (format!("c-{port}"), coordinator(port))).collect(),
            as_of: None,
            is_stale: false,
            skipped: 0,
            vanished: BTreeMap::new(),
            trouble: None,
        };
        let since = std::time::Instant::now();
        Registry {
            health: watch::channel(RegistrationHealth::Registered { since }).1,
            coordinators: watch::channel(view).1,
            ..Registry::start(address, record()).unwrap()
        }
    }

    /// The links of a node that is told of no coordinator, with the sender of its status and the events of its membership.
    fn links() -> (watch::Sender<NodeStatus>, Links, mpsc::Receiver<MembershipEvent>) {
        let (status_in, status_out) = watch::channel(status(1, 0));
        let (events, events_out) = mpsc::channel(64);
        let config = JoinConfig {
            coordinators: CoordinatorsAt::Fixed(Vec::new()),
            record: record(),
            prefixes: watch::channel(PrefixLog::default()).1,
            gauges: MembershipGauges::default(),
            identity: Identity::none(),
        };
        let links = Links::new(config, status_out, (events, watch::channel(Vec::new()).0)).unwrap();
        (status_in, links, events_out)
    }

    #[tokio::test]
    async fn a_stream_that_panics_ends_the_membership() {
        async fn broken() {
            panic!("a bug of a stream");
        }
        let (_status_in, mut links, mut heard) = links();
        links.tasks.spawn(broken());
        let kept = tokio::spawn(links.keep(Shutdown::new()));
        let heard = tokio::time::timeout(Duration::from_secs(20), heard.recv()).await;
        assert_eq!(heard.expect("nobody is left to tell of an event"), None);
        assert!(kept.await.unwrap_err().is_panic());
    }

    #[tokio::test]
    async fn of_very_many_registered_coordinators_only_so_many_are_dialled_and_others_when_these_go() {
        let (_status_in, mut links, _events_out) = links();
        links.registry = Some(registry_of(1..75));
        links.follow_registry().await;
        assert_eq!((links.running.len(), links.left_out), (COORDINATORS_MAX, 10));
        let dialled: Vec<String> = links.running.keys().cloned().collect();
        links.follow_registry().await;
        assert!(links.running.keys().eq(&dialled), "those that are dialled stay");
        links.registry = Some(registry_of(11..75));
        links.follow_registry().await;
        assert_eq!((links.running.len(), links.left_out), (COORDINATORS_MAX, 0));
    }

    #[tokio::test]
    async fn a_coordinator_that_has_gone_is_let_go_of_though_every_step_changes_the_status() {
        let (status_in, mut links, _events_out) = links();
        links.registry = Some(registry_of(0..0));
        let (welcome_in, is_welcome) = watch::channel(true);
        let link = Shutdown::new();
        let running = Running {
            id: ShareId(0),
            leave: link.clone(),
            is_welcome,
        };
        links.running.insert("127.0.0.1:2".to_owned(), running);
        let mut steps = tokio::time::interval(REVIEW_INTERVAL / 100);
        let stepping = async {
            assert!(!link.is_requested(), "its stream is open");
            welcome_in.send_replace(false);
            loop {
                steps.tick().await;
                status_in.send_modify(|status| status.computed_tokens_total += 1);
            }
        };
        tokio::select! {
            // The first look comes before the stream's end.
            biased;
            () = links.keep(Shutdown::new()) => panic!("nobody leaves"),
            () = stepping => {}
            gone = tokio::time::timeout(2 * REVIEW_INTERVAL, link.requested()) => gone.expect("a review"),
        }
    }
}
