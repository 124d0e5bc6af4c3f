//! One transfer on a pair's stream: the order of its calls, and its waits for room within the pair's limit of bytes in
//! flight.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use proto::messages::{KvBlockFrame, KvFrame, LastFrame};
use serving_core::ids::{BlockId, Generation, TransferId};
use serving_core::request::TokenEvent;
use tokio::sync::oneshot;

use super::copies::{Copies, Copy};
use super::pair_stream::{End, PairStream, Signals};
use crate::choice::TransportKind;
use crate::frame;
use crate::link::queue::Queued;
use crate::link::{NoPlace, NotCopied, Place};
use crate::transport::{
    AbortReason, PairFault, PushedBlock, SendTransfer, TransferError, TransferReport, TransferStart,
};

/// How long an abort may wait for room in a full queue. After it the receiver's own timer ends the transfer.
const ABORT_TIME_LIMIT: Duration = Duration::from_secs(1);
/// How long a transfer that finds its stream gone waits for the reason. The pair's keeper sets it within milliseconds.
const FAULT_TIME_LIMIT: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct PairTransfer {
    live: Arc<PairStream>,
    start: TransferStart,
    signals: Arc<Signals>,
    next_sequence_no: u32,
    blocks: u32,
    kv_bytes: u64,
    moving: Arc<AtomicU64>,
    last_written: Option<Instant>,
    copies: Arc<Copies>,
}

impl PairTransfer {
    pub async fn begin(live: Arc<PairStream>, start: TransferStart) -> Result<Self, TransferError> {
        let transfer = start.ticket.transfer;
        let signals = live.register(transfer).map_err(|fault| TransferError::PairLost {
            node: live.node.clone(),
            fault,
        })?;
        let copies = Copies::new(start.source.clone(), live.clone(), signals.clone());
        let this = Self {
            live,
            start,
            signals,
            next_sequence_no: 0,
            blocks: 0,
            kv_bytes: 0,
            moving: Arc::default(),
            last_written: None,
            copies,
        };
        this.queue(Queued::control(KvFrame::Begin { transfer })).await?;
        Ok(this)
    }

    fn transfer(&self) -> TransferId {
        self.start.ticket.transfer
    }

    fn error(&self, end: End) -> TransferError {
        let node = self.live.node.clone();
        match end {
            End::Refused { reason, detail } => TransferError::Refused { node, reason, detail },
            End::AbortedByPeer { reason } => TransferError::AbortedByPeer { node, reason },
            End::PairLost(fault) => TransferError::PairLost { node, fault },
            End::Acked => TransferError::Refused {
                node,
                reason: "early_ack".to_owned(),
                detail: "the decode node acknowledged before the last frame".to_owned(),
            },
        }
    }

    /// Ends when the other side ends the transfer.
    async fn ended(&self) -> End {
        let mut end = self.signals.end.subscribe();
        let ended = end.wait_for(Option::is_some).await.ok().and_then(|ended| ended.clone());
        ended.unwrap_or(End::PairLost(PairFault::Closed))
    }

    /// The stream takes nothing more, and the pair's keeper says why next.
    async fn lost(&self) -> TransferError {
        let end = tokio::time::timeout(FAULT_TIME_LIMIT, self.ended()).await;
        self.error(end.unwrap_or_else(|_| End::PairLost(self.live.fault())))
    }

    async fn queue(&self, queued: Queued) -> Result<(), TransferError> {
        let is_taken = tokio::select! {
            biased;
            end = self.ended() => return Err(self.error(end)),
            sent = self.live.outbox.frames.send(queued) => sent.is_ok(),
        };
        match is_taken {
            true => Ok(()),
            false => Err(self.lost().await),
        }
    }

    async fn push_layers(
        &mut self,
        block: PushedBlock,
        (target, generation): (BlockId, Generation),
        layers: Range<u32>,
    ) -> Result<(), TransferError> {
        let place = self.room(target, layers.clone()).await?;
        let header = KvBlockFrame {
            transfer: self.transfer(),
            sequence_no: self.next_sequence_no,
            ticket_index: block.ticket_index,
            block: target,
            generation,
            layer_begin: layers.start,
            layer_end: layers.end,
            checksum: 0,
            data: Bytes::new(),
        };
        self.next_sequence_no += 1;
        self.kv_bytes += (layers.len() * self.start.source.layer_bytes()) as u64;
        self.copies.add(Copy {
            block: block.block,
            layers,
            place,
            header,
            moving: self.moving.clone(),
        });
        Ok(())
    }

    /// Waits for room on the pair for one frame.
    async fn room(&self, target: BlockId, layers: Range<u32>) -> Result<Box<dyn Place>, TransferError> {
        let carrier = &self.live.carrier;
        if carrier.writes_in_place() {
            // Before the decode node has claimed it, the ticket may have expired and its blocks may belong to another
            // request.
            let mut begun = self.signals.begun.subscribe();
            self.unless_ended(begun.wait_for(|begun| *begun)).await?.ok();
        }
        let bytes = layers.len() * self.start.source.layer_bytes();
        self.unless_ended(carrier.room((target, layers), bytes)).await
    }

    async fn unless_ended<T>(&self, wait: impl Future<Output = T>) -> Result<T, TransferError> {
        let failed = tokio::select! {
            biased;
            end = self.ended() => return Err(self.error(end)),
            failed = self.copies.failed() => failed,
            got = wait => return Ok(got),
        };
        Err(self.not_copied(failed).await)
    }

