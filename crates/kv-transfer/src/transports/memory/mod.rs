//! KV between two nodes of one process: frames go through a channel as they are. It is for tests, and it is the example of a
//! transport: all of its code is in this folder.
//!
//! The offer is a number by which this process knows the decode node's end. KV in host memory travels in the frames. Where the
//! sender's KV is in a device's memory, a frame stays there too: the receiver gets the span, and its event.

use std::any::Any;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt as _;
use identity::Caller;
use proto::messages::{Hello, KvBlockFrame, KvFrame, KvReply, TransportOffer};
use serving_core::ids::BlockId;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::Means;
use crate::choice::{Fallback, TransportKind};
use crate::frame::FRAME_DATA_BYTES_MAX;
use crate::link::budget::{BufferPlace, Share};
use crate::link::queue::{Outbox, Pace, Queued};
use crate::link::{
    Carrier, Copied, Dial, KvTransport, Link, LinkReply, NoLink, NotCopied, Place, ReceivingEnd, Serving,
};
use crate::receiver::{FrameData, HandoffSink, IncomingPair, Offered, Receiver, TransferRefusal, copy_in};
use crate::span::{DeviceSpan, Ready, Span, SpanMut};
use crate::transport::PairFault;

pub const KIND: TransportKind = TransportKind::new("memory");

/// Senders that wait to be taken. Then further senders wait.
const SENDERS_WAITING_MAX: usize = 16;
/// Replies that wait for a sender which does not read. Then its frames are not taken either.
const REPLIES_QUEUED_MAX: usize = 256;

/// The decode nodes' ends in this process, by the number in their offer.
static SERVED: Mutex<BTreeMap<u128, mpsc::Sender<Came>>> = Mutex::new(BTreeMap::new());

fn served<R>(change: impl FnOnce(&mut BTreeMap<u128, mpsc::Sender<Came>>) -> R) -> R {
    change(&mut SERVED.lock().unwrap_or_else(PoisonError::into_inner))
}

/// A sender that comes.
struct Came {
    hello: Hello,
    queue: mpsc::Receiver<Queued>,
    over: CancellationToken,
    replies: mpsc::Sender<KvReply>,
}

#[derive(Debug)]
struct Memory;

pub(super) fn transport(_: &Means<'_>) -> Arc<dyn KvTransport> {
    Arc::new(Memory)
}

#[async_trait]
impl KvTransport for Memory {
    fn kind(&self) -> TransportKind {
        KIND
    }

    fn fallbacks(&self) -> &'static [(TransportKind, &'static [&'static str])] {
        &[(KIND, &["disabled", "refused"])]
    }

    fn serve(&self, receiver: &Arc<Receiver>, _: &ReceivingEnd) -> io::Result<Option<Serving>> {
        let (comes, mut coming) = mpsc::channel(SENDERS_WAITING_MAX);
        let (number, stop) = (rand::random(), CancellationToken::new());
        served(|served| served.insert(number, comes));
        let end = End {
            _offered: receiver.offer(TransportOffer {
                transport: KIND.name().to_owned(),
                offer: Bytes::copy_from_slice(&number.to_be_bytes()),
            }),
            number,
            _stop: stop.clone().drop_guard(),
        };
        let receiver = receiver.clone();
        tokio::spawn(async move {
            while let Some(Some(came)) = stop.run_until_cancelled(coming.recv()).await {
                let pair = IncomingPair::new(&receiver, KIND, Caller::PlainText);
                tokio::spawn(receive(pair, came, stop.clone()));
            }
        });
        Ok(Some(Serving(Box::new(end))))
    }

    async fn connect(&self, dial: &Dial<'_>) -> Result<Link, NoLink> {
        let (outbox, queue) = Outbox::new();
        let (replies_in, mut replies) = mpsc::channel(REPLIES_QUEUED_MAX);
        let number = dial
            .offer
            .and_then(|offer| offer.try_into().ok())
            .map(u128::from_be_bytes);
        let served = number.and_then(|number| served(|served| served.get(&number).cloned()));
        let served = served.ok_or_else(|| without("disabled", "the decode node is in another process"))?;
        let came = Came {
            hello: dial.hello.clone(),
            queue,
            over: outbox.over.clone(),
            replies: replies_in,
        };
        let _ = served.send(came).await;
        let hello = match replies.recv().await {
            Some(KvReply::Hello(hello)) if hello.refused.is_none() => hello,
            _ => {
                return Err(without(
                    "refused",
                    "the decode node refuses the hello that it took before",
                ));
            }
        };
        let replies = ReceiverStream::new(replies).map(|reply| Ok::<_, PairFault>(LinkReply::Reply(reply)));
        Ok(Link {
            carrier: Arc::new(InProcess(Share::of(dial.budget))),
            hello,
            outbox,
            replies: replies.boxed(),
            lesser_because: None,
        })
    }
}

