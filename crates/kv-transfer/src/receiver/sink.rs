//! What a decode node implements to receive handoffs, and every way in which a handoff can end there.

use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serving_core::ids::{BlockId, NodeId, TransferId};
use serving_core::kv::reservation::{LedgerError, Reservation};
use serving_core::request::{AttemptKey, TokenEvent};
use thiserror::Error;

use crate::choice::TransportKind;
use crate::span::{DeviceAddress, Lending, Lent, Span};

/// What a decode node does with a handoff. Calls of one transfer come in order; calls of several interleave.
#[async_trait]
pub trait HandoffSink: Send + Sync + Debug + 'static {
    /// Hands out the reservation behind a ticket, once. It must not call back into the `Receiver`.
    ///
    /// # Errors
    /// Unknown, expired, cancelled or already claimed: the transfer is refused.
    fn claim(&self, transfer: TransferId, sender: &NodeId) -> Result<Reservation, TransferRefusal>;

    /// The prefill has started: the reservation timer restarts (PROTOCOL rule 9). Never blocks.
    fn began(&self, transfer: TransferId);

    /// A good frame has landed: the reservation timer restarts. Never blocks.
    fn progressed(&self, transfer: TransferId);

    /// Copies checked and verified bytes into a reserved block. Called on a blocking thread, for small frames on an async
    /// one, so it must not wait unless [`waits`](Self::waits) says so. A copy out of a device's span may be complete later than
    /// the call; until then the sink keeps a clone of the span.
    ///
    /// # Errors
    /// The memory could not be written: the transfer is refused.
    fn import(&self, block: BlockId, layers: Range<u32>, data: Span<'_>) -> Result<(), ImportError>;

    /// Lends the place of some layers in a reserved block to `copy`, where it is in the memory of a CUDA device. `copy` writes
    /// checked and verified bytes there. It returns when the device has written them, or says that it keeps the place. Called
    /// on a blocking thread.
    ///
    /// # Errors
    /// The memory could not be written: the transfer is refused.
    fn lend(
        &self,
        _block: BlockId,
        _layers: Range<u32>,
        _copy: &mut dyn FnMut(DeviceAddress) -> Lent,
    ) -> Result<Lending, ImportError> {
        Ok(Lending::NotOnDevice)
    }

    /// Whether `import`, and [`WrittenPool::verify`] of this node's pool, wait for a device. Then they are called on blocking threads
    /// alone.
    fn waits(&self) -> bool {
        false
    }

    /// Whether bytes that were imported are still on their way to a device. Never waits.
    fn is_settling(&self) -> bool {
        false
    }

    /// Waits until everything that was imported before the call is in its place. The receiver waits for it before `commit` and
    /// before `ended`; until then an abort of the transfer is answered with "`ended` follows".
    ///
    /// # Errors
    /// The device does not answer, and the bytes may still come. The transfer is refused, and `ended` is not called for it before
    /// they are there.
    async fn settled(&self) -> Result<(), TransferRefusal> {
        Ok(())
    }

    /// Everything that was promised has arrived, and nothing is written any more. `Ok` is acknowledged to the sender.
    ///
    /// # Errors
    /// The request is gone or its first tokens make no sense: the transfer is refused.
    async fn commit(&self, arrived: Arrived) -> Result<(), TransferRefusal>;

    /// A claimed transfer is over without `commit`, and nothing is written any more. Never blocks. Where the sender writes
    /// in place, this call comes after the sender's confirmation that it stores no more, or after its exit.
    fn ended(&self, transfer: TransferId, transport: TransportKind, end: ReceiveEnd);
}

/// How a node's KV memory is divided: `blocks` of `layers` of `layer_bytes` each, without gaps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolShape {
    pub blocks: u32,
    pub layers: u32,
    pub layer_bytes: u32,
}

impl PoolShape {
    pub fn block_bytes(self) -> u64 {
        u64::from(self.layers) * u64::from(self.layer_bytes)
    }
    /// `None` when it is empty or larger than an address.
    pub(crate) fn bytes(self) -> Option<usize> {
        let bytes = self.block_bytes().checked_mul(u64::from(self.blocks))?;
        usize::try_from(bytes).ok().filter(|bytes| *bytes > 0)
    }
    /// The position of some layers of a block, from the first byte of the pool.
    pub(crate) fn span(self, block: BlockId, layers: &Range<u32>) -> Option<Range<usize>> {
        if block.0 >= self.blocks || layers.start > layers.end || layers.end > self.layers {
            return None;
        }
        let layer_bytes = u64::from(self.layer_bytes);
        let start = u64::from(block.0) * self.block_bytes() + u64::from(layers.start) * layer_bytes;
        let end = start + layers.len() as u64 * layer_bytes;
        Some(usize::try_from(start).ok()?..usize::try_from(end).ok()?)
    }
}

