//! A prefill node on the stand-in engine, a scripted decode side that records, and a client, all over real gRPC.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use clap::Parser;
use engine::{
    EngineLimits, HostEngine, KvDtype, KvGeometry, OnHost, OpenedEngine, StandInConfig, StandInEngine, compatibility,
};
use kv_transfer::choice::TransportKind;
use kv_transfer::receiver::{Arrived, HandoffSink, ImportError, ReceiveEnd, Receiver, TransferRefusal};
use kv_transfer::span::Span;
use kv_transfer::{ReceivingEnd, Serving, shm, transports};
use node::Node;
use prefill_node::Config;
use prometheus_client::registry::Registry;
use proto::messages::{PROTOCOL_VERSION, PrefillEvent, PrefillRequest};
use proto::v1::prefill_service_client::PrefillServiceClient;
use service_runtime::health::Health;
use service_runtime::serve::{self, Ops};
use service_runtime::shutdown::Shutdown;
use serving_core::compatibility::Compatibility;
use serving_core::ids::{Attempt, BlockId, Generation, NodeEpoch, NodeId, NodeName, RequestId, TokenId, TransferId};
use serving_core::kv::reservation::Reservation;
use serving_core::node::{NodeStatus, Ticket};
use serving_core::request::{AttemptKey, Lane, Request, SamplingParams, StopConditions};
use tokio::runtime::Runtime;
use tonic::service::RoutesBuilder;
use tonic::transport::Channel;

pub const VOCAB: u32 = 512;
pub const BLOCK_TOKENS: u32 = 16;
pub const GEOMETRY: KvGeometry = KvGeometry {
    layer_count: 3,
    kv_head_count: 2,
    head_dim: 4,
    block_tokens: BLOCK_TOKENS,
    dtype: KvDtype::F16,
};
/// Everything here ends within this long, or the test fails.
pub const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug)]
pub struct NodeSpec {
    pub blocks: u32,
    pub batch_tokens: u32,
    pub step: Duration,
    pub hold_ms: u64,
}

impl Default for NodeSpec {
    fn default() -> Self {
        Self {
            blocks: 64,
            batch_tokens: 16,
            step: Duration::ZERO,
            hold_ms: 10_000,
        }
    }
}

pub fn engine(spec: NodeSpec) -> StandInEngine {
    StandInEngine::new(StandInConfig {
        geometry: GEOMETRY,
        vocab_size: VOCAB,
        context_length: 4096,
        block_count: spec.blocks,
        kv_backing: Default::default(),
        limits: EngineLimits {
            max_batch_tokens: spec.batch_tokens,
            max_sequences: 4,
        },
        nanoseconds_per_token: 0,
        nanoseconds_per_step: spec.step.as_nanos() as u64,
        seed: 7,
    })
    .unwrap()
}

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    config: Config,
}

/// A running prefill node.
pub struct Prefill {
    pub node: Node,
    pub client: PrefillServiceClient<Channel>,
    pub compatibility: Compatibility,
    pub registry: Arc<Registry>,
    stop: Shutdown,
}

impl Prefill {
    pub async fn start(spec: NodeSpec) -> Self {
        let hold = format!("--hold-ms-max={}", spec.hold_ms);
        let config = Flags::try_parse_from(["node", "--engine=stand-in", &hold])
            .unwrap()
            .config;
        let engine = engine(spec);
        let compatibility = compatibility(engine.model(), [0; 32], PROTOCOL_VERSION);
        let opened = OpenedEngine {
            engine: Box::new(OnHost::new(engine).unwrap()),
            compatibility: compatibility.clone(),
            model_name: "tiny".to_owned(),
        };
        let (listener, address) = serve::bind("127.0.0.1:0").await.unwrap();
        let mut registry = Registry::default();
        let node = Node::start(&config.settings(), (opened, &address.to_string()), &mut registry).unwrap();
        let registry = Arc::new(registry);
        let mut routes = RoutesBuilder::default();
        prefill_node::add_to_routes(&mut routes, node.handle());
        let stop = serve_routes(listener, routes, registry.clone());
        let channel = serve::endpoint(&address.to_string()).unwrap().connect_lazy();
        Self {
            node,
            client: PrefillServiceClient::new(channel),
            compatibility,
            registry,
            stop,
        }
    }

    /// The whole request message for this node.
    pub fn message(&self, request: Request, ticket: Option<Ticket>) -> PrefillRequest {
        PrefillRequest {
            attempt: Attempt(0),
            permit_tokens: request.prompt_tokens(),
            coordinator_epoch: NodeEpoch(1),
            request,
            node_epoch: self.node.record.id.epoch,
            ticket,
        }
    }

