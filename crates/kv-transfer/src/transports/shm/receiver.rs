//! The receiver's end: one socket for senders of this host, and a task and a ring (or the pool) for each sender.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{SinkExt, StreamExt as _};
use identity::Caller;
use prost::Message as _;
use proto::messages::{KvFrame, StagedBlock, StagedFrame, StagedReply, TransportOffer};
use proto::v1;
use thiserror::Error;
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::codec::{FramedRead, FramedWrite, LengthDelimitedCodec};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::config::{RingBudget, ShmConfig};
use super::fault::ShmFault;
use super::part::{Frames, parted};
use super::peer_process::PeerProcess;
use super::ring::RingShape;
use super::socket::{self, ShmOffer};
use super::welcome::{Incoming, Placed, welcome};
use super::{DIRECT, KIND};
use crate::receiver::{IncomingPair, Offered, PairError, REPLY_TIME_LIMIT, Receiver, WrittenPool};

/// The pause after a failed accept (no descriptors left, for example).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Shared memory is served while this value lives. Dropping it ends every pair that uses it.
#[derive(Debug)]
pub(super) struct ShmServing {
    _offered: Offered,
    _stop: DropGuard,
}

/// Offers shared memory to senders of this host and serves those that come. Needs a Tokio runtime around it.
///
/// # Errors
/// The system gives no socket, or does not say which boot it is.
pub(super) fn serve(receiver: &Arc<Receiver>, config: ShmConfig) -> io::Result<ShmServing> {
    let name = format!("baton-kv-{:032x}", rand::random::<u128>());
    let listener = UnixListener::bind(socket::path(&name))?;
    let offer = ShmOffer {
        boot_id: socket::boot_id()?,
        socket: name,
    };
    let offered = receiver.offer(TransportOffer {
        transport: KIND.name().to_owned(),
        offer: offer.encode_to_vec().into(),
    });
    let stop = CancellationToken::new();
    let accepting = accept(listener, receiver.clone(), Arc::new(config));
    tokio::spawn(stop.clone().run_until_cancelled_owned(accepting));
    Ok(ShmServing {
        _offered: offered,
        _stop: stop.drop_guard(),
    })
}

/// Never ends by itself. The pairs' tasks go on when it is dropped, until `pairs` ends them.
async fn accept(listener: UnixListener, receiver: Arc<Receiver>, config: Arc<ShmConfig>) {
    let room = Arc::new(Semaphore::new(config.pairs_max));
    let rings = Arc::new(RingBudget::of(&config));
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
            rings: rings.clone(),
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
pub(in crate::transports) enum PairEnd {
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
    config: Arc<ShmConfig>,
    rings: Arc<RingBudget>,
}

impl Sender {
    async fn serve(self, stop: CancellationToken) -> Result<(), PairEnd> {
        let welcomed = welcome(&self.stream, (&self.config, &self.rings), self.is_one_too_many).await?;
        let Some(incoming) = welcomed else {
            return Ok(());
        };
        // The socket is for processes of this user and host. Their memory can be read by each other anyway.
        let caller = Caller::PlainText;
        let pair = match &incoming {
            Incoming::Ring { .. } => IncomingPair::new(&self.receiver, KIND, caller),
            Incoming::Pool { .. } => IncomingPair::new(&self.receiver, DIRECT, caller).written_in_place(),
        };
        let pair = ServedPair::new(self.stream, (pair, incoming));
        pair.serve(stop, self.config.hello_wait).await
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
pub(in crate::transports) struct ServedPair {
    pair: IncomingPair,
    incoming: Incoming,
    frames: Frames,
    replies: Replies,
    /// Whether the pair is over only when the sender has parted with the pool.
    must_part: bool,
}

/// A pool that a sender writes in place.
#[derive(Debug)]
pub(in crate::transports) struct Granted {
    pub pool: Arc<dyn WrittenPool>,
    pub has_checksums: bool,
    /// The process that can write the pool.
    pub writer: PeerProcess,
}

impl ServedPair {
    /// A sender that has begun no transfer has no block to write, so a link that fails while it is made leaves nothing.
    fn new(stream: UnixStream, (pair, incoming): (IncomingPair, Incoming)) -> Self {
        let (frames, replies) = stream.into_split();
        Self {
            pair,
            incoming,
            frames: FramedRead::new(frames, socket::codec()),
            replies: FramedWrite::new(replies, socket::codec()),
            must_part: false,
        }
    }

    /// For a transport whose senders write in place, on a socket on which the memory is settled. This process frees the pool
    /// itself, and nobody may have it open then: a sender that has begun nothing must part with it, too.
    pub(in crate::transports) fn in_place(stream: UnixStream, pair: IncomingPair, granted: Granted) -> Self {
        let Granted {
            pool,
            has_checksums,
            writer,
        } = granted;
        let incoming = Incoming::Pool {
            pool,
            has_checksums,
            writer,
        };
        Self {
            must_part: true,
            ..Self::new(stream, (pair.written_in_place(), incoming))
        }
    }

    /// Serves the sender until one of the two ends. Returns when the sender can write no block any more.
    pub(in crate::transports) async fn serve(
        mut self,
        stop: CancellationToken,
        hello_wait: Duration,
    ) -> Result<(), PairEnd> {
        let ended = self.carry(stop, hello_wait).await;
        let Self {
            mut pair,
            incoming,
            frames,
            replies,
            must_part,
        } = self;
        if let Incoming::Pool { writer, .. } = &incoming {
            drop(replies);
            if must_part && !matches!(ended, Ok(PeerEnd::Goodbye)) {
                parted(frames, writer).await;
            }
            pair.writer_is_gone();
        }
        ended.map(drop)
    }

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
        self.must_part |= begun.is_some();
        let taken = self.pair.frame(frame).await;
        if let Some(reply) = taken.as_ref().err().and_then(PairError::last_reply) {
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
            Incoming::Ring { ring, .. } => {
                let shape = ring.shape();
                let data = ring.data(slot, bytes);
                let data = data.ok_or(PairEnd::OutsideRing { slot, bytes, shape })?;
                self.pair.block(block.header, data).await?
            }
            Incoming::Pool {
                pool, has_checksums, ..
            } => {
                let summed = has_checksums.then(|| pool.clone());
                self.pair.block(block.header, Placed { summed, bytes }).await?
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
