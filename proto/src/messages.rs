//! The messages between processes in core types. `convert` makes them from the wire, and all other crates use them.

use std::time::Duration;

pub use serving_core::cluster::{NodeFault, PrefillOutcome, RefuseReason};
use serving_core::compatibility::Compatibility;
use serving_core::ids::{Attempt, NodeEpoch, NodeId};
use serving_core::kv::prefix_log::PrefixReport;
use serving_core::node::{AssignedRole, NodeRecord, NodeStatus, PermitNote, Ticket};
use serving_core::request::{LocalPrefillReason, Request, TokenEvent, TokenLogprobs};
use serving_core::stage::StageTimings;
use serving_core::time::Time;

mod handoff;

pub use handoff::{
    Hello, HelloRefused, HelloRefusedReason, HelloReply, KvBlockFrame, KvFrame, KvReply, KvShard, LastFrame,
    StagedBlock, StagedFrame, StagedReply, TRANSPORT_OFFER_BYTES_MAX, TransportOffer,
};

/// Version of the whole wire. It is equal on both ends of a stream, and part of the compatibility hash. It rises when an older node
/// would do something else than it is asked: 3 came with constrained outputs.
pub const PROTOCOL_VERSION: u32 = 3;

/// Largest control message (Open, Prefill, Join, token events). A prompt of 700,000 tokens of 5-byte varints fits.
pub const CONTROL_MESSAGE_BYTES_MAX: usize = 4 << 20;
/// Largest KV frame: a block of a 70B-class model (80 layers, 8 KV heads, dim 128, f16: 5 MiB) fits whole.
pub const KV_FRAME_BYTES_MAX: usize = 8 << 20;
/// Largest message of a pair that shares memory: a header, a last frame with the first tokens of every choice, or a refusal
/// with its detail.
pub const STAGED_MESSAGE_BYTES_MAX: usize = 256 << 10;

/// C -> D. `request.time_limit` is the time left when the message was sent.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenRequest {
    pub attempt: Attempt,
    pub request: Request,
    /// A node with another epoch refuses.
    pub node_epoch: NodeEpoch,
    pub permit_blocks: u32,
    /// The life of the coordinator that owns these permits.
    pub coordinator_epoch: NodeEpoch,
    /// When set, the decode node computes the prompt itself and mints no ticket.
    pub local_prefill: Option<LocalPrefillReason>,
    /// Only this node may write the reservation; `None` with local prefill.
    pub prefill_node: Option<NodeId>,
}

/// C -> P. `request.time_limit` is the time left when the message was sent.
#[derive(Clone, Debug, PartialEq)]
pub struct PrefillRequest {
    pub attempt: Attempt,
    pub request: Request,
    pub node_epoch: NodeEpoch,
    pub permit_tokens: u32,
    /// The life of the coordinator that owns these permits.
    pub coordinator_epoch: NodeEpoch,
    /// `None`: the request ends at its first token, and nothing is handed over.
    pub ticket: Option<Ticket>,
}

/// D -> C.
#[derive(Clone, Debug, PartialEq)]
pub enum DecodeEvent {
    Opened(Opened),
    Tokens(TokenBatch),
    PromptLogprobs(PromptLogprobs),
    /// The handoff is verified and committed. The prefill leg is no longer needed.
    Committed {
        timings: StageTimings,
        /// Prompt tokens that the prefill node found in its prefix cache.
        cached_tokens: Option<u32>,
    },
    Finished(DecodeFinished),
    Failed(Failed),
    Refused(Refused),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Opened {
    /// `None` with local prefill.
    pub ticket: Option<Ticket>,
    pub prefix_blocks: u32,
    pub cached_tokens: u32,
    /// On the node's clock; [`ClockOffset`] converts it.
    pub at: Time,
}

/// Tokens of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenBatch {
    pub tokens: Vec<TokenEvent>,
    /// On the node's clock; [`ClockOffset`] converts it.
    pub sampled_at: Time,
    /// `None` for tokens that no step of this node sampled, because they came with a handoff.
    pub step: Option<StepNote>,
}

impl TokenBatch {
    /// Tokens that no step of this node sampled.
    pub fn handed_over(tokens: Vec<TokenEvent>, sampled_at: Time) -> Self {
        Self {
            tokens,
            sampled_at,
            step: None,
        }
    }
}

/// The step that sampled a token, for a reader who asks why the token was late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepNote {
    pub took: Duration,
    /// Prompt tokens that were computed in the same step.
    pub prompt_tokens: u32,
    /// How often this request had been preempted until then.
    pub preemptions: u32,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct DecodeFinished {
    pub timings: StageTimings,
    pub cached_tokens: u32,
    pub preemptions: u32,
    /// Guessed while decoding, and how many of them were right.
    pub drafted_tokens: u64,
    pub accepted_tokens: u64,
    /// One per prompt block, when asked for.
    pub kv_hashes: Vec<u64>,
    pub kv_bytes: u64,
    /// Empty with local prefill.
    pub transport: String,
}

