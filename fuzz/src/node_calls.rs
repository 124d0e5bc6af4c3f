//! Any order of calls and frames to a decode node with its loop, its engine and its KV: whatever peers do, the node goes on and every
//! block comes home.

use std::time::Duration;

use clap::Parser as _;
use identity::Caller;
use node::Node;
use prometheus_client::registry::Registry;
use proto::messages::{DecodeEvent, Hello, KvBlockFrame, KvFrame, KvShard, LastFrame, OpenRequest, PROTOCOL_VERSION};
use proto::v1;
use proto::v1::cache_service_client::CacheServiceClient;
use proto::v1::decode_service_client::DecodeServiceClient;
use proto::v1::handoff_service_client::HandoffServiceClient;
use serving_core::ids::{
    Attempt, BlockId, ChoiceIndex, Generation, NodeEpoch, NodeId, NodeName, OutputIndex, RequestId, TokenId, TransferId,
};
use serving_core::node::Ticket;
use serving_core::request::{Lane, LocalPrefillReason, Request, SamplingParams, StopConditions, TokenEvent};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::{Routes, RoutesBuilder};
use tonic::{Request as Call, Streaming};
use xxhash_rust::xxh3::xxh3_64;

use crate::choices::Choices;

/// Blocks are home within a second. A machine that is busy with other work takes longer.
const PATIENCE: Duration = Duration::from_secs(20);
/// For what may come and need not.
const GLANCE: Duration = Duration::from_millis(2);
const CALLS_MAX: usize = 48;
const OPEN_MAX: usize = 4;
/// Of the stand-in engine.
const LAYERS: u32 = 4;

#[derive(clap::Parser)]
struct Flags {
    #[command(flatten)]
    config: decode_node::Config,
}

struct Served {
    runtime: Runtime,
    node: Node,
    routes: Routes,
}

thread_local! {
    static SERVED: Served = Served::start();
}

impl Served {
    fn start() -> Self {
        let flags = "fuzz --engine stand-in --kv-cache-memory 64KiB --max-num-batched-tokens 32 --transports grpc";
        let config = Flags::parse_from(flags.split(' ')).config;
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let (node, routes) = runtime.block_on(async {
            let opened = config.open_engine(Default::default()).expect("the stand-in opens");
            let address = "127.0.0.1:1";
            let node = Node::start(&config.settings(), (opened, address), &mut Registry::default()).expect("starts");
            let mut routes = RoutesBuilder::default();
            decode_node::add_to_routes(&mut routes, node.handle());
            node.add_to_routes(&mut routes);
            (node, routes.routes())
        });
        Self { runtime, node, routes }
    }
}

pub(crate) fn check(data: &[u8]) {
    SERVED.with(|served| {
        served.runtime.block_on(async {
            let mut world = World {
                served,
                opened: Vec::new(),
                streams: Vec::new(),
                next_request: 1,
            };
            let mut choices = Choices::of(data);
            for _ in 0..CALLS_MAX {
                let Some(call) = choices.next() else { break };
                world.call(call, &mut choices).await;
            }
            drop(world);
            assert_blocks_home(&served.node).await;
        });
    });
}

async fn assert_blocks_home(node: &Node) {
    let mut status = node.status.clone();
    let home = status.wait_for(|status| status.kv_blocks.free + status.kv_blocks.cached == status.kv_blocks.total());
    let waited = tokio::time::timeout(PATIENCE, home).await;
    assert!(
        waited.is_ok_and(|status| status.is_ok()),
        "blocks are out: {:?}",
        node.status.borrow().kv_blocks
    );
}

/// A request that the node answers.
struct Opened {
    request: Request,
    events: Streaming<v1::DecodeEvent>,
    ticket: Option<Ticket>,
    frames_sent: u32,
}

/// A sender's stream.
struct Pushing {
    frames: mpsc::Sender<v1::KvFrame>,
    replies: Streaming<v1::KvReply>,
}

struct World<'a> {
    served: &'a Served,
    opened: Vec<Opened>,
    streams: Vec<Pushing>,
    next_request: u128,
}

