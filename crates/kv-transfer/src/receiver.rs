//! The receiver's half, the same for every transport: who may write, is it what was promised, is it undamaged.
//!
//! A decode node implements [`HandoffSink`] and shares one [`Receiver`]. A transport makes an [`IncomingPair`] per stream
//! and feeds it frames. For each claimed transfer exactly one of two things happens in the end: `commit` is called, or
//! `ended` is. After either, nothing of that transfer is written any more. So a node that cancels a request calls
//! [`Receiver::abort`] and keeps the blocks in quarantine until `ended` comes (or at once lets go when `abort` is false).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use proto::messages::{
    Hello, HelloReply, KvBlockFrame, KvFrame, KvReply, LastFrame, PROTOCOL_VERSION, SharedMemoryOffer,
};
use serving_core::ids::{NodeId, TransferId};
use serving_core::kv::reservation::{LastHeader, ReservationLedger};
use serving_core::node::CompatibilityHash;
use serving_core::request::AttemptKey;
use thiserror::Error;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::choice::TransportKind;
use crate::frame::{self, FrameData};
pub use crate::sink::{Arrived, HandoffSink, ImportError, ReceiveEnd, RefuseReason};

/// Everything a decode node receives, over all transports and pairs.
#[derive(Debug)]
pub struct Receiver {
    node: NodeId,
    compatibility: CompatibilityHash,
    sink: Arc<dyn HandoffSink>,
    /// Where each claimed transfer is being received. Held while claiming, so that `abort` never misses one.
    active: Mutex<BTreeMap<TransferId, Arc<AbortBox>>>,
    /// Told to every sender whose hello is accepted.
    shared_memory: Mutex<Option<SharedMemoryOffer>>,
}

/// Abort requests for one pair's stream: at most one per active transfer.
#[derive(Debug, Default)]
struct AbortBox {
    requests: Mutex<Vec<(TransferId, String)>>,
    notify: Notify,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Receiver {
    pub fn new(node: NodeId, compatibility: CompatibilityHash, sink: Arc<dyn HandoffSink>) -> Arc<Self> {
        Arc::new(Self {
            node,
            compatibility,
            sink,
            active: Mutex::default(),
            shared_memory: Mutex::default(),
        })
    }

    /// What hellos say of this node's shared memory from now on.
    pub(crate) fn offer_shared_memory(&self, offer: SharedMemoryOffer) {
        *lock(&self.shared_memory) = Some(offer);
    }

    /// Unless another offer has taken its place.
    pub(crate) fn withdraw_shared_memory(&self, offer: &SharedMemoryOffer) {
        lock(&self.shared_memory).take_if(|offered| offered == offer);
    }

    /// This node gives a transfer up; idempotent, never blocks. The sink must already refuse to hand its reservation out.
    /// True: `ended` (never `commit`) follows as soon as no write is running. False: the transfer was never claimed, or
    /// `commit` or `ended` was called already: nothing is or will be written.
    pub fn abort(&self, transfer: TransferId, reason: &str) -> bool {
        let active = lock(&self.active);
        let Some(pair) = active.get(&transfer) else {
            return false;
        };
        let mut requests = lock(&pair.requests);
        if !requests.iter().any(|(requested, _)| *requested == transfer) {
            requests.push((transfer, reason.to_owned()));
        }
        pair.notify.notify_one();
        true
    }

    /// A transport has accepted a stream.
    pub fn incoming(self: &Arc<Self>, transport: TransportKind) -> IncomingPair {
        IncomingPair {
            receiver: self.clone(),
            transport,
            sender: None,
            transfers: BTreeMap::new(),
            aborts: Arc::default(),
            commits: JoinSet::new(),
        }
    }

    fn check_hello(&self, hello: &Hello) -> Result<(), &'static str> {
        if hello.protocol_version != PROTOCOL_VERSION {
            return Err("protocol_version");
        }
        if hello.to != self.node {
            return Err("stale_epoch");
        }
        if hello.compatibility != self.compatibility {
            return Err("incompatible");
        }
        Ok(())
    }
}

/// One stream from one prefill node, driven by its transport: `frame` for each frame, `next_reply` in between.
#[derive(Debug)]
pub struct IncomingPair {
    receiver: Arc<Receiver>,
    transport: TransportKind,
    /// Known after a good hello; before it no frame is taken.
    sender: Option<NodeId>,
    transfers: BTreeMap<TransferId, Incoming>,
    aborts: Arc<AbortBox>,
    commits: JoinSet<KvReply>,
}

