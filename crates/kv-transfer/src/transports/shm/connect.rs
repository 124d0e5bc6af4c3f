//! The sender's end of a pair that shares memory: socket, greeting, ring or pool, hello; then a writer and the replies.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use futures::{SinkExt, StreamExt as _};
use prost::Message as _;
use proto::messages::{Hello, HelloReply, KvFrame, KvReply, StagedBlock, StagedFrame, StagedReply};
use proto::v1;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio_util::codec::{FramedRead, FramedWrite, LengthDelimitedCodec};
use tokio_util::sync::CancellationToken;

use super::Shm;
use super::fault::{DirectFault, ShmFault};
use super::in_place::{Writing, WrittenInPlace};
use super::lent::LentSlots;
use super::pool::SendPool;
use super::ring::SendRing;
use super::socket::{self, Ask, Grant, ShmOffer, Welcome};
use crate::choice::Fallback;
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
        let mut messages = Messages::on(stream);
        let hello = messages.say_hello(dial.hello.clone()).await?;
        Ok::<_, ShmFault>((memory, hello, messages))
    });
    let (memory, hello, messages) = connected.await.map_err(|_| ShmFault::TimeOut)??;
    let way = match memory {
        Memory::Ring(ring, staged) => Way {
            carrier: Arc::new(ring),
            in_place: None,
            lesser_because: staged.map(Into::into),
        },
        Memory::Pool(pool) => Way {
            carrier: Arc::new(pool.clone()),
            in_place: Some(pool),
            lesser_because: None,
        },
    };
    Ok(messages.link(hello, way))
}

/// How the bytes of a link's blocks travel, when its messages are on a socket.
pub(in crate::transports) struct Way {
    pub carrier: Arc<dyn Carrier>,
    /// Where this process itself writes the peer's blocks.
    pub in_place: Option<Arc<dyn WrittenInPlace>>,
    /// Why it is not the better mode that was wanted.
    pub lesser_because: Option<Fallback>,
}

/// Both directions of a socket whose memory is settled.
pub(in crate::transports) struct Messages {
    frames: Frames,
    replies: Replies,
}

impl Messages {
    pub(in crate::transports) fn on(stream: UnixStream) -> Self {
        let (replies, frames) = stream.into_split();
        Self {
            frames: FramedWrite::new(frames, socket::codec()),
            replies: FramedRead::new(replies, socket::codec()),
        }
    }

    /// For what is said before the first message.
    pub(in crate::transports) fn socket(&self) -> &UnixStream {
        self.replies.get_ref().as_ref()
    }

    /// The first message.
    pub(in crate::transports) async fn say_hello(&mut self, hello: Hello) -> Result<HelloReply, ShmFault> {
        send(&mut self.frames, StagedFrame::Control(KvFrame::Hello(hello))).await?;
        let first = self.replies.next().await.ok_or(io::ErrorKind::UnexpectedEof)??;
        match read(first) {
            Ok(StagedReply::Reply(KvReply::Hello(reply))) if reply.refused.is_none() => Ok(reply),
            _ => Err(ShmFault::Refused("the hello that it took over gRPC")),
        }
    }

    /// The last message of a sender that can write nothing in place. It is lost with the socket, and the exit of this process
    /// says the same.
    pub(in crate::transports) async fn say_goodbye(&mut self) {
        let goodbye = send(&mut self.frames, StagedFrame::Goodbye);
        // A peer that does not read learns it from our exit.
        let _ = tokio::time::timeout(GOODBYE_TIME_LIMIT, goodbye).await;
    }

    /// Starts the writer.
    pub(in crate::transports) fn link(self, hello: HelloReply, way: Way) -> Link {
        let (outbox, queue) = Outbox::new();
        let lent: Arc<LentSlots> = Arc::default();
        let Self { frames, replies } = self;
        let writer = Writer {
            frames,
            lent: lent.clone(),
            in_place: way.in_place,
        };
        tokio::spawn(writer.run(queue, outbox.over.clone()));
        Link {
            carrier: way.carrier,
            hello,
            outbox,
            replies: until_broken(replies, lent).boxed(),
            lesser_because: way.lesser_because,
        }
    }
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
    in_place: Option<Arc<dyn WrittenInPlace>>,
}

impl Writer {
    /// Writes until the pair is over. It leaves nothing of the peer's memory mapped, and says so: the decode node keeps the
    /// blocks of our transfers out of use until then.
    async fn run(mut self, mut queue: mpsc::Receiver<Queued>, over: CancellationToken) {
        tokio::select! {
            () = over.cancelled() => {}
            // The replies end too and give the reason.
            _ = self.write(&mut queue) => {}
        }
        if let Some(memory) = self.in_place {
            // A running copy ends first. The work is cancelled only with the process.
            let ended = tokio::task::spawn_blocking(move || memory.end()).await;
            if matches!(ended, Ok(Writing::Over)) {
                let goodbye = send(&mut self.frames, StagedFrame::Goodbye);
                // A peer that does not read learns it from our exit.
                let _ = tokio::time::timeout(GOODBYE_TIME_LIMIT, goodbye).await;
            }
        }
    }

    /// An abort says that this process stores no more for a transfer. It must not be said while a copy may go on.
    fn check(&self, frame: &KvFrame) -> io::Result<()> {
        let is_true = match (frame, &self.in_place) {
            (KvFrame::Abort { .. }, Some(memory)) => memory.writing() == Writing::Over,
            _ => true,
        };
        match is_true {
            true => Ok(()),
            false => Err(io::Error::other("a copy into the decode node's memory does not end")),
        }
    }

    /// Frames that have come up in the meantime leave in one write.
    async fn write(&mut self, queue: &mut mpsc::Receiver<Queued>) -> io::Result<()> {
        let mut batch = Vec::with_capacity(FRAMES_WRITTEN_AT_ONCE);
        while queue.recv_many(&mut batch, FRAMES_WRITTEN_AT_ONCE).await > 0 {
            let mut told = Vec::new();
            for mut queued in batch.drain(..) {
                self.check(&queued.frame)?;
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
