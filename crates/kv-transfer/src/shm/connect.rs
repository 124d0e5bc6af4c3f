//! The sender's end of a pair that shares memory: socket, greeting, ring or pool, hello; then a writer and the replies.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use futures::{SinkExt, StreamExt as _};
use prost::Message as _;
use proto::messages::{KvBlockFrame, KvFrame, KvReply, SharedMemoryOffer, StagedBlock, StagedFrame, StagedReply};
use proto::v1;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio_util::codec::{FramedRead, FramedWrite, LengthDelimitedCodec};

use super::DirectWish;
use super::lent::LentSlots;
use super::place::Slot;
use super::pool::SendPool;
use super::ring::SendRing;
use super::socket::{self, Ask, Grant, Welcome, Word32};
use super::trust::Prover;
use crate::choice::{DirectFault, ShmFault};
use crate::pairs::queue::{FrameTap, Queued, Room};
use crate::pairs::{Carrier, Link, PairConfig, PairStream};
use crate::transport::{PairFault, PairPeer};

/// A peer of the same host that does not answer within this time is not waited for, because the pair has gRPC.
const CONNECT_TIME_LIMIT: Duration = Duration::from_secs(2);
/// A frame is about a hundred bytes.
const FRAMES_WRITTEN_AT_ONCE: usize = 64;
/// Longer than a healthy peer takes to read the content of the socket's buffer.
const GOODBYE_TIME_LIMIT: Duration = Duration::from_secs(2);

type Frames = FramedWrite<OwnedWriteHalf, LengthDelimitedCodec>;
type Replies = FramedRead<OwnedReadHalf, LengthDelimitedCodec>;

/// Shares memory with a decode node that offers it, or returns why not. The second fault is the reason against the direct
/// mode.
pub(crate) async fn connect(
    peer: &PairPeer,
    offer: Option<&SharedMemoryOffer>,
    config: &PairConfig,
) -> Result<(Link, Option<DirectFault>), ShmFault> {
    let offer = offer.ok_or(ShmFault::Disabled)?;
    if socket::boot_id()? != offer.boot_id {
        return Err(ShmFault::NotSameHost);
    }
    let connected = tokio::time::timeout(CONNECT_TIME_LIMIT, async {
        let connected = UnixStream::connect(socket::path(&offer.socket)).await;
        let stream = connected.map_err(ShmFault::Unreachable)?;
        socket::check_user(&stream, config.uid)?;
        let (lane, staged) = take_memory(&stream, config.direct.as_ref()).await?;
        let (replies, frames) = stream.into_split();
        let mut frames = FramedWrite::new(frames, socket::codec());
        let mut replies = FramedRead::new(replies, socket::codec());
        send(&mut frames, StagedFrame::Control(KvFrame::Hello(config.hello(peer)))).await?;
        let first = replies.next().await.ok_or(io::ErrorKind::UnexpectedEof)??;
        match read(first) {
            Ok(StagedReply::Reply(KvReply::Hello(reply))) if reply.refused.is_none() => {
                Ok(((lane, staged), frames, replies))
            }
            _ => Err(ShmFault::Refused("the hello that it took over gRPC")),
        }
    });
    let ((lane, staged), frames, replies) = connected.await.map_err(|_| ShmFault::TimeOut)??;
    let (live, queue) = PairStream::new(peer.node.clone(), lane, config.buffers.clone());
    let lent = LentSlots::new(live.gauge.clone());
    let writer = Writer {
        frames,
        lent: lent.clone(),
        tap: config.tap.clone(),
    };
    tokio::spawn(writer.run(queue, live.clone()));
    let replies = until_broken(replies, lent, live.clone()).boxed();
    Ok((Link { live, replies }, staged))
}

/// The pool, where both sides want that and trust each other; else the ring.
async fn take_memory(
    stream: &UnixStream,
    wish: Option<&DirectWish>,
) -> Result<(Carrier, Option<DirectFault>), ShmFault> {
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
        (Grant::Ring(shape, staged), _) => Ok((Carrier::Ring(SendRing::map(&memory()?, shape)?), staged)),
        (Grant::Pool(terms, proof), Some(wish)) => {
            if !wish.secret.is_proof(&proof, Prover::Receiver, nonces) {
                return Err(ShmFault::Refused("it passed its pool without holding the secret"));
            }
            let pool = SendPool::map(&memory()?, terms)?;
            if !pool.fits(wish.layers, wish.layer_bytes as usize) {
                return Err(ShmFault::Refused("it passed a pool of other blocks"));
            }
            pool.warm();
            Ok((Carrier::Pool(pool), None))
        }
        (Grant::Pool(..), None) => Err(ShmFault::Refused("it passed a pool that nobody asked for")),
        (Grant::NoMemory, _) => Err(ShmFault::Refused("it could make no shared memory")),
    }
}