/// P -> C.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillEvent {
    Accepted {
        cached_tokens: u32,
        /// On the node's clock; [`ClockOffset`] converts it.
        at: Time,
    },
    Tokens(TokenBatch),
    PromptLogprobs(PromptLogprobs),
    /// Stage timings up to the first token.
    FirstToken {
        timings: StageTimings,
        /// On the node's clock; [`ClockOffset`] converts it.
        sampled_at: Time,
    },
    Finished(PrefillFinished),
    Failed(Failed),
    Refused(Refused),
}

#[derive(Clone, Debug, PartialEq)]
pub struct PrefillFinished {
    pub outcome: PrefillOutcome,
    pub timings: StageTimings,
    pub kv_bytes: u64,
    /// Sum of the times the pair spent moving this request's KV.
    pub transfer: Duration,
    /// Empty when nothing was handed over.
    pub transport: String,
    pub cached_tokens: u32,
    pub kv_hashes: Vec<u64>,
}

/// Logprobs of prompt tokens from `first_position` on; position 0 has none and is never sent.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptLogprobs {
    pub first_position: u32,
    pub tokens: Vec<TokenLogprobs>,
}

/// Something broke after the request was accepted. Ends the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    pub fault: NodeFault,
    /// Closed snake_case label, for metrics.
    pub reason: String,
    /// For people.
    pub detail: String,
}

/// A policy refused before anything was held. Ends the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    pub reason: RefuseReason,
    pub detail: String,
}

/// Node -> coordinator on the membership stream. `Register` is first on every stream.
#[derive(Clone, Debug, PartialEq)]
pub enum NodeReport {
    Register(NodeRecord),
    Status {
        epoch: NodeEpoch,
        status: NodeStatus,
    },
    /// Clean end after a drain.
    Leave {
        reason: String,
    },
    Clock(ClockOffset),
    Prefixes(PrefixReport),
}

/// The offset between a node's clocks and the coordinator's: node's time + offset = coordinator's time, within `error`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockOffset {
    /// Between the two monotonic clocks, whose starting points are unrelated.
    pub monotonic_ns: i64,
    /// Between the two wall clocks.
    pub unix_ns: i64,
    pub error: Duration,
}

/// The coordinator's clocks, read at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockReading {
    pub monotonic: Time,
    pub unix_ns: u64,
}

impl ClockOffset {
    /// A time of the node on the coordinator's clock. `None` when it lies before that clock's start.
    pub fn map(&self, node_time: Time) -> Option<Time> {
        let nanoseconds = i128::from(node_time.0) + i128::from(self.monotonic_ns);
        u64::try_from(nanoseconds).ok().map(Time)
    }
}

/// Coordinator -> node on the membership stream.
#[derive(Clone, Debug, PartialEq)]
pub enum CoordinatorReport {
    Welcome(Welcome),
    Renewed {
        lease: Duration,
    },
    /// To prefill nodes: the decode nodes to keep a link to. Replaces the list before.
    Peers(Vec<Peer>),
    RegisterRefused {
        reason: RegisterRefusedReason,
        detail: String,
    },
    Drain {
        reason: String,
        /// The role in which to join again. `None`: the process must end.
        next_role: Option<AssignedRole>,
    },
    /// To a node that has other coordinators too.
    Permits(PermitNote),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    pub coordinator: NodeId,
    pub lease: Duration,
    pub status_interval: Duration,
    /// Whether the coordinator can read [`NodeReport::Prefixes`]. Coordinators of earlier versions cannot.
    pub takes_prefixes: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisterRefusedReason {
    /// Another live process has this name.
    NameTaken,
    /// The cluster serves another model, or the same one with other numerics.
    IncompatibleModel,
    /// The record breaks the contract.
    Invalid,
}

impl RegisterRefusedReason {
    pub const ALL: &'static [Self] = &[Self::NameTaken, Self::IncompatibleModel, Self::Invalid];

    pub fn name(self) -> &'static str {
        match self {
            Self::NameTaken => "name_taken",
            Self::IncompatibleModel => "incompatible_model",
            Self::Invalid => "invalid",
        }
    }
}

/// The facts about a decode node that a prefill node needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Peer {
    pub node: NodeId,
    /// host:port of its handoff service.
    pub address: String,
    pub transports: Vec<String>,
    pub compatibility: Compatibility,
}
