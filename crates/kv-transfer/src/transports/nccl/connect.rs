//! The sender's end of a pair by NCCL: the control stream and the hello. The communicator comes with the first transfer.

use std::sync::Arc;
use std::time::Instant;

use futures::StreamExt as _;
use http::uri::PathAndQuery;
use prost::Message as _;
use proto::messages::{HelloReply, KvFrame, KvReply};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Streaming};
use tonic_prost::ProstCodec;

use super::Nccl;
use super::carrier::ByNccl;
use super::fault::NcclFault;
use super::messages::{NcclOffer, PATH, ToDecode, ToDecodeWire, ToPrefill, ToPrefillWire};
use super::send::{Facts, Sending};
use crate::link::queue::Outbox;
use crate::link::{Dial, Link};
use crate::transports::grpc::connect::{HELLO_TIME_LIMIT, channel};
use crate::transports::shm::credits::Credits;

/// Messages that wait for the control stream. Then the pair's frames wait.
const MESSAGES_QUEUED_MAX: usize = 64;
/// Replies that wait for the pair.
const REPLIES_QUEUED_MAX: usize = 256;

/// Opens a control stream to a decode node that offers NCCL, or returns why not.
pub(super) async fn connect(dial: &Dial<'_>, nccl: &Nccl) -> Result<Link, NcclFault> {
    let device = nccl.device.as_ref().ok_or(NcclFault::NoDevice)?;
    let offer = NcclOffer::decode(dial.offer.ok_or(NcclFault::Disabled)?);
    let offer = offer.map_err(|error| NcclFault::Control(error.to_string()))?;
    let shape = offer.ring();
    if !shape.is_sound() {
        let (slots, slot_bytes) = (shape.slots, shape.slot_bytes);
        return Err(NcclFault::Geometry { slots, slot_bytes });
    }
    let node = &dial.peer.node;
    if let Some(left) = nccl.rests.left(node, Instant::now()) {
        return Err(NcclFault::Resting { left });
    }
    let library = nccl.library(&device.kv)?;
    let (ours, theirs) = (library.version(), offer.version);
    if ours != theirs {
        return Err(NcclFault::Version { ours, theirs });
    }
    let opened = tokio::time::timeout(HELLO_TIME_LIMIT, open(dial)).await;
    let control = opened.map_err(|_| NcclFault::Control("no answer in time".to_owned()))??;
    let (outbox, queue) = Outbox::new();
    let (ring_in, ring) = watch::channel(None);
    let (replies_in, replies) = mpsc::channel(REPLIES_QUEUED_MAX);
    let facts = Facts {
        peer: node.clone(),
        library,
        rings: nccl.rings(&device.kv),
        rests: nccl.rests.clone(),
        shape,
        has_checksums: offer.has_checksums,
    };
    let sending = Sending::new(facts, (control.out, replies_in), ring_in, outbox.over.clone());
    tokio::spawn(sending.run(queue, control.incoming));
    Ok(Link {
        carrier: Arc::new(ByNccl {
            ring,
            credits: Credits::new(shape.slots),
            shape,
        }),
        hello: control.hello,
        outbox,
        replies: ReceiverStream::new(replies).boxed(),
        lesser_because: None,
    })
}

/// A control stream that has shaken hands.
struct Control {
    hello: HelloReply,
    out: mpsc::Sender<ToDecodeWire>,
    incoming: Streaming<ToPrefillWire>,
}

async fn open(dial: &Dial<'_>) -> Result<Control, NcclFault> {
    let control = |error: &dyn std::fmt::Display| NcclFault::Control(error.to_string());
    let channel = channel(dial).await.map_err(|fault| control(&fault))?;
    let (out, queue) = mpsc::channel(MESSAGES_QUEUED_MAX);
    // A fresh channel has room.
    let _ = out.try_send(ToDecode::Frame(KvFrame::Hello(dial.hello.clone())).into());
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.map_err(|error| control(&error))?;
    let codec = ProstCodec::<ToDecodeWire, ToPrefillWire>::default();
    let messages = Request::new(ReceiverStream::new(queue));
    let response = client.streaming(messages, PathAndQuery::from_static(PATH), codec);
    let words = |status: tonic::Status| NcclFault::Control(proto::status::words(&status));
    let mut incoming = response.await.map_err(words)?.into_inner();
    match incoming.message().await.map_err(words)?.map(ToPrefill::try_from) {
        Some(Ok(ToPrefill::Reply(KvReply::Hello(hello)))) if hello.refused.is_none() => {
            Ok(Control { hello, out, incoming })
        }
        _ => Err(NcclFault::Control(
            "the hello that was taken before is refused".to_owned(),
        )),
    }
}
