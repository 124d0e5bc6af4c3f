//! How long a decode node takes from reading `Open` to its answer while steps run, without waiting for a CPU: the stand-in engine
//! sleeps through its steps of `STEP`, so the machine is idle.
//!
//! `cargo run --release -p decode-node --example open_latency -- [OPENS]`

#![forbid(unsafe_code)]

use std::future::poll_fn;
use std::time::{Duration, Instant};

use clap::Parser as _;
use decode_node::Config;
use engine::{EngineLimits, KvDtype, KvGeometry, OnHost, OpenedEngine, StandInConfig, StandInEngine};
use node::{Asked, Handle, Node};
use prometheus_client::registry::Registry;
use proto::messages::OpenRequest;
use serving_core::compatibility::CompatibilityHash;
use serving_core::ids::{Attempt, NodeEpoch, NodeId, NodeName, RequestId, TokenId};
use serving_core::request::{Lane, LocalPrefillReason, Request, SamplingParams, StopConditions};

const STEP: Duration = Duration::from_millis(20);
/// Streams that always decode.
const STREAMS: u128 = 8;
const BETWEEN_OPENS: Duration = Duration::from_millis(3);

#[derive(clap::Parser)]
struct Flags {
    #[command(flatten)]
    config: Config,
}

fn engine() -> OnHost<StandInEngine> {
    let engine = StandInEngine::new(StandInConfig {
        geometry: KvGeometry {
            layer_count: 4,
            kv_head_count: 1,
            head_dim: 8,
            block_tokens: 16,
            dtype: KvDtype::F16,
        },
        vocab_size: 1000,
        context_length: 8192,
        block_count: 4096,
        kv_backing: Default::default(),
        limits: EngineLimits {
            max_batch_tokens: 512,
            max_sequences: 64,
        },
        nanoseconds_per_token: 0,
        nanoseconds_per_step: STEP.as_nanos() as u64,
        seed: 1,
    });
    OnHost::new(engine.expect("a good configuration")).expect("a small vocabulary")
}

fn asked(handle: &Handle, id: u128, max_tokens: u32, prefill_node: Option<NodeId>) -> Asked {
    let request = Request {
        id: RequestId(id),
        prompt: (0..64).map(TokenId).collect(),
        client_prompt_tokens: 64,
        constraint: Default::default(),
        sampling: SamplingParams::greedy(),
        stop: StopConditions {
            max_tokens,
            min_tokens: 0,
            end_tokens: Vec::new(),
            stop_token_ids: Vec::new(),
        },
        choice_count: 1,
        seed: 0,
        logprobs: None,
        prompt_logprobs: None,
        prefix_salt: None,
        cache_tenant: None,
        report_kv_hashes: false,
        share: None,
        priority: 0,
        lane: Lane::Interactive,
        time_limit: Duration::from_secs(600),
    };
    let open = OpenRequest {
        attempt: Attempt(0),
        request,
        node_epoch: handle.epoch,
        permit_blocks: 1,
        coordinator_epoch: NodeEpoch(1),
        local_prefill: prefill_node.is_none().then_some(LocalPrefillReason::Short),
        prefill_node,
    };
    Asked::open(open, tracing::Span::none(), None).expect("somebody computes the prompt")
}

#[tokio::main]
async fn main() {
    let opens = std::env::args()
        .nth(1)
        .map_or(2_000, |n| n.parse().expect("a number of opens"));
    let config = Flags::parse_from(["open_latency", "--engine", "stand-in"]).config;
    let opened = OpenedEngine {
        engine: Box::new(engine()),
        compatibility: CompatibilityHash([0; 32]).into(),
        model_name: "tiny".to_owned(),
    };
    let node = Node::start(&config.settings(), (opened, "127.0.0.1:1"), &mut Registry::default()).expect("it starts");
    let handle = node.handle();
    let streams: Vec<_> = (0..STREAMS)
        .map(|id| handle.submit(asked(&handle, id, 8_000, None)))
        .collect();
    let mut status = node.status.clone();
    let running = status.wait_for(|status| status.running_sequences == STREAMS as u32);
    running.await.expect("the node lives");
    let prefill_node = NodeId {
        name: NodeName::new("prefill-0"),
        epoch: NodeEpoch(7),
    };
    let mut took = Vec::with_capacity(opens);
    for open in 0..opens {
        let began = Instant::now();
        let mut stream = handle.submit(asked(&handle, 1_000 + open as u128, 2, Some(prefill_node.clone())));
        poll_fn(|context| stream.poll_event(context)).await.expect("an answer");
        took.push(began.elapsed());
        drop(stream);
        tokio::time::sleep(BETWEEN_OPENS).await;
    }
    drop(streams);
    took.sort_unstable();
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
    println!(
        "steps of {} ms, {opens} opens: p50 {:.3} ms, p90 {:.3}, p99 {:.3}, most {:.3}",
        STEP.as_millis(),
        at(0.5),
        at(0.9),
        at(0.99),
        at(1.0)
    );
}
