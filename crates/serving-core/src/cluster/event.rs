//! Everything that can happen to the cluster, as one closed list.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::{ChoiceIndex, NodeName, RequestId, TokenId};
use crate::kv::prefix_log::PrefixReport;
use crate::node::{AssignedRole, NodeRecord, NodeStatus, Ticket};
use crate::request::{AttemptKey, Request, RequestError};
use crate::time::Time;

use super::content_free;

/// One connection of one node to the membership endpoint. Minted by the shell, never reused: permits live and die with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StreamId(pub u64);

/// The two streams a request can have open: to its prefill node and to its decode node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Leg {
    Prefill,
    Decode,
}

impl Leg {
    pub fn name(self) -> &'static str {
        match self {
            Leg::Prefill => "prefill",
            Leg::Decode => "decode",
        }
    }
}

/// Written down, it has no content of requests (`content_free.rs`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ClusterEvent {
    RequestArrived {
        #[serde(with = "content_free::request")]
        request: Arc<Request>,
    },
    /// The client closed its connection, or dropped its handle.
    ClientGone {
        request: RequestId,
    },
    /// One choice has had its last token. The request is over when all have.
    ChoiceFinished {
        request: RequestId,
        choice: ChoiceIndex,
        by: FinishedBy,
    },
    /// The client's stream cannot go on (it read too slowly).
    StreamBroken {
        request: RequestId,
        error: RequestError,
    },
    /// Answer to `EndAttempt`: nothing of this attempt will reach the client any more.
    AttemptEnded {
        key: AttemptKey,
        delivered: Delivered,
    },
    /// Something came in on a leg.
    Leg {
        key: AttemptKey,
        event: LegEvent,
    },
    NodeJoined {
        record: NodeRecord,
        stream: StreamId,
    },
    NodeReported {
        stream: StreamId,
        /// When it was read from the connection: what waits for this coordinator is not fresh when it is looked at.
        read_at: Time,
        status: NodeStatus,
    },
    /// What a node's prefix cache lists: everything first on a stream, then changes.
    PrefixesReported {
        stream: StreamId,
        report: PrefixReport,
    },
    /// The membership stream ended without a word. The lease runs on.
    NodeDisconnected {
        stream: StreamId,
    },
    /// The node said goodbye after a drain.
    NodeLeft {
        stream: StreamId,
    },
    /// Somebody asked for this node to be drained, and perhaps to come back as something else.
    DrainNode {
        name: NodeName,
        next_role: Option<AssignedRole>,
    },
    /// This coordinator shuts down: nothing new is admitted.
    DrainStarted,
    /// This coordinator did nothing for so long (stopped, frozen, starved of CPU), and heard nobody meanwhile. Comes before
    /// whatever it does next.
    StoodStill {
        stillness: Duration,
    },
    /// Time passed; `Cluster::next_wake` says when this is due.
    Tick,
    /// Output tokens of a request that no leg has told of ([`LegEvent::TokensDelivered`]), because its client ended it first.
    TokensCounted {
        request: RequestId,
        count: u32,
    },
}

