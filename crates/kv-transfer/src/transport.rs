//! The sender's half: what a prefill node asks of any transport, and every way in which a transfer can end.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use proto::messages::HelloRefusedReason;
use serving_core::compatibility::{Compatibility, Incompatibility};
use serving_core::ids::{BlockId, NodeId};
use serving_core::node::{PairHealth, Ticket};
use serving_core::request::{AttemptKey, TokenEvent};
use thiserror::Error;
use tokio::sync::watch;

use crate::choice::TransportKind;
use crate::span::{DeviceAddress, Lending, Lent, SpanMemory, SpanMut};

/// The KV memory a transfer reads from. Blocks given to `push` must be complete and must not change until the transfer
/// has ended or its `abort` has returned.
pub trait KvSource: Send + Sync + Debug {
    fn layer_count(&self) -> u32;
    /// Bytes of one (block, layer).
    fn layer_bytes(&self) -> usize;
    /// Copies layers of a block out; `out` has `layers.len() * layer_bytes()`. Called on a blocking thread. A copy into a
    /// device's span may be complete later than the call: then the span's event is signalled.
    ///
    /// # Errors
    /// The block could not be read, or not into this memory: the transfer fails.
    fn export(&self, block: BlockId, layers: Range<u32>, out: SpanMut<'_>) -> Result<(), SourceError>;
    /// Lends some layers of a block to `copy`, where they are in the memory of a CUDA device. `copy` returns when the device has
    /// read them, or says that it keeps them. Called on a blocking thread.
    ///
    /// # Errors
    /// The block could not be lent: the transfer fails.
    fn lend(
        &self,
        _block: BlockId,
        _layers: Range<u32>,
        _copy: &mut dyn FnMut(DeviceAddress) -> Lent,
    ) -> Result<Lending, SourceError> {
        Ok(Lending::NotOnDevice)
    }
    /// Memory of the device that has the KV, for links that can move it: they keep a frame there. `None`: frames are in the
    /// memory of this process.
    fn staging(&self, _bytes: usize) -> Option<Arc<dyn SpanMemory>> {
        None
    }
}

/// Why the node's own memory could not be read. Not the peer's fault.
#[derive(Debug, Error)]
#[error("block {block} of this node's KV memory could not be read: {source}")]
pub struct SourceError {
    pub block: BlockId,
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// A decode node to keep a pair with.
#[derive(Clone, Debug, PartialEq)]
pub struct PairPeer {
    pub node: NodeId,
    /// host:port of its handoff service.
    pub address: String,
    pub compatibility: Compatibility,
}

/// How KV bytes leave a node. It keeps one pair per decode node and reconnects for ever, until told otherwise.
#[async_trait]
pub trait Transport: Send + Sync + Debug {
    /// The decode nodes to keep pairs with. Opens pairs to new nodes (another epoch is another node) and closes pairs to
    /// nodes that are not in the list. Transfers on a closed pair fail. Returns at once.
    fn keep_pairs(&self, peers: Vec<PairPeer>);

    /// Health of every kept pair, by node.
    fn health(&self) -> watch::Receiver<Vec<PairHealth>>;

    /// Starts a transfer: tells the decode node that the prefill has begun. Opens the pair when it is not kept, and waits a
    /// limited time for a pair that is connecting.
    ///
    /// # Errors
    /// No usable pair. Nothing was sent.
    async fn begin(&self, start: TransferStart) -> Result<Box<dyn SendTransfer>, TransferError>;
}

/// The facts with which a transfer starts.
#[derive(Clone, Debug)]
pub struct TransferStart {
    pub ticket: Ticket,
    pub key: AttemptKey,
    pub source: Arc<dyn KvSource>,
    /// W3C context of the sender's span. The receiver's span links to it.
    pub traceparent: Option<String>,
    /// Prompt tokens found in the sender's prefix cache. The last frame tells the receiver.
    pub cached_tokens: u32,
}

/// One transfer at the sender. Calls come in the order `push`* `last` `acked`; `abort` may come at any point. Calls are
/// cancel-safe in this sense: after a dropped `push` or `last` only `abort` may follow (`acked` may be called again).
/// Dropping the transfer is an abort that nobody waits for. After an error the transfer is over.
#[async_trait]
pub trait SendTransfer: Send + Debug {
    /// The transport that carries this transfer.
    fn transport(&self) -> TransportKind;

    /// Queues one whole block. Waits while the pair has its limit of bytes in flight. The block may still be read after the
    /// return; a failure to read it is reported by a later call.
    async fn push(&mut self, block: PushedBlock) -> Result<(), TransferError>;

    /// Queues the last frame and waits until it is written. Returns the time of writing.
    async fn last(&mut self, first_tokens: Vec<TokenEvent>) -> Result<Instant, TransferError>;

    /// Waits for the decode node's acknowledgement, without a time limit of its own: the hold deadline is the caller's.
    /// Ends when the pair is lost. May be called at any time; before `last` it ends only when the other side ends the
    /// transfer.
    async fn acked(&mut self) -> Result<TransferReport, TransferError>;

    /// Gives the transfer up. When it returns, nothing reads the sender's blocks any more.
    async fn abort(self: Box<Self>, reason: AbortReason);
}

/// The target of a local block: the ticket's place names block and generation of the decode node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PushedBlock {
    pub ticket_index: u32,
    pub block: BlockId,
}

/// Why the sender gave a transfer up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbortReason {
    /// The client or the coordinator is gone.
    Cancelled,
    /// The first token ended the request (PROTOCOL rule 1).
    EndedAtFirstToken,
    /// The prefill itself failed.
    PrefillFailed,
    /// The decode node did not acknowledge in time.
    HoldExpired,
}

