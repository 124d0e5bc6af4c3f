//! The gRPC end of the receiver: one task for each pair's stream, which passes frames on and sends replies.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::task::{Context, Poll};

use http::header::CONTENT_TYPE;
use http::{Request, Response};
use http_body_util::BodyExt as _;
use identity::Caller;
use proto::kv_stream::{self, FrameReader};
use proto::messages::{KV_FRAME_BYTES_MAX, KvFrame};
use proto::v1;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::body::Body;
use tonic::codec::{Codec as _, EncodeBody, SingleMessageCompressionOverride};
use tonic::metadata::GRPC_CONTENT_TYPE;
use tonic::server::NamedService;
use tonic::service::{Routes, RoutesBuilder};
use tonic_prost::ProstCodec;

use super::KIND;
use crate::receiver::{IncomingPair, REPLY_TIME_LIMIT, Receiver};

/// Replies that wait for a sender which does not read. Then its frames are not read either, and soon it is given up.
const REPLIES_QUEUED_MAX: usize = 256;

/// Adds the handoff service to a node's port.
pub fn add_to_routes(routes: &mut RoutesBuilder, receiver: Arc<Receiver>) {
    routes.add_service(Service { receiver });
}

/// The handoff service alone, for a port that has no other.
pub fn routes(receiver: Arc<Receiver>) -> Routes {
    let mut routes = RoutesBuilder::default();
    add_to_routes(&mut routes, receiver);
    routes.routes()
}

/// The generated server is not used, because its decoder would copy every block once more.
#[derive(Clone, Debug)]
struct Service {
    receiver: Arc<Receiver>,
}

impl NamedService for Service {
    const NAME: &'static str = kv_stream::SERVICE;
}

impl tower::Service<Request<Body>> for Service {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let path = request.uri().path();
        ready(Ok(if path == kv_stream::PUSH_PATH {
            let (head, frames) = request.into_parts();
            self.push(caller_of(&head.extensions), frames)
        } else if let Some(end) = self.receiver.stream_end(path) {
            end.take(request)
        } else {
            Status::unimplemented(format!("this node's {} has no method at {path}", kv_stream::SERVICE)).into_http()
        }))
    }
}

/// Each port of baton says who calls (`service_runtime::serve`). A call of which nobody said it is nobody's.
pub(in crate::transports) fn caller_of(of_call: &http::Extensions) -> Caller {
    of_call.get().cloned().unwrap_or(Caller::Nobody)
}

impl Service {
    fn push(&self, caller: Caller, frames: Body) -> Response<Body> {
        let (replies, queue) = mpsc::channel(REPLIES_QUEUED_MAX);
        let pair = IncomingPair::new(&self.receiver, KIND, caller);
        // A task of its own, because it must finish a running import when the connection drops.
        tokio::spawn(run(pair, Frames::of(frames), (replies, self.receiver.closed.clone())));
        let body = EncodeBody::new_server(
            ProstCodec::<v1::KvReply, v1::KvFrame>::default().encoder(),
            ReceiverStream::new(queue),
            None,
            SingleMessageCompressionOverride::default(),
            Some(KV_FRAME_BYTES_MAX),
        );
        let mut response = Response::new(Body::new(body));
        response.headers_mut().insert(CONTENT_TYPE, GRPC_CONTENT_TYPE);
        response
    }
}

/// The frames of one stream.
#[derive(Debug)]
struct Frames {
    body: Body,
    reader: FrameReader,
}

impl Frames {
    fn of(body: Body) -> Self {
        Self {
            body,
            reader: FrameReader::default(),
        }
    }

    /// `None` when no further frame can come. Cancel-safe.
    ///
    /// # Errors
    /// The last message to the sender, who breaks the contract.
    async fn next(&mut self) -> Result<Option<KvFrame>, Status> {
        loop {
            let frame = self.reader.next_frame().map_err(|error| {
                tracing::warn!(%error, "a handoff stream breaks the contract; closing it");
                error.status()
            })?;
            if frame.is_some() {
                return Ok(frame);
            }
            match self.body.frame().await {
                // gRPC gives no meaning to trailers of a request.
                Some(Ok(frame)) => self.reader.add(frame.into_data().unwrap_or_default()),
                Some(Err(status)) => {
                    tracing::debug!(%status, "a handoff stream broke");
                    return Ok(None);
                }
                None => {
                    if !self.reader.is_between_frames() {
                        tracing::debug!("a handoff stream ended in the middle of a frame");
                    }
                    return Ok(None);
                }
            }
        }
    }
}