impl ClusterEvent {
    /// What a node says of itself on its membership stream, and the stream's own fate.
    pub fn is_of_membership(&self) -> bool {
        matches!(
            self,
            ClusterEvent::NodeJoined { .. }
                | ClusterEvent::NodeReported { .. }
                | ClusterEvent::PrefixesReported { .. }
                | ClusterEvent::NodeDisconnected { .. }
                | ClusterEvent::NodeLeft { .. }
        )
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishedBy {
    /// The node set a finish reason; its leg ends by itself.
    Node,
    /// A stop string was found at the HTTP edge; the node does not know.
    Edge,
}

/// What the client has had when an attempt was ended.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Delivered {
    /// Output tokens delivered by that attempt, in order; meaningful for one choice only.
    #[serde(with = "content_free::tokens")]
    pub tokens: Vec<TokenId>,
    /// Tokens delivered over all choices by that attempt.
    pub token_count: u64,
    /// Every choice has had its last token.
    pub is_complete: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum LegEvent {
    /// The decode node reserved its blocks; no ticket with local prefill.
    Opened {
        ticket: Option<Ticket>,
    },
    /// The prefill node took the work on.
    PrefillAccepted,
    /// The first token reached the coordinator through this leg.
    FirstToken {
        leg: Leg,
    },
    /// The decode node verified and committed the KV.
    Committed,
    /// Tokens came in on this leg since the last report; sent at a bounded rate.
    TokensDelivered {
        leg: Leg,
        count: u32,
    },
    PrefillFinished {
        outcome: PrefillOutcome,
    },
    /// All choices ended on the decode node.
    DecodeFinished,
    /// Policy on the node said no before anything was held.
    Refused {
        leg: Leg,
        reason: RefuseReason,
    },
    Failed {
        leg: Leg,
        error: LegError,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PrefillOutcome {
    HandedOver,
    EndedAtFirstToken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum RefuseReason {
    NoCapacity,
    StaleEpoch,
    Draining,
    Duplicate,
    Invalid,
    Incompatible,
}

impl RefuseReason {
    pub const ALL: [Self; 6] = [
        Self::NoCapacity,
        Self::StaleEpoch,
        Self::Draining,
        Self::Duplicate,
        Self::Invalid,
        Self::Incompatible,
    ];

    pub fn name(self) -> &'static str {
        match self {
            RefuseReason::NoCapacity => "no_capacity",
            RefuseReason::StaleEpoch => "stale_epoch",
            RefuseReason::Draining => "draining",
            RefuseReason::Duplicate => "duplicate",
            RefuseReason::Invalid => "invalid",
            RefuseReason::Incompatible => "incompatible",
        }
    }
}

/// How a leg broke.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LegError {
    /// No connection was made: the node never saw the work.
    Unreachable { detail: String },
    /// The connection broke while the leg was open.
    ConnectionLost { detail: String },
    /// The node said so itself.
    Node {
        fault: NodeFault,
        reason: String,
        detail: String,
    },
    /// A timer of this coordinator ran out.
    TimedOut { wait: TimedWait },
    /// The node's lease ended, or its name came back with a new epoch.
    NodeLost,
    /// The node broke the protocol.
    Protocol { detail: String },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum NodeFault {
    Engine,
    Transfer,
    Deadline,
    Peer,
    Internal,
    Draining,
    /// The request's own constraints leave no token to draw.
    RuledOut,
}

/// The coordinator's timers on a leg (PROTOCOL, timers).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum TimedWait {
    Open,
    PrefillStart,
    Silence,
}

impl LegError {
    /// Every [`LegError::name`].
    pub const NAMES: [&'static str; 14] = [
        "unreachable",
        "connection_lost",
        "node_lost",
        "protocol",
        "open_timeout",
        "prefill_start_timeout",
        "silence",
        "engine",
        "transfer",
        "deadline",
        "peer",
        "node_internal",
        "draining",
        "ruled_out",
    ];

    /// Closed label for `baton_handoff_retries_total{reason}`.
    pub fn name(&self) -> &'static str {
        match self {
            LegError::Unreachable { .. } => "unreachable",
            LegError::ConnectionLost { .. } => "connection_lost",
            LegError::NodeLost => "node_lost",
            LegError::Protocol { .. } => "protocol",
            LegError::TimedOut { wait: TimedWait::Open } => "open_timeout",
            LegError::TimedOut {
                wait: TimedWait::PrefillStart,
            } => "prefill_start_timeout",
            LegError::TimedOut {
                wait: TimedWait::Silence,
            } => "silence",
            LegError::Node { fault, .. } => match fault {
                NodeFault::Engine => "engine",
                NodeFault::Transfer => "transfer",
                NodeFault::Deadline => "deadline",
                NodeFault::Peer => "peer",
                NodeFault::Internal => "node_internal",
                NodeFault::Draining => "draining",
                NodeFault::RuledOut => "ruled_out",
            },
        }
    }
    /// The model could not run, or the node said nonsense: it can be reached, but what it does is in doubt.
    pub(super) fn blames_engine(&self) -> bool {
        let is_engine = |fault: &NodeFault| *fault == NodeFault::Engine;
        match self {
            LegError::Node { fault, .. } => is_engine(fault),
            LegError::Protocol { .. } => true,
            _ => false,
        }
    }
    /// True when the node itself, not the request, is in doubt.
    pub(super) fn casts_suspicion(&self) -> bool {
        matches!(
            self,
            LegError::Unreachable { .. } | LegError::ConnectionLost { .. } | LegError::TimedOut { .. }
        )
    }
}

impl fmt::Display for LegError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LegError::Unreachable { detail } => write!(f, "could not be reached: {detail}"),
            LegError::ConnectionLost { detail } => write!(f, "connection lost: {detail}"),
            LegError::Node { reason, detail, .. } => write!(f, "{reason}: {detail}"),
            LegError::TimedOut { .. } => write!(f, "no answer in time ({})", self.name()),
            LegError::NodeLost => f.write_str("its lease ended or it restarted"),
            LegError::Protocol { detail } => write!(f, "broke the protocol: {detail}"),
        }
    }
}
