//! A node's side of membership: one stream to each coordinator, for as long as the node lives.
//!
//! Each stream registers, reports status (at least every `status_interval` the coordinator asks for, and at once when
//! the watched status changes, at most every 2 ms) and listens. It reconnects for ever with a jittered, capped back-off.
//!
//! **Permits** live and die with a stream and belong to one coordinator: the connected one that comes first in the
//! configured list (the *holder*). The node's own counters run on for ever; each stream sees them from the point where
//! the streams' holder changed (`granted - received_then`, `received - received_then`), so what was granted and not used
//! on a lost stream is granted again on the next, and nothing has to be restarted in the node's brain.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use proto::convert::ConvertError;
use proto::messages::{CONTROL_MESSAGE_BYTES_MAX, CoordinatorReport, NodeReport, Peer, RegisterRefusedReason};
use proto::v1;
use proto::v1::membership_service_client::MembershipServiceClient;
use rand::Rng as _;
use serving_core::ids::NodeId;
use serving_core::node::{NodeRecord, NodeState, NodeStatus};
use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;

use crate::clock_offset;
use crate::serve;
use crate::shutdown::Shutdown;

const BACK_OFF_FIRST: Duration = Duration::from_millis(50);
const BACK_OFF_MAX: Duration = Duration::from_secs(2);
/// Two statuses closer than this are one: under load every step changes the status.
const COALESCE: Duration = Duration::from_millis(2);
/// Reports waiting for the stream: a status replaces nothing, so a coordinator that does not read holds these and no more.
const REPORTS_QUEUED_MAX: usize = 8;
/// Events waiting for the node; when it does not take them the streams stand still.
const EVENTS_QUEUED_MAX: usize = 64;
/// Until the coordinator has said how often it wants a status.
const FIRST_ANSWER_TIME_LIMIT: Duration = Duration::from_secs(5);
/// How long `leave` may take to reach the coordinators.
const LEAVE_TIME_LIMIT: Duration = Duration::from_secs(1);

