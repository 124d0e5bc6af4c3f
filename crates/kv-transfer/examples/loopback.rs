//! Moves KV between both halves over each transport and prints GB/s, beside the memcpy of two threads over the same bytes:
//! `cargo run --release -p kv-transfer --example loopback -- [blocks] [layer KiB]`.
#![allow(clippy::unwrap_used, reason = "a measuring tool, run by hand")]

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use kv_transfer::choice::TransportKind;
use kv_transfer::grpc::add_to_routes;
use kv_transfer::pairs::{PairConfig, PairTransport};
use kv_transfer::receiver::{Arrived, HandoffSink, ImportError, ReceiveEnd, Receiver, RefuseReason};
use kv_transfer::shm::{self, ShmConfig};
use kv_transfer::transport::{KvSource, PushedBlock, SourceError, TransferReport, TransferStart, Transport};
use serving_core::ids::{Attempt, BlockId, Generation, NodeEpoch, NodeId, NodeName, RequestId, TransferId};
use serving_core::kv::reservation::Reservation;
use serving_core::node::{CompatibilityHash, Ticket};
use serving_core::request::AttemptKey;
use tokio_stream::StreamExt;

const LAYERS: u32 = 30;
const ROUNDS: u128 = 12;

#[derive(Debug)]
struct Memory {
    layer_bytes: usize,
    blocks: u32,
    bytes: Vec<Mutex<Vec<u8>>>,
}

impl Memory {
    fn new(layer_bytes: usize, blocks: u32) -> Arc<Self> {
        let block = vec![0xa5; layer_bytes * LAYERS as usize];
        let bytes = (0..blocks).map(|_| Mutex::new(block.clone())).collect();
        Arc::new(Self {
            layer_bytes,
            blocks,
            bytes,
        })
    }
    fn span(&self, layers: &Range<u32>) -> Range<usize> {
        layers.start as usize * self.layer_bytes..layers.end as usize * self.layer_bytes
    }
    fn tickets(&self) -> Vec<(BlockId, Generation)> {
        (0..self.blocks).map(|block| (BlockId(block), Generation(0))).collect()
    }
}

impl KvSource for Memory {
    fn layer_count(&self) -> u32 {
        LAYERS
    }
    fn layer_bytes(&self) -> usize {
        self.layer_bytes
    }
    fn export(&self, block: BlockId, layers: Range<u32>, out: &mut [u8]) -> Result<(), SourceError> {
        let bytes = self.bytes[block.0 as usize].lock().unwrap();
        out.copy_from_slice(&bytes[self.span(&layers)]);
        Ok(())
    }
}

#[async_trait]
impl HandoffSink for Memory {
    fn claim(&self, transfer: TransferId, sender: &NodeId) -> Result<Reservation, RefuseReason> {
        Ok(Reservation {
            transfer,
            key: key(transfer),
            sender: sender.clone(),
            blocks: self.tickets(),
            layer_count: LAYERS,
            layer_bytes: self.layer_bytes,
        })
    }
    fn began(&self, _: TransferId) {}
    fn progressed(&self, _: TransferId) {}
    fn import(&self, block: BlockId, layers: Range<u32>, data: &[u8]) -> Result<(), ImportError> {
        let mut bytes = self.bytes[block.0 as usize].lock().unwrap();
        bytes[self.span(&layers)].copy_from_slice(data);
        Ok(())
    }
    async fn commit(&self, _: Arrived) -> Result<(), RefuseReason> {
        Ok(())
    }
    fn ended(&self, transfer: TransferId, _: TransportKind, end: ReceiveEnd) {
        eprintln!("transfer {transfer} ended: {end}");
    }
}

fn key(transfer: TransferId) -> AttemptKey {
    AttemptKey {
        request: RequestId(transfer.0),
        attempt: Attempt(0),
    }
}

fn node(name: &str) -> NodeId {
    NodeId {
        name: NodeName::new(name),
        epoch: NodeEpoch(1),
    }
}