    async fn not_copied(&self, failed: NotCopied) -> TransferError {
        let ended = self.signals.end.borrow().clone();
        match (ended, failed) {
            (Some(end), _) => self.error(end),
            (None, NotCopied::Source(error)) => error.into(),
            (None, NotCopied::Place(NoPlace::Unmapped) | NotCopied::NoStream) => self.lost().await,
            (
                None,
                NotCopied::Place(NoPlace::LayerTooLarge {
                    layer_bytes,
                    slot_bytes,
                }),
            ) => TransferError::LayerTooLarge {
                layer_bytes,
                slot_bytes,
            },
            (None, NotCopied::Place(fault)) => TransferError::NoPlace {
                node: self.live.node.clone(),
                detail: fault.to_string(),
            },
            (None, NotCopied::BrokeOff) => TransferError::Stopping,
        }
    }

    fn abort_frame(&self, reason: AbortReason) -> KvFrame {
        KvFrame::Abort {
            transfer: self.transfer(),
            reason: reason.name().to_owned(),
        }
    }
}

#[async_trait]
impl SendTransfer for PairTransfer {
    fn transport(&self) -> TransportKind {
        self.live.carrier.kind()
    }

    async fn push(&mut self, block: PushedBlock) -> Result<(), TransferError> {
        let blocks = &self.start.ticket.blocks;
        let target = blocks.get(block.ticket_index as usize).copied();
        let target = target.ok_or(TransferError::NoSuchTicketBlock {
            ticket_index: block.ticket_index,
            blocks: blocks.len(),
        })?;
        let source = &self.start.source;
        let data_bytes_max = self.live.carrier.data_bytes_max();
        for layers in frame::layer_ranges(source.layer_count(), source.layer_bytes(), data_bytes_max) {
            self.push_layers(block, target, layers).await?;
        }
        self.blocks += 1;
        Ok(())
    }

    async fn last(&mut self, first_tokens: Vec<TokenEvent>) -> Result<Instant, TransferError> {
        let (written, was_written) = oneshot::channel();
        let frame = KvFrame::Last(LastFrame {
            transfer: self.transfer(),
            request: self.start.key.request,
            attempt: self.start.key.attempt,
            block_count: self.blocks,
            frame_count: self.next_sequence_no,
            first_tokens,
            traceparent: self.start.traceparent.clone(),
            cached_tokens: Some(self.start.cached_tokens),
        });
        let queued = Queued {
            written: Some(written),
            ..Queued::control(frame)
        };
        let copies = self.copies.clone();
        match copies.add_behind(queued) {
            Ok(None) => {}
            Ok(Some(queued)) => self.queue(queued).await?,
            Err(failed) => return Err(self.not_copied(failed).await),
        }
        // The end by the other side does not count here: its answer to the last frame may come before the news that the
        // frame was written.
        let was_written = tokio::select! {
            biased;
            at = was_written => at.ok(),
            failed = copies.failed() => return Err(self.not_copied(failed).await),
            // A stream whose peer stops reading keeps its frames.
            () = self.live.outbox.over.cancelled() => None,
        };
        if let Some(at) = was_written {
            self.last_written = Some(at);
            return Ok(at);
        }
        // Dropped by a copy that failed, or by a pair that has ended.
        let failed = copies.take_failed().unwrap_or(NotCopied::NoStream);
        Err(self.not_copied(failed).await)
    }

    async fn acked(&mut self) -> Result<TransferReport, TransferError> {
        let ended = tokio::select! {
            biased;
            end = self.ended() => end,
            failed = self.copies.failed() => return Err(self.not_copied(failed).await),
        };
        match (ended, self.last_written) {
            (End::Acked, Some(last_written)) => Ok(TransferReport {
                kv_bytes: self.kv_bytes,
                frames: self.next_sequence_no,
                moving: Duration::from_nanos(self.moving.load(Ordering::Relaxed)),
                last_written,
            }),
            (end, _) => Err(self.error(end)),
        }
    }

    async fn abort(self: Box<Self>, reason: AbortReason) {
        // Waits for the running copy. Copies in line find the gate closed.
        let signals = self.signals.clone();
        let _ = tokio::task::spawn_blocking(move || signals.gate.close()).await;
        if self.live.forget(self.transfer()) {
            // Frames hold copies of the blocks, so nothing reads the blocks any more. The few frames that are made but not
            // queued may still come after the abort. The receiver refuses them, because their reservation is gone.
            let frame = self.abort_frame(reason);
            if self.live.carrier.writes_in_place() {
                // This is never given up while the pair lives: the decode node keeps the blocks out of use until it comes.
                return self.live.say_when_stopped(self.signals.clone(), frame);
            }
            let frame = Queued::control(frame);
            let _ = tokio::time::timeout(ABORT_TIME_LIMIT, self.live.outbox.frames.send(frame)).await;
        }
    }
}

impl Drop for PairTransfer {
    fn drop(&mut self) {
        if !self.live.forget(self.transfer()) {
            return;
        }
        let frame = self.abort_frame(AbortReason::Cancelled);
        if self.live.carrier.writes_in_place() {
            // A copy whose `push` was dropped may still run. The message comes after it.
            return self.live.say_when_stopped(self.signals.clone(), frame);
        }
        let frame = Queued::control(frame);
        let frames = self.live.outbox.frames.clone();
        if let Err(tokio::sync::mpsc::error::TrySendError::Full(frame)) = frames.try_send(frame)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move {
                let _ = tokio::time::timeout(ABORT_TIME_LIMIT, frames.send(frame)).await;
            });
        }
    }
}

#[cfg(test)]
mod tests;
