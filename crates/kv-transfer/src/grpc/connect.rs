//! The sender's end of a gRPC stream: connects, says hello, and hears which other transports the decode node offers.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use proto::messages::{HelloReply, KV_FRAME_BYTES_MAX, KvFrame, KvReply};
use proto::v1;
use proto::v1::handoff_service_client::HandoffServiceClient;
use tokio::sync::Semaphore;
use tonic::transport::Endpoint;

use crate::pairs::queue::{Outgoing, Queued};
use crate::pairs::{Lane, Link, Live, PairConfig};
use crate::transport::{PairFault, PairPeer};

const CONNECT_TIME_LIMIT: Duration = Duration::from_secs(2);
const HELLO_TIME_LIMIT: Duration = Duration::from_secs(5);
/// A peer whose machine vanished is noticed within interval + time limit.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_TIME_LIMIT: Duration = Duration::from_secs(5);
/// Replies are small; the data goes the other way, under the receiver's windows.
const REPLY_WINDOW_BYTES: u32 = 1 << 20;

/// Every pair begins here, whatever carries its bytes afterwards: the port is the one address a peer is known by.
pub(crate) async fn connect(peer: &PairPeer, config: &PairConfig) -> Result<(Link, HelloReply), PairFault> {
    let mut client = client(peer).await?;
    let room = Arc::new(Semaphore::new(config.room_kib() as usize));
    let lane = Lane::Stream {
        room,
        room_kib: config.room_kib(),
    };
    let (live, queue) = Live::new(peer.node.clone(), lane);
    let outgoing = Outgoing::new(queue, live.gauge.clone(), config.tap.clone());
    let hello = KvFrame::Hello(config.hello(peer));
    let _ = live.frames.send(Queued::control(hello)).await;
    let shake_hands = async {
        let outgoing = outgoing.take_until(live.over());
        let mut replies = client.push(outgoing).await.map_err(broken)?.into_inner();
        let first = replies.message().await.map_err(broken)?;
        match first.map(KvReply::try_from) {
            Some(Ok(KvReply::Hello(reply))) => match reply.refused {
                None => Ok((replies, reply)),
                Some(reason) => Err(PairFault::Refused(reason)),
            },
            other => Err(PairFault::Broken(format!("expected a hello, got {other:?}"))),
        }
    };
    let shaken = tokio::time::timeout(HELLO_TIME_LIMIT, shake_hands).await;
    match shaken.unwrap_or_else(|_| Err(PairFault::Broken("no answer to the hello".to_owned()))) {
        Ok((replies, reply)) => {
            let replies = replies.map(read).boxed();
            Ok((Link { live, replies }, reply))
        }
        Err(fault) => {
            live.close(fault.clone());
            Err(fault)
        }
    }
}

async fn client(peer: &PairPeer) -> Result<HandoffServiceClient<tonic::transport::Channel>, PairFault> {
    let unreachable = |error: &dyn std::fmt::Display| PairFault::Unreachable(error.to_string());
    let endpoint = Endpoint::from_shared(format!("http://{}", peer.address))
        .map_err(|error| unreachable(&error))?
        .connect_timeout(CONNECT_TIME_LIMIT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIME_LIMIT)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(REPLY_WINDOW_BYTES)
        .initial_connection_window_size(REPLY_WINDOW_BYTES);
    let channel = endpoint.connect().await.map_err(|error| unreachable(&error))?;
    Ok(HandoffServiceClient::new(channel)
        .max_encoding_message_size(KV_FRAME_BYTES_MAX)
        .max_decoding_message_size(KV_FRAME_BYTES_MAX))
}

fn broken(status: tonic::Status) -> PairFault {
    PairFault::Broken(proto::status::words(&status))
}

fn read(reply: Result<v1::KvReply, tonic::Status>) -> Result<KvReply, PairFault> {
    let reply = KvReply::try_from(reply.map_err(broken)?);
    reply.map_err(|error| PairFault::Broken(error.to_string()))
}
