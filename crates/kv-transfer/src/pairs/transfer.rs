//! One transfer on a pair's stream: exports blocks, sums them, queues frames within the pair's limit of bytes in flight.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use proto::messages::{KvBlockFrame, KvFrame, LastFrame};
use serving_core::ids::{BlockId, TransferId};
use serving_core::request::TokenEvent;
use thiserror::Error;
use tokio::sync::{OwnedSemaphorePermit, oneshot, watch};
use tokio::task::JoinHandle;

use super::live::{End, Hearing, Lane, Live};
use super::queue::{Queued, Room};
use crate::choice::TransportKind;
use crate::frame;
use crate::shm::{NoPlace, Slot};
use crate::transport::{
    AbortReason, PushedBlock, SendTransfer, SourceError, TransferError, TransferReport, TransferStart,
};

/// How long an abort may wait for room in a full queue; after it the receiver's own timer ends the transfer.
const ABORT_TIME_LIMIT: Duration = Duration::from_secs(1);

/// A frame's bytes, copied out of the node's memory.
#[derive(Debug)]
enum Staged {
    Own(Bytes),
    InSlot(Slot, usize),
}

impl Staged {
    fn len(&self) -> usize {
        match self {
            Staged::Own(data) => data.len(),
            Staged::InSlot(_, bytes) => *bytes,
        }
    }
}

/// With its checksum, and its place in the byte limit where there is one.
type StagedFrame = (Staged, u64, Option<OwnedSemaphorePermit>);

#[derive(Debug)]
pub(super) struct PairTransfer {
    live: Arc<Live>,
    start: TransferStart,
    hearing: Hearing,
    next_sequence_no: u32,
    blocks: u32,
    kv_bytes: u64,
    moving: Arc<AtomicU64>,
    last_written: Option<Instant>,
    /// The export that runs, also when the `push` that started it was dropped: `abort` waits for it.
    exporting: Option<JoinHandle<Result<(Staged, u64), NotExported>>>,
}