fn without(reason: &'static str, detail: &str) -> NoLink {
    NoLink::Way(Fallback {
        wanted: KIND,
        reason,
        detail: detail.to_owned(),
        may_pass: false,
    })
}

/// A decode node's end.
#[derive(Debug)]
struct End {
    _offered: Offered,
    number: u128,
    _stop: DropGuard,
}

impl Drop for End {
    fn drop(&mut self) {
        served(|served| served.remove(&self.number));
    }
}

#[derive(Debug)]
struct InProcess(Share);

#[async_trait]
impl Carrier for InProcess {
    fn kind(&self) -> TransportKind {
        KIND
    }

    fn data_bytes_max(&self) -> usize {
        FRAME_DATA_BYTES_MAX
    }

    async fn room(&self, _: (BlockId, Range<u32>), bytes: usize) -> Box<dyn Place> {
        let (host, device) = (self.0.take(bytes).await, None);
        Box::new(FramePlace { host, device })
    }
}

/// The memory of one frame: of this process, or of the device that has the KV.
#[derive(Debug)]
struct FramePlace {
    host: BufferPlace,
    device: Option<DeviceSpan>,
}

impl Place for FramePlace {
    fn fill(&mut self, from: &Copied<'_>) -> Result<u64, NotCopied> {
        let Some(memory) = from.source.staging(from.bytes) else {
            return self.host.fill(from);
        };
        let (bytes, ready) = (from.bytes, Ready::default());
        let span = self.device.insert(DeviceSpan { memory, bytes, ready });
        from.to(SpanMut::Device(span.clone()))?;
        Ok(Span::Device(span.clone()).checksum())
    }

    fn inline(&mut self) -> Bytes {
        self.host.inline()
    }
}

impl FrameData for DeviceSpan {
    fn len(&self) -> usize {
        self.bytes
    }

    fn land(self, frame: &KvBlockFrame, sink: &dyn HandoffSink) -> Result<(), TransferRefusal> {
        copy_in(Span::Device(self), frame, sink)
    }
}

/// One pair at the decode node, until one of its ends is gone.
async fn receive(mut pair: IncomingPair, came: Came, stop: CancellationToken) {
    let Came {
        hello,
        mut queue,
        over,
        replies,
    } = came;
    let mut pace = Pace::default();
    let mut taken = pair.frame(KvFrame::Hello(hello)).await;
    loop {
        let reply = match taken {
            Ok(reply) => reply,
            Err(error) => {
                if let Some(reply) = error.last_reply() {
                    let _ = replies.send(reply).await;
                }
                return;
            }
        };
        if let Some(reply) = reply
            && replies.send(reply).await.is_err()
        {
            return;
        }
        taken = tokio::select! {
            biased;
            () = over.cancelled() => return,
            () = stop.cancelled() => return,
            reply = pair.next_reply() => Ok(Some(reply)),
            queued = queue.recv() => match queued {
                Some(queued) => take(&mut pair, queued, &mut pace).await,
                None => return,
            },
        };
    }
}

async fn take(
    pair: &mut IncomingPair,
    queued: Queued,
    pace: &mut Pace,
) -> Result<Option<KvReply>, crate::receiver::PairError> {
    let place: Option<&dyn Any> = queued.kv.as_ref().map(|kv| &*kv.place as &dyn Any);
    let device = place.and_then(|place| place.downcast_ref::<FramePlace>()?.device.clone());
    let reply = match (queued.frame, device) {
        (KvFrame::Block(header), Some(span)) => pair.block(header, span).await,
        (frame, _) => pair.frame(frame).await,
    };
    if let Some(kv) = queued.kv {
        kv.moved(pace, queued.queued_at);
    }
    if let Some(written) = queued.written {
        let _ = written.send(std::time::Instant::now());
    }
    reply
}

mod conformance_tests;