async fn serve(sink: Arc<Memory>) -> (String, shm::Serving) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut routes = tonic::service::RoutesBuilder::default();
    let shm_config = ShmConfig::new(sink.layer_bytes);
    let receiver = Receiver::new(node("decode-0"), CompatibilityHash([0; 32]), sink);
    add_to_routes(&mut routes, receiver.clone());
    let serving = shm::serve(receiver, shm_config).unwrap();
    // As service-runtime serves a node's port.
    let server = tonic::transport::Server::builder()
        .max_frame_size(1 << 20)
        .initial_stream_window_size(8 << 20)
        .initial_connection_window_size(32 << 20)
        .add_routes(routes.routes());
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener).map(|stream| {
        // Without it the acknowledgement waits 40 ms for the other side's delayed ACK.
        stream.as_ref().unwrap().set_nodelay(true).unwrap();
        stream
    });
    tokio::spawn(server.serve_with_incoming(incoming));
    (address, serving)
}

async fn send(transport: &dyn Transport, source: &Arc<Memory>, (id, address): (u128, &str)) -> TransferReport {
    let ticket = Ticket {
        transfer: TransferId(id),
        decode_node: node("decode-0"),
        decode_address: address.to_owned(),
        blocks: source.tickets(),
        prefix_blocks: 0,
        total_bytes: 0,
        expires_in: Duration::from_secs(60),
    };
    let start = TransferStart {
        key: key(ticket.transfer),
        ticket,
        source: source.clone(),
    };
    let mut transfer = transport.begin(start).await.unwrap();
    for block in 0..source.blocks {
        transfer
            .push(PushedBlock {
                ticket_index: block,
                block: BlockId(block),
            })
            .await
            .unwrap();
    }
    transfer.last(Vec::new()).await.unwrap();
    transfer.acked().await.unwrap()
}

/// The same bytes by two threads, half of the blocks each: what copying once costs here.
fn copy_with_two_threads(source: &Memory, sink: &Memory) -> Duration {
    let started = Instant::now();
    std::thread::scope(|scope| {
        let halves = source.bytes.chunks(source.bytes.len().div_ceil(2));
        for (from, to) in halves.zip(sink.bytes.chunks(sink.bytes.len().div_ceil(2))) {
            scope.spawn(move || {
                for (from, to) in from.iter().zip(to) {
                    to.lock().unwrap().copy_from_slice(&from.lock().unwrap());
                }
            });
        }
    });
    started.elapsed()
}

fn print(what: &str, (bytes, frames): (u64, u32), mut took: Vec<Duration>) {
    took.sort_unstable();
    let gb = bytes as f64 / 1e9;
    let rate = |took: Duration| gb / took.as_secs_f64();
    println!(
        "{what:>20}: {:7.2} ms median of {ROUNDS}, {:6.2} GB/s (best {:.2}, worst {:.2}), {frames} frames",
        took[took.len() / 2].as_secs_f64() * 1e3,
        rate(took[took.len() / 2]),
        rate(took[0]),
        rate(took[took.len() - 1]),
    );
}

#[tokio::main]
async fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<u32>().unwrap());
    let blocks = args.next().unwrap_or(64);
    let layer_bytes = args.next().unwrap_or(12) as usize * 1024;
    let (source, sink) = (Memory::new(layer_bytes, blocks), Memory::new(layer_bytes, blocks));
    let bytes = u64::from(blocks) * u64::from(LAYERS) * layer_bytes as u64;
    println!("{:.1} MB in {blocks} blocks of {LAYERS} layers", bytes as f64 / 1e6);
    let (address, _serving) = serve(sink.clone()).await;
    let mut id = 0;
    for kind in [TransportKind::Grpc, TransportKind::Shm] {
        let config = PairConfig::new(node("prefill-0"), CompatibilityHash([0; 32]));
        let transport = PairTransport::new(config.over(vec![kind]));
        let (mut took, mut moving, mut frames) = (Vec::new(), Vec::new(), 0);
        // The first one connects and touches memory for the first time: not counted.
        for round in 0..=ROUNDS {
            id += 1;
            let started = Instant::now();
            let report = send(&transport, &source, (id, &address)).await;
            frames = report.frames;
            if round > 0 {
                took.push(started.elapsed());
                moving.push(report.moving);
            }
        }
        print(kind.name(), (bytes, frames), took);
        print("of it moving", (bytes, frames), moving);
    }
    let copies = (0..ROUNDS).map(|_| copy_with_two_threads(&source, &sink)).collect();
    print("memcpy, two threads", (bytes, 0), copies);
}
