//! Many calls that are cancelled while one end stands still: the connection and the other calls on it must survive.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test that unwraps fails, as it should")]

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt as _, stream};
use proto::v1;
use proto::v1::decode_service_client::DecodeServiceClient;
use proto::v1::decode_service_server::{DecodeService, DecodeServiceServer};
use service_runtime::health::Health;
use service_runtime::serve::{self, Calls, Ops};
use service_runtime::shutdown::Shutdown;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

/// Nothing here takes longer, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);
/// What a node has permits for, in these tests. h2's default is that 20 cancelled calls may wait at a server, and that a client
/// forgets all but 50 of those it cancelled, and takes late answers to 1,024 forgotten ones over the life of a connection.
const PERMITS: usize = 1_200;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const FRAME_HEADER_BYTES: usize = 9;
const PREFACE_BYTES: usize = 24;

/// One direction of the connection: counts frames, and keeps the bytes back while it is held. The network stands still, or
/// the process at its end.
#[derive(Debug)]
struct Way {
    is_held: watch::Sender<bool>,
    seen: watch::Sender<[usize; 16]>,
}

impl Way {
    fn new() -> Arc<Self> {
        let (is_held, seen) = (watch::channel(false).0, watch::channel([0; 16]).0);
        Arc::new(Self { is_held, seen })
    }

    fn count(&self, frame: u8) -> usize {
        self.seen.borrow()[usize::from(frame)]
    }

    async fn until(&self, frame: u8, count: usize) {
        let mut seen = self.seen.subscribe();
        let reached = seen.wait_for(|seen| seen[usize::from(frame)] >= count);
        let reached = tokio::time::timeout(PATIENCE, reached).await.is_ok();
        assert!(reached, "{} of {count} frames of type {frame}", self.count(frame));
    }

    async fn carry(self: Arc<Self>, mut from: OwnedReadHalf, mut to: OwnedWriteHalf, preface_bytes: usize) {
        let (mut kept, mut unread) = (Vec::new(), preface_bytes);
        let mut header = Vec::new();
        let mut held = self.is_held.subscribe();
        let mut bytes = vec![0; 64 << 10];
        loop {
            let is_held = *held.borrow_and_update();
            if !is_held && !kept.is_empty() {
                if to.write_all(&kept).await.is_err() {
                    return;
                }
                kept.clear();
            }
            let read = tokio::select! {
                read = from.read(&mut bytes) => read.unwrap_or(0),
                _ = held.changed() => continue,
            };
            if read == 0 {
                return;
            }
            kept.extend_from_slice(&bytes[..read]);
            for byte in &bytes[..read] {
                if unread > 0 {
                    unread -= 1;
                    continue;
                }
                header.push(*byte);
                if header.len() == FRAME_HEADER_BYTES {
                    unread = usize::from(header[0]) << 16 | usize::from(header[1]) << 8 | usize::from(header[2]);
                    self.seen.send_modify(|seen| seen[usize::from(header[3])] += 1);
                    header.clear();
                }
            }
        }
    }
}

/// Calls go up to the node, answers come down.
#[derive(Debug)]
struct Network {
    up: Arc<Way>,
    down: Arc<Way>,
    address: String,
}

impl Network {
    async fn to(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (up, down) = (Way::new(), Way::new());
        let (up_too, down_too) = (up.clone(), down.clone());
        tokio::spawn(async move {
            // One connection: a second one would hide that the first was closed.
            let (client, _) = listener.accept().await.unwrap();
            let (client_in, client_out) = client.into_split();
            let (server_in, server_out) = TcpStream::connect(server).await.unwrap().into_split();
            tokio::spawn(up_too.carry(client_in, server_out, PREFACE_BYTES));
            tokio::spawn(down_too.carry(server_in, client_out, 0));
        });
        Self { up, down, address }
    }
}

/// Answers every call with tokens for ever, at the pace of whoever holds the other end.
struct Endless {
    pace: watch::Receiver<usize>,
}

#[tonic::async_trait]
impl DecodeService for Endless {
    type OpenStream = Pin<Box<dyn Stream<Item = Result<v1::DecodeEvent, Status>> + Send>>;
    async fn open(&self, _: Request<v1::OpenRequest>) -> Result<Response<Self::OpenStream>, Status> {
        let events = stream::unfold((self.pace.clone(), 0), |(mut pace, sent)| async move {
            pace.wait_for(|allowed| *allowed > sent).await.ok()?;
            Some((Ok(v1::DecodeEvent::default()), (pace, sent + 1)))
        });
        Ok(Response::new(events.boxed()))
    }
}

