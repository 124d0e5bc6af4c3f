//! The receiver's half, the same for every transport: may this sender write, is it what was promised, is it undamaged?
//!
//! A decode node implements [`HandoffSink`] and shares one [`Receiver`]. A transport makes an [`IncomingPair`] per stream
//! and passes frames to it. For each claimed transfer exactly one of two calls comes in the end: `commit` or `ended`. After
//! either, nothing of that transfer is written any more. So a node that cancels a request calls [`Receiver::abort`] and
//! keeps the blocks in quarantine until `ended` comes. (When `abort` returns false it can release them at once.)
//!
//! Where the sender writes blocks in place (`TransportKind::writes_in_place`), a transfer that is over for this node may
//! still be written by a sender that does not know it yet, or that was paused in the middle of a store. Such a transfer
//! *lingers*: `ended` waits for the sender's abort, which says that it stores no more, or for the end of the pair, whose
//! transport must then have proof that the writer is gone ([`IncomingPair::writer_is_gone`]).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use proto::messages::{Hello, PROTOCOL_VERSION, SharedMemoryOffer};
use serving_core::ids::{NodeId, TransferId};
use serving_core::node::CompatibilityHash;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::choice::TransportKind;
pub use crate::incoming::{IncomingPair, PairError};
pub use crate::sink::{Arrived, HandoffSink, ImportError, MappedPool, PoolShape, ReceiveEnd, TransferRefusal};

/// Everything a decode node receives, over all transports and pairs.
#[derive(Debug)]
pub struct Receiver {
    pub(crate) node: NodeId,
    compatibility: CompatibilityHash,
    pub(crate) sink: Arc<dyn HandoffSink>,
    /// The stream on which each claimed transfer is being received. Held while claiming, so that `abort` never misses one.
    pub(crate) active: Mutex<BTreeMap<TransferId, Arc<AbortBox>>>,
    /// Sent to every sender whose hello is accepted.
    pub(crate) shared_memory: Mutex<Option<SharedMemoryOffer>>,
    /// The streams of gRPC pairs end with it. Shared memory has its own (`shm::Serving`).
    pub(crate) closed: CancellationToken,
}

/// Abort requests for one pair's stream: at most one per active transfer.
#[derive(Debug, Default)]
pub(crate) struct AbortBox {
    pub requests: Mutex<Vec<(TransferId, String)>>,
    pub notify: Notify,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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
            closed: CancellationToken::new(),
        })
    }

    /// This node has drained. It ends its senders' streams, which would otherwise stay for as long as the senders want.
    pub fn close(&self) {
        self.closed.cancel();
    }

    /// The offer of shared memory that answers to hellos carry from now on.
    pub(crate) fn offer_shared_memory(&self, offer: SharedMemoryOffer) {
        *lock(&self.shared_memory) = Some(offer);
    }

    /// Removes the offer, unless another one has replaced it.
    pub(crate) fn withdraw_shared_memory(&self, offer: &SharedMemoryOffer) {
        lock(&self.shared_memory).take_if(|offered| offered == offer);
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

    /// A transport has accepted a stream.
    pub fn incoming(self: &Arc<Self>, transport: TransportKind) -> IncomingPair {
        IncomingPair::new(self.clone(), transport)
    }

    pub(crate) fn check_hello(&self, hello: &Hello) -> Result<(), &'static str> {
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