type Replies = mpsc::Sender<Result<v1::KvReply, Status>>;

async fn run(mut pair: IncomingPair, mut frames: Frames, (replies, closed): (Replies, CancellationToken)) {
    let end = loop {
        let taken = tokio::select! {
            biased;
            // The sender is gone, so nobody reads replies.
            () = replies.closed() => return,
            // Before the end, because a committed transfer must be acknowledged.
            reply = pair.next_reply() => Ok(Some(reply)),
            () = closed.cancelled() => return,
            frame = frames.next() => match frame {
                Ok(Some(frame)) => pair.frame(frame).await,
                Ok(None) => return,
                Err(status) => break status,
            },
        };
        let (reply, end) = match taken {
            Ok(reply) => (reply, None),
            Err(error) => {
                tracing::warn!(%error, "closing a handoff stream");
                (error.last_reply(), Some(Status::failed_precondition(error.to_string())))
            }
        };
        if let Some(reply) = reply
            && !is_taken(&replies, Ok(reply.into())).await
        {
            return;
        }
        if let Some(end) = end {
            break end;
        }
    };
    is_taken(&replies, Err(end)).await;
}

/// False when nobody takes it: the sender is gone, or reads no replies.
async fn is_taken(replies: &Replies, reply: Result<v1::KvReply, Status>) -> bool {
    match tokio::time::timeout(REPLY_TIME_LIMIT, replies.send(reply)).await {
        Ok(sent) => sent.is_ok(),
        Err(_) => {
            tracing::warn!("a sender does not read its replies; closing its handoff stream");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::{StreamExt as _, stream};
    use http_body_util::StreamBody;
    use proto::messages::{Hello, KvShard, PROTOCOL_VERSION};
    use serving_core::ids::TransferId;

    use super::*;
    use crate::conformance::{CommitAnswer, Recorder, compatibility, empty_ticket, eventually, node, within};
    use crate::receiver::ReceiveEnd;

    /// A stream of these frames that stays open.
    fn open(frames: Vec<KvFrame>) -> Frames {
        let parts = frames.into_iter().flat_map(kv_stream::encode);
        let parts = parts.filter(|part| !part.is_empty());
        let parts = parts.map(|part| Ok::<_, Infallible>(http_body::Frame::data(part)));
        let body = StreamBody::new(stream::iter(parts).chain(stream::pending()));
        Frames::of(Body::new(body))
    }

    fn hello() -> KvFrame {
        KvFrame::Hello(Hello {
            from: node("prefill-0", 11),
            to: node("decode-0", 22),
            protocol_version: PROTOCOL_VERSION,
            compatibility: compatibility(1),
            shard: KvShard::WHOLE,
        })
    }

    /// The answer to the frame behind a hello and a begin finds no room.
    async fn is_given_up(frame: KvFrame) {
        let sink = Recorder::new(CommitAnswer::Accept);
        let receiver = Receiver::new(node("decode-0", 22), compatibility(1), sink.clone());
        let ticket = empty_ticket(node("decode-0", 22), "");
        sink.reserve(ticket.transfer, &node("prefill-0", 11), &ticket);
        let begin = KvFrame::Begin {
            transfer: ticket.transfer,
        };
        let frames = open(vec![hello(), begin, frame]);
        // Room for the answer to the hello.
        let (replies, _unread) = mpsc::channel(1);
        let pair = IncomingPair::new(&receiver, KIND, Caller::PlainText);
        let running = run(pair, frames, (replies, CancellationToken::new()));
        within("the end of the stream", running).await;
        eventually("its transfer ends", || {
            sink.ends() == [(ticket.transfer, ReceiveEnd::PairLost)]
        })
        .await;
    }

    #[tokio::test]
    async fn a_sender_that_reads_no_replies_is_given_up() {
        let answered = KvFrame::Abort {
            transfer: TransferId(77),
            reason: "a test".to_owned(),
        };
        // A second hello gets the stream's last word.
        futures::future::join(is_given_up(answered), is_given_up(hello())).await;
    }
}
