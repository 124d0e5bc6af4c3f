//! The sender's end of a pair that shares memory: socket, greeting, ring, hello; then a writer and the replies.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use futures::{SinkExt as _, StreamExt as _};
use prost::Message as _;
use proto::messages::{KvBlockFrame, KvFrame, KvReply, SharedMemoryOffer, StagedBlock, StagedFrame, StagedReply};
use proto::v1;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio_util::codec::{FramedRead, FramedWrite, LengthDelimitedCodec};

use super::ring::{SendRing, Slot};
use super::socket::{self, Greeting};
use crate::choice::ShmFault;
use crate::pairs::queue::{FrameTap, Gauge, Pace, Queued, Room};
use crate::pairs::{Lane, Link, Live, PairConfig};
use crate::transport::{PairFault, PairPeer};

/// A peer of the same host that does not answer within this is not waited for: the pair has gRPC.
const CONNECT_TIME_LIMIT: Duration = Duration::from_secs(2);

type Frames = FramedWrite<OwnedWriteHalf, LengthDelimitedCodec>;
type Replies = FramedRead<OwnedReadHalf, LengthDelimitedCodec>;

/// Shares memory with a decode node that offers it, or says why not.
pub(crate) async fn connect(
    peer: &PairPeer,
    offer: Option<&SharedMemoryOffer>,
    config: &PairConfig,
) -> Result<Link, ShmFault> {
    let offer = offer.ok_or(ShmFault::Disabled)?;
    if socket::boot_id()? != offer.boot_id {
        return Err(ShmFault::NotSameHost);
    }
    let connected = tokio::time::timeout(CONNECT_TIME_LIMIT, async {
        let connected = UnixStream::connect(socket::path(&offer.socket)).await;
        let stream = connected.map_err(ShmFault::Unreachable)?;
        socket::check_user(&stream, config.uid)?;
        let ring = take_ring(&stream).await?;
        let (replies, frames) = stream.into_split();
        let mut frames = FramedWrite::new(frames, socket::codec());
        let mut replies = FramedRead::new(replies, socket::codec());
        send(&mut frames, StagedFrame::Control(KvFrame::Hello(config.hello(peer)))).await?;
        let first = replies.next().await.ok_or(io::ErrorKind::UnexpectedEof)??;
        match read(first) {
            Ok(StagedReply::Reply(KvReply::Hello(reply))) if reply.refused.is_none() => Ok((ring, frames, replies)),
            _ => Err(ShmFault::Refused("the hello that it took over gRPC")),
        }
    });
    let (ring, frames, replies) = connected.await.map_err(|_| ShmFault::TimeOut)??;
    let (live, queue) = Live::new(peer.node.clone(), Lane::Ring(ring));
    let lent = Arc::new(LentSlots {
        slots: Mutex::default(),
        gauge: live.gauge.clone(),
    });
    let writer = Writer {
        frames,
        lent: lent.clone(),
        tap: config.tap.clone(),
    };
    let over = live.over();
    tokio::spawn(async move {
        tokio::select! {
            () = over => {}
            // The replies end too and say why.
            _ = writer.write(queue) => {}
        }
    });
    Ok(Link {
        live,
        replies: until_broken(replies, lent).boxed(),
    })
}

