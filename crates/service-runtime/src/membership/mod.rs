//! A node's side of membership: one stream to each coordinator, for as long as the node lives.
//!
//! Each stream (`link.rs`) registers, reports status (at least every `status_interval` the coordinator asks for, and at
//! once when the watched status changes, at most every 2 ms) and listens. It reconnects for ever with a jittered, capped
//! back-off. Which coordinators there are is a list that does not change, or what is registered in etcd, where the node
//! registers too (`coordinators.rs`, `links.rs`).
//!
//! **Permits** live and die with a stream and belong to one coordinator: `shared.rs` divides the node's between the
//! streams. The node's own counters run on for ever, each stream's begin with it, so what was granted and not used on a
//! lost stream is granted again, and nothing has to be restarted in the node's brain.

mod coordinators;
mod link;
mod links;
mod shared;

use std::time::Duration;

use proto::convert::ConvertError;
use proto::messages::{Peer, RegisterRefusedReason};
use serving_core::ids::{NodeEpoch, NodeId};
use serving_core::kv::prefix_log::PrefixLog;
use serving_core::node::{AssignedRole, NodeRecord, NodeStatus};
use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::metrics::membership::MembershipGauges;
use crate::shutdown::Shutdown;

pub use coordinators::{CoordinatorsAt, MixedCoordinators};
pub use etcd_membership::BadRecord;

/// Events waiting for the node; when it does not take them the streams stand still.
const EVENTS_QUEUED_MAX: usize = 64;
/// How long `leave` may take to reach the coordinators, and as long again to take back what stands in etcd.
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
    /// The coordinator wants the node to leave, for good or to join again as `next_role`.
    DrainRequested {
        reason: String,
        next_role: Option<AssignedRole>,
    },
    /// A process that was started later has this node's name in etcd: this one has to go.
    Fenced {
        by_epoch: NodeEpoch,
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
    /// There is nobody to dial.
    #[error("none is registered{0}")]
    NoneRegistered(String),
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
    /// Membership services to join.
    pub coordinators: CoordinatorsAt,
    pub record: NodeRecord,
    /// What the node's prefix cache lists.
    pub prefixes: watch::Receiver<PrefixLog>,
    pub gauges: MembershipGauges,
}

/// A node's membership; ends with `leave`, or when it is dropped.
#[derive(Debug)]
pub struct Membership {
    events: mpsc::Receiver<MembershipEvent>,
    peers: watch::Receiver<Vec<Peer>>,
    leave: Shutdown,
    keeper: Option<JoinHandle<()>>,
}

/// Starts the streams. `status` is what the node reports; its permit counters run from the node's start.
///
/// # Errors
/// A record that etcd's other readers would skip: a name that cannot be a key, for example.
pub fn join(config: JoinConfig, status: watch::Receiver<NodeStatus>) -> Result<Membership, BadRecord> {
    let (events_in, events) = mpsc::channel(EVENTS_QUEUED_MAX);
    let (peers_in, peers) = watch::channel(Vec::new());
    let leave = Shutdown::new();
    let links = links::Links::new(config, status, (events_in, peers_in))?;
    Ok(Membership {
        events,
        peers,
        keeper: Some(tokio::spawn(links.keep(leave.clone()))),
        leave,
    })
}

impl Membership {
    /// `None` never comes before `leave`.
    pub async fn next_event(&mut self) -> Option<MembershipEvent> {
        self.events.recv().await
    }
    /// One that waits already.
    pub fn queued_event(&mut self) -> Option<MembershipEvent> {
        self.events.try_recv().ok()
    }
    /// Decode nodes to keep links to, over all coordinators.
    pub fn peers(&self) -> watch::Receiver<Vec<Peer>> {
        self.peers.clone()
    }
    /// Tells the coordinators that the drain is over and closes the streams; at most two seconds.
    pub async fn leave(mut self) {
        self.leave.request();
        if let Some(keeper) = self.keeper.as_mut() {
            let _ = tokio::time::timeout(LEAVE_TIME_LIMIT * 2, keeper).await;
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if let Some(keeper) = self.keeper.take() {
            keeper.abort();
        }
    }
}

#[cfg(test)]
#[path = "../membership_tests.rs"]
mod tests;