    pub async fn send(&mut self, message: PrefillRequest) -> Events {
        let response = self
            .client
            .prefill(proto::v1::PrefillRequest::from(message))
            .await
            .unwrap();
        Events {
            stream: response.into_inner(),
        }
    }

    /// Waits for a status; fails the test when it does not come.
    pub async fn until(&mut self, within: Duration, wanted: impl FnMut(&NodeStatus) -> bool) -> NodeStatus {
        let mut status = self.node.status.clone();
        let reached = tokio::time::timeout(within, status.wait_for(wanted)).await;
        match reached {
            Ok(status) => status.unwrap().clone(),
            Err(_) => panic!("not reached; last status {:?}", *self.node.status.borrow()),
        }
    }

    /// No block belongs to a request any more.
    pub async fn until_at_rest(&mut self, within: Duration) -> NodeStatus {
        self.until(within, |status| {
            status.kv_blocks.free + status.kv_blocks.cached == status.kv_blocks.total()
        })
        .await
    }

    pub fn scrape(&self) -> String {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
        text
    }
}

impl Drop for Prefill {
    fn drop(&mut self) {
        self.stop.request();
    }
}

fn serve_routes(listener: tokio::net::TcpListener, routes: RoutesBuilder, metrics: Arc<Registry>) -> Shutdown {
    let stop = Shutdown::new();
    let ops = Ops {
        role: "test",
        name: "test".to_owned(),
        version: "0",
        health: Health::new("test"),
        metrics,
        ledger: None,
        guard: Default::default(),
    };
    tokio::spawn(serve::serve_node(listener, routes.routes(), ops, stop.clone()));
    stop
}

/// What a node answered.
pub struct Events {
    stream: tonic::Streaming<proto::v1::PrefillEvent>,
}

impl Events {
    pub async fn next(&mut self) -> Option<PrefillEvent> {
        let message = tokio::time::timeout(PATIENCE, self.stream.message()).await;
        let message = message
            .expect("an event within the time limit")
            .expect("no broken stream");
        message.map(|event| event.try_into().unwrap())
    }
    pub async fn rest(mut self) -> Vec<PrefillEvent> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            events.push(event);
        }
        events
    }
}

/// How the decode side treats handoffs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Script {
    Commit,
    /// Knows no ticket.
    Refuse,
    /// Takes everything and never answers.
    NeverAck,
}

#[derive(Debug, Default)]
pub struct Recorded {
    pub reservations: BTreeMap<TransferId, Reservation>,
    pub blocks: BTreeMap<BlockId, Vec<u8>>,
    pub begun: Vec<TransferId>,
    pub first_import: Option<Instant>,
    pub arrived: Vec<Arrived>,
    pub ended: Vec<(TransferId, ReceiveEnd)>,
}

#[derive(Debug)]
pub struct RecordingSink {
    script: Script,
    recorded: Mutex<Recorded>,
}

#[tonic::async_trait]
impl HandoffSink for RecordingSink {
    fn claim(&self, transfer: TransferId, _: &NodeId) -> Result<Reservation, TransferRefusal> {
        let claimed = self.recorded.lock().unwrap().reservations.remove(&transfer);
        claimed
            .filter(|_| self.script != Script::Refuse)
            .ok_or(TransferRefusal::UnknownTransfer)
    }
    fn began(&self, transfer: TransferId) {
        self.recorded.lock().unwrap().begun.push(transfer);
    }
    fn progressed(&self, _: TransferId) {}
    fn import(&self, block: BlockId, layers: Range<u32>, data: Span<'_>) -> Result<(), ImportError> {
        let data = data.host().unwrap();
        let mut recorded = self.recorded.lock().unwrap();
        recorded.first_import.get_or_insert_with(Instant::now);
        let bytes = recorded
            .blocks
            .entry(block)
            .or_insert_with(|| vec![0; GEOMETRY.block_bytes()]);
        bytes[layers.start as usize * GEOMETRY.layer_bytes()..][..data.len()].copy_from_slice(data);
        Ok(())
    }
    async fn commit(&self, arrived: Arrived) -> Result<(), TransferRefusal> {
        self.recorded.lock().unwrap().arrived.push(arrived);
        if self.script == Script::NeverAck {
            std::future::pending::<()>().await;
        }
        Ok(())
    }
    fn ended(&self, transfer: TransferId, _: TransportKind, end: ReceiveEnd) {
        self.recorded.lock().unwrap().ended.push((transfer, end));
    }
}

