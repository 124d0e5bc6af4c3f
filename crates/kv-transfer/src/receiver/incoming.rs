//! One stream at the receiver: each frame is checked against its reservation, and each transfer ends exactly once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use identity::{Caller, PeerRole};
use proto::messages::{Hello, HelloReply, KvBlockFrame, KvFrame, KvReply, LastFrame};
use serving_core::ids::{NodeId, TransferId};
use serving_core::kv::reservation::{FrameHeader, LastHeader, ReservationLedger};
use serving_core::request::AttemptKey;
use thiserror::Error;
use tokio::task::JoinSet;

use super::landing::FrameData;
use super::shared::{AbortBox, Receiver, lock};
use super::sink::{Arrived, ReceiveEnd, TransferRefusal};
use crate::choice::TransportKind;

/// A sender that does not read its replies for this long is given up, because its transfers must not live longer than their timers.
pub(crate) const REPLY_TIME_LIMIT: Duration = Duration::from_secs(2);

/// One stream from one prefill node. Its transport calls `frame` for each frame and `next_reply` in between.
#[derive(Debug)]
pub(crate) struct IncomingPair {
    receiver: Arc<Receiver>,
    transport: TransportKind,
    /// Who opened the stream, by the certificate.
    caller: Caller,
    /// Known after a valid hello. No frame is taken before the hello.
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

/// The sender breaks the protocol in such a way that the stream must be closed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum PairError {
    #[error("the stream does not begin with a hello")]
    NoHello,
    #[error("a second hello came on one stream")]
    SecondHello,
    #[error(transparent)]
    AnotherName(identity::Refused),
    #[error("hello refused: {}", .0.refused.as_ref().map_or("", |refused| &refused.detail))]
    HelloRefused(HelloReply),
}

impl PairError {
    /// What the sender must still be told.
    pub fn last_reply(&self) -> Option<KvReply> {
        match self {
            PairError::NoHello | PairError::SecondHello | PairError::AnotherName(_) => None,
            PairError::HelloRefused(reply) => Some(KvReply::Hello(reply.clone())),
        }
    }
}

impl IncomingPair {
    /// A transport has accepted a stream of `caller`.
    pub fn new(receiver: &Arc<Receiver>, transport: TransportKind, caller: Caller) -> Self {
        Self {
            receiver: receiver.clone(),
            transport,
            caller,
            sender: None,
            transfers: BTreeMap::new(),
            lingering: BTreeMap::new(),
            is_writer_gone: true,
            aborts: Arc::default(),
            commits: JoinSet::new(),
        }
    }

