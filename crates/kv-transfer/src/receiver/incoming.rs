//! One stream at the receiver: each frame is checked against its reservation, and each transfer ends exactly once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use proto::messages::{Hello, HelloReply, KvBlockFrame, KvFrame, KvReply, LastFrame};
use serving_core::ids::{NodeId, TransferId};
use serving_core::kv::reservation::{LastHeader, ReservationLedger};
use serving_core::request::AttemptKey;
use thiserror::Error;
use tokio::task::JoinSet;

use super::shared::{AbortBox, Receiver, lock};
use super::sink::{Arrived, MappedPool, ReceiveEnd, TransferRefusal};
use crate::choice::TransportKind;
use crate::frame::{self, FrameData};
use crate::span::checksum;

/// One stream from one prefill node. Its transport calls `frame` for each frame and `next_reply` in between.
#[derive(Debug)]
pub struct IncomingPair {
    receiver: Arc<Receiver>,
    transport: TransportKind,
    /// Known after a good hello. No frame is taken before it.
    sender: Option<NodeId>,
    transfers: BTreeMap<TransferId, Incoming>,
    /// Transfers that are over for this node, while the sender may still write their blocks. They stay in `active`, so that
    /// an abort is answered with "`ended` follows".
    lingering: BTreeMap<TransferId, ReceiveEnd>,
    is_writer_gone: bool,
    aborts: Arc<AbortBox>,
    commits: JoinSet<KvReply>,
}

#[derive(Debug)]
struct Incoming {
    ledger: ReservationLedger,
    kv_bytes: u64,
    first_frame: Option<Instant>,
}

/// The sender breaks the protocol in a way that allows no answer on this stream: close it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PairError {
    #[error("the stream does not begin with a hello")]
    NoHello,
    #[error("a second hello came on one stream")]
    SecondHello,
    #[error("hello refused: {}", .0.refused.as_ref().map_or("", |refused| &refused.detail))]
    HelloRefused(HelloReply),
}

impl PairError {
    /// What the sender must still be told.
    pub fn last_reply(&self) -> Option<KvReply> {
        match self {
            PairError::NoHello | PairError::SecondHello => None,
            PairError::HelloRefused(reply) => Some(KvReply::Hello(reply.clone())),
        }
    }
}

impl IncomingPair {
    /// A transport has accepted a stream.
    pub fn new(receiver: &Arc<Receiver>, transport: TransportKind) -> Self {
        Self {
            receiver: receiver.clone(),
            transport,
            sender: None,
            transfers: BTreeMap::new(),
            lingering: BTreeMap::new(),
            is_writer_gone: true,
            aborts: Arc::default(),
            commits: JoinSet::new(),
        }
    }

    /// The sender writes this node's blocks in place.
    pub(crate) fn written_in_place(mut self) -> Self {
        self.is_writer_gone = false;
        self
    }

    /// Takes one frame. Returns the answer to send at once, if there is one. An error ends the stream after the answer.
    ///
    /// # Errors
    /// [`PairError`]; [`PairError::last_reply`] is still to be sent.
    pub async fn frame(&mut self, frame: KvFrame) -> Result<Option<KvReply>, PairError> {
        match frame {
            KvFrame::Hello(hello) => self.hello(&hello).map(Some),
            KvFrame::Begin { transfer } => self.begin(transfer),
            KvFrame::Block(mut block) => {
                let data = std::mem::take(&mut block.data);
                self.block(block, data).await
            }
            KvFrame::Last(last) => self.last(last),
            KvFrame::Abort { transfer, reason } => {
                self.sender()?;
                Ok(Some(self.abort_by_sender(transfer, reason)))
            }
        }
    }

    /// Takes a block whose bytes may have come by another way than its header.
    ///
    /// # Errors
    /// [`PairError::NoHello`].
    pub(crate) async fn block(
        &mut self,
        header: KvBlockFrame,
        data: impl FrameData,
    ) -> Result<Option<KvReply>, PairError> {
        let (transfer, sender) = (header.transfer, self.sender()?);
        let landed = self.land(header, data, &sender).await;
        Ok(self.landed(transfer, landed))
    }