impl AbortReason {
    pub const ALL: [Self; 4] = [
        Self::Cancelled,
        Self::EndedAtFirstToken,
        Self::PrefillFailed,
        Self::HoldExpired,
    ];
    /// A transfer that ends for these has not failed.
    pub const FAULTLESS: [Self; 2] = [Self::Cancelled, Self::EndedAtFirstToken];

    /// Label on the wire and in metrics.
    pub fn name(self) -> &'static str {
        match self {
            AbortReason::Cancelled => "cancelled",
            AbortReason::EndedAtFirstToken => "ended_at_first_token",
            AbortReason::PrefillFailed => "prefill_failed",
            AbortReason::HoldExpired => "hold_expired",
        }
    }
}

/// A transfer that was acknowledged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferReport {
    pub kv_bytes: u64,
    pub frames: u32,
    /// Time that the pair spent on this transfer's frames alone. Waiting behind other transfers is not part of it.
    pub moving: Duration,
    pub last_written: Instant,
}

/// Every way in which a transfer can fail.
#[derive(Debug, Error)]
pub enum TransferError {
    #[error("no usable pair with {node}: {fault}; place the request anew")]
    NoPair { node: NodeId, fault: PairFault },
    #[error("the pair with {node} was lost: {fault}; place the request anew")]
    PairLost { node: NodeId, fault: PairFault },
    /// The receiver's check failed, or the receiver does not know the ticket (any more).
    #[error("{node} refused the transfer ({reason}): {detail}; place the request anew")]
    Refused {
        node: NodeId,
        reason: String,
        detail: String,
    },
    /// The receiver gave the transfer up, for example because its own leg was cancelled.
    #[error("{node} aborted the transfer ({reason})")]
    AbortedByPeer { node: NodeId, reason: String },
    #[error(
        "the ticket has {blocks} blocks, block number {ticket_index} was pushed; this is a bug in the prefill node"
    )]
    NoSuchTicketBlock { ticket_index: u32, blocks: usize },
    #[error(
        "a layer of a block is {layer_bytes} bytes, the pair's ring has slots of {slot_bytes}; leave `shm` out of `transports`"
    )]
    LayerTooLarge { layer_bytes: usize, slot_bytes: usize },
    /// The coordinator's ticket, or this node's memory, does not fit the pool that the decode node has passed.
    #[error("the pool of {node} cannot be written in place: {detail}; place the request anew")]
    NoPlace { node: NodeId, detail: String },
    #[error("{0}")]
    Source(#[from] SourceError),
    #[error("the thread that exports blocks is gone; the process is stopping")]
    Stopping,
}

impl TransferError {
    /// Every [`TransferError::name`] of this side's own.
    pub const NAMES: [&'static str; 6] = [
        "aborted_by_peer",
        "no_such_ticket_block",
        "layer_too_large",
        "no_place",
        "source",
        "stopping",
    ];

    /// Closed label for metrics; the receiver's refusals carry their own.
    pub fn name(&self) -> &str {
        match self {
            TransferError::NoPair { fault, .. } | TransferError::PairLost { fault, .. } => fault.name(),
            TransferError::Refused { reason, .. } => reason,
            TransferError::AbortedByPeer { .. } => "aborted_by_peer",
            TransferError::NoSuchTicketBlock { .. } => "no_such_ticket_block",
            TransferError::LayerTooLarge { .. } => "layer_too_large",
            TransferError::NoPlace { .. } => "no_place",
            TransferError::Source(_) => "source",
            TransferError::Stopping => "stopping",
        }
    }
}

/// Why a pair cannot be used now. It is tried again by itself.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PairFault {
    #[error("it is connecting")]
    Connecting,
    #[error("cannot connect: {0}")]
    Unreachable(String),
    #[error("the stream broke: {0}")]
    Broken(String),
    #[error(
        "{moved_bytes} bytes moved in {window_ms} ms, under the floor of {floor_bytes_per_second} bytes per second"
    )]
    Stalled {
        moved_bytes: u64,
        window_ms: u64,
        floor_bytes_per_second: u64,
    },
    #[error("the decode node refused the pair ({}): {detail}", .reason.name())]
    Refused { reason: HelloRefusedReason, detail: String },
    #[error("the two nodes do not fit: {0}")]
    Incompatible(Incompatibility),
    /// Only when `grpc` is not among this node's transports.
    #[error("no transport of this node reaches the peer: {detail}")]
    NoTransport {
        detail: String,
        /// Whether it may end while both nodes live on.
        may_pass: bool,
    },
    #[error("this node keeps it no longer: it is leaving, or the coordinator's list has this decode node no more")]
    Closed,
}

impl PairFault {
    /// Every [`PairFault::name`], the receiver's refusals of a pair included.
    pub const NAMES: [&'static str; 10] = [
        "connecting",
        "unreachable",
        "broken",
        "stalled",
        "incompatible",
        "stale_epoch",
        "protocol_version",
        "shard",
        "no_transport",
        "closed",
    ];

    /// Only a new start of one of the nodes can end it.
    pub(crate) fn is_lasting(&self) -> bool {
        matches!(
            self,
            PairFault::Incompatible(_) | PairFault::Refused { .. } | PairFault::NoTransport { may_pass: false, .. }
        )
    }

    /// Closed label for metrics and the coordinator.
    pub fn name(&self) -> &'static str {
        match self {
            PairFault::Connecting => "connecting",
            PairFault::Unreachable(_) => "unreachable",
            PairFault::Broken(_) => "broken",
            PairFault::Stalled { .. } => "stalled",
            PairFault::Refused { reason, .. } => reason.name(),
            PairFault::Incompatible(_) => "incompatible",
            PairFault::NoTransport { .. } => "no_transport",
            PairFault::Closed => "closed",
        }
    }
}