impl World<'_> {
    async fn call(&mut self, call: u8, choices: &mut Choices<'_>) {
        match call % 10 {
            0 | 1 => self.open(choices).await,
            2 => self.push(choices).await,
            3..=6 => self.frame(call, choices).await,
            7 => self.listen(choices).await,
            8 if choices.flag() && !self.opened.is_empty() => {
                drop(self.opened.swap_remove(choices.below(self.opened.len())));
            }
            8 if !self.streams.is_empty() => {
                drop(self.streams.swap_remove(choices.below(self.streams.len())));
            }
            9 => {
                let mut client = CacheServiceClient::new(self.served.routes.clone());
                let reset = client
                    .reset_prefix_cache(of_cluster(v1::ResetPrefixCacheRequest {}))
                    .await;
                reset.expect("the node takes orders");
            }
            _ => {}
        }
    }

    async fn open(&mut self, choices: &mut Choices<'_>) {
        if self.opened.len() == OPEN_MAX {
            return;
        }
        let request = request(self.next_request, choices);
        self.next_request += 1;
        let prefill_node = [Some(sender(77)), Some(sender(78)), None][choices.below(3)].clone();
        let open = OpenRequest {
            attempt: Attempt(0),
            request: request.clone(),
            node_epoch: self.served.node.record.id.epoch,
            permit_blocks: 1,
            coordinator_epoch: NodeEpoch(1),
            local_prefill: prefill_node.is_none().then_some(LocalPrefillReason::Short),
            prefill_node,
        };
        let mut client = DecodeServiceClient::new(self.served.routes.clone());
        let Ok(answer) = client.open(of_cluster(v1::OpenRequest::from(open))).await else {
            return;
        };
        let mut opened = Opened {
            request,
            events: answer.into_inner(),
            ticket: None,
            frames_sent: 0,
        };
        // A node says at once whether it takes a request.
        let first = tokio::time::timeout(PATIENCE, opened.events.message()).await;
        if let Ok(Some(event)) = first.expect("a first event in time")
            && let Ok(DecodeEvent::Opened(facts)) = DecodeEvent::try_from(event)
        {
            opened.ticket = facts.ticket;
        }
        self.opened.push(opened);
    }

    async fn push(&mut self, choices: &mut Choices<'_>) {
        if self.streams.len() == OPEN_MAX {
            return;
        }
        let record = &self.served.node.record;
        let (frames, queue) = mpsc::channel(CALLS_MAX + 1);
        let mut hello = Hello {
            from: sender(77),
            to: record.id.clone(),
            protocol_version: PROTOCOL_VERSION,
            compatibility: record.compatibility.clone(),
            shard: KvShard::WHOLE,
        };
        let fault = choices.below(8);
        match fault {
            0 => hello.to.epoch = NodeEpoch(1),
            1 => hello.from = sender(78),
            2 => hello.compatibility.hash.0 = [9; 32],
            _ => {}
        }
        if fault != 3 {
            let _ = frames.try_send(KvFrame::Hello(hello).into());
        }
        let mut client = HandoffServiceClient::new(self.served.routes.clone());
        if let Ok(answer) = client.push(of_cluster(ReceiverStream::new(queue))).await {
            let replies = answer.into_inner();
            self.streams.push(Pushing { frames, replies });
        }
    }

    async fn frame(&mut self, call: u8, choices: &mut Choices<'_>) {
        if self.streams.is_empty() || self.opened.is_empty() {
            return;
        }
        let (stream, opened) = (choices.below(self.streams.len()), choices.below(self.opened.len()));
        let opened = &mut self.opened[opened];
        let transfer = opened.ticket.as_ref().map_or(TransferId(7), |ticket| ticket.transfer);
        let frame = match call % 10 {
            3 => KvFrame::Begin { transfer },
            4 => KvFrame::Block(block(opened, choices)),
            5 => KvFrame::Last(last(opened, choices)),
            _ => KvFrame::Abort {
                transfer,
                reason: "cancelled".to_owned(),
            },
        };
        // A stream that the node has ended takes none.
        let _ = self.streams[stream].frames.try_send(frame.into());
        tokio::task::yield_now().await;
    }

    async fn listen(&mut self, choices: &mut Choices<'_>) {
        if choices.flag() && !self.streams.is_empty() {
            let stream = choices.below(self.streams.len());
            let _ = tokio::time::timeout(GLANCE, self.streams[stream].replies.message()).await;
        } else if !self.opened.is_empty() {
            let opened = choices.below(self.opened.len());
            let _ = tokio::time::timeout(GLANCE, self.opened[opened].events.message()).await;
        }
    }
}

