//! A decode node on loopback with the stand-in engine, and a scripted prefill side with the same engine.

use std::sync::Arc;
use std::time::Duration;

use clap::Parser as _;
use decode_node::Config;
use engine::{Step, open_engine};
use node::Node;
use prometheus_client::registry::Registry;
use proto::messages::{
    DecodeEvent, Hello, KvBlockFrame, KvFrame, KvReply, KvShard, LastFrame, OpenRequest, PROTOCOL_VERSION,
};
use proto::v1;
use proto::v1::decode_service_client::DecodeServiceClient;
use proto::v1::handoff_service_client::HandoffServiceClient;
use service_runtime::health::Health;
use service_runtime::serve::{self, Ops};
use service_runtime::shutdown::Shutdown;
use serving_core::ids::{Attempt, NodeEpoch, NodeId, NodeName, RequestId, TokenId};
use serving_core::node::{NodeRecord, NodeStatus, Ticket};
use serving_core::request::{Lane, LocalPrefillReason, Request, SamplingParams, StopConditions, TokenEvent};
use serving_core::scheduler::{Admission, NodeLimits, PushPlan, Scheduler, SchedulerConfig, SchedulerEvent, Work};
use serving_core::time::Time;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::service::RoutesBuilder;
use tonic::transport::Channel;

/// Everything on loopback answers in milliseconds; a test that waits longer has failed.
pub const PATIENCE: Duration = Duration::from_secs(10);

#[derive(clap::Parser)]
struct Flags {
    #[command(flatten)]
    config: Config,
}

pub fn config(extra: &[&str]) -> Config {
    let fixed = [
        "test",
        "--engine",
        "stand-in",
        "--kv-cache-memory",
        "256KiB",
        "--max-num-batched-tokens",
        "64",
    ];
    Flags::parse_from(fixed.iter().chain(extra)).config
}

pub struct TestNode {
    pub node: Node,
    pub record: NodeRecord,
    pub status: watch::Receiver<NodeStatus>,
    pub channel: Channel,
    metrics: Arc<Registry>,
    config: Config,
    stop: Shutdown,
}

impl TestNode {
    pub async fn start(extra: &[&str]) -> Self {
        let config = config(extra);
        let (listener, bound) = serve::bind("127.0.0.1:0").await.expect("a free port");
        let opened = config.open_engine(Default::default()).expect("the stand-in opens");
        let mut registry = Registry::default();
        let node = Node::start(&config.settings(), (opened, &bound.to_string()), &mut registry).expect("starts");
        let mut routes = RoutesBuilder::default();
        decode_node::add_to_routes(&mut routes, node.handle());
        node.add_to_routes(&mut routes);
        let metrics = Arc::new(registry);
        let ops = Ops {
            role: "decode",
            name: config.node.name.clone(),
            version: "test",
            health: Health::new("test"),
            metrics: metrics.clone(),
            ledger: None,
            guard: Default::default(),
        };
        let stop = Shutdown::new();
        tokio::spawn(serve::serve_node(listener, routes.routes(), ops, stop.clone()));
        let channel = serve::endpoint(&bound.to_string()).expect("an address").connect_lazy();
        Self {
            record: node.record.clone(),
            status: node.status.clone(),
            node,
            channel,
            metrics,
            config,
            stop,
        }
    }

    pub async fn open(&self, open: OpenRequest) -> Events {
        let mut client = DecodeServiceClient::new(self.channel.clone());
        let opening = tokio::time::timeout(PATIENCE, client.open(v1::OpenRequest::from(open))).await;
        Events {
            stream: opening.expect("an answer in time").expect("a stream").into_inner(),
        }
    }

    pub fn open_request(&self, request: Request, prefill_node: Option<NodeId>) -> OpenRequest {
        OpenRequest {
            attempt: Attempt(0),
            request,
            node_epoch: self.record.id.epoch,
            permit_blocks: 1,
            coordinator_epoch: NodeEpoch(1),
            local_prefill: prefill_node.is_none().then_some(LocalPrefillReason::Short),
            prefill_node,
        }
    }

    /// The handoffs that ended with `outcome`.
    pub fn handoffs(&self, outcome: &str) -> u32 {
        self.count(&format!(
            "baton_handoffs_total{{transport=\"grpc\",outcome=\"{outcome}\"}} "
        ))
    }