#[derive(Debug)]
struct Incoming {
    ledger: ReservationLedger,
    kv_bytes: u64,
    first_frame: Option<Instant>,
}

/// The sender breaks the protocol in a way that leaves nothing to say on this stream: close it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PairError {
    #[error("the stream does not begin with a hello")]
    NoHello,
    #[error("a second hello came on one stream")]
    SecondHello,
    #[error("hello refused: {0}")]
    HelloRefused(&'static str),
}

impl IncomingPair {
    /// Takes one frame and says what to answer at once, if anything. An error ends the stream after the answer.
    ///
    /// # Errors
    /// [`PairError`]; the reply to a refused hello is given by [`Self::hello_reply`].
    pub async fn frame(&mut self, frame: KvFrame) -> Result<Option<KvReply>, PairError> {
        if let KvFrame::Hello(hello) = frame {
            return self.hello(&hello).map(Some);
        }
        let sender = self.sender.clone().ok_or(PairError::NoHello)?;
        Ok(match frame {
            KvFrame::Hello(_) => None,
            KvFrame::Begin { transfer } => self.begin(transfer, &sender),
            KvFrame::Block(mut block) => {
                let data = std::mem::take(&mut block.data);
                self.block(block, data, &sender).await
            }
            KvFrame::Last(last) => self.last(last, &sender),
            KvFrame::Abort { transfer, reason } => Some(self.abort_by_sender(transfer, reason)),
        })
    }

    /// Takes a block whose bytes came by another way than its header.
    ///
    /// # Errors
    /// [`PairError::NoHello`].
    pub(crate) async fn staged_block(
        &mut self,
        header: KvBlockFrame,
        data: impl FrameData,
    ) -> Result<Option<KvReply>, PairError> {
        let sender = self.sender.clone().ok_or(PairError::NoHello)?;
        Ok(self.block(header, data, &sender).await)
    }

    /// The next answer that no frame asked for: a commit is through, or this node aborts. Pends while there is none;
    /// cancel-safe.
    pub async fn next_reply(&mut self) -> KvReply {
        loop {
            if let Some(reply) = self.abort_here() {
                return reply;
            }
            tokio::select! {
                Some(done) = self.commits.join_next() => {
                    // A commit that panicked has no answer: the sender's hold deadline ends it.
                    if let Ok(reply) = done {
                        return reply;
                    }
                }
                () = self.aborts.notify.notified() => {}
            }
        }
    }

    /// Answer for a stream that ends with [`PairError::HelloRefused`].
    pub fn hello_reply(&self, refused: Option<&str>) -> KvReply {
        let offered = || lock(&self.receiver.shared_memory).clone();
        KvReply::Hello(HelloReply {
            node: self.receiver.node.clone(),
            refused: refused.map(str::to_owned),
            shared_memory: refused.is_none().then(offered).flatten(),
        })
    }

    fn hello(&mut self, hello: &Hello) -> Result<KvReply, PairError> {
        if self.sender.is_some() {
            return Err(PairError::SecondHello);
        }
        self.receiver.check_hello(hello).map_err(PairError::HelloRefused)?;
        self.sender = Some(hello.from.clone());
        Ok(self.hello_reply(None))
    }

    fn begin(&mut self, transfer: TransferId, sender: &NodeId) -> Option<KvReply> {
        match self.claimed(transfer, sender) {
            Ok(_) => {
                self.receiver.sink.began(transfer);
                None
            }
            Err(reason) => Some(refusal(transfer, &reason)),
        }
    }

    /// The transfer's entry; the first frame of a transfer claims its reservation.
    fn claimed(&mut self, transfer: TransferId, sender: &NodeId) -> Result<&mut Incoming, RefuseReason> {
        if !self.transfers.contains_key(&transfer) {
            let incoming = self.claim(transfer, sender)?;
            self.transfers.insert(transfer, incoming);
        }
        self.transfers.get_mut(&transfer).ok_or(RefuseReason::UnknownTransfer)
    }