/// What happened on a membership stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MembershipEvent {
    Welcomed {
        coordinator: NodeId,
        address: String,
    },
    /// The stream is gone; it is being opened again. Permits on it are void; requests of that coordinator end by
    /// themselves, with their own streams.
    ConnectionLost {
        address: String,
        reason: LostReason,
    },
    /// The coordinator wants the node to leave.
    DrainRequested {
        reason: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LostReason {
    #[error("cannot connect: {0}")]
    Connect(String),
    #[error("the stream broke: {0}")]
    Stream(String),
    /// Trying again as things are will end the same way: a person has to change a setting.
    #[error("the coordinator cannot read this node's registration: {0}; fix the node's configuration")]
    NotUnderstood(String),
    #[error("the coordinator ended the stream")]
    Ended,
    #[error("nothing was heard from the coordinator for {silent_ms} ms")]
    Silent { silent_ms: u64 },
    #[error("registration refused ({}): {detail}; fix the node's configuration or stop its namesake", reason.name())]
    Refused {
        reason: RegisterRefusedReason,
        detail: String,
    },
    #[error("the coordinator breaks the contract: {0}")]
    Contract(ConvertError),
}

impl LostReason {
    fn of(status: &tonic::Status) -> Self {
        match status.code() {
            tonic::Code::InvalidArgument => Self::NotUnderstood(status.message().to_owned()),
            _ => Self::Stream(proto::status::words(status)),
        }
    }
}

/// What a node joins with.
#[derive(Clone, Debug)]
pub struct JoinConfig {
    /// host:port of each coordinator's membership service, in order of preference.
    pub coordinators: Vec<String>,
    pub record: NodeRecord,
}

/// A node's membership; ends with `leave`, or when it is dropped.
#[derive(Debug)]
pub struct Membership {
    events: mpsc::Receiver<MembershipEvent>,
    peers: watch::Receiver<Vec<Peer>>,
    leave: Shutdown,
    streams: JoinSet<()>,
}

/// Starts the streams. `status` is what the node reports; its permit counters run from the node's start.
pub fn join(config: JoinConfig, status: watch::Receiver<NodeStatus>) -> Membership {
    let (events_in, events) = mpsc::channel(EVENTS_QUEUED_MAX);
    let (peers_in, peers) = watch::channel(Vec::new());
    let leave = Shutdown::new();
    let shared = Arc::new(Shared {
        holders: Mutex::default(),
        peers_by_coordinator: Mutex::default(),
        peers: peers_in,
        holder_changed: watch::channel(()).0,
    });
    let mut streams = JoinSet::new();
    for (rank, address) in config.coordinators.into_iter().enumerate() {
        let link = Link {
            rank,
            address,
            record: config.record.clone(),
            status: status.clone(),
            events: events_in.clone(),
            leave: leave.clone(),
            shared: shared.clone(),
        };
        streams.spawn(link.keep());
    }
    Membership {
        events,
        peers,
        leave,
        streams,
    }
}

impl Membership {
    /// `None` never comes before `leave`.
    pub async fn next_event(&mut self) -> Option<MembershipEvent> {
        self.events.recv().await
    }
    /// Decode nodes to keep links to, over all coordinators.
    pub fn peers(&self) -> watch::Receiver<Vec<Peer>> {
        self.peers.clone()
    }
    /// Tells the coordinators that the drain is over and closes the streams; at most one second.
    pub async fn leave(mut self) {
        self.leave.request();
        let all = async { while self.streams.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(LEAVE_TIME_LIMIT, all).await;
    }
}

/// Who holds the permits, and from which point its counters run.
#[derive(Debug, Default)]
struct Holders {
    connected: BTreeMap<usize, ()>,
    holder: Option<usize>,
    received_then: u64,
}

#[derive(Debug)]
struct Shared {
    holders: Mutex<Holders>,
    peers_by_coordinator: Mutex<BTreeMap<usize, Vec<Peer>>>,
    peers: watch::Sender<Vec<Peer>>,
    /// Wakes the other streams when the permits change hands.
    holder_changed: watch::Sender<()>,
}

impl Shared {
    fn connect(&self, rank: usize, received: u64) {
        self.change(received, |holders| {
            holders.connected.insert(rank, ());
        });
    }

    /// Its peers stay known: links to them carry requests that are still running, and the next stream brings a new list.
    fn disconnect(&self, rank: usize, received: u64) {
        self.change(received, |holders| {
            holders.connected.remove(&rank);
            // The same coordinator coming back is a new stream all the same.
            if holders.holder == Some(rank) {
                holders.holder = None;
            }
        });
    }

    fn change(&self, received: u64, change: impl FnOnce(&mut Holders)) {
        let mut holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut holders);
        let next = holders.connected.keys().next().copied();
        if next != holders.holder {
            holders.holder = next;
            holders.received_then = received;
            drop(holders);
            self.holder_changed.send_replace(());
        }
    }

    /// The status as the stream of `rank` may see it.
    fn seen_by(&self, rank: usize, mut status: NodeStatus) -> NodeStatus {
        let holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        if holders.holder == Some(rank) {
            status.permits_granted_total = status.permits_granted_total.saturating_sub(holders.received_then);
            status.permits_received_total = status.permits_received_total.saturating_sub(holders.received_then);
        } else {
            status.permits_granted_total = 0;
            status.permits_received_total = 0;
        }
        status
    }

    fn set_peers(&self, rank: usize, list: Vec<Peer>) {
        let mut all = self.peers_by_coordinator.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(rank, list);
        let mut merged: Vec<Peer> = Vec::new();
        for peer in all.values().flatten() {
            if !merged.iter().any(|known| known.node == peer.node) {
                merged.push(peer.clone());
            }
        }
        self.peers.send_if_modified(|peers| {
            let changes = *peers != merged;
            *peers = merged;
            changes
        });
    }
}

/// One coordinator's stream over all its lives.
struct Link {
    rank: usize,
    address: String,
    record: NodeRecord,
    status: watch::Receiver<NodeStatus>,
    events: mpsc::Sender<MembershipEvent>,
    leave: Shutdown,
    shared: Arc<Shared>,
}

impl Link {
    fn is_leaving(&self) -> bool {
        self.leave.is_requested() || self.status.borrow().state == NodeState::Draining
    }

    async fn keep(mut self) {
        let mut back_off = BACK_OFF_FIRST;
        while !self.leave.is_requested() {
            let mut was_welcome = false;
            let Err(reason) = self.one_stream(&mut was_welcome).await else {
                return;
            };
            if was_welcome {
                back_off = BACK_OFF_FIRST;
            }
            match was_welcome {
                // It has told us, or we have told it.
                true if reason == LostReason::Ended || self.is_leaving() => {
                    tracing::info!(coordinator = %self.address, %reason, "the coordinator's stream ended");
                }
                true => tracing::warn!(coordinator = %self.address, %reason, "lost the coordinator; dialling again"),
                false => tracing::debug!(coordinator = %self.address, %reason, "no coordinator yet"),
            }
            if matches!(
                reason,
                LostReason::Refused { .. } | LostReason::NotUnderstood(_) | LostReason::Contract(_)
            ) {
                tracing::error!(coordinator = %self.address, %reason, "not a member");
            }
            let lost = MembershipEvent::ConnectionLost {
                address: self.address.clone(),
                reason,
            };
            if self.events.send(lost).await.is_err() {
                return;
            }
            let pause = back_off.mul_f64(rand::rng().random_range(0.5..1.0));
            back_off = (back_off * 2).min(BACK_OFF_MAX);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.leave.requested() => {}
            }
        }
    }

    /// One stream from its start to its end; `Ok` only after a clean leave.
    async fn one_stream(&mut self, was_welcome: &mut bool) -> Result<(), LostReason> {
        let connect = |error: &dyn std::fmt::Display| LostReason::Connect(error.to_string());
        let endpoint = serve::endpoint(&self.address).map_err(|error| connect(&error))?;
        let channel = endpoint.connect().await.map_err(|error| connect(&error))?;
        let mut client = MembershipServiceClient::new(channel)
            .max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX)
            .max_encoding_message_size(CONTROL_MESSAGE_BYTES_MAX);
        let (reports, queue) = mpsc::channel(REPORTS_QUEUED_MAX);
        let mut record = self.record.clone();
        record.state = self.status.borrow().state;
        let register = NodeReport::Register(record).into();
        reports.send(register).await.map_err(|_| LostReason::Ended)?;
        let clock = client.clone();
        let opening = client.join(ReceiverStream::new(queue));
        let opened = tokio::time::timeout(FIRST_ANSWER_TIME_LIMIT, opening).await;
        let silent = LostReason::Silent {
            silent_ms: FIRST_ANSWER_TIME_LIMIT.as_millis() as u64,
        };
        let response = opened.map_err(|_| silent)?.map_err(|status| LostReason::of(&status))?;
        let _measuring = clock_offset::measure(clock, reports.clone(), self.rank);
        let mut stream = Stream {
            link: self,
            reports,
            incoming: response.into_inner(),
            timing: None,
            heard: Instant::now(),
            reported: Instant::now(),
        };
        let ended = stream.talk().await;
        *was_welcome = stream.timing.is_some();
        if *was_welcome {
            let received = self.status.borrow().permits_received_total;
            self.shared.disconnect(self.rank, received);
        }
        ended
    }
}