impl From<io::ErrorKind> for ShmFault {
    fn from(kind: io::ErrorKind) -> Self {
        ShmFault::Io(kind.into())
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

/// Passes replies to transfers. Returned slots are taken back on the way. The first error ends it.
fn until_broken(
    replies: Replies,
    lent: Arc<LentSlots>,
    live: Arc<PairStream>,
) -> impl futures::Stream<Item = Result<KvReply, PairFault>> {
    futures::stream::unfold(Some((replies, lent, live)), async |state| {
        let (mut replies, lent, live) = state?;
        loop {
            let read = match replies.next().await? {
                Ok(bytes) => read(bytes),
                Err(error) => Err(PairFault::Broken(error.to_string())),
            };
            match read {
                Ok(StagedReply::Reply(reply)) => return Some((Ok(reply), Some((replies, lent, live)))),
                Ok(StagedReply::ReturnedSlot(slot)) if lent.take_back(slot, Instant::now()) => {}
                Ok(StagedReply::ReturnedSlot(_)) => {
                    let fault = PairFault::Broken("the decode node returned a slot it did not have".to_owned());
                    return Some((Err(fault), None));
                }
                Ok(StagedReply::Begun(transfer)) => live.begun(transfer),
                Err(fault) => return Some((Err(fault), None)),
            }
        }
    })
}

/// Takes frames from the pair's queue. Ends with the queue or the socket.
#[derive(Debug)]
struct Writer {
    frames: Frames,
    lent: Arc<LentSlots>,
    tap: Option<Arc<dyn FrameTap>>,
}

impl Writer {
    /// Writes until the pair is over. It leaves nothing of a pool mapped, and says so: the decode node keeps the blocks of
    /// our transfers out of use until then.
    async fn run(mut self, mut queue: mpsc::Receiver<Queued>, live: Arc<PairStream>) {
        tokio::select! {
            () = live.over() => {}
            // The replies end too and give the reason.
            _ = self.write(&mut queue) => {}
        }
        if let Carrier::Pool(pool) = &live.lane {
            let pool = pool.clone();
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
                let frames = match &self.tap {
                    None => vec![queued],
                    Some(tap) => tapped(&**tap, queued),
                };
                for frame in frames {
                    let bytes: Bytes = v1::StagedFrame::from(self.staged(frame)).encode_to_vec().into();
                    self.frames.feed(bytes).await?;
                }
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
        match (queued.frame, queued.slot) {
            (KvFrame::Block(header), Some(slot)) => {
                let data_bytes = queued.room.as_ref().map_or(0, |room| room.bytes);
                StagedFrame::Block(StagedBlock {
                    header,
                    slot: self.lent.lend(slot, (queued.room, queued.moving)),
                    // At most a slot, whose size is a u32.
                    data_bytes: u32::try_from(data_bytes).unwrap_or(u32::MAX),
                })
            }
            (frame, _) => StagedFrame::Control(frame),
        }
    }
}

/// Applies a tap to a frame: the tap sees the slot's bytes in the frame, and its changes go back into slots.
fn tapped(tap: &dyn FrameTap, queued: Queued) -> Vec<Queued> {
    let Queued {
        mut frame,
        mut slot,
        room,
        moving,
        ..
    } = queued;
    let gauge = room.as_ref().map(Room::gauge);
    if let (KvFrame::Block(block), Some(slot), Some(room)) = (&mut frame, &mut slot, &room) {
        let data = slot.fill(room.bytes as usize, |place| Bytes::copy_from_slice(place));
        block.data = data.unwrap_or_default();
    }
    // Taken from the end, so the frame's own slot is first. One more slot is enough for a tap that doubles the frame.
    let more = slot.as_ref().and_then(Slot::another);
    let mut slots: Vec<Slot> = more.into_iter().chain(slot).collect();
    let mut restage = |frame: KvFrame| match (frame, &gauge) {
        (KvFrame::Block(block), Some(gauge)) => {
            let mut slot = slots.pop()?;
            let filled = slot.fill(block.data.len(), |place| {
                let bytes = place.len();
                place.copy_from_slice(&block.data[..bytes]);
                bytes
            });
            let bytes = filled.ok()?;
            let header = KvBlockFrame {
                data: Bytes::new(),
                ..block
            };
            Some(Queued {
                room: Some(Room::take(bytes as u64, gauge, None)),
                slot: Some(slot),
                moving: moving.clone(),
                ..Queued::control(KvFrame::Block(header))
            })
        }
        (frame, _) => Some(Queued::control(frame)),
    };
    tap.pass(frame).into_iter().filter_map(&mut restage).collect()
}
