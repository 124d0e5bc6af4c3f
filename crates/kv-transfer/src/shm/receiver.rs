//! The receiver's end: one socket for senders of this host, and a task and a ring (or the pool) for each sender.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{SinkExt, StreamExt as _};
use prost::Message as _;
use proto::messages::{KvFrame, SharedMemoryOffer, StagedBlock, StagedFrame, StagedReply};
use proto::v1;
use thiserror::Error;
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::codec::{FramedRead, FramedWrite, LengthDelimitedCodec};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::part::{Frames, parted};
use super::ring::RingShape;
use super::socket;
use super::welcome::{DirectOffer, Incoming, welcome};
use crate::choice::{ShmFault, TransportKind};
use crate::receiver::{IncomingPair, PairError, Receiver};

/// A sender that does not read its replies for this long is given up: its transfers must not outlive their timers.
const REPLY_TIME_LIMIT: Duration = Duration::from_secs(2);
/// The pause after a failed accept (no descriptors left, for example).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a decode node gives to shared memory.
#[derive(Clone, Debug)]
pub struct ShmConfig {
    /// KV bytes in flight per pair. Memory that is never used is never taken from the system.
    pub ring_bytes: u64,
    /// Largest run of KV bytes in one frame.
    pub slot_bytes: u32,
    /// Senders at the same time. Further senders are refused and use gRPC.
    pub pairs_max: usize,
    /// A sender that has its ring must say hello within this time, or the ring is taken away.
    pub hello_wait: Duration,
    /// This process as its peers see it.
    pub uid: u32,
    /// Where the direct mode is offered too.
    pub direct: Option<DirectOffer>,
}

impl ShmConfig {
    /// For a node whose (block, layer) has `layer_bytes`. A slot has 512 KiB: a block of a small model in one piece, and
    /// two slots fit a core's second-level cache. A ring has 32 MiB, as much as gRPC has in flight.
    pub fn new(layer_bytes: usize) -> Self {
        const SLOT_BYTES: u32 = 512 << 10;
        Self {
            ring_bytes: 32 << 20,
            slot_bytes: u32::try_from(layer_bytes).unwrap_or(u32::MAX).max(SLOT_BYTES),
            pairs_max: 64,
            hello_wait: Duration::from_secs(5),
            uid: rustix::process::geteuid().as_raw(),
            direct: None,
        }
    }

    pub(super) fn shape(&self) -> RingShape {
        let slots = self.ring_bytes / u64::from(self.slot_bytes.max(1));
        RingShape {
            // At least two: one is filled while the other is copied out.
            slots: u32::try_from(slots).unwrap_or(u32::MAX).max(2),
            slot_bytes: self.slot_bytes,
        }
    }
}

/// Shared memory is served while this value lives. Dropping it ends every pair that uses it.
#[derive(Debug)]
pub struct Serving {
    receiver: Arc<Receiver>,
    offer: SharedMemoryOffer,
    _stop: DropGuard,
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.receiver.withdraw_shared_memory(&self.offer);
    }
}

/// Offers shared memory to senders of this host and serves those that come. Needs a Tokio runtime around it.
///
/// # Errors
/// The system gives no socket, or does not say which boot it is.
pub fn serve(receiver: Arc<Receiver>, config: ShmConfig) -> io::Result<Serving> {
    let name = format!("baton-kv-{:032x}", rand::random::<u128>());
    let listener = UnixListener::bind(socket::path(&name))?;
    let offer = SharedMemoryOffer {
        boot_id: socket::boot_id()?,
        socket: name,
    };
    receiver.offer_shared_memory(offer.clone());
    let stop = CancellationToken::new();
    let accepting = accept(listener, receiver.clone(), config);
    tokio::spawn(stop.clone().run_until_cancelled_owned(accepting));
    Ok(Serving {
        receiver,
        offer,
        _stop: stop.drop_guard(),
    })
}

/// Never ends by itself. The pairs' tasks go on when it is dropped, until `pairs` ends them.
async fn accept(listener: UnixListener, receiver: Arc<Receiver>, config: ShmConfig) {
    let room = Arc::new(Semaphore::new(config.pairs_max));
    let pairs = CancellationToken::new();
    let _ends_with_this = pairs.clone().drop_guard();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a sender that wants to share memory");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let permit = room.clone().try_acquire_owned().ok();
        let sender = Sender {
            stream,
            is_one_too_many: permit.is_none(),
            receiver: receiver.clone(),
            config: config.clone(),
        };
        let stop = pairs.clone();
        // A task of its own, because it must finish a running import when the connection drops.
        tokio::spawn(async move {
            let _permit = permit;
            if let Err(end) = sender.serve(stop).await {
                tracing::warn!(%end, "a sender that shares memory is given up");
            }
        });
    }
}

