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
use crate::receiver::{IncomingPair, Receiver};

/// Replies that wait for a sender which does not read. Then its frames are not read either.
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
            && replies.send(Ok(reply.into())).await.is_err()
        {
            return;
        }
        if let Some(end) = end {
            break end;
        }
    };
    let _ = replies.send(Err(end)).await;
}
