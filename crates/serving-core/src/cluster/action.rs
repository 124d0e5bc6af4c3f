//! Everything the cluster can ask its shell to do, as one closed list. Actions are carried out in order.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::{NodeId, RequestId};
use crate::node::{AssignedRole, NodeRecord, PermitNote, Ticket};
use crate::request::{AttemptKey, LocalPrefillReason, RejectReason, Request, RequestError};

use super::content_free;
use super::event::{Leg, LegError, StreamId};

/// A node to call: who it must be, and where it listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    pub node: NodeId,
    pub address: String,
}

/// Written down, it has no content of requests (`content_free.rs`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ClusterAction {
    /// Nodes were chosen for this attempt. Always comes before the attempt's first `StartOpen` or `StartPrefill`.
    Place {
        key: AttemptKey,
        placement: PlacementFacts,
    },
    StartOpen {
        key: AttemptKey,
        #[serde(with = "content_free::request")]
        request: Arc<Request>,
        decode: Target,
        /// The node that will push KV; `None` with local prefill.
        prefill: Option<NodeId>,
        local: Option<LocalPrefillReason>,
        permit_blocks: u32,
        time_left: Duration,
    },
    StartPrefill {
        key: AttemptKey,
        #[serde(with = "content_free::request")]
        request: Arc<Request>,
        prefill: Target,
        /// `None`: the request ends at its first token.
        ticket: Option<Ticket>,
        permit_tokens: u32,
        time_left: Duration,
    },
    /// The brain's own verdict: close this leg's stream and say that the leg failed by this error. Nothing is reported back,
    /// and the action that follows from it comes next. A leg that has ended already is left alone.
    FailLeg {
        key: AttemptKey,
        leg: Leg,
        error: LegError,
    },
    /// Close one leg's stream; nothing is reported back. A leg that has ended already is left alone.
    CancelLeg {
        key: AttemptKey,
        leg: Leg,
    },
    /// Close both legs, let nothing more of this attempt reach the client, then report `AttemptEnded`.
    EndAttempt {
        key: AttemptKey,
    },
    /// Terminal, before anything was promised.
    Reject {
        request: RequestId,
        reason: RejectReason,
        retry_after: Option<Duration>,
    },
    /// Terminal.
    Fail {
        request: RequestId,
        error: RequestError,
    },
    /// Terminal: every token has been delivered.
    Complete {
        request: RequestId,
        attempts: u32,
    },
    /// Terminal: the client is gone, nobody is told.
    Forget {
        request: RequestId,
    },
    WelcomeNode {
        stream: StreamId,
    },
    RefuseNode {
        stream: StreamId,
        reason: JoinRefusal,
    },
    RenewLease {
        stream: StreamId,
    },
    /// To a prefill node: the decode nodes it should keep a link to.
    SendPeers {
        stream: StreamId,
        peers: Vec<NodeRecord>,
    },
    /// To a node that other coordinators use too.
    TellPermits {
        stream: StreamId,
        note: PermitNote,
    },
    RequestDrain {
        stream: StreamId,
        /// What the node is to join as when it has drained; `None`: it is to end.
        next_role: Option<AssignedRole>,
    },
    /// This life of the node is over: close its connections.
    DropNode {
        node: NodeId,
        cause: DropCause,
    },
}

/// Why a node's life is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DropCause {
    /// It said goodbye after its drain.
    Left,
    /// It said nothing for as long as its lease.
    LeaseExpired,
    /// Another life of the same name has registered.
    Restarted,
}

/// What is told about a placement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementFacts {
    pub prefill: Option<NodeId>,
    pub decode: Option<NodeId>,
    pub local: Option<LocalPrefillReason>,
    /// For example `least-loaded: decode tie, prefill only_candidate`.
    pub route_reason: String,
    pub queued_for: Duration,
}

/// Why a node may not join. The names are the wire labels of `RegisterRefused.reason`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum JoinRefusal {
    /// Another process with this name is connected and its lease is live.
    NameTaken,
    IncompatibleModel {
        expected: String,
        got: String,
    },
    Invalid {
        field: Cow<'static, str>,
    },
}

impl JoinRefusal {
    pub fn name(&self) -> &'static str {
        match self {
            JoinRefusal::NameTaken => "name_taken",
            JoinRefusal::IncompatibleModel { .. } => "incompatible_model",
            JoinRefusal::Invalid { .. } => "invalid",
        }
    }
}