    /// Takes a block that the sender has written in place. The pool shows the bytes when they must be summed.
    ///
    /// # Errors
    /// [`PairError::NoHello`].
    pub(crate) async fn placed_block(
        &mut self,
        header: KvBlockFrame,
        data_bytes: usize,
        summed: Option<Arc<dyn MappedPool>>,
    ) -> Result<Option<KvReply>, PairError> {
        self.sender()?;
        let transfer = header.transfer;
        let placed = self.place(header, data_bytes, summed).await;
        Ok(self.landed(transfer, placed))
    }

    fn sender(&self) -> Result<NodeId, PairError> {
        self.sender.clone().ok_or(PairError::NoHello)
    }

    /// The transport has proof that the sender can write no block any more. Drop the pair next.
    pub(crate) fn writer_is_gone(&mut self) {
        self.is_writer_gone = true;
    }

    /// The next answer that no frame asked for: a commit is complete, or this node aborts. Waits while there is none.
    /// Cancel-safe.
    pub async fn next_reply(&mut self) -> KvReply {
        loop {
            if let Some(reply) = self.abort_here() {
                return reply;
            }
            tokio::select! {
                Some(done) = self.commits.join_next() => {
                    // A commit that panicked has no answer. The sender's hold deadline ends it.
                    if let Ok(reply) = done {
                        return reply;
                    }
                }
                () = self.aborts.notify.notified() => {}
            }
        }
    }

    fn hello(&mut self, hello: &Hello) -> Result<KvReply, PairError> {
        if self.sender.is_some() {
            return Err(PairError::SecondHello);
        }
        if let Err(refused) = self.receiver.check_hello(hello) {
            return Err(PairError::HelloRefused(self.receiver.hello_reply(Some(refused))));
        }
        self.sender = Some(hello.from.clone());
        Ok(KvReply::Hello(self.receiver.hello_reply(None)))
    }

    fn begin(&mut self, transfer: TransferId) -> Result<Option<KvReply>, PairError> {
        let sender = self.sender()?;
        Ok(match self.claimed(transfer, &sender) {
            Ok(_) => {
                self.receiver.sink.began(transfer);
                None
            }
            Err(reason) => Some(refusal(transfer, &reason)),
        })
    }

    /// The transfer's entry. The first frame of a transfer claims its reservation.
    fn claimed(&mut self, transfer: TransferId, sender: &NodeId) -> Result<&mut Incoming, TransferRefusal> {
        if !self.transfers.contains_key(&transfer) {
            let incoming = self.claim(transfer, sender)?;
            self.transfers.insert(transfer, incoming);
        }
        self.transfers
            .get_mut(&transfer)
            .ok_or(TransferRefusal::UnknownTransfer)
    }

    fn claim(&self, transfer: TransferId, sender: &NodeId) -> Result<Incoming, TransferRefusal> {
        let mut active = lock(&self.receiver.active);
        if active.contains_key(&transfer) {
            // Another stream is receiving it. A ticket is for one stream of one node.
            return Err(TransferRefusal::UnknownTransfer);
        }
        let reservation = self.receiver.sink.claim(transfer, sender)?;
        let ledger = ReservationLedger::new(reservation);
        if let Err(error) = ledger.check_sender(sender) {
            drop(active);
            let reason = TransferRefusal::Frame(error);
            self.ended(transfer, ReceiveEnd::Refused(reason.clone()));
            return Err(reason);
        }
        active.insert(transfer, self.aborts.clone());
        Ok(Incoming {
            ledger,
            kv_bytes: 0,
            first_frame: None,
        })
    }

    fn landed(&mut self, transfer: TransferId, landed: Result<(), TransferRefusal>) -> Option<KvReply> {
        match landed {
            Ok(()) => {
                self.receiver.sink.progressed(transfer);
                None
            }
            Err(reason) => {
                let reason = self.refuse(transfer, reason);
                Some(refusal(transfer, &reason))
            }
        }
    }

