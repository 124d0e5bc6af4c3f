//! What all pairs of a receiver share: who it is, its sink, the transfers under way, and the offers of its transports.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use proto::messages::{Hello, HelloRefused, HelloRefusedReason, HelloReply, KvShard, PROTOCOL_VERSION, TransportOffer};
use serving_core::compatibility::{Compatibility, Incompatibility};
use serving_core::ids::{NodeId, TransferId};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::sink::{HandoffSink, ReceiveEnd};
use super::stream_end::StreamEnd;
use crate::choice::TransportKind;

/// Everything a decode node receives, over all transports and pairs.
#[derive(Debug)]
pub struct Receiver {
    node: NodeId,
    compatibility: Compatibility,
    pub(super) sink: Arc<dyn HandoffSink>,
    /// The stream on which each claimed transfer is being received. Held while claiming, so that `abort` never misses one.
    pub(super) active: Mutex<BTreeMap<TransferId, Arc<AbortBox>>>,
    /// Sent to every sender whose hello is accepted.
    offers: Mutex<Vec<TransportOffer>>,
    /// Transports that have a method of the handoff service, by its path.
    pub(super) stream_ends: Mutex<BTreeMap<&'static str, Arc<dyn StreamEnd>>>,
    /// Senders that have this node's memory on a device open.
    openers: watch::Sender<usize>,
    /// The streams of pairs that came by the node's port end with it. Each other transport has its own end.
    pub(crate) closed: CancellationToken,
}

/// Abort requests for one pair's stream: at most one per active transfer.
#[derive(Debug, Default)]
pub(super) struct AbortBox {
    pub requests: Mutex<Vec<(TransferId, String)>>,
    pub notify: Notify,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Receiver {
    pub fn new(node: NodeId, compatibility: Compatibility, sink: Arc<dyn HandoffSink>) -> Arc<Self> {
        Arc::new(Self {
            node,
            compatibility,
            sink,
            active: Mutex::default(),
            offers: Mutex::default(),
            stream_ends: Mutex::default(),
            openers: watch::Sender::default(),
            closed: CancellationToken::new(),
        })
    }

    /// This node has drained. It ends its senders' streams, which would otherwise stay for as long as the senders want.
    pub fn close(&self) {
        self.closed.cancel();
    }

    /// A sender may have this node's memory on a device open until the returned value is dropped.
    pub(crate) fn opened(self: &Arc<Self>) -> Opener {
        self.openers.send_modify(|openers| *openers += 1);
        Opener(self.clone())
    }

    /// Waits until no sender has this node's memory on a device open: the device must not free it before. Cancel-safe.
    pub async fn is_left(&self) {
        // The value that it waits for outlives it.
        let _ = self.openers.subscribe().wait_for(|openers| *openers == 0).await;
    }

    /// An offer that answers to hellos carry until the returned value is dropped.
    pub(crate) fn offer(self: &Arc<Self>, offer: TransportOffer) -> Offered {
        lock(&self.offers).push(offer.clone());
        let receiver = self.clone();
        Offered { receiver, offer }
    }

    /// Calls of its method go to `end` until the returned value is dropped.
    pub(crate) fn take_streams(self: &Arc<Self>, end: Arc<dyn StreamEnd>) -> TakenStreams {
        let path = end.path();
        lock(&self.stream_ends).insert(path, end);
        let receiver = self.clone();
        TakenStreams { receiver, path }
    }

    /// `None`: no transport of this node takes the method.
    pub(crate) fn stream_end(&self, path: &str) -> Option<Arc<dyn StreamEnd>> {
        lock(&self.stream_ends).get(path).cloned()
    }

    /// This node gives a transfer up. Idempotent, never blocks. The sink must already refuse to hand its reservation out.
    /// True: `ended` (never `commit`) follows as soon as no write runs. False: the transfer was never claimed, or `commit`
    /// or `ended` was called already; nothing is or will be written.
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

    /// Nothing of a claimed transfer is written any more.
    pub(super) fn end(&self, transfer: TransferId, transport: TransportKind, end: ReceiveEnd) {
        lock(&self.active).remove(&transfer);
        self.sink.ended(transfer, transport, end);
    }

    /// The answer to a hello that is accepted, or to one that is not.
    pub(crate) fn hello_reply(&self, refused: Option<HelloRefused>) -> HelloReply {
        HelloReply {
            node: self.node.clone(),
            offers: match refused {
                None => lock(&self.offers).clone(),
                Some(_) => Vec::new(),
            },
            refused,
        }
    }

    /// The version first: what an older node means by the other fields is not known.
    pub(super) fn check_hello(&self, hello: &Hello) -> Result<(), HelloRefused> {
        let Hello { from, to, shard, .. } = hello;
        let me = &self.node;
        let refused = |reason, detail| Err(HelloRefused { reason, detail });
        if hello.protocol_version != PROTOCOL_VERSION {
            let theirs = hello.protocol_version;
            let detail =
                format!("{me} speaks version {PROTOCOL_VERSION} of the protocol, {from} speaks version {theirs}");
            return refused(HelloRefusedReason::ProtocolVersion, detail);
        }
        if *to != self.node {
            let detail = format!("{from} means {to}, this node is {me}");
            return refused(HelloRefusedReason::StaleEpoch, detail);
        }
        let theirs = (&from.name, &hello.compatibility);
        if let Some(why) = Incompatibility::between((&me.name, &self.compatibility), theirs) {
            return refused(HelloRefusedReason::Incompatible, why.to_string());
        }
        if *shard != KvShard::WHOLE {
            let detail = format!("{me} holds {}, {from} holds {shard}", KvShard::WHOLE);
            return refused(HelloRefusedReason::Shard, detail);
        }
        Ok(())
    }
}

/// A method of the handoff service that a transport takes.
#[derive(Debug)]
pub(crate) struct TakenStreams {
    receiver: Arc<Receiver>,
    path: &'static str,
}

impl Drop for TakenStreams {
    fn drop(&mut self) {
        lock(&self.receiver.stream_ends).remove(self.path);
    }
}

/// One sender that may have memory open.
#[derive(Debug)]
pub(crate) struct Opener(Arc<Receiver>);

impl Drop for Opener {
    fn drop(&mut self) {
        self.0.openers.send_modify(|openers| *openers -= 1);
    }
}

/// An offer that stands.
#[derive(Debug)]
pub(crate) struct Offered {
    receiver: Arc<Receiver>,
    offer: TransportOffer,
}

impl Drop for Offered {
    fn drop(&mut self) {
        lock(&self.receiver.offers).retain(|offer| *offer != self.offer);
    }
}