/// The decode side: the real receiver half over a recording memory.
pub struct Decode {
    pub id: NodeId,
    address: String,
    sink: Arc<RecordingSink>,
    pub receiver: Arc<Receiver>,
    /// Its own, so that killing it closes every connection as the end of a process does.
    runtime: Option<Runtime>,
    next_transfer: u128,
    next_block: u32,
    _transports: Vec<Serving>,
}

impl Decode {
    pub async fn start(script: Script, compatibility: Compatibility) -> Self {
        Self::start_with(script, compatibility, false).await
    }

    /// One that offers shared memory.
    pub async fn start_sharing(script: Script, compatibility: Compatibility) -> Self {
        Self::start_with(script, compatibility, true).await
    }

    async fn start_with(script: Script, compatibility: Compatibility, is_sharing: bool) -> Self {
        let id = NodeId {
            name: NodeName::new("decode-0"),
            epoch: NodeEpoch(99),
        };
        let sink = Arc::new(RecordingSink {
            script,
            recorded: Mutex::default(),
        });
        let mut routes = RoutesBuilder::default();
        let receiver = Receiver::new(id.clone(), compatibility, sink.clone());
        kv_transfer::grpc::add_to_routes(&mut routes, receiver.clone());
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let kept = receiver.clone();
        let serving = runtime.spawn(async move {
            let (listener, address) = serve::bind("127.0.0.1:0").await.unwrap();
            serve_routes(listener, routes, Arc::default());
            let end = ReceivingEnd {
                layer_bytes: GEOMETRY.layer_bytes(),
                direct: None,
            };
            let shared = if is_sharing { &[shm::KIND][..] } else { &[] };
            (address, transports::serve(&receiver, shared, &end))
        });
        let (address, transports) = serving.await.unwrap();
        Self {
            id,
            address: address.to_string(),
            _transports: transports,
            sink,
            receiver: kept,
            runtime: Some(runtime),
            next_transfer: 1,
            next_block: 100,
        }
    }

    /// Reserves blocks for a request and gives the ticket to write them.
    pub fn ticket(&mut self, prefill: &Prefill, request: &Request, prefix_blocks: u32) -> Ticket {
        let count = request.prompt_tokens().div_ceil(BLOCK_TOKENS) - prefix_blocks;
        let blocks: Vec<_> = (self.next_block..self.next_block + count)
            .map(|block| (BlockId(block), Generation(5)))
            .collect();
        self.next_block += count;
        let transfer = TransferId(self.next_transfer);
        self.next_transfer += 1;
        let reservation = Reservation {
            transfer,
            key: AttemptKey {
                request: request.id,
                attempt: Attempt(0),
            },
            sender: prefill.node.record.id.clone(),
            blocks: blocks.clone(),
            layer_count: GEOMETRY.layer_count,
            layer_bytes: GEOMETRY.layer_bytes(),
        };
        self.sink
            .recorded
            .lock()
            .unwrap()
            .reservations
            .insert(transfer, reservation);
        Ticket {
            transfer,
            decode_node: self.id.clone(),
            decode_address: self.address.clone(),
            total_bytes: u64::from(count) * GEOMETRY.block_bytes() as u64,
            blocks,
            prefix_blocks,
            expires_in: Duration::from_secs(10),
        }
    }

    pub fn look<R>(&self, look: impl FnOnce(&Recorded) -> R) -> R {
        look(&self.sink.recorded.lock().unwrap())
    }

    /// Polls the record; fails the test when what is wanted does not happen.
    pub async fn until(&self, mut wanted: impl FnMut(&Recorded) -> bool) {
        let give_up = Instant::now() + PATIENCE;
        while !self.look(&mut wanted) {
            assert!(
                Instant::now() < give_up,
                "not seen: {:?}",
                self.look(|r| r.ended.clone())
            );
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for Decode {
    fn drop(&mut self) {
        self.kill();
    }
}

pub fn request(id: u128, prompt_tokens: u32, max_tokens: u32) -> Request {
    Request {
        id: RequestId(id),
        prompt: (0..prompt_tokens)
            .map(|i| TokenId((i * 31 + id as u32 * 7) % VOCAB))
            .collect(),
        client_prompt_tokens: prompt_tokens,
        constraint: Default::default(),
        sampling: SamplingParams::greedy(),
        stop: StopConditions {
            max_tokens,
            min_tokens: 0,
            end_tokens: Vec::new(),
            stop_token_ids: Vec::new(),
        },
        choice_count: 1,
        seed: 11,
        logprobs: None,
        prompt_logprobs: None,
        prefix_salt: None,
        cache_tenant: None,
        report_kv_hashes: false,
        share: None,
        priority: 0,
        lane: Lane::Interactive,
        time_limit: Duration::from_secs(60),
    }
}