    /// The sum of a counter's series whose lines begin so.
    pub fn count(&self, series: &str) -> u32 {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.metrics).expect("a string takes everything");
        let lines = text.lines().filter(|line| line.starts_with(series));
        let values = lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u32>().ok());
        values.sum()
    }

    /// Every block is free or cached again, in at most a second (PROTOCOL rule 8).
    pub async fn assert_blocks_home(&self) {
        let mut status = self.status.clone();
        let home = |status: &NodeStatus| status.kv_blocks.free + status.kv_blocks.cached == status.kv_blocks.total();
        let waited = tokio::time::timeout(Duration::from_secs(1), status.wait_for(home)).await;
        assert!(waited.is_ok(), "blocks are out: {:?}", self.status.borrow().kv_blocks);
    }

    pub async fn wait_for(&self, what: impl FnMut(&NodeStatus) -> bool) {
        let mut status = self.status.clone();
        let waited = tokio::time::timeout(PATIENCE, status.wait_for(what)).await;
        assert!(waited.is_ok(), "never: {:?}", self.status.borrow().clone());
    }
}

impl Drop for TestNode {
    fn drop(&mut self) {
        self.stop.request();
    }
}

pub struct Events {
    stream: Streaming<v1::DecodeEvent>,
}

impl Events {
    pub async fn next(&mut self) -> Option<DecodeEvent> {
        let next = tokio::time::timeout(PATIENCE, self.stream.message()).await;
        let event = next.expect("an event in time").expect("no broken stream")?;
        Some(event.try_into().expect("a well-formed event"))
    }
    /// The rest of the stream.
    pub async fn rest(&mut self) -> Vec<DecodeEvent> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            events.push(event);
        }
        events
    }
    pub async fn ticket(&mut self) -> Ticket {
        match self.next().await {
            Some(DecodeEvent::Opened(opened)) => opened.ticket.expect("a handoff has a ticket"),
            other => panic!("not opened: {other:?}"),
        }
    }
}

pub fn tokens(events: &[DecodeEvent], choice: u32) -> Vec<TokenId> {
    let mut found = Vec::new();
    for event in events {
        if let DecodeEvent::Tokens(batch) = event {
            for event in batch.tokens.iter().filter(|event| event.choice.0 == choice) {
                assert_eq!(event.index.0 as usize, found.len(), "each index once and in order");
                found.push(event.token);
            }
        }
    }
    found
}

pub fn request(id: u128, prompt: u32, max_tokens: u32) -> Request {
    Request {
        id: RequestId(id),
        prompt: (0..prompt).map(|i| TokenId((i * 31 + 7) % 49_000)).collect(),
        client_prompt_tokens: prompt,
        constraint: Default::default(),
        sampling: SamplingParams {
            temperature: 1.0,
            ..SamplingParams::greedy()
        },
        stop: StopConditions {
            max_tokens,
            min_tokens: 0,
            end_tokens: Vec::new(),
            stop_token_ids: Vec::new(),
        },
        choice_count: 1,
        seed: 5,
        logprobs: Some(1),
        prompt_logprobs: None,
        prefix_salt: None,
        cache_tenant: None,
        report_kv_hashes: true,
        share: None,
        priority: 0,
        lane: Lane::Interactive,
        time_limit: Duration::from_secs(30),
    }
}

/// A computed prompt: the bytes of its blocks and the first tokens.
pub struct Computed {
    pub blocks: Vec<Vec<u8>>,
    pub first_tokens: Vec<TokenEvent>,
}

