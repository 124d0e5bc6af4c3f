//! The loop over a transport that is as slow, and breaks, as a test wants it.

#![allow(clippy::unwrap_used, reason = "a test that unwraps fails, as it should")]

use std::sync::mpsc;
use std::time::Instant;

use engine::{
    CompletedStep, Engine, EngineLimits, KvDtype, KvGeometry, ModelFacts, OnHost, StandInConfig, StandInEngine,
};
use grammar::Grammars;
use kv_transfer::choice::{Fallbacks, TransportKind};
use kv_transfer::transport::{
    AbortReason, PairPeer, PushedBlock, SendTransfer, TransferError, TransferReport, TransferStart, Transport,
};
use prometheus_client::registry::Registry;
use proto::messages::{PrefillEvent, PrefillOutcome, PrefillRequest};
use serving_core::ids::{Attempt, BlockId, ChoiceIndex, Generation, NodeEpoch, NodeName, RequestId, TokenId};
use serving_core::node::Ticket;
use serving_core::request::{Lane, Request, SamplingParams, StopConditions, TokenEvent};
use serving_core::scheduler::{NodeLimits, SampledToken, SchedulerConfig};
use tokio::runtime::Handle as RuntimeHandle;

use super::*;
use crate::engine_thread::NodeWork;
use crate::handle::{Asked, EventStream, Handle};
use crate::handoff_out::PushQueue;
use crate::kv_access::KvAccess;
use crate::request::NodeEvent;

const EPOCH: NodeEpoch = NodeEpoch(2);
const PATIENCE: Duration = Duration::from_secs(20);
const BLOCK_TOKENS: u32 = 16;
const POOL_BLOCKS: u32 = 32;
const GEOMETRY: KvGeometry = KvGeometry {
    layer_count: 1,
    kv_head_count: 1,
    head_dim: 8,
    block_tokens: BLOCK_TOKENS,
    dtype: KvDtype::F16,
};

const LIMITS: EngineLimits = EngineLimits {
    max_batch_tokens: 512,
    max_sequences: 4,
};

/// A pair on which each block takes `per_block`, and whose acknowledgement follows the last one.
#[derive(Clone, Copy, Debug)]
struct Scripted {
    per_block: Duration,
    /// What is wrong with this transport.
    panics_in_abort: bool,
}

#[tonic::async_trait]
impl Transport for Scripted {
    fn keep_pairs(&self, _: Vec<PairPeer>) {}
    fn health(&self) -> watch::Receiver<Vec<PairHealth>> {
        watch::channel(Vec::new()).1
    }
    async fn begin(&self, _: TransferStart) -> Result<Box<dyn SendTransfer>, TransferError> {
        let (scripted, last_written) = (*self, None);
        Ok(Box::new(ScriptedTransfer { scripted, last_written }))
    }
}

#[derive(Debug)]
struct ScriptedTransfer {
    scripted: Scripted,
    last_written: Option<Instant>,
}

#[tonic::async_trait]
impl SendTransfer for ScriptedTransfer {
    fn transport(&self) -> TransportKind {
        kv_transfer::grpc::KIND
    }
    async fn push(&mut self, _: PushedBlock) -> Result<(), TransferError> {
        tokio::time::sleep(self.scripted.per_block).await;
        Ok(())
    }
    async fn last(&mut self, _: Vec<TokenEvent>) -> Result<Instant, TransferError> {
        Ok(*self.last_written.insert(Instant::now()))
    }
    async fn acked(&mut self) -> Result<TransferReport, TransferError> {
        let Some(last_written) = self.last_written else {
            return std::future::pending().await;
        };
        Ok(TransferReport {
            kv_bytes: 1,
            frames: 1,
            moving: Duration::ZERO,
            last_written,
        })
    }
    async fn abort(self: Box<Self>, _: AbortReason) {
        assert!(!self.scripted.panics_in_abort, "this transport is broken");
    }
}

struct Rig {
    handle: Handle,
    status: watch::Receiver<NodeStatus>,
    _pairs: watch::Sender<Vec<PairHealth>>,
}