async fn take_ring(stream: &UnixStream) -> Result<Arc<SendRing>, ShmFault> {
    let (greeting, memory) = socket::greeted(stream).await?;
    match greeting {
        Greeting::Accepted(shape) => SendRing::map(&memory.ok_or(io::ErrorKind::InvalidData)?, shape),
        Greeting::OtherUser => Err(ShmFault::Refused("this process runs as another user")),
        Greeting::TooManyPairs => Err(ShmFault::Refused("it shares memory with as many nodes as it may")),
        Greeting::NoMemory => Err(ShmFault::Refused("it could make no shared memory")),
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

/// The replies for transfers; returned slots are taken back on the way. The first error is the end.
fn until_broken(replies: Replies, lent: Arc<LentSlots>) -> impl futures::Stream<Item = Result<KvReply, PairFault>> {
    futures::stream::unfold(Some((replies, lent)), async |state| {
        let (mut replies, lent) = state?;
        loop {
            let read = match replies.next().await? {
                Ok(bytes) => read(bytes),
                Err(error) => Err(PairFault::Broken(error.to_string())),
            };
            match read {
                Ok(StagedReply::Reply(reply)) => return Some((Ok(reply), Some((replies, lent)))),
                Ok(StagedReply::ReturnedSlot(slot)) if lent.take_back(slot, Instant::now()) => {}
                Ok(StagedReply::ReturnedSlot(_)) => {
                    let fault = PairFault::Broken("the decode node returned a slot it did not have".to_owned());
                    return Some((Err(fault), None));
                }
                Err(fault) => return Some((Err(fault), None)),
            }
        }
    })
}

/// Slots that the receiver has: at most every slot of the ring.
#[derive(Debug)]
struct LentSlots {
    slots: Mutex<(BTreeMap<u32, Lent>, Pace)>,
    gauge: Arc<Gauge>,
}

/// What waits until its slot is given back; only then its bytes have moved.
#[derive(Debug)]
struct Lent {
    _slot: Slot,
    room: Option<Room>,
    moving: Option<Arc<AtomicU64>>,
    lent_at: Instant,
}

impl LentSlots {
    fn lock(&self) -> MutexGuard<'_, (BTreeMap<u32, Lent>, Pace)> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lend(&self, slot: Slot, lent: (Option<Room>, Option<Arc<AtomicU64>>)) -> u32 {
        let index = slot.index();
        let lent = Lent {
            _slot: slot,
            room: lent.0,
            moving: lent.1,
            lent_at: Instant::now(),
        };
        self.lock().0.insert(index, lent);
        index
    }

    /// False when the slot was not lent.
    fn take_back(&self, slot: u32, now: Instant) -> bool {
        let (slots, pace) = &mut *self.lock();
        let Some(lent) = slots.remove(&slot) else {
            return false;
        };
        if let Some(room) = &lent.room {
            self.gauge.taken_bytes.fetch_add(room.bytes, Ordering::Relaxed);
        }
        if let Some(moving) = &lent.moving {
            pace.moved(moving, lent.lent_at, now);
        }
        true
    }
}

/// Takes frames off the pair's queue. Ends with the queue or the socket.
#[derive(Debug)]
struct Writer {
    frames: Frames,
    lent: Arc<LentSlots>,
    tap: Option<Arc<dyn FrameTap>>,
}

impl Writer {
    async fn write(mut self, mut queue: mpsc::Receiver<Queued>) -> io::Result<()> {
        while let Some(mut queued) = queue.recv().await {
            let written = queued.written.take();
            match &self.tap {
                None => {
                    let frame = self.staged(queued);
                    send(&mut self.frames, frame).await?;
                }
                Some(tap) => {
                    for frame in tapped(&**tap, queued) {
                        let frame = self.staged(frame);
                        send(&mut self.frames, frame).await?;
                    }
                }
            }
            if let Some(written) = written {
                let _ = written.send(Instant::now());
            }
        }
        Ok(())
    }

    /// The message for a frame. A block's slot is lent from before the receiver can hear of it.
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

/// What a tap makes of a frame: it sees the slot's bytes in the frame, and what it changes goes back into slots.
fn tapped(tap: &dyn FrameTap, queued: Queued) -> Vec<Queued> {
    let Queued {
        mut frame,
        mut slot,
        room,
        moving,
        ..
    } = queued;
    let ring = slot.as_ref().map(|slot| slot.ring().clone());
    let gauge = room.as_ref().map(Room::gauge);
    if let (KvFrame::Block(block), Some(slot), Some(room)) = (&mut frame, &mut slot, &room) {
        block.data = Bytes::copy_from_slice(slot.bytes_mut(room.bytes as usize));
    }
    let restage = |frame: KvFrame| match (frame, &ring, &gauge) {
        (KvFrame::Block(block), Some(ring), Some(gauge)) => {
            let mut slot = slot.take().or_else(|| ring.try_slot())?;
            let place = slot.bytes_mut(block.data.len());
            let bytes = place.len();
            place.copy_from_slice(&block.data[..bytes]);
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
        (frame, ..) => Some(Queued::control(frame)),
    };
    tap.pass(frame).into_iter().filter_map(restage).collect()
}