/// As the node's port marks the calls of a cluster without certificates.
fn of_cluster<T>(message: T) -> Call<T> {
    let mut call = Call::new(message);
    call.extensions_mut().insert(Caller::PlainText);
    call
}

fn sender(epoch: u64) -> NodeId {
    NodeId {
        name: NodeName::new("prefill-0"),
        epoch: NodeEpoch(epoch),
    }
}

fn request(id: u128, choices: &mut Choices<'_>) -> Request {
    let prompt = 1 + choices.below(80) as u32;
    Request {
        id: RequestId(id),
        prompt: (0..prompt).map(|token| TokenId(token * 31 + 7)).collect(),
        client_prompt_tokens: prompt,
        constraint: Default::default(),
        sampling: SamplingParams::greedy(),
        stop: StopConditions {
            max_tokens: 1 + choices.below(8) as u32,
            min_tokens: 0,
            end_tokens: Vec::new(),
            stop_token_ids: Vec::new(),
        },
        choice_count: 1 + choices.below(3) as u32,
        seed: 5,
        logprobs: None,
        prompt_logprobs: None,
        prefix_salt: None,
        cache_tenant: None,
        report_kv_hashes: choices.flag(),
        share: None,
        priority: 0,
        lane: Lane::Interactive,
        time_limit: PATIENCE,
    }
}

/// The next block of a ticket, or one that differs from it in one way.
fn block(opened: &mut Opened, choices: &mut Choices<'_>) -> KvBlockFrame {
    let ticket = opened.ticket.as_ref();
    let blocks = ticket.map_or(&[][..], |ticket| &ticket.blocks[..]);
    let block_bytes = ticket.map_or(64, |ticket| ticket.total_bytes as usize / blocks.len().max(1));
    let (block, generation) = blocks
        .get(opened.frames_sent as usize)
        .copied()
        .unwrap_or((BlockId(0), Generation(0)));
    let data = vec![0; block_bytes];
    let mut frame = KvBlockFrame {
        transfer: ticket.map_or(TransferId(7), |ticket| ticket.transfer),
        sequence_no: opened.frames_sent,
        ticket_index: opened.frames_sent,
        block,
        generation,
        layer_begin: 0,
        layer_end: LAYERS,
        checksum: xxh3_64(&data),
        data: data.into(),
    };
    match choices.below(16) {
        0 => frame.generation.0 ^= 1,
        1 => frame.checksum ^= 1,
        2 => frame.block.0 ^= 1,
        3 => frame.sequence_no += 1,
        4 => frame.layer_end = 1,
        5 => frame.data = frame.data.slice(1..),
        6 => frame.ticket_index = u32::MAX,
        _ => opened.frames_sent += 1,
    }
    frame
}

fn last(opened: &Opened, choices: &mut Choices<'_>) -> LastFrame {
    let ticket = opened.ticket.as_ref();
    let blocks = ticket.map_or(0, |ticket| ticket.blocks.len() as u32);
    let token = |choice| TokenEvent {
        choice: ChoiceIndex(choice),
        index: OutputIndex(0),
        token: TokenId(3),
        logprobs: None,
        finish: None,
    };
    let mut frame = LastFrame {
        transfer: ticket.map_or(TransferId(7), |ticket| ticket.transfer),
        request: opened.request.id,
        attempt: Attempt(0),
        block_count: blocks,
        frame_count: blocks,
        first_tokens: (0..opened.request.choice_count).map(token).collect(),
        traceparent: None,
        cached_tokens: None,
    };
    match choices.below(8) {
        0 => frame.first_tokens.clear(),
        1 => frame.first_tokens.extend([token(0), token(9)]),
        2 => frame.request = RequestId(0),
        3 => frame.frame_count += 1,
        _ => {}
    }
    frame
}
