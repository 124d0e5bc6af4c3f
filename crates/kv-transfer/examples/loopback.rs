//! Moves KV over loopback through both halves and prints GB/s: `cargo run --release -p kv-transfer --example loopback -- [blocks] [layer KiB]`.
#![allow(clippy::unwrap_used, reason = "a measuring tool, run by hand")]

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use kv_transfer::grpc::{GrpcConfig, GrpcTransport, add_to_routes};
use kv_transfer::receiver::{Arrived, HandoffSink, ImportError, ReceiveEnd, Receiver, RefuseReason};
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
    fn ended(&self, transfer: TransferId, end: ReceiveEnd) {
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

async fn serve(sink: Arc<Memory>) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut routes = tonic::service::RoutesBuilder::default();
    add_to_routes(
        &mut routes,
        Receiver::new(node("decode-0"), CompatibilityHash([0; 32]), sink),
    );
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
    address
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

#[tokio::main]
async fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<u32>().unwrap());
    let blocks = args.next().unwrap_or(64);
    let layer_bytes = args.next().unwrap_or(12) as usize * 1024;
    let (source, sink) = (Memory::new(layer_bytes, blocks), Memory::new(layer_bytes, blocks));
    let address = serve(sink).await;
    let transport = GrpcTransport::new(GrpcConfig::new(node("prefill-0"), CompatibilityHash([0; 32])));
    for round in 0..ROUNDS {
        let started = Instant::now();
        let report = send(&transport, &source, (round, &address)).await;
        let seconds = started.elapsed().as_secs_f64();
        let gb = report.kv_bytes as f64 / 1e9;
        println!(
            "{:.1} MB in {} frames: {:.2} ms, {:.2} GB/s (moving {:.2} ms)",
            gb * 1e3,
            report.frames,
            seconds * 1e3,
            gb / seconds,
            report.moving.as_secs_f64() * 1e3,
        );
    }
}
