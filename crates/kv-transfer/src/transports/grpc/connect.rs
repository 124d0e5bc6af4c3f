//! The sender's end of a gRPC stream: it connects, says hello, and learns which other transports the decode node offers.

use std::convert::Infallible;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt as _, stream};
use http::header::{CONTENT_TYPE, HeaderValue, TE};
use http::{Method, Request, Uri};
use http_body::Frame;
use http_body_util::StreamBody;
use identity::Expected;
use proto::kv_stream::{self, PUSH_PATH};
use proto::messages::{HelloRefused, HelloReply, KV_FRAME_BYTES_MAX, KvFrame, KvReply, PROTOCOL_VERSION};
use proto::v1;
use tonic::body::Body;
use tonic::codec::Codec as _;
use tonic::metadata::GRPC_CONTENT_TYPE;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};
use tonic_prost::ProstCodec;
use tower::Service as _;

use super::InFrames;
use crate::link::budget::Share;
use crate::link::queue::{Outbox, Outgoing};
use crate::link::{Dial, Link, LinkReply};
use crate::transport::PairFault;

const CONNECT_TIME_LIMIT: Duration = Duration::from_secs(2);
pub(in crate::transports) const HELLO_TIME_LIMIT: Duration = Duration::from_secs(5);
/// A peer whose machine vanished is noticed within interval + time limit.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_TIME_LIMIT: Duration = Duration::from_secs(5);
/// Replies are small. The data goes the other way, under the receiver's windows.
const REPLY_WINDOW_BYTES: u32 = 1 << 20;

/// Every pair begins here, whatever carries its bytes later: this port is the only address under which a peer is known.
pub(super) async fn connect(dial: &Dial<'_>) -> Result<Link, PairFault> {
    let channel = channel(dial).await?;
    let (outbox, queue) = Outbox::new();
    let hello = stream::iter([KvFrame::Hello(dial.hello.clone())]);
    let outgoing = hello.chain(Outgoing::new(queue, &outbox.over));
    let outgoing = outgoing.take_until(outbox.over.clone().cancelled_owned());
    let shake_hands = async {
        let mut replies = push(channel, outgoing).await.map_err(broken)?;
        let first = replies.message().await.map_err(broken)?;
        match first.map(KvReply::try_from) {
            Some(Ok(KvReply::Hello(reply))) => Ok((replies, accepted(reply)?)),
            other => Err(PairFault::Broken(format!("expected a hello, got {other:?}"))),
        }
    };
    let shaken = tokio::time::timeout(HELLO_TIME_LIMIT, shake_hands).await;
    let shaken = shaken.unwrap_or_else(|_| Err(PairFault::Broken("no answer to the hello".to_owned())));
    let (replies, hello) = shaken.inspect_err(|_| outbox.over.cancel())?;
    Ok(Link {
        carrier: Arc::new(InFrames(Share::of(dial.budget))),
        hello,
        outbox,
        replies: replies.map(|reply| read(reply).map(LinkReply::Reply)).boxed(),
        lesser_because: None,
    })
}

fn accepted(reply: HelloReply) -> Result<HelloReply, PairFault> {
    match reply.refused {
        None => Ok(reply),
        // A node of protocol version 1 gives no detail.
        Some(HelloRefused { reason, detail }) if detail.is_empty() => Err(PairFault::Refused {
            reason,
            detail: format!(
                "this node speaks version {PROTOCOL_VERSION} of the protocol, {} another one",
                reply.node
            ),
        }),
        Some(HelloRefused { reason, detail }) => Err(PairFault::Refused { reason, detail }),
    }
}

/// A connection to a node's port.
pub(in crate::transports) async fn channel(dial: &Dial<'_>) -> Result<Channel, PairFault> {
    let endpoint = Endpoint::from_shared(format!("http://{}", dial.peer.address))
        .map_err(|error| PairFault::Unreachable(error.to_string()))?
        .connect_timeout(CONNECT_TIME_LIMIT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIME_LIMIT)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(REPLY_WINDOW_BYTES)
        .initial_connection_window_size(REPLY_WINDOW_BYTES);
    let expected = Expected::decode_node(&dial.peer.node.name);
    let connected = dial.identity.connect(endpoint, expected).await;
    connected.map_err(PairFault::Unreachable)
}

/// Calls `Push`. The generated client is not used, because its encoder would copy every block once more.
async fn push(
    mut channel: Channel,
    frames: impl Stream<Item = KvFrame> + Send + 'static,
) -> Result<Streaming<v1::KvReply>, Status> {
    let parts =
        frames.flat_map(|frame| stream::iter(kv_stream::encode(frame).into_iter().filter(|part| !part.is_empty())));
    let body = parts.map(|part| Ok::<_, Infallible>(Frame::data(part)));
    let mut request = Request::new(Body::new(StreamBody::new(body)));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = Uri::from_static(PUSH_PATH);
    let headers = request.headers_mut();
    headers.insert(TE, HeaderValue::from_static("trailers"));
    headers.insert(CONTENT_TYPE, GRPC_CONTENT_TYPE);
    let failed = |error: tonic::transport::Error| Status::from_error(error.into());
    poll_fn(|context| channel.poll_ready(context)).await.map_err(failed)?;
    let response = channel.call(request).await.map_err(failed)?;
    // A refusal may come without a body. Its status is then in the headers.
    let status = Status::from_header_map(response.headers());
    if let Some(refused) = status.filter(|status| status.code() != Code::Ok) {
        return Err(refused);
    }
    let decoder = ProstCodec::<v1::KvFrame, v1::KvReply>::default().decoder();
    let http_status = response.status();
    let body = response.into_body();
    Ok(Streaming::new_response(
        decoder,
        body,
        http_status,
        None,
        Some(KV_FRAME_BYTES_MAX),
    ))
}

fn broken(status: tonic::Status) -> PairFault {
    PairFault::Broken(proto::status::words(&status))
}

fn read(reply: Result<v1::KvReply, tonic::Status>) -> Result<KvReply, PairFault> {
    let reply = KvReply::try_from(reply.map_err(broken)?);
    reply.map_err(|error| PairFault::Broken(error.to_string()))
}
