//! The messages between processes in core types. `convert` makes them from the wire, and all other crates use them.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
pub use serving_core::cluster::{NodeFault, PrefillOutcome, RefuseReason};
use serving_core::compatibility::Compatibility;
use serving_core::ids::{Attempt, BlockId, Generation, NodeEpoch, NodeId, RequestId, TransferId};
use serving_core::kv::prefix_log::PrefixReport;
use serving_core::node::{AssignedRole, NodeRecord, NodeStatus, PermitNote, Ticket};
use serving_core::request::{LocalPrefillReason, Request, TokenEvent, TokenLogprobs};
use serving_core::stage::StageTimings;
use serving_core::time::Time;

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

/// P -> D on the pair's stream.
#[derive(Clone, Debug, PartialEq)]
pub enum KvFrame {
    /// First on every stream.
    Hello(Hello),
    /// Prefill started: the reservation timer restarts.
    Begin {
        transfer: TransferId,
    },
    Block(KvBlockFrame),
    Last(LastFrame),
    Abort {
        transfer: TransferId,
        reason: String,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub struct Hello {
    pub from: NodeId,
    /// The epoch that the sender believes the receiver has.
    pub to: NodeId,
    pub protocol_version: u32,
    pub compatibility: Compatibility,
    pub shard: KvShard,
}

/// The part of each block's KV that a process holds: its rank in a group that computes one model, and its KV heads. Both ends
/// of a pair must hold the same part (PROTOCOL rule 14).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvShard {
    pub rank: u32,
    pub rank_count: u32,
    /// `None`: all heads.
    pub heads: Option<Range<u32>>,
}

impl KvShard {
    /// Each process of this version computes the whole model.
    pub const WHOLE: Self = Self {
        rank: 0,
        rank_count: 1,
        heads: None,
    };
}

impl fmt::Display for KvShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {} with ", self.rank, self.rank_count)?;
        match &self.heads {
            None => write!(f, "all KV heads"),
            Some(heads) => write!(f, "KV heads {} to {}", heads.start, heads.end),
        }
    }
}

/// One block, or a layer range of it, in the wire layout of PROTOCOL rule 14.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvBlockFrame {
    pub transfer: TransferId,
    /// Per transfer, from 0, no gaps.
    pub sequence_no: u32,
    /// Index into the ticket's blocks.
    pub ticket_index: u32,
    pub block: BlockId,
    pub generation: Generation,
    pub layer_begin: u32,
    /// Exclusive; above `layer_begin`.
    pub layer_end: u32,
    /// xxh3-64 of `data`, computed by the sender; not verified by the conversion.
    pub checksum: u64,
    pub data: Bytes,
}

/// Ends a transfer. The bytes that arrived must now equal what was promised.
#[derive(Clone, Debug, PartialEq)]
pub struct LastFrame {
    pub transfer: TransferId,
    pub request: RequestId,
    pub attempt: Attempt,
    pub block_count: u32,
    pub frame_count: u32,
    /// Index 0 of each choice that goes on.
    pub first_tokens: Vec<TokenEvent>,
    /// W3C context of the sender's span of this transfer.
    pub traceparent: Option<String>,
    /// Prompt tokens that the sender found in its prefix cache.
    pub cached_tokens: Option<u32>,
}

/// D -> P on the pair's stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvReply {
    Hello(HelloReply),
    /// Committed: the sender releases its hold.
    Ack {
        transfer: TransferId,
    },
    Refused {
        transfer: TransferId,
        reason: String,
        detail: String,
    },
    /// Answer to `Abort`, or the receiver's own abort: no more frames are accepted.
    Aborted {
        transfer: TransferId,
        reason: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HelloReply {
    pub node: NodeId,
    /// `None`: accepted.
    pub refused: Option<HelloRefused>,
    /// The ends of the node's transports. Empty when the pair is refused.
    pub offers: Vec<TransportOffer>,
}

/// A decode node takes no frame of this stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HelloRefused {
    pub reason: HelloRefusedReason,
    /// For people, with the values of both nodes. Nodes of protocol version 1 send none.
    pub detail: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HelloRefusedReason {
    ProtocolVersion,
    /// The node has another epoch than the sender believes.
    StaleEpoch,
    Incompatible,
    /// The two processes hold different parts of each block.
    Shard,
}

impl HelloRefusedReason {
    pub const ALL: &'static [Self] = &[Self::ProtocolVersion, Self::StaleEpoch, Self::Incompatible, Self::Shard];

    /// Closed label.
    pub fn name(self) -> &'static str {
        match self {
            Self::ProtocolVersion => "protocol_version",
            Self::StaleEpoch => "stale_epoch",
            Self::Incompatible => "incompatible",
            Self::Shard => "shard",
        }
    }
}

/// What a transport of a decode node tells the same transport of a prefill node. Only that transport knows what the bytes mean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransportOffer {
    pub transport: String,
    pub offer: Bytes,
}

/// Bytes of one offer.
pub const TRANSPORT_OFFER_BYTES_MAX: usize = 4096;

/// P -> D on the Unix socket of a pair that shares memory.
#[derive(Clone, Debug, PartialEq)]
pub enum StagedFrame {
    /// Anything but a block.
    Control(KvFrame),
    Block(StagedBlock),
    /// Direct mode: the sender can write no block any more.
    Goodbye,
}

/// A block whose bytes lie in a slot of the pair's ring, or in their place already (direct mode).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagedBlock {
    /// With empty `data`.
    pub header: KvBlockFrame,
    pub slot: u32,
    /// From the slot's first byte on; not checked against the slot's size by the conversion.
    pub data_bytes: u32,
}

/// D -> P on the Unix socket of a pair that shares memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StagedReply {
    Reply(KvReply),
    ReturnedSlot(u32),
    /// Direct mode: the transfer is claimed, its blocks may be written.
    Begun(TransferId),
}