/// An engine that waits at one place until a test lets it go on.
struct Gated {
    engine: OnHost<StandInEngine>,
    gate: mpsc::Receiver<()>,
    waits: Waits,
}

#[derive(PartialEq, Eq)]
enum Waits {
    InEachStep,
    /// It gives its first step up, and takes as long to go.
    WhenDropped,
}

impl Engine for Gated {
    fn model(&self) -> &ModelFacts {
        self.engine.model()
    }
    fn limits(&self) -> EngineLimits {
        self.engine.limits()
    }
    fn kv(&self) -> &Arc<KvMemory> {
        self.engine.kv()
    }
    fn submit(&mut self, step: Step) {
        self.engine.submit(step);
    }
    fn complete(&mut self) -> Option<CompletedStep> {
        if self.waits == Waits::WhenDropped {
            return None;
        }
        // A test that has ended lets everything go on.
        let _ = self.gate.recv();
        self.engine.complete()
    }
}

impl Drop for Gated {
    fn drop(&mut self) {
        if self.waits == Waits::WhenDropped {
            let _ = self.gate.recv();
        }
    }
}

fn stand_in() -> OnHost<StandInEngine> {
    let engine = StandInEngine::new(StandInConfig {
        geometry: GEOMETRY,
        vocab_size: 64,
        context_length: 1024,
        block_count: POOL_BLOCKS,
        kv_backing: Default::default(),
        limits: LIMITS,
        nanoseconds_per_token: 0,
        nanoseconds_per_step: 0,
        seed: 7,
    });
    OnHost::new(engine.unwrap()).unwrap()
}

impl Rig {
    fn start(transport: Scripted, hold: Duration) -> Self {
        Self::with_engine(Box::new(stand_in()), transport, hold)
    }

    fn of_engine(engine: Box<dyn Engine>) -> Self {
        let transport = Scripted {
            per_block: Duration::ZERO,
            panics_in_abort: false,
        };
        Self::with_engine(engine, transport, PATIENCE)
    }

    fn with_engine(engine: Box<dyn Engine>, transport: Scripted, hold: Duration) -> Self {
        let inbox: Arc<Inbox> = Arc::default();
        let work = NodeWork {
            hands_over: true,
            decodes: false,
        };
        let engine = EngineThread::start(engine, inbox.clone(), work, Arc::new(Grammars::unknown())).unwrap();
        let node_limits = NodeLimits {
            kv_blocks: POOL_BLOCKS,
            block_tokens: BLOCK_TOKENS,
            max_batch_tokens: LIMITS.max_batch_tokens,
            max_sequences: LIMITS.max_sequences,
            max_model_tokens: 1024,
            vocab_size: 64,
            prefix_cache: true,
        };
        let scheduler = Scheduler::new(SchedulerConfig::prefill(node_limits, hold, None));
        let metrics = Metrics::of_prefill(&mut Registry::default(), Arc::new(Fallbacks::default()), None);
        let (status_in, status) = watch::channel(scheduler.status(NodeState::Ready));
        let (pairs_in, pairs) = watch::channel(Vec::new());
        let node = NodeId {
            name: NodeName::new("prefill-0"),
            epoch: EPOCH,
        };
        let handoffs = Handoffs {
            transport: Arc::new(transport),
            kv: KvAccess::of(engine.kv()).unwrap(),
            queue: Arc::new(PushQueue::new(POOL_BLOCKS as usize)),
            inbox: inbox.clone(),
            metrics: metrics.clone(),
            runtime: RuntimeHandle::current(),
        };
        let node_loop = NodeLoop::new(LoopParts {
            node,
            engine,
            scheduler,
            inbox: inbox.clone(),
            metrics: metrics.clone(),
            status: status_in,
            prefixes: watch::channel(PrefixLog::default()).0,
            outgoing: Some(Outgoing { handoffs, pairs }),
            incoming: None,
        });
        std::thread::spawn(move || node_loop.run());
        let handle = Handle {
            grammars: Arc::new(Grammars::unknown()),
            compiling: Arc::new(tokio::sync::Semaphore::new(1)),
            metrics,
            inbox,
            epoch: EPOCH,
            block_tokens: BLOCK_TOKENS,
        };
        Self {
            handle,
            status,
            _pairs: pairs_in,
        }
    }

