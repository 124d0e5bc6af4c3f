//! A node's side of membership: one stream to each coordinator, for as long as the node lives.
//!
//! Each stream (`link.rs`) registers, reports status and listens. A status is sent at least every `status_interval` that
//! the coordinator asks for, and at once when the watched status changes, but at most every 2 ms. A stream reconnects for
//! ever, with a limited back-off and jitter. The coordinators are a list that does not change, or those that are registered
//! in etcd, where the node registers too (`coordinators.rs`, `links.rs`).
//!
//! **Permits** begin and end with a stream and belong to one coordinator; `shared.rs` divides the node's permits between
//! the streams. The node's own counters run for ever, and those of a stream begin with it. So permits that were granted on
//! a lost stream and not used are granted again, and the node's brain restarts nothing.

mod coordinators;
mod link;
mod links;
mod shared;
mod silence;
mod trouble;

use std::time::Duration;

use identity::Identity;
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

pub use coordinators::{CoordinatorsAt, MixedCoordinators, of_process};
pub use etcd_membership::{AddressError, BadRecord};

/// Events that wait for the node. When the node does not take them the streams stand still.
const EVENTS_QUEUED_MAX: usize = 64;
/// How long `leave` may take to reach the coordinators. Removing the entry in etcd may take as long again.
const LEAVE_TIME_LIMIT: Duration = Duration::from_secs(1);

/// An event of a membership stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MembershipEvent {
    Welcomed {
        coordinator: NodeId,
        address: String,
    },
    /// The stream is lost and is being opened again. Its permits are void. Requests of that coordinator end by themselves,
    /// with their own streams.
    ConnectionLost {
        address: String,
        reason: LostReason,
    },
    /// The coordinator wants the node to leave, for good or to join again as `next_role`.
    DrainRequested {
        reason: String,
        next_role: Option<AssignedRole>,
    },
    /// A process that was started later has this node's name in etcd. This process must end.
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
    /// Another attempt will end in the same way: a person must change a setting.
    #[error("the coordinator cannot read this node's registration: {0}; fix the node's configuration")]
    NotUnderstood(String),
    /// The same.
    #[error(
        "the coordinator does not take this node for what it says that it is: {0}; give the node the certificate of its name and role"
    )]
    AnotherName(String),
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
    /// There is no coordinator to dial.
    #[error("none is registered{0}")]
    NoneRegistered(String),
}

impl LostReason {
    fn of(status: &tonic::Status) -> Self {
        match status.code() {
            tonic::Code::InvalidArgument => Self::NotUnderstood(status.message().to_owned()),
            tonic::Code::PermissionDenied => Self::AnotherName(status.message().to_owned()),
            _ => Self::Stream(proto::status::words(status)),
        }
    }
}

/// The facts with which a node joins.
#[derive(Clone, Debug)]
pub struct JoinConfig {
    /// Membership services to join.
    pub coordinators: CoordinatorsAt,
    pub record: NodeRecord,
    /// The keys that the node's prefix cache lists.
    pub prefixes: watch::Receiver<PrefixLog>,
    pub gauges: MembershipGauges,
    /// Who this node is to the coordinators.
    pub identity: Identity,
}

/// A node's membership. It ends with `leave`, or when it is dropped.
#[derive(Debug)]
pub struct Membership {
    events: mpsc::Receiver<MembershipEvent>,
    peers: watch::Receiver<Vec<Peer>>,
    leave: Shutdown,
    keeper: Option<JoinHandle<()>>,
}

/// Starts the streams. `status` is what the node reports. Its permit counters run from the node's start.
///
/// # Errors
/// A record that other readers of etcd would skip, for example a name that cannot be a key.
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
    /// An event that has come already.
    pub(crate) fn queued_event(&mut self) -> Option<MembershipEvent> {
        self.events.try_recv().ok()
    }
    /// Decode nodes to which links are kept, over all coordinators.
    pub fn peers(&self) -> watch::Receiver<Vec<Peer>> {
        self.peers.clone()
    }
    /// Tells the coordinators that the drain is over and closes the streams. It takes two seconds at most.
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