/// Why this side ends a pair.
#[derive(Debug, Error)]
enum PairEnd {
    #[error("{0}")]
    NotServed(#[from] ShmFault),
    #[error("it sent no hello in time")]
    NoHello,
    #[error("it does not read its replies")]
    NotReading,
    #[error("a message breaks the contract: {0}")]
    BadMessage(String),
    #[error("{bytes} bytes of slot {slot} are not inside the ring of {shape:?}")]
    OutsideRing { slot: u32, bytes: u32, shape: RingShape },
    #[error("{0}")]
    Pair(#[from] PairError),
    #[error("the socket failed: {0}")]
    Io(#[from] io::Error),
}

type Replies = FramedWrite<OwnedWriteHalf, LengthDelimitedCodec>;

/// A process that came to the socket.
#[derive(Debug)]
struct Sender {
    stream: UnixStream,
    is_one_too_many: bool,
    receiver: Arc<Receiver>,
    config: ShmConfig,
}

impl Sender {
    async fn serve(self, stop: CancellationToken) -> Result<(), PairEnd> {
        let welcomed = welcome(&self.stream, &self.config, self.is_one_too_many).await?;
        let Some(incoming) = welcomed else {
            return Ok(());
        };
        let kind = match &incoming {
            Incoming::Ring(_) => TransportKind::Shm,
            Incoming::Pool { .. } => TransportKind::ShmDirect,
        };
        let (frames, replies) = self.stream.into_split();
        let mut serving = ServedPair {
            pair: self.receiver.incoming(kind),
            incoming,
            frames: FramedRead::new(frames, socket::codec()),
            replies: FramedWrite::new(replies, socket::codec()),
        };
        let ended = serving.carry(stop, self.config.hello_wait).await;
        let ServedPair {
            mut pair,
            incoming,
            frames,
            replies,
        } = serving;
        if let Incoming::Pool { writer, .. } = &incoming {
            drop(replies);
            if !matches!(ended, Ok(PeerEnd::Goodbye)) {
                parted(frames, writer).await;
            }
            pair.writer_is_gone();
        }
        ended.map(drop)
    }
}

/// How a sender ends by itself, or how serving on this side ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerEnd {
    Goodbye,
    Closed,
}

/// A sender that has memory.
#[derive(Debug)]
struct ServedPair {
    pair: IncomingPair,
    incoming: Incoming,
    frames: Frames,
    replies: Replies,
}

impl ServedPair {
    async fn carry(&mut self, stop: CancellationToken, hello_wait: Duration) -> Result<PeerEnd, PairEnd> {
        let mut is_greeted = false;
        let hello_due = tokio::time::sleep(hello_wait);
        tokio::pin!(hello_due);
        loop {
            tokio::select! {
                () = stop.cancelled() => return Ok(PeerEnd::Closed),
                () = &mut hello_due, if !is_greeted => return Err(PairEnd::NoHello),
                reply = self.pair.next_reply() => {
                    send(&mut self.replies, StagedReply::Reply(reply)).await?;
                    flush(&mut self.replies).await?;
                }
                message = self.frames.next() => {
                    let Some(message) = message else {
                        return Ok(PeerEnd::Closed);
                    };
                    let bad = |error: &dyn std::fmt::Display| PairEnd::BadMessage(error.to_string());
                    let frame = v1::StagedFrame::decode(message?).map_err(|error| bad(&error))?;
                    match StagedFrame::try_from(frame).map_err(|error| bad(&error))? {
                        StagedFrame::Goodbye => return Ok(PeerEnd::Goodbye),
                        StagedFrame::Control(frame) => self.control(frame).await?,
                        StagedFrame::Block(block) => self.block(block).await?,
                    }
                    // The first message was a good hello, or this line is not reached.
                    is_greeted = true;
                    if self.frames.read_buffer().is_empty() {
                        flush(&mut self.replies).await?;
                    }
                }
            }
        }
    }

    async fn control(&mut self, frame: KvFrame) -> Result<(), PairEnd> {
        let begun = match (&frame, &self.incoming) {
            (KvFrame::Begin { transfer }, Incoming::Pool { .. }) => Some(StagedReply::Begun(*transfer)),
            _ => None,
        };
        let taken = self.pair.frame(frame).await;
        if let Err(PairError::HelloRefused(reason)) = &taken {
            let reply = self.pair.hello_reply(Some(reason));
            send(&mut self.replies, StagedReply::Reply(reply)).await?;
            flush(&mut self.replies).await?;
        }
        // A begin that is not refused is a claim.
        match taken?.map(StagedReply::Reply).or(begun) {
            Some(reply) => send(&mut self.replies, reply).await,
            None => Ok(()),
        }
    }

    /// Handles a block to its end: its answer, and its slot back.
    async fn block(&mut self, block: StagedBlock) -> Result<(), PairEnd> {
        let (slot, bytes) = (block.slot, block.data_bytes);
        let refused = match &self.incoming {
            Incoming::Ring(ring) => {
                let shape = ring.shape();
                let data = ring.data(slot, bytes);
                let data = data.ok_or(PairEnd::OutsideRing { slot, bytes, shape })?;
                self.pair.staged_block(block.header, data).await?
            }
            Incoming::Pool {
                pool, has_checksums, ..
            } => {
                let pool = has_checksums.then(|| pool.clone());
                self.pair.placed_block(block.header, bytes as usize, pool).await?
            }
        };
        if let Some(refused) = refused {
            send(&mut self.replies, StagedReply::Reply(refused)).await?;
        }
        send(&mut self.replies, StagedReply::ReturnedSlot(slot)).await
    }
}

/// Leaves with the next flush, or when the buffer is full.
async fn send(replies: &mut Replies, reply: StagedReply) -> Result<(), PairEnd> {
    let bytes: Bytes = v1::StagedReply::from(reply).encode_to_vec().into();
    let sent = tokio::time::timeout(REPLY_TIME_LIMIT, replies.feed(bytes)).await;
    Ok(sent.map_err(|_| PairEnd::NotReading)??)
}

async fn flush(replies: &mut Replies) -> Result<(), PairEnd> {
    let flushed = tokio::time::timeout(REPLY_TIME_LIMIT, SinkExt::<Bytes>::flush(replies)).await;
    Ok(flushed.map_err(|_| PairEnd::NotReading)??)
}