    /// Sends a request that hands so many blocks over.
    fn hand_over(&self, blocks: u32) -> EventStream {
        self.hand_over_as(1, blocks)
    }
    fn hand_over_as(&self, id: u128, blocks: u32) -> EventStream {
        let mut asked = message(blocks);
        asked.request.id = RequestId(id);
        asked.ticket.as_mut().unwrap().transfer = TransferId(id);
        self.handle.submit(Asked::prefill(asked, tracing::Span::none()))
    }

    async fn until(&mut self, wanted: impl FnMut(&NodeStatus) -> bool) {
        let reached = tokio::time::timeout(PATIENCE, self.status.wait_for(wanted))
            .await
            .is_ok();
        assert!(reached, "last status: {:?}", *self.status.borrow());
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.handle.inbox.drain(Clock::now());
    }
}

async fn next(stream: &mut EventStream) -> Option<NodeEvent> {
    let next = std::future::poll_fn(|context| stream.poll_event(context));
    tokio::time::timeout(PATIENCE, next).await.unwrap()
}

pub(crate) fn message(blocks: u32) -> PrefillRequest {
    let prompt: Arc<[TokenId]> = (0..blocks * BLOCK_TOKENS).map(|i| TokenId(i % 64)).collect();
    PrefillRequest {
        attempt: Attempt(0),
        permit_tokens: prompt.len() as u32,
        coordinator_epoch: NodeEpoch(1),
        node_epoch: EPOCH,
        request: Request {
            id: RequestId(1),
            client_prompt_tokens: prompt.len() as u32,
            constraint: Default::default(),
            prompt,
            sampling: SamplingParams::greedy(),
            stop: StopConditions {
                max_tokens: 8,
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
            time_limit: Duration::from_secs(60),
        },
        ticket: Some(Ticket {
            transfer: TransferId(1),
            decode_node: NodeId {
                name: NodeName::new("decode-0"),
                epoch: NodeEpoch(3),
            },
            decode_address: String::new(),
            blocks: (0..blocks).map(|block| (BlockId(block), Generation(1))).collect(),
            prefix_blocks: 0,
            total_bytes: 0,
            expires_in: PATIENCE,
        }),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_that_takes_longer_than_a_hold_is_no_dead_decode_node_while_blocks_leave() {
    const BLOCKS: u32 = 12;
    let hold = Duration::from_secs(2);
    let transport = Scripted {
        per_block: hold / 8,
        panics_in_abort: false,
    };
    let rig = Rig::start(transport, hold);
    let mut stream = rig.hand_over(BLOCKS);
    loop {
        match next(&mut stream).await {
            Some(NodeEvent::Prefill(PrefillEvent::Finished(finished))) => {
                assert_eq!(finished.outcome, PrefillOutcome::HandedOver);
                break;
            }
            Some(NodeEvent::Prefill(
                PrefillEvent::Accepted { .. } | PrefillEvent::FirstToken { .. } | PrefillEvent::Tokens(_),
            )) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_of_a_push_that_ended_without_a_word_leave_quarantine() {
    let transport = Scripted {
        per_block: PATIENCE,
        panics_in_abort: true,
    };
    let mut rig = Rig::start(transport, PATIENCE);
    let stream = rig.hand_over(4);
    rig.until(|status| status.kv_blocks.in_transfer == 4).await;
    drop(stream);
    rig.until(|status| status.kv_blocks.in_transfer == 0 && status.kv_blocks.quarantined == 0)
        .await;
}

/// A node whose steps end when the test says so.
fn gated() -> (Rig, mpsc::SyncSender<()>) {
    let (go, gate) = mpsc::sync_channel(2);
    let engine = Gated {
        engine: stand_in(),
        gate,
        waits: Waits::InEachStep,
    };
    (Rig::of_engine(Box::new(engine)), go)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_answered_and_cancelled_while_a_step_runs() {
    let (mut rig, go) = gated();
    let mut first = rig.hand_over_as(1, 4);
    assert!(matches!(
        next(&mut first).await,
        Some(NodeEvent::Prefill(PrefillEvent::Accepted { .. }))
    ));
    rig.until(|status| status.running_sequences == 1).await;
    let mut second = rig.hand_over_as(2, 4);
    assert!(matches!(
        next(&mut second).await,
        Some(NodeEvent::Prefill(PrefillEvent::Accepted { .. }))
    ));
    let mut third = rig.hand_over_as(3, 4);
    assert!(next(&mut third).await.is_some());
    rig.until(|status| status.waiting_sequences == 2).await;
    // One that waits leaves at once, one that is computed leaves with its step.
    drop(third);
    rig.until(|status| status.waiting_sequences == 1).await;
    drop(first);
    let blocks = rig.status.borrow().kv_blocks.active;
    assert_eq!(blocks, 8, "the step still writes to the first request's blocks");
    go.send(()).unwrap();
    rig.until(|status| status.kv_blocks.active == 4).await;
    go.send(()).unwrap();
    loop {
        match next(&mut second).await {
            Some(NodeEvent::Prefill(PrefillEvent::Finished(finished))) => {
                assert_eq!(finished.outcome, PrefillOutcome::HandedOver);
                break;
            }
            Some(_) => {}
            None => panic!("the stream ended without its end"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_loop_whose_engine_is_given_up_ends_its_streams_before_the_step_has_ended() {
    let (mut rig, go) = gated();
    let stream = in_a_step(&mut rig).await;
    rig.handle.inbox.engine_gone();
    leaves(&mut rig, stream).await;
    drop(go);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_loop_that_has_panicked_leaves_before_the_step_has_ended() {
    let (mut rig, go) = gated();
    let stream = in_a_step(&mut rig).await;
    // More tokens than the step draws, as only a bug could bring.
    let drawn = |_| SampledToken {
        row: 0,
        choice: ChoiceIndex(0),
        token: Ok(TokenId(1)),
        logprobs: None,
    };
    let output = StepOutput {
        sampled: (0..3).map(drawn).collect(),
        ..StepOutput::default()
    };
    rig.handle.inbox.step_done(StepDone {
        ended: Clock::now(),
        took: Duration::ZERO,
        completed: CompletedStep {
            step: Step::default(),
            result: Ok(output),
        },
    });
    leaves(&mut rig, stream).await;
    drop(go);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_loop_whose_engine_has_given_up_leaves_before_the_engine_is_gone() {
    let (go, gate) = mpsc::sync_channel(1);
    let engine = Gated {
        engine: stand_in(),
        gate,
        waits: Waits::WhenDropped,
    };
    let mut rig = Rig::of_engine(Box::new(engine));
    let mut stream = rig.hand_over(4);
    assert!(matches!(
        next(&mut stream).await,
        Some(NodeEvent::Prefill(PrefillEvent::Accepted { .. }))
    ));
    leaves(&mut rig, stream).await;
    drop(go);
}

/// A request whose step ends when the test says so.
async fn in_a_step(rig: &mut Rig) -> EventStream {
    let mut stream = rig.hand_over(4);
    assert!(matches!(
        next(&mut stream).await,
        Some(NodeEvent::Prefill(PrefillEvent::Accepted { .. }))
    ));
    rig.until(|status| status.running_sequences == 1).await;
    stream
}

/// The request ends, the coordinators hear that the node leaves, and it takes no other request.
async fn leaves(rig: &mut Rig, mut stream: EventStream) {
    assert_eq!(next(&mut stream).await, None);
    rig.until(|status| status.state == NodeState::Draining).await;
    let mut late = rig.hand_over_as(2, 4);
    assert!(matches!(
        next(&mut late).await,
        Some(NodeEvent::Prefill(PrefillEvent::Refused(_)))
    ));
}
