//! What a pair of nodes says to each other: frames of KV one way, replies the other way, over a stream or beside shared memory.

use std::fmt;
use std::ops::Range;

use bytes::Bytes;
use serving_core::compatibility::Compatibility;
use serving_core::ids::{Attempt, BlockId, Generation, NodeId, RequestId, TransferId};
use serving_core::request::TokenEvent;

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
