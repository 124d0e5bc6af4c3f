//! What a transport is. It implements these traits whole; nothing outside its folder in `transports/` knows its types.
//!
//! A pair meets over the transport that needs no offer (gRPC: a node's address is all that its peers know). The answer to the
//! hello carries the decode node's offers, each the bytes of one transport. The pair shows each of its transports the offer
//! of that name, in the order in which this node prefers them, and keeps the first [`Link`] that it gets.

pub(crate) mod budget;
pub(crate) mod queue;

use std::any::Any;
use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use identity::Identity;
use proto::messages::{Hello, HelloReply, KvReply};
use serving_core::ids::{BlockId, TransferId};
use thiserror::Error;

use self::budget::Budget;
use self::queue::Outbox;
use crate::choice::{Fallback, TransportKind};
use crate::device::DeviceFault;
use crate::receiver::Receiver;
use crate::span::{DeviceAddress, Lending, SpanMut, checksum};
use crate::transport::{KvSource, PairFault, PairPeer, SourceError};
use crate::trust::DirectOffer;

/// Both ends of a transport at one node.
#[async_trait]
pub(crate) trait KvTransport: Send + Sync + Debug {
    fn kind(&self) -> TransportKind;

    /// The reasons for which a pair may have to go without this transport, or without a mode of it.
    fn fallbacks(&self) -> &'static [(TransportKind, &'static [&'static str])] {
        &[]
    }

    /// The decode node's end: makes an offer to `receiver` and takes senders until the returned value is dropped. `None` when
    /// senders come by the port that all nodes have.
    ///
    /// # Errors
    /// The system does not give what is needed. The node's pairs use other transports.
    fn serve(&self, _: &Arc<Receiver>, _: &ReceivingEnd) -> io::Result<Option<Serving>> {
        Ok(None)
    }

    /// Whether a link that is made also carries. Where it may not, the first transfer pays for the try, so a pair that has gone on
    /// to its next transport does not try this one again.
    fn proves_its_links(&self) -> bool {
        true
    }

    /// The prefill node's end: reaches the peer and shakes hands.
    ///
    /// # Errors
    /// [`NoLink`]. Nothing is left behind.
    async fn connect(&self, dial: &Dial<'_>) -> Result<Link, NoLink>;
}

/// The facts about a decode node's memory that its transports need.
#[derive(Clone, Debug)]
pub struct ReceivingEnd {
    /// Of one (block, layer).
    pub layer_bytes: usize,
    /// Where senders of this host and start may write in place.
    pub direct: Option<DirectOffer>,
}

/// A transport takes senders as long as this value lives.
#[derive(Debug)]
pub struct Serving(#[allow(dead_code, reason = "it is held for its drop")] pub(crate) Box<dyn AnyGuard>);

pub(crate) trait AnyGuard: Any + Send + Sync + Debug {}
impl<T: Any + Send + Sync + Debug> AnyGuard for T {}

/// One try to reach a peer.
#[derive(Debug)]
pub(crate) struct Dial<'a> {
    pub peer: &'a PairPeer,
    /// This node's first message on each stream.
    pub hello: Hello,
    /// The bytes that the peer's end of this transport gave, in its answer to the hello over the meeting transport.
    pub offer: Option<&'a [u8]>,
    pub budget: &'a Arc<Budget>,
    /// Who this node is to the peer.
    pub identity: &'a Identity,
}

/// Why there is no link.
#[derive(Debug)]
pub(crate) enum NoLink {
    /// No transport could do better.
    Pair(PairFault),
    /// Another transport may carry the pair.
    Way(Fallback),
}

/// A stream that has shaken hands.
pub(crate) struct Link {
    pub carrier: Arc<dyn Carrier>,
    /// The peer's answer to the hello.
    pub hello: HelloReply,
    /// Taken by the transport until it is over.
    pub outbox: Outbox,
    /// Ends with the stream.
    pub replies: BoxStream<'static, Result<LinkReply, PairFault>>,
    /// Why it is not the better mode that was wanted.
    pub lesser_because: Option<Fallback>,
}

/// The messages of a decode node.
#[derive(Debug)]
pub(crate) enum LinkReply {
    Reply(KvReply),
    /// The transfer is claimed. Sent only where the sender writes in place.
    Begun(TransferId),
}

/// How the bytes of a pair's blocks reach its peer, and what limits the bytes in flight.
#[async_trait]
pub(crate) trait Carrier: Send + Sync + Debug {
    /// The label of the pair: the transport, or the mode of it.
    fn kind(&self) -> TransportKind;