/// What a prefill node would compute, with the node's own scheduler and engine.
pub fn compute(node: &TestNode, request: &Request) -> Computed {
    let options = engine::OpenOptions {
        kind: engine::EngineKind::StandIn,
        model: None,
        numerics: node.config.node.numerics,
        kernel: node.config.node.kernel,
        threads: 1,
        block_tokens: node.config.node.block_size,
        kv_bytes: node.config.node.kv_cache_memory.bytes(),
        kv_backing: Default::default(),
        limits: node.config.engine_limits(),
        protocol_version: PROTOCOL_VERSION,
        kept_weights: engine::KeptWeights::default(),
        progress: None,
    };
    let opened = open_engine(options).expect("the stand-in opens");
    assert_eq!(opened.compatibility, node.record.compatibility);
    let vocab_size = opened.engine.model().vocab_size;
    let (mut engine, mut step) = (opened.engine, Step::default());
    let limits = NodeLimits {
        kv_blocks: engine.kv().block_count(),
        block_tokens: 16,
        max_batch_tokens: 32,
        max_sequences: 4,
        max_model_tokens: 8192,
        vocab_size,
        prefix_cache: true,
    };
    let mut scheduler = Scheduler::new(SchedulerConfig::prefill(limits, PATIENCE, None));
    let push = PushPlan {
        skip_blocks: 0,
        is_streamed: false,
    };
    let admission = Admission {
        request: Arc::new(request.clone()),
        attempt: Attempt(0),
        permits: 1,
        coordinator: NodeEpoch(1),
        work: Work::Prefill(Some(push)),
    };
    scheduler.admit(Time::ZERO, admission).expect("fits");
    let mut computed = Computed {
        blocks: Vec::new(),
        first_tokens: Vec::new(),
    };
    while let Some(plan) = scheduler.next_step(Time::ZERO) {
        step.fill(&plan);
        engine.submit(step);
        let completed = engine.complete().expect("one step is under way");
        step = completed.step;
        scheduler.step_done(Time::ZERO, &mut completed.result.expect("a good batch").sampled);
        while let Some(event) = scheduler.take_event() {
            match event {
                SchedulerEvent::BlocksReady { blocks, .. } => {
                    let kv = engine.kv();
                    for pushed in blocks {
                        let mut bytes = vec![0; kv.geometry().block_bytes()];
                        kv.export_block(pushed.block, &mut bytes).expect("complete");
                        computed.blocks.push(bytes);
                    }
                }
                SchedulerEvent::Token { event, .. } => computed.first_tokens.push(event),
                SchedulerEvent::Held { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
    computed
}

pub fn prefill_node() -> NodeId {
    NodeId {
        name: NodeName::new("prefill-0"),
        epoch: NodeEpoch(77),
    }
}

/// What the prefill node says first.
pub fn hello(node: &TestNode) -> Hello {
    Hello {
        from: prefill_node(),
        to: node.record.id.clone(),
        protocol_version: PROTOCOL_VERSION,
        compatibility: node.record.compatibility.clone(),
        shard: KvShard::WHOLE,
    }
}

/// One pair's stream, frame by frame.
pub struct Pusher {
    frames: mpsc::Sender<v1::KvFrame>,
    replies: Streaming<v1::KvReply>,
}

impl Pusher {
    pub async fn connect(node: &TestNode) -> Self {
        let mut pusher = Self::connect_as(node, hello(node)).await;
        match pusher.reply().await {
            Some(KvReply::Hello(hello)) => assert_eq!(hello.refused, None),
            other => panic!("no hello: {other:?}"),
        }
        pusher
    }

    pub async fn connect_as(node: &TestNode, hello: Hello) -> Self {
        let (frames, queue) = mpsc::channel(64);
        frames.send(KvFrame::Hello(hello).into()).await.expect("queued");
        let mut client = HandoffServiceClient::new(node.channel.clone());
        let replies = client
            .push(ReceiverStream::new(queue))
            .await
            .expect("a stream")
            .into_inner();
        Self { frames, replies }
    }

    pub async fn send(&self, frame: KvFrame) {
        self.frames.send(frame.into()).await.expect("the stream is open");
    }

    pub async fn reply(&mut self) -> Option<KvReply> {
        let next = tokio::time::timeout(PATIENCE, self.replies.message()).await;
        let reply = next.expect("a reply in time").ok().flatten()?;
        Some(reply.try_into().expect("a well-formed reply"))
    }

    /// A whole handoff.
    pub async fn push(&self, ticket: &Ticket, request: &Request, computed: &Computed) {
        self.send(KvFrame::Begin {
            transfer: ticket.transfer,
        })
        .await;
        for index in 0..ticket.blocks.len() {
            self.send(KvFrame::Block(block_frame(ticket, computed, index))).await;
        }
        self.send(KvFrame::Last(last_frame(ticket, request, computed))).await;
    }
}

pub fn block_frame(ticket: &Ticket, computed: &Computed, index: usize) -> KvBlockFrame {
    let (block, generation) = ticket.blocks[index];
    let data = computed.blocks[index + ticket.prefix_blocks as usize].clone();
    KvBlockFrame {
        transfer: ticket.transfer,
        sequence_no: index as u32,
        ticket_index: index as u32,
        block,
        generation,
        layer_begin: 0,
        layer_end: 4,
        checksum: xxhash_rust::xxh3::xxh3_64(&data),
        data: data.into(),
    }
}

/// What a last frame says was cached.
pub const CACHED: u32 = 48;

pub fn last_frame(ticket: &Ticket, request: &Request, computed: &Computed) -> LastFrame {
    LastFrame {
        transfer: ticket.transfer,
        request: request.id,
        attempt: Attempt(0),
        block_count: ticket.blocks.len() as u32,
        frame_count: ticket.blocks.len() as u32,
        first_tokens: computed.first_tokens.clone(),
        traceparent: None,
        cached_tokens: Some(CACHED),
    }
}
