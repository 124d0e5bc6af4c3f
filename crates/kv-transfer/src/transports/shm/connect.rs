//! The sender's end of a pair that shares memory: socket, greeting, ring or pool, hello; then a writer and the replies.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use futures::{SinkExt, StreamExt as _};
use prost::Message as _;
use proto::messages::{KvFrame, KvReply, StagedBlock, StagedFrame, StagedReply};
use proto::v1;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio_util::codec::{FramedRead, FramedWrite, LengthDelimitedCodec};
use tokio_util::sync::CancellationToken;

use super::Shm;
use super::fault::{DirectFault, ShmFault};
use super::lent::LentSlots;
use super::pool::SendPool;
use super::ring::SendRing;
use super::socket::{self, Ask, Grant, ShmOffer, Welcome};
use crate::link::queue::{Outbox, Queued};
use crate::link::{Carrier, Dial, Link, LinkReply};
use crate::transport::PairFault;
use crate::trust::{DirectWish, Prover, Word32};

/// A peer of the same host that does not answer within this time is not waited for, because the pair has gRPC.
const CONNECT_TIME_LIMIT: Duration = Duration::from_secs(2);
/// A frame is about a hundred bytes.
const FRAMES_WRITTEN_AT_ONCE: usize = 64;
/// Longer than a healthy peer takes to read the content of the socket's buffer.
const GOODBYE_TIME_LIMIT: Duration = Duration::from_secs(2);

type Frames = FramedWrite<OwnedWriteHalf, LengthDelimitedCodec>;
type Replies = FramedRead<OwnedReadHalf, LengthDelimitedCodec>;

/// The memory that a decode node gave.
enum Memory {
    Ring(Arc<SendRing>, Option<DirectFault>),
    Pool(Arc<SendPool>),
}

/// Shares memory with a decode node that offers it, or returns why not.
pub(super) async fn connect(dial: &Dial<'_>, shm: &Shm) -> Result<Link, ShmFault> {
    let offer = ShmOffer::decode(dial.offer.ok_or(ShmFault::Disabled)?).map_err(|_| io::ErrorKind::InvalidData)?;
    if socket::boot_id()? != offer.boot_id {
        return Err(ShmFault::NotSameHost);
    }
    let connected = tokio::time::timeout(CONNECT_TIME_LIMIT, async {
        let connected = UnixStream::connect(socket::path(&offer.socket)).await;
        let stream = connected.map_err(ShmFault::Unreachable)?;
        socket::check_user(&stream, shm.uid)?;
        let memory = take_memory(&stream, shm.direct.as_ref()).await?;
        let (replies, frames) = stream.into_split();
        let mut frames = FramedWrite::new(frames, socket::codec());
        let mut replies = FramedRead::new(replies, socket::codec());
        send(&mut frames, StagedFrame::Control(KvFrame::Hello(dial.hello.clone()))).await?;
        let first = replies.next().await.ok_or(io::ErrorKind::UnexpectedEof)??;
        match read(first) {
            Ok(StagedReply::Reply(KvReply::Hello(reply))) if reply.refused.is_none() => {
                Ok((memory, reply, (frames, replies)))
            }
            _ => Err(ShmFault::Refused("the hello that it took over gRPC")),
        }
    });
    let (memory, hello, (frames, replies)) = connected.await.map_err(|_| ShmFault::TimeOut)??;
    let (outbox, queue) = Outbox::new();
    let lent: Arc<LentSlots> = Arc::default();
    let (carrier, pool, staged): (Arc<dyn Carrier>, _, _) = match memory {
        Memory::Ring(ring, staged) => (Arc::new(ring), None, staged),
        Memory::Pool(pool) => (Arc::new(pool.clone()), Some(pool), None),
    };
    let writer = Writer {
        frames,
        lent: lent.clone(),
        pool,
    };
    tokio::spawn(writer.run(queue, outbox.over.clone()));
    Ok(Link {
        carrier,
        hello,
        outbox,
        replies: until_broken(replies, lent).boxed(),
        lesser_because: staged.map(Into::into),
    })
}

/// The pool, where both sides want that and trust each other; else the ring.
async fn take_memory(stream: &UnixStream, wish: Option<&DirectWish>) -> Result<Memory, ShmFault> {
    let (welcome, _) = socket::heard(stream).await?;
    let theirs = match welcome {
        Welcome::Ask(nonce) => nonce,
        Welcome::OtherUser => return Err(ShmFault::Refused("this process runs as another user")),
        Welcome::TooManyPairs => return Err(ShmFault::Refused("it shares memory with as many nodes as it may")),
    };
    let ours: Word32 = rand::random();
    let nonces = [&theirs, &ours];
    let ask = wish.map_or(Ask::Staged, |wish| Ask::Direct {
        nonce: ours,
        proof: wish.secret.proof(Prover::Sender, nonces),
        layers: wish.layers,
        layer_bytes: wish.layer_bytes,
    });
    socket::say(stream, &ask, None).await?;
    let (grant, memory) = socket::heard(stream).await?;
    let memory = || memory.ok_or(io::ErrorKind::InvalidData);
    match (grant, wish) {
        (Grant::Ring(shape, staged), _) => Ok(Memory::Ring(SendRing::map(&memory()?, shape)?, staged)),
        (Grant::Pool(terms, proof), Some(wish)) => {
            if !wish.secret.is_proof(&proof, Prover::Receiver, nonces) {
                return Err(ShmFault::Refused("it passed its pool without holding the secret"));
            }
            let pool = SendPool::map(&memory()?, terms)?;
            if !pool.fits(wish.layers, wish.layer_bytes as usize) {
                return Err(ShmFault::Refused("it passed a pool of other blocks"));
            }
            pool.warm();
            Ok(Memory::Pool(pool))
        }
        (Grant::Pool(..), None) => Err(ShmFault::Refused("it passed a pool that nobody asked for")),
        (Grant::NoMemory, _) => Err(ShmFault::Refused("it could make no shared memory")),
    }
}