struct Rig {
    network: Network,
    client: DecodeServiceClient<tonic::transport::Channel>,
    /// Events that each call may have had.
    pace: watch::Sender<usize>,
    stop: Shutdown,
}

impl Rig {
    async fn start() -> Self {
        let (listener, address) = serve::bind("127.0.0.1:0").await.unwrap();
        let ops = Ops {
            role: "test",
            name: "test".to_owned(),
            version: "0",
            health: Health::new("test"),
            guard: Default::default(),
            metrics: Arc::default(),
            ledger: None,
        };
        let (pace, paced) = watch::channel(1);
        let routes = Routes::new(DecodeServiceServer::new(Endless { pace: paced }));
        let stop = Shutdown::new();
        let calls = Calls::new(routes, PERMITS as u32);
        tokio::spawn(serve::serve_node(listener, calls, ops, stop.clone()));
        let network = Network::to(address.to_string()).await;
        let channel = serve::endpoint(&network.address).unwrap().connect_lazy();
        let client = DecodeServiceClient::new(channel);
        Self {
            network,
            client,
            pace,
            stop,
        }
    }

    async fn open(&self) -> Streaming<v1::DecodeEvent> {
        let mut client = self.client.clone();
        client.open(v1::OpenRequest::default()).await.unwrap().into_inner()
    }

    /// Calls that reach the network and are cancelled before the node has seen them.
    async fn open_and_cancel(&self, count: usize) {
        let up = &self.network.up;
        let (opened, cancelled) = (up.count(HEADERS), up.count(RST_STREAM));
        let calls: Vec<_> = (0..count)
            .map(|_| {
                let mut client = self.client.clone();
                tokio::spawn(async move { client.open(v1::OpenRequest::default()).await.map(drop) })
            })
            .collect();
        up.until(HEADERS, opened + count).await;
        calls.iter().for_each(tokio::task::JoinHandle::abort);
        up.until(RST_STREAM, cancelled + count).await;
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.request();
    }
}

async fn next(events: &mut Streaming<v1::DecodeEvent>) -> Result<Option<v1::DecodeEvent>, Status> {
    let event = tokio::time::timeout(PATIENCE, events.message()).await;
    event.expect("an event in time")
}

#[tokio::test(flavor = "multi_thread")]
async fn cancels_that_a_node_finds_after_a_stall_end_no_other_call_of_its_coordinator() {
    let rig = Rig::start().await;
    let mut healthy = rig.open().await;
    assert!(next(&mut healthy).await.is_ok_and(|event| event.is_some()));
    rig.network.up.is_held.send_replace(true);
    rig.open_and_cancel(PERMITS).await;
    rig.network.up.is_held.send_replace(false);
    // A call that comes after them all has been answered, so they have all been read.
    let mut later = rig.open().await;
    assert!(next(&mut later).await.is_ok_and(|event| event.is_some()));
    rig.pace.send_replace(2);
    let event = next(&mut healthy).await;
    assert!(matches!(event, Ok(Some(_))), "the healthy call got {event:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_cancels_ends_its_connection() {
    let rig = Rig::start().await;
    let mut open = rig.open().await;
    assert!(next(&mut open).await.is_ok_and(|event| event.is_some()));
    rig.network.up.is_held.send_replace(true);
    for _ in 0..2 {
        rig.open_and_cancel(PERMITS).await;
    }
    rig.network.up.is_held.send_replace(false);
    let event = next(&mut open).await;
    assert!(event.is_err(), "{event:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_to_cancelled_calls_that_come_late_end_no_other_call() {
    let rig = Rig::start().await;
    let mut healthy = rig.open().await;
    assert!(next(&mut healthy).await.is_ok_and(|event| event.is_some()));
    let mut cancelled = Vec::new();
    for _ in 0..PERMITS {
        cancelled.push(rig.open().await);
    }
    for events in &mut cancelled {
        assert!(next(events).await.is_ok_and(|event| event.is_some()));
    }
    let before = rig.network.down.count(DATA);
    rig.network.down.is_held.send_replace(true);
    rig.pace.send_replace(2);
    rig.network.down.until(DATA, before + PERMITS + 1).await;
    drop(cancelled);
    rig.network.up.until(RST_STREAM, PERMITS).await;
    rig.network.down.is_held.send_replace(false);
    for paced in [2, 3] {
        rig.pace.send_replace(paced);
        let event = next(&mut healthy).await;
        assert!(matches!(event, Ok(Some(_))), "the healthy call got {event:?}");
    }
}