    fn claim(&self, transfer: TransferId, sender: &NodeId) -> Result<Incoming, RefuseReason> {
        let mut active = lock(&self.receiver.active);
        if active.contains_key(&transfer) {
            // Another stream is receiving it: tickets are for one stream of one node.
            return Err(RefuseReason::UnknownTransfer);
        }
        let reservation = self.receiver.sink.claim(transfer, sender)?;
        let ledger = ReservationLedger::new(reservation);
        if let Err(error) = ledger.check_sender(sender) {
            drop(active);
            let reason = RefuseReason::Frame(error);
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

    async fn block(&mut self, block: KvBlockFrame, data: impl FrameData, sender: &NodeId) -> Option<KvReply> {
        let transfer = block.transfer;
        match self.land(block, data, sender).await {
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

    /// Header first, then checksum, and only then a byte is written. What is summed is what is written: bytes that the
    /// sender can still change are copied before either.
    async fn land(&mut self, block: KvBlockFrame, data: impl FrameData, sender: &NodeId) -> Result<(), RefuseReason> {
        let transfer = block.transfer;
        let incoming = self.claimed(transfer, sender)?;
        incoming.first_frame.get_or_insert_with(Instant::now);
        let header = frame::header(&block, data.len());
        incoming.ledger.admit(&header)?;
        let kv_bytes = data.len() as u64;
        let sink = self.receiver.sink.clone();
        let landing = tokio::task::spawn_blocking(move || {
            data.read(|bytes| {
                if frame::checksum(bytes) != block.checksum {
                    let sequence_no = block.sequence_no;
                    return Err(RefuseReason::Checksum { sequence_no });
                }
                sink.import(block.block, header.layers, bytes)
                    .map_err(|error| RefuseReason::Import(error.to_string()))
            })
        });
        match landing.await {
            Ok(landed) => landed?,
            // The runtime is being torn down: this process is going, and must not blame the transfer with its last breath.
            Err(error) if error.is_cancelled() => std::future::pending().await,
            Err(error) => return Err(RefuseReason::Import(error.to_string())),
        }
        if let Some(incoming) = self.transfers.get_mut(&transfer) {
            incoming.ledger.landed();
            incoming.kv_bytes += kv_bytes;
        }
        Ok(())
    }

    /// Commits run beside the stream: the node's step loop answers between two steps, other transfers go on.
    fn last(&mut self, last: LastFrame, sender: &NodeId) -> Option<KvReply> {
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
        if self.forget(transfer).is_some() {
            let end = ReceiveEnd::AbortedBySender(reason.clone());
            self.ended(transfer, end);
        }
        KvReply::Aborted { transfer, reason }
    }

    fn abort_here(&mut self) -> Option<KvReply> {
        loop {
            let (transfer, reason) = lock(&self.aborts.requests).pop()?;
            if self.forget(transfer).is_some() {
                return Some(self.aborted_here(transfer, reason));
            }
        }
    }

    fn aborted_here(&self, transfer: TransferId, reason: String) -> KvReply {
        self.ended(transfer, ReceiveEnd::AbortedHere(reason.clone()));
        KvReply::Aborted { transfer, reason }
    }

    /// The way to a commit. One lock decides between it and an abort: who was told that `ended` follows must hear it.
    fn forget_unless_aborted(&mut self, transfer: TransferId) -> Option<Result<Incoming, String>> {
        let incoming = self.transfers.remove(&transfer)?;
        let mut active = lock(&self.receiver.active);
        active.remove(&transfer);
        let mut requests = lock(&self.aborts.requests);
        let requested = requests.iter().position(|(requested, _)| *requested == transfer);
        Some(match requested {
            Some(index) => Err(requests.swap_remove(index).1),
            None => Ok(incoming),
        })
    }

    /// Ends a transfer that was claimed; gives the reason back for the reply.
    fn refuse(&mut self, transfer: TransferId, reason: RefuseReason) -> RefuseReason {
        if self.forget(transfer).is_some() {
            self.ended(transfer, ReceiveEnd::Refused(reason.clone()));
        }
        reason
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

/// The stream is over, in whatever way: what it carried is, too. Commits under way run to their end in the node.
impl Drop for IncomingPair {
    fn drop(&mut self) {
        self.commits.detach_all();
        let transfers: Vec<TransferId> = self.transfers.keys().copied().collect();
        for transfer in transfers {
            self.forget(transfer);
            self.ended(transfer, ReceiveEnd::PairLost);
        }
    }
}

fn refusal(transfer: TransferId, reason: &RefuseReason) -> KvReply {
    KvReply::Refused {
        transfer,
        reason: reason.name().to_owned(),
        detail: reason.to_string(),
    }
}