    /// Marks a sender that writes this node's blocks in place.
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
            KvFrame::Last(last) => self.last(last).await,
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
        Ok(match self.land(header, data, &sender).await {
            Ok(()) => {
                self.receiver.sink.progressed(transfer);
                None
            }
            Err(reason) => Some(self.refuse(transfer, reason)),
        })
    }

    fn sender(&self) -> Result<NodeId, PairError> {
        self.sender.clone().ok_or(PairError::NoHello)
    }

    /// The transport has proof that the sender can write no block any more. Drop the pair next.
    pub(crate) fn writer_is_gone(&mut self) {
        self.is_writer_gone = true;
    }

    /// The next answer that is not the direct answer to a frame: a commit is complete, or this node aborts. Waits while there is none.
    /// The call can be cancelled without a loss.
    pub async fn next_reply(&mut self) -> KvReply {
        loop {
            if let Some(reply) = self.abort_here() {
                return reply;
            }
            tokio::select! {
                Some(done) = self.commits.join_next() => {
                    // A commit that panicked has no answer. The sender's hold deadline ends the transfer then.
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
        let named = self.caller.check_name(PeerRole::Prefill, hello.from.name.as_str());
        named.map_err(PairError::AnotherName)?;
        if let Err(refused) = self.receiver.check_hello(hello) {
            return Err(PairError::HelloRefused(self.receiver.hello_reply(Some(refused))));
        }
        self.sender = Some(hello.from.clone());
        Ok(KvReply::Hello(self.receiver.hello_reply(None)))
    }

    fn begin(&mut self, transfer: TransferId) -> Result<Option<KvReply>, PairError> {
        let sender = self.sender()?;
        let claimed = self.claimed(transfer, &sender).map(|_| ());
        let refused = claimed.map_err(|reason| refusal(transfer, &reason)).err();
        if refused.is_none() {
            self.receiver.sink.began(transfer);
        }
        Ok(refused)
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

    /// Checks the header first, then the bytes.
    async fn land<D: FrameData>(
        &mut self,
        frame: KvBlockFrame,
        data: D,
        sender: &NodeId,
    ) -> Result<(), TransferRefusal> {
        let (transfer, data_bytes) = (frame.transfer, data.len());
        if D::IS_IN_PLACE && !self.transfers.contains_key(&transfer) {
            return Err(TransferRefusal::UnknownTransfer);
        }
        let incoming = self.claimed(transfer, sender)?;
        incoming.first_frame.get_or_insert_with(Instant::now);
        incoming.ledger.admit(&FrameHeader {
            sequence_no: frame.sequence_no,
            ticket_index: frame.ticket_index,
            block: frame.block,
            generation: frame.generation,
            layers: frame.layer_begin..frame.layer_end,
            data_bytes,
        })?;
        let sink = self.receiver.sink.clone();
        let inline_bytes_max = match sink.waits() && data.asks_memory() {
            true => 0,
            false => D::INLINE_BYTES_MAX,
        };
        off_the_stream((data_bytes, inline_bytes_max), move || data.land(&frame, &*sink)).await?;
        if let Some(incoming) = self.transfers.get_mut(&transfer) {
            incoming.ledger.landed();
            incoming.kv_bytes += data_bytes as u64;
        }
        Ok(())
    }

    /// Takes the last frame. Its commit runs beside the stream, because the node's loop answers between two steps and other transfers go on.
    async fn last(&mut self, last: LastFrame) -> Result<Option<KvReply>, PairError> {
        let sender = self.sender()?;
        // This wait is here because the transfer can still be aborted now. Later an abort would find no transfer, and the node would use the
        // blocks again.
        if let Err(reason) = self.receiver.sink.settled().await {
            return Ok(Some(self.refuse(last.transfer, reason)));
        }
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
            return Some(self.refuse(transfer, reason));
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
            cached_tokens: last.cached_tokens,
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
        // This is the sender's last message about the transfer. A sender that writes in place stores nothing more.
        let claimed = self.transfers.remove(&transfer);
        let aborted = claimed.map(|_| ReceiveEnd::AbortedBySender(reason.clone()));
        if let Some(end) = self.lingering.remove(&transfer).or(aborted) {
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

    /// Takes the transfer out for its commit, unless it was aborted. One lock decides between commit and abort, because a caller that was
    /// told "`ended` follows" must get it.
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

    /// Ends a transfer, if it is claimed.
    fn refuse(&mut self, transfer: TransferId, reason: TransferRefusal) -> KvReply {
        let reply = refusal(transfer, &reason);
        if self.transfers.remove(&transfer).is_some() {
            self.over(transfer, ReceiveEnd::Refused(reason));
        }
        reply
    }

    /// This node is done with a claimed transfer, which is no longer in `transfers` but still in `active`. A sender that
    /// writes in place must confirm first.
    fn over(&mut self, transfer: TransferId, end: ReceiveEnd) {
        if self.is_writer_gone {
            self.ended(transfer, end);
        } else {
            self.lingering.insert(transfer, end);
        }
    }

    /// The transfer has ended. It stays in `active` until its bytes have settled.
    fn ended(&self, transfer: TransferId, end: ReceiveEnd) {
        let (receiver, transport) = (self.receiver.clone(), self.transport);
        if !receiver.sink.is_settling() {
            return receiver.end(transfer, transport, end);
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            // The process is ending, and its blocks with it.
            return;
        };
        runtime.spawn(async move {
            match receiver.sink.settled().await {
                Ok(()) => receiver.end(transfer, transport, end),
                Err(reason) => {
                    let transfer = transfer.label();
                    tracing::error!(transfer, %reason, "blocks of a transfer stay out of use");
                }
            }
        });
    }
}

/// The stream has ended, for whatever reason, and all its transfers end with it. A commit that has begun runs to its end in the node.
impl Drop for IncomingPair {
    fn drop(&mut self) {
        self.commits.detach_all();
        if !self.is_writer_gone {
            // This happens only when the runtime ends. Blocks that the writer may still touch stay out of use for the rest
            // of this process.
            return;
        }
        let transfers = std::mem::take(&mut self.transfers).into_keys();
        let lost = transfers.map(|transfer| (transfer, ReceiveEnd::PairLost));
        for (transfer, end) in std::mem::take(&mut self.lingering).into_iter().chain(lost) {
            self.ended(transfer, end);
        }
    }
}

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