#[derive(Debug, Error)]
enum NotExported {
    #[error("{0}")]
    Source(#[from] SourceError),
    #[error("{0}")]
    Place(#[from] NoPlace),
}

impl PairTransfer {
    pub async fn begin(live: Arc<Live>, start: TransferStart) -> Result<Self, TransferError> {
        let transfer = start.ticket.transfer;
        let hearing = live.register(transfer).map_err(|fault| TransferError::PairLost {
            node: live.node.clone(),
            fault,
        })?;
        let mut this = Self {
            live,
            start,
            hearing,
            next_sequence_no: 0,
            blocks: 0,
            kv_bytes: 0,
            moving: Arc::default(),
            last_written: None,
            exporting: None,
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

    /// Ends when the transfer ends from the other side.
    async fn ended(end: &mut watch::Receiver<Option<End>>) -> End {
        match end.wait_for(Option::is_some).await {
            Ok(ended) => ended.clone(),
            Err(_) => None,
        }
        .unwrap_or(End::PairLost(crate::transport::PairFault::Closed))
    }

    async fn queue(&mut self, queued: Queued) -> Result<(), TransferError> {
        let sent = tokio::select! {
            biased;
            end = Self::ended(&mut self.hearing.end) => Err(end),
            sent = self.live.frames.send(queued) => sent.map_err(|_| End::PairLost(self.live.fault())),
        };
        sent.map_err(|end| self.error(end))
    }

    async fn push_layers(&mut self, block: PushedBlock, layers: Range<u32>) -> Result<(), TransferError> {
        let Some((target, generation)) = self.start.ticket.blocks.get(block.ticket_index as usize).copied() else {
            return Err(self.no_such_block(block.ticket_index));
        };
        let (staged, checksum, room) = self.stage(block.block, target, layers.clone()).await?;
        let data_bytes = staged.len() as u64;
        let (data, slot) = match staged {
            Staged::Own(data) => (data, None),
            Staged::InSlot(slot, _) => (Bytes::new(), Some(slot)),
        };
        let frame = KvFrame::Block(KvBlockFrame {
            transfer: self.transfer(),
            sequence_no: self.next_sequence_no,
            ticket_index: block.ticket_index,
            block: target,
            generation,
            layer_begin: layers.start,
            layer_end: layers.end,
            checksum,
            data,
        });
        let queued = Queued {
            room: Some(Room::take(data_bytes, &self.live.gauge, room)),
            slot,
            moving: Some(self.moving.clone()),
            ..Queued::control(frame)
        };
        self.queue(queued).await?;
        self.next_sequence_no += 1;
        self.kv_bytes += data_bytes;
        Ok(())
    }

    /// Copies layers out and waits for their room on the pair: before the copy where it goes into the room itself.
    async fn stage(
        &mut self,
        block: BlockId,
        target: BlockId,
        layers: Range<u32>,
    ) -> Result<StagedFrame, TransferError> {
        let live = self.live.clone();
        match &live.lane {
            Lane::Stream { room, room_kib } => {
                let (staged, checksum) = self.export(block, layers, None).await?;
                let kib = u32::try_from(staged.len().div_ceil(1024)).unwrap_or(u32::MAX);
                let acquire = room.clone().acquire_many_owned(kib.min(*room_kib));
                let room = self.unless_ended(acquire).await?.ok();
                Ok((staged, checksum, room))
            }
            Lane::Ring(ring) => {
                let layer_bytes = self.start.source.layer_bytes();
                if layer_bytes > ring.slot_bytes() {
                    return Err(TransferError::LayerTooLarge {
                        layer_bytes,
                        slot_bytes: ring.slot_bytes(),
                    });
                }
                let slot = self.unless_ended(ring.slot()).await?;
                let (staged, checksum) = self.export(block, layers, Some(slot)).await?;
                Ok((staged, checksum, None))
            }
            Lane::Pool(pool) => {
                let source = &self.start.source;
                if !pool.fits(source.layer_count(), source.layer_bytes()) {
                    return Err(self.no_place(NoPlace::Outside));
                }
                // Before the decode node has claimed it, the ticket may have expired and its blocks be somebody else's.
                let mut begun = self.hearing.begun.clone();
                self.unless_ended(begun.wait_for(|begun| *begun)).await?.ok();
                let slot = self.unless_ended(pool.place((target, layers.clone()))).await?;
                let (staged, checksum) = self.export(block, layers, Some(slot)).await?;
                Ok((staged, checksum, None))
            }
        }
    }

    async fn unless_ended<T>(&mut self, wait: impl Future<Output = T>) -> Result<T, TransferError> {
        tokio::select! {
            biased;
            end = Self::ended(&mut self.hearing.end) => Err(self.error(end)),
            got = wait => Ok(got),
        }
    }

    /// Off the async threads: copying and summing a block takes 0.1 ms for a small model, milliseconds for a large one.
    /// A slot of a `push` that was dropped goes back to the ring when the copy into it is over.
    async fn export(
        &mut self,
        block: BlockId,
        layers: Range<u32>,
        slot: Option<Slot>,
    ) -> Result<(Staged, u64), TransferError> {
        let source = self.start.source.clone();
        let gate = self.hearing.gate.clone();
        let has_checksums = self.live.lane.has_checksums();
        let exporting = self.exporting.insert(tokio::task::spawn_blocking(move || {
            let bytes = layers.len() * source.layer_bytes();
            let sum = |data: &[u8]| if has_checksums { frame::checksum(data) } else { 0 };
            match slot {
                None => {
                    let mut data = BytesMut::zeroed(bytes);
                    source.export(block, layers, &mut data)?;
                    let checksum = sum(&data);
                    Ok((Staged::Own(data.freeze()), checksum))
                }
                Some(mut slot) => {
                    let copy = || {
                        slot.fill(bytes, |place| {
                            source.export(block, layers, place)?;
                            Ok::<u64, SourceError>(sum(place))
                        })
                    };
                    // Closed: the transfer has ended, and the decode node was told that we write no more.
                    let checksum = gate.pass(copy).unwrap_or(Err(NoPlace::Unmapped))??;
                    Ok((Staged::InSlot(slot, bytes), checksum))
                }
            }
        }));
        let exported = exporting.await;
        self.exporting = None;
        match exported.map_err(|_| TransferError::Stopping)? {
            Ok(exported) => Ok(exported),
            Err(NotExported::Source(error)) => Err(error.into()),
            Err(NotExported::Place(fault)) => Err(self.no_place(fault)),
        }
    }

    fn no_place(&self, fault: NoPlace) -> TransferError {
        let ended = self.hearing.end.borrow().clone();
        match (ended, fault) {
            (Some(end), _) => self.error(end),
            (None, NoPlace::Unmapped) => self.error(End::PairLost(self.live.fault())),
            (None, NoPlace::Outside | NoPlace::Taken) => TransferError::NoPlace {
                node: self.live.node.clone(),
                detail: fault.to_string(),
            },
        }
    }

    fn no_such_block(&self, ticket_index: u32) -> TransferError {
        TransferError::NoSuchTicketBlock {
            ticket_index,
            blocks: self.start.ticket.blocks.len(),
        }
    }

    /// Still registered: the other side has not ended it and nobody has aborted it.
    fn is_open(&self) -> bool {
        self.hearing.end.borrow().is_none()
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
        self.live.lane.kind()
    }

    async fn push(&mut self, block: PushedBlock) -> Result<(), TransferError> {
        if block.ticket_index as usize >= self.start.ticket.blocks.len() {
            return Err(self.no_such_block(block.ticket_index));
        }
        let source = &self.start.source;
        let data_bytes_max = self.live.lane.data_bytes_max();
        for layers in frame::layer_ranges(source.layer_count(), source.layer_bytes(), data_bytes_max) {
            self.push_layers(block, layers).await?;
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
        });
        let queued = Queued {
            written: Some(written),
            ..Queued::control(frame)
        };
        self.queue(queued).await?;
        // Its acknowledgement may overtake the news that it was written: not an end that came from elsewhere.
        match was_written.await {
            Ok(at) => {
                self.last_written = Some(at);
                Ok(at)
            }
            Err(_) => {
                let fault = self.live.fault();
                Err(self.error(End::PairLost(fault)))
            }
        }
    }

    async fn acked(&mut self) -> Result<TransferReport, TransferError> {
        match (Self::ended(&mut self.hearing.end).await, self.last_written) {
            (End::Acked, Some(last_written)) => Ok(TransferReport {
                kv_bytes: self.kv_bytes,
                frames: self.next_sequence_no,
                moving: Duration::from_nanos(self.moving.load(Ordering::Relaxed)),
                last_written,
            }),
            (end, _) => Err(self.error(end)),
        }
    }

    async fn abort(mut self: Box<Self>, reason: AbortReason) {
        if let Some(exporting) = self.exporting.take() {
            let _ = exporting.await;
        }
        if self.is_open() {
            self.live.forget(self.transfer());
            // Frames hold copies of the blocks: nothing reads them any more. The receiver sees the abort behind every frame.
            let frame = self.abort_frame(reason);
            if self.live.lane.kind().writes_in_place() {
                // Never given up while the pair lives: the decode node keeps the blocks out of use until it comes.
                return self.live.say_when_stopped(self.hearing.gate.clone(), frame);
            }
            let frame = Queued::control(frame);
            let _ = tokio::time::timeout(ABORT_TIME_LIMIT, self.live.frames.send(frame)).await;
        }
    }
}

impl Drop for PairTransfer {
    fn drop(&mut self) {
        // Forgotten by `abort`, or ended: the watch's sender is gone or holds the end.
        if self.hearing.end.borrow().is_some() || self.hearing.end.has_changed().is_err() {
            return;
        }
        self.live.forget(self.transfer());
        let frame = self.abort_frame(AbortReason::Cancelled);
        if self.live.lane.kind().writes_in_place() {
            // A copy whose `push` was dropped may still run: the word comes after it.
            return self.live.say_when_stopped(self.hearing.gate.clone(), frame);
        }
        let frame = Queued::control(frame);
        let frames = self.live.frames.clone();
        if let Err(tokio::sync::mpsc::error::TrySendError::Full(frame)) = frames.try_send(frame)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move {
                let _ = tokio::time::timeout(ABORT_TIME_LIMIT, frames.send(frame)).await;
            });
        }
    }
}