/// What a welcome fixes for a stream.
#[derive(Clone, Copy, Debug)]
struct Timing {
    lease: Duration,
    status_interval: Duration,
}

struct Stream<'a> {
    link: &'a mut Link,
    reports: mpsc::Sender<v1::NodeReport>,
    incoming: tonic::Streaming<v1::CoordinatorReport>,
    /// `None` until welcomed.
    timing: Option<Timing>,
    heard: Instant,
    reported: Instant,
}

impl Stream<'_> {
    async fn talk(&mut self) -> Result<(), LostReason> {
        let leave = self.link.leave.clone();
        let mut status = self.link.status.clone();
        let mut holder_changed = self.link.shared.holder_changed.subscribe();
        let mut is_stale = true;
        loop {
            let silence_limit = self.timing.map_or(FIRST_ANSWER_TIME_LIMIT, |timing| timing.lease);
            let next_report = match (self.timing, is_stale) {
                (Some(_), true) => self.reported + COALESCE,
                (Some(timing), false) => self.reported + timing.status_interval,
                (None, _) => self.heard + FIRST_ANSWER_TIME_LIMIT,
            };
            tokio::select! {
                () = leave.requested() => return self.say_goodbye().await,
                report = self.incoming.message() => {
                    let report = report.map_err(|status| LostReason::of(&status))?.ok_or(LostReason::Ended)?;
                    self.heard = Instant::now();
                    self.take(report.try_into().map_err(LostReason::Contract)?).await?;
                }
                changed = status.changed(), if !is_stale => {
                    changed.map_err(|_| LostReason::Ended)?;
                    is_stale = true;
                }
                _ = holder_changed.changed(), if !is_stale => is_stale = true,
                () = tokio::time::sleep_until(next_report), if self.timing.is_some() => {
                    let current = status.borrow_and_update().clone();
                    self.report(current)?;
                    is_stale = false;
                }
                () = tokio::time::sleep_until(self.heard + silence_limit) => {
                    return Err(LostReason::Silent { silent_ms: silence_limit.as_millis() as u64 });
                }
            }
        }
    }

    /// A full queue means the coordinator does not read: this status is skipped, the next is newer anyway.
    fn report(&mut self, status: NodeStatus) -> Result<(), LostReason> {
        let status = self.link.shared.seen_by(self.link.rank, status);
        let epoch = self.link.record.id.epoch;
        self.reported = Instant::now();
        match self.reports.try_send(NodeReport::Status { epoch, status }.into()) {
            Ok(()) | Err(mpsc::error::TrySendError::Full(_)) => Ok(()),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(LostReason::Ended),
        }
    }

    async fn take(&mut self, report: CoordinatorReport) -> Result<(), LostReason> {
        match report {
            CoordinatorReport::Welcome(welcome) => {
                self.timing = Some(Timing {
                    lease: welcome.lease,
                    status_interval: welcome.status_interval,
                });
                let received = self.link.status.borrow().permits_received_total;
                self.link.shared.connect(self.link.rank, received);
                tracing::info!(coordinator = %welcome.coordinator, address = %self.link.address, "joined");
                let address = self.link.address.clone();
                self.tell(MembershipEvent::Welcomed {
                    coordinator: welcome.coordinator,
                    address,
                })
                .await
            }
            CoordinatorReport::Renewed { lease } => {
                if let Some(timing) = &mut self.timing {
                    timing.lease = lease;
                }
                Ok(())
            }
            CoordinatorReport::Peers(peers) => {
                self.link.shared.set_peers(self.link.rank, peers);
                Ok(())
            }
            CoordinatorReport::RegisterRefused { reason, detail } => Err(LostReason::Refused { reason, detail }),
            CoordinatorReport::Drain { reason } => self.tell(MembershipEvent::DrainRequested { reason }).await,
        }
    }

    async fn tell(&self, event: MembershipEvent) -> Result<(), LostReason> {
        self.link.events.send(event).await.map_err(|_| LostReason::Ended)
    }

    async fn say_goodbye(&mut self) -> Result<(), LostReason> {
        let mut status = self.link.status.borrow().clone();
        status.state = NodeState::Draining;
        self.report(status)?;
        let leave = NodeReport::Leave {
            reason: "drained".to_owned(),
        };
        let _ = self.reports.send(leave.into()).await;
        // The coordinator ends the stream when it has read the goodbye.
        let ended = async { while let Ok(Some(_)) = self.incoming.message().await {} };
        let _ = tokio::time::timeout(LEAVE_TIME_LIMIT / 2, ended).await;
        Ok(())
    }
}

#[cfg(test)]
#[path = "membership_tests.rs"]
mod tests;