    /// Checks the header first, then the checksum, and only then writes a byte. The bytes that are summed are the bytes
    /// that are written: bytes that the sender can still change are copied before.
    async fn land<D: FrameData>(
        &mut self,
        block: KvBlockFrame,
        data: D,
        sender: &NodeId,
    ) -> Result<(), TransferRefusal> {
        let transfer = block.transfer;
        let incoming = self.claimed(transfer, sender)?;
        incoming.first_frame.get_or_insert_with(Instant::now);
        let header = frame::header(&block, data.len());
        incoming.ledger.admit(&header)?;
        let kv_bytes = data.len() as u64;
        let sink = self.receiver.sink.clone();
        off_the_stream((data.len(), D::INLINE_BYTES_MAX), move || {
            data.read(|bytes| {
                if bytes.checksum() != block.checksum {
                    let sequence_no = block.sequence_no;
                    return Err(TransferRefusal::Checksum { sequence_no });
                }
                sink.import(block.block, header.layers, bytes)
                    .map_err(|error| TransferRefusal::Import(error.to_string()))
            })
        })
        .await?;
        self.count(transfer, kv_bytes);
        Ok(())
    }

    /// Like [`Self::land`], for bytes that are in their block already. Only a claimed transfer may have written any, so a
    /// frame claims nothing here.
    async fn place(
        &mut self,
        block: KvBlockFrame,
        data_bytes: usize,
        summed: Option<Arc<dyn MappedPool>>,
    ) -> Result<(), TransferRefusal> {
        let incoming = self.transfers.get_mut(&block.transfer);
        let incoming = incoming.ok_or(TransferRefusal::UnknownTransfer)?;
        incoming.first_frame.get_or_insert_with(Instant::now);
        let header = frame::header(&block, data_bytes);
        incoming.ledger.admit(&header)?;
        if let Some(pool) = summed {
            off_the_stream((data_bytes, SUMMED_INLINE_BYTES_MAX), move || {
                let mut is_good = |bytes: &[u8]| checksum(bytes) == block.checksum;
                match pool.verify(block.block, header.layers, &mut is_good) {
                    Ok(true) => Ok(()),
                    Ok(false) => Err(TransferRefusal::Checksum {
                        sequence_no: block.sequence_no,
                    }),
                    Err(error) => Err(TransferRefusal::Import(error.to_string())),
                }
            })
            .await?;
        }
        self.count(block.transfer, data_bytes as u64);
        Ok(())
    }

    fn count(&mut self, transfer: TransferId, kv_bytes: u64) {
        if let Some(incoming) = self.transfers.get_mut(&transfer) {
            incoming.ledger.landed();
            incoming.kv_bytes += kv_bytes;
        }
    }

    /// Commits run beside the stream: the node's loop answers between two steps, and other transfers go on.
    fn last(&mut self, last: LastFrame) -> Result<Option<KvReply>, PairError> {
        let sender = self.sender()?;
        Ok(self.finish(last, &sender))
    }

    fn finish(&mut self, last: LastFrame, sender: &NodeId) -> Option<KvReply> {
        let last_frame = Instant::now();
        let transfer = last.transfer;
        let key = AttemptKey {
            request: last.request,
            attempt: last.attempt,
        };
        let header = LastHeader {
            key,
            block_count: last.block_count,
            frame_count: last.frame_count,
        };
        let finished = self
            .claimed(transfer, sender)
            .and_then(|incoming| Ok(incoming.ledger.finish(&header)?));
        if let Err(reason) = finished {
            let reason = self.refuse(transfer, reason);
            return Some(refusal(transfer, &reason));
        }
        let incoming = match self.forget_unless_aborted(transfer)? {
            Ok(incoming) => incoming,
            Err(reason) => return Some(self.aborted_here(transfer, reason)),
        };
        let arrived = Arrived {
            transfer,
            key,
            transport: self.transport,
            first_tokens: last.first_tokens,
            kv_bytes: incoming.kv_bytes,
            frames: incoming.ledger.landed_frames(),
            first_frame: incoming.first_frame,
            last_frame,
            traceparent: last.traceparent,
        };
        let sink = self.receiver.sink.clone();
        self.commits.spawn(async move {
            match sink.commit(arrived).await {
                Ok(()) => KvReply::Ack { transfer },
                Err(reason) => refusal(transfer, &reason),
            }
        });
        None
    }

    fn abort_by_sender(&mut self, transfer: TransferId, reason: String) -> KvReply {
        // The sender's last message about it. A sender that writes in place stores nothing more.
        let end = match self.lingering.remove(&transfer) {
            Some(end) => {
                lock(&self.receiver.active).remove(&transfer);
                Some(end)
            }
            None => self
                .forget(transfer)
                .map(|_| ReceiveEnd::AbortedBySender(reason.clone())),
        };
        if let Some(end) = end {
            self.ended(transfer, end);
        }
        KvReply::Aborted { transfer, reason }
    }