async fn send(frames: &mut Frames, frame: StagedFrame) -> io::Result<()> {
    let bytes: Bytes = v1::StagedFrame::from(frame).encode_to_vec().into();
    frames.send(bytes).await
}

fn read(bytes: BytesMut) -> Result<StagedReply, PairFault> {
    let broken = |error: &dyn std::fmt::Display| PairFault::Broken(error.to_string());
    let reply = v1::StagedReply::decode(bytes).map_err(|error| broken(&error))?;
    StagedReply::try_from(reply).map_err(|error| broken(&error))
}

/// The replies. Returned slots are taken back on the way. The first error ends it.
fn until_broken(replies: Replies, lent: Arc<LentSlots>) -> impl futures::Stream<Item = Result<LinkReply, PairFault>> {
    futures::stream::unfold(Some((replies, lent)), async |state| {
        let (mut replies, lent) = state?;
        loop {
            let read = match replies.next().await? {
                Ok(bytes) => read(bytes),
                Err(error) => Err(PairFault::Broken(error.to_string())),
            };
            let reply = match read {
                Ok(StagedReply::Reply(reply)) => LinkReply::Reply(reply),
                Ok(StagedReply::Begun(transfer)) => LinkReply::Begun(transfer),
                Ok(StagedReply::ReturnedSlot(slot)) if lent.take_back(slot) => continue,
                Ok(StagedReply::ReturnedSlot(_)) => {
                    let fault = PairFault::Broken("the decode node returned a slot it did not have".to_owned());
                    return Some((Err(fault), None));
                }
                Err(fault) => return Some((Err(fault), None)),
            };
            return Some((Ok(reply), Some((replies, lent))));
        }
    })
}

/// Takes frames from the pair's queue. Ends with the queue or the socket.
#[derive(Debug)]
struct Writer {
    frames: Frames,
    lent: Arc<LentSlots>,
    /// Written in place.
    pool: Option<Arc<SendPool>>,
}

impl Writer {
    /// Writes until the pair is over. It leaves nothing of a pool mapped, and says so: the decode node keeps the blocks of
    /// our transfers out of use until then.
    async fn run(mut self, mut queue: mpsc::Receiver<Queued>, over: CancellationToken) {
        tokio::select! {
            () = over.cancelled() => {}
            // The replies end too and give the reason.
            _ = self.write(&mut queue) => {}
        }
        if let Some(pool) = self.pool {
            // A running copy ends first. It is cancelled only with the process.
            if tokio::task::spawn_blocking(move || pool.unmap()).await.is_ok() {
                let goodbye = send(&mut self.frames, StagedFrame::Goodbye);
                // A peer that does not read learns it from our exit.
                let _ = tokio::time::timeout(GOODBYE_TIME_LIMIT, goodbye).await;
            }
        }
    }

    /// Frames that have come up in the meantime leave in one write.
    async fn write(&mut self, queue: &mut mpsc::Receiver<Queued>) -> io::Result<()> {
        let mut batch = Vec::with_capacity(FRAMES_WRITTEN_AT_ONCE);
        while queue.recv_many(&mut batch, FRAMES_WRITTEN_AT_ONCE).await > 0 {
            let mut told = Vec::new();
            for mut queued in batch.drain(..) {
                told.extend(queued.written.take());
                let bytes: Bytes = v1::StagedFrame::from(self.staged(queued)).encode_to_vec().into();
                self.frames.feed(bytes).await?;
            }
            SinkExt::<Bytes>::flush(&mut self.frames).await?;
            for written in told {
                let _ = written.send(Instant::now());
            }
        }
        Ok(())
    }

    /// The message for a frame. The slot counts as lent before the receiver can know of it.
    fn staged(&self, queued: Queued) -> StagedFrame {
        match (queued.frame, queued.kv) {
            (KvFrame::Block(header), Some(kv)) => StagedFrame::Block(StagedBlock {
                header,
                // At most a slot, whose size is a u32.
                data_bytes: u32::try_from(kv.bytes).unwrap_or(u32::MAX),
                slot: self.lent.lend(kv),
            }),
            (frame, _) => StagedFrame::Control(frame),
        }
    }
}