/// A decode node's KV memory, whose blocks trusted processes may write in place, in the wire layout (PROTOCOL rules 11 and 14).
pub trait WrittenPool: Send + Sync + Debug + 'static {
    fn shape(&self) -> PoolShape;
    /// Shows layers of a block to `is_good` and returns its result. The block stays claimed against this process's own
    /// writers meanwhile. Called on a blocking thread, for small frames on an async one, so it must not wait unless
    /// [`HandoffSink::waits`] says so.
    ///
    /// # Errors
    /// The block does not exist or this process writes it itself: the transfer is refused.
    fn verify(
        &self,
        block: BlockId,
        layers: Range<u32>,
        is_good: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<bool, ImportError>;
}

/// Such memory on the host, in the form in which processes map it.
pub trait MappedPool: WrittenPool {
    /// A memfd whose size is sealed, exactly as long as the shape says.
    fn memory(&self) -> BorrowedFd<'_>;
}

/// A whole handoff, verified.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrived {
    pub transfer: TransferId,
    pub key: AttemptKey,
    pub transport: TransportKind,
    /// Index 0 of each choice that goes on, as the sender claims.
    pub first_tokens: Vec<TokenEvent>,
    pub kv_bytes: u64,
    pub frames: u32,
    /// When the first KV frame and the last frame were received, for the sink's spans and its commit stage.
    pub first_frame: Option<Instant>,
    pub last_frame: Instant,
    /// The context of the sender's span, as the sender claims.
    pub traceparent: Option<String>,
    /// Prompt tokens that the sender found in its prefix cache, as it claims.
    pub cached_tokens: Option<u32>,
}

/// Why the node's memory could not be written.
#[derive(Debug, Error)]
#[error("block {block} of this node's KV memory could not be written: {source}")]
pub struct ImportError {
    pub block: BlockId,
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// How a claimed transfer ended without commit.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ReceiveEnd {
    #[error("refused: {0}")]
    Refused(TransferRefusal),
    /// Label of the sender's [`crate::transport::AbortReason`].
    #[error("the sender aborted ({0})")]
    AbortedBySender(String),
    #[error("aborted by this node ({0})")]
    AbortedHere(String),
    #[error("the pair's stream ended")]
    PairLost,
}

impl ReceiveEnd {
    /// Every [`ReceiveEnd::name`] but those of refusals, which are [`TransferRefusal::NAMES`].
    pub const NAMES: [&'static str; 3] = ["aborted_by_sender", "aborted_here", "pair_lost"];

    /// Closed label for metrics.
    pub fn name(&self) -> &'static str {
        match self {
            ReceiveEnd::Refused(reason) => reason.name(),
            ReceiveEnd::AbortedBySender(_) => "aborted_by_sender",
            ReceiveEnd::AbortedHere(_) => "aborted_here",
            ReceiveEnd::PairLost => "pair_lost",
        }
    }
}

/// Why a transfer is refused. The name travels to the sender.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TransferRefusal {
    #[error("no reservation has this transfer id: it expired, was cancelled, or never existed")]
    UnknownTransfer,
    #[error("{0}")]
    Frame(#[from] LedgerError),
    #[error("the bytes of frame {sequence_no} do not match their checksum")]
    Checksum { sequence_no: u32 },
    #[error("{0}")]
    Import(String),
    /// The node's brain did not commit, with its own label and words.
    #[error("not committed ({label}): {detail}")]
    NotCommitted { label: &'static str, detail: String },
}

impl TransferRefusal {
    /// Every [`TransferRefusal::name`] of this crate's own; those of frames are [`LedgerError::NAMES`].
    pub const NAMES: [&'static str; 3] = ["unknown_transfer", "checksum", "import"];

    /// Closed label for metrics and the wire.
    pub fn name(&self) -> &'static str {
        match self {
            TransferRefusal::UnknownTransfer => "unknown_transfer",
            TransferRefusal::Frame(error) => error.name(),
            TransferRefusal::Checksum { .. } => "checksum",
            TransferRefusal::Import(_) => "import",
            TransferRefusal::NotCommitted { label, .. } => label,
        }
    }
}