    fn abort_here(&mut self) -> Option<KvReply> {
        loop {
            let (transfer, reason) = lock(&self.aborts.requests).pop()?;
            if self.transfers.remove(&transfer).is_some() {
                return Some(self.aborted_here(transfer, reason));
            }
        }
    }

    fn aborted_here(&mut self, transfer: TransferId, reason: String) -> KvReply {
        self.over(transfer, ReceiveEnd::AbortedHere(reason.clone()));
        KvReply::Aborted { transfer, reason }
    }

    /// The way to a commit. One lock decides between commit and abort: a caller that was told "`ended` follows" must get
    /// it.
    fn forget_unless_aborted(&mut self, transfer: TransferId) -> Option<Result<Incoming, String>> {
        let incoming = self.transfers.remove(&transfer)?;
        let mut active = lock(&self.receiver.active);
        let mut requests = lock(&self.aborts.requests);
        let requested = requests.iter().position(|(requested, _)| *requested == transfer);
        Some(match requested {
            Some(index) => Err(requests.swap_remove(index).1),
            None => {
                active.remove(&transfer);
                Ok(incoming)
            }
        })
    }

    /// Ends a claimed transfer. Returns the reason for the reply.
    fn refuse(&mut self, transfer: TransferId, reason: TransferRefusal) -> TransferRefusal {
        if self.transfers.remove(&transfer).is_some() {
            self.over(transfer, ReceiveEnd::Refused(reason.clone()));
        }
        reason
    }

    /// This node is done with a claimed transfer, which is no longer in `transfers` but still in `active`. A sender that
    /// writes in place must confirm first.
    fn over(&mut self, transfer: TransferId, end: ReceiveEnd) {
        if self.is_writer_gone {
            lock(&self.receiver.active).remove(&transfer);
            self.ended(transfer, end);
        } else {
            self.lingering.insert(transfer, end);
        }
    }

    fn ended(&self, transfer: TransferId, end: ReceiveEnd) {
        self.receiver.sink.ended(transfer, self.transport, end);
    }

    fn forget(&mut self, transfer: TransferId) -> Option<Incoming> {
        let incoming = self.transfers.remove(&transfer)?;
        lock(&self.receiver.active).remove(&transfer);
        Some(incoming)
    }
}

/// The stream is over, for whatever reason, and so are its transfers. Commits under way run to their end in the node.
impl Drop for IncomingPair {
    fn drop(&mut self) {
        self.commits.detach_all();
        if !self.is_writer_gone {
            // This happens only when the runtime ends. Blocks that the writer may still touch stay out of use for the rest
            // of this process.
            return;
        }
        for (transfer, end) in std::mem::take(&mut self.lingering) {
            lock(&self.receiver.active).remove(&transfer);
            self.ended(transfer, end);
        }
        let transfers: Vec<TransferId> = self.transfers.keys().copied().collect();
        for transfer in transfers {
            self.forget(transfer);
            self.ended(transfer, ReceiveEnd::PairLost);
        }
    }
}

/// Summing this many bytes takes 20 us: as long as two changes of threads, and short enough for an async thread.
const SUMMED_INLINE_BYTES_MAX: usize = 512 << 10;

/// Runs work on KV bytes on a blocking thread, unless the work is so small that the change of threads would take longer.
async fn off_the_stream(
    (bytes, inline_bytes_max): (usize, usize),
    work: impl FnOnce() -> Result<(), TransferRefusal> + Send + 'static,
) -> Result<(), TransferRefusal> {
    if bytes <= inline_bytes_max {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(landed) => landed,
        // The runtime is ending, and so is this process. The transfer must not be blamed for it.
        Err(error) if error.is_cancelled() => std::future::pending().await,
        Err(error) => Err(TransferRefusal::Import(error.to_string())),
    }
}

fn refusal(transfer: TransferId, reason: &TransferRefusal) -> KvReply {
    KvReply::Refused {
        transfer,
        reason: reason.name().to_owned(),
        detail: reason.to_string(),
    }
}