    /// Whether the sender itself writes the receiver's blocks. Such a sender may still write a block that it was given,
    /// until it has said that it will not, or is gone (PROTOCOL rule 11).
    fn writes_in_place(&self) -> bool {
        false
    }

    /// Whether an idle pair keeps memory for it. Then the pair closes the link and meets again.
    fn holds_memory(&self) -> bool {
        true
    }

    /// Largest run of KV bytes in one frame, unless a single layer is larger.
    fn data_bytes_max(&self) -> usize;

    /// Waits for room for one frame: `bytes` for these layers of the peer's block. Cancel-safe.
    async fn room(&self, target: (BlockId, Range<u32>), bytes: usize) -> Box<dyn Place>;
}

/// Room for one frame's bytes. It is free again when it is dropped.
pub(crate) trait Place: Any + Send + Debug {
    /// Takes the bytes and returns their checksum, 0 where nobody looks at it. Called on a blocking thread.
    fn fill(&mut self, from: &Copied<'_>) -> Result<u64, NotCopied>;

    /// The bytes, when they travel in the frame itself.
    fn inline(&mut self) -> Bytes {
        Bytes::new()
    }

    /// By which the peer knows the place, when they do not.
    fn index(&self) -> u32 {
        0
    }
}

/// Some layers of a block of this node, to be copied into a place.
#[derive(Debug)]
pub(crate) struct Copied<'a> {
    pub source: &'a dyn KvSource,
    pub block: BlockId,
    pub layers: Range<u32>,
    pub bytes: usize,
}

impl Copied<'_> {
    pub fn to(&self, place: SpanMut<'_>) -> Result<(), SourceError> {
        self.source.export(self.block, self.layers.clone(), place)
    }

    /// Copies into `place` and sums what lies there.
    pub fn summed(&self, place: &mut [u8]) -> Result<u64, SourceError> {
        self.to(SpanMut::Host(place))?;
        Ok(checksum(place))
    }

    /// Into a place on a device: `copy` copies from where the source has the bytes on a device, and sums them if anybody looks
    /// at sums. Bytes that are on the host are given to `bring`.
    pub fn to_device(
        &self,
        copy: &mut dyn FnMut(DeviceAddress) -> Result<u64, DeviceFault>,
        bring: &mut dyn FnMut(&[u8]) -> Result<(), DeviceFault>,
    ) -> Result<u64, NotCopied> {
        let mut ended = None;
        let lending = self.source.lend(self.block, self.layers.clone(), &mut |from| {
            let copied = copy(from);
            let lent = DeviceFault::lent(&copied);
            ended = Some(copied);
            lent
        })?;
        let copied = match lending {
            Lending::Lent => ended.ok_or(NotCopied::BrokeOff)?,
            Lending::NotOnDevice => {
                let mut bytes = vec![0; self.bytes];
                let sum = self.summed(&mut bytes)?;
                bring(&bytes).map(|()| sum)
            }
        };
        Ok(copied.map_err(|fault| SourceError {
            block: self.block,
            source: Box::new(fault),
        })?)
    }
}

/// Why bytes have no place. The transfer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum NoPlace {
    #[error("the pair has ended: its memory is mapped no more")]
    Unmapped,
    #[error("the place is not inside the decode node's pool")]
    Outside,
    #[error("another transfer of this node writes the same block")]
    Taken,
    #[error("a layer of a block is {layer_bytes} bytes, the pair's ring has slots of {slot_bytes}")]
    LayerTooLarge { layer_bytes: usize, slot_bytes: usize },
}

/// Why a copy was not made. The transfer ends.
#[derive(Debug, Error)]
pub(crate) enum NotCopied {
    #[error("{0}")]
    Source(#[from] SourceError),
    #[error("{0}")]
    Place(#[from] NoPlace),
    /// Nobody takes frames any more.
    #[error("the pair's stream has ended")]
    NoStream,
    /// The source panicked. The process has logged it.
    #[error("a copy broke off")]
    BrokeOff,
}
