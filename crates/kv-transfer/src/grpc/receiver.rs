//! The gRPC end of the receiver: a task per pair's stream that feeds frames and sends replies.

use std::sync::Arc;

use proto::messages::{KV_FRAME_BYTES_MAX, KvFrame, KvReply};
use proto::v1;
use proto::v1::handoff_service_server::{HandoffService, HandoffServiceServer};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::{Routes, RoutesBuilder};
use tonic::{Request, Response, Status, Streaming};

use crate::choice::TransportKind;
use crate::receiver::{IncomingPair, PairError, Receiver};

/// Replies waiting for a sender that does not read; then its frames are not read either.
const REPLIES_QUEUED_MAX: usize = 256;

/// Adds the handoff service to a node's port.
pub fn add_to_routes(routes: &mut RoutesBuilder, receiver: Arc<Receiver>) {
    let service = HandoffServiceServer::new(Service { receiver })
        .max_decoding_message_size(KV_FRAME_BYTES_MAX)
        .max_encoding_message_size(KV_FRAME_BYTES_MAX);
    routes.add_service(service);
}

/// The handoff service alone, for a port that has no other.
pub fn routes(receiver: Arc<Receiver>) -> Routes {
    let mut routes = RoutesBuilder::default();
    add_to_routes(&mut routes, receiver);
    routes.routes()
}

#[derive(Debug)]
struct Service {
    receiver: Arc<Receiver>,
}

#[tonic::async_trait]
impl HandoffService for Service {
    type PushStream = ReceiverStream<Result<v1::KvReply, Status>>;

    async fn push(&self, request: Request<Streaming<v1::KvFrame>>) -> Result<Response<Self::PushStream>, Status> {
        let (replies, queue) = mpsc::channel(REPLIES_QUEUED_MAX);
        let pair = self.receiver.incoming(TransportKind::Grpc);
        // A task of its own: it must see a running import through when the connection drops.
        tokio::spawn(run(pair, request.into_inner(), replies));
        Ok(Response::new(ReceiverStream::new(queue)))
    }
}

async fn run(
    mut pair: IncomingPair,
    mut frames: Streaming<v1::KvFrame>,
    replies: mpsc::Sender<Result<v1::KvReply, Status>>,
) {
    loop {
        let reply = tokio::select! {
            // The sender is gone: nobody reads replies.
            () = replies.closed() => return,
            reply = pair.next_reply() => Some(reply),
            frame = frames.message() => match frame {
                Ok(Some(frame)) => match take(&mut pair, frame).await {
                    Ok(reply) => reply,
                    Err(end) => {
                        if let Some(reply) = end.reply {
                            let _ = replies.send(Ok(reply.into())).await;
                        }
                        let _ = replies.send(Err(end.status)).await;
                        return;
                    }
                },
                Ok(None) => return,
                Err(status) => {
                    tracing::debug!(%status, "a handoff stream broke");
                    return;
                }
            },
        };
        if let Some(reply) = reply
            && replies.send(Ok(reply.into())).await.is_err()
        {
            return;
        }
    }
}

struct StreamEnd {
    reply: Option<KvReply>,
    status: Status,
}

async fn take(pair: &mut IncomingPair, frame: v1::KvFrame) -> Result<Option<KvReply>, StreamEnd> {
    let frame = KvFrame::try_from(frame).map_err(|error| {
        tracing::warn!(%error, "a handoff stream breaks the contract; closing it");
        StreamEnd {
            reply: None,
            status: proto::status::convert_status(&error),
        }
    })?;
    pair.frame(frame).await.map_err(|error| {
        tracing::warn!(%error, "closing a handoff stream");
        let reply = match error {
            PairError::HelloRefused(reason) => Some(pair.hello_reply(Some(reason))),
            PairError::NoHello | PairError::SecondHello => None,
        };
        StreamEnd {
            reply,
            status: Status::failed_precondition(error.to_string()),
        }
    })
}
