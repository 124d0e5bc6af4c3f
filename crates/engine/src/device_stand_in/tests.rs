//! The contract on a device: the same tokens, claims until completion, and every way to the bytes.

use std::sync::mpsc::sync_channel;
use std::time::Duration;

use serving_core::ids::{Attempt, NodeEpoch, RequestId, TokenId};
use serving_core::request::{Lane, Request, SamplingParams, StopConditions};
use serving_core::scheduler::{Admission, NodeLimits, Scheduler, SchedulerConfig, SchedulerEvent, Work};
use serving_core::time::Time;

use super::*;
use crate::{BLOCK_TOKENS, EngineKind, KeptWeights, KernelChoice, Numerics, open_engine};

const LIMITS: EngineLimits = EngineLimits {
    max_batch_tokens: 32,
    max_sequences: 8,
};

fn options(kind: EngineKind) -> OpenOptions<'static> {
    OpenOptions {
        kind,
        model: None,
        numerics: Numerics::Int8Blocks,
        kernel: KernelChoice::Auto,
        threads: 1,
        block_tokens: BLOCK_TOKENS,
        kv_bytes: 64 << 10,
        kv_backing: Default::default(),
        limits: LIMITS,
        protocol_version: 1,
        kept_weights: KeptWeights::default(),
        progress: None,
    }
}

fn scheduler(kv: &KvMemory, vocab_size: u32) -> Scheduler {
    let limits = NodeLimits {
        kv_blocks: kv.block_count(),
        block_tokens: BLOCK_TOKENS,
        max_batch_tokens: LIMITS.max_batch_tokens,
        max_sequences: LIMITS.max_sequences,
        max_model_tokens: 300,
        vocab_size,
        prefix_cache: true,
    };
    let mut scheduler = Scheduler::new(SchedulerConfig::decode(limits, Duration::from_secs(5)));
    let request = Request {
        id: RequestId(1),
        prompt: (0..50).map(TokenId).collect(),
        client_prompt_tokens: 50,
        constraint: Default::default(),
        sampling: SamplingParams {
            temperature: 1.0,
            frequency_penalty: 0.5,
            ..SamplingParams::greedy()
        },
        stop: StopConditions {
            max_tokens: 12,
            min_tokens: 0,
            end_tokens: Vec::new(),
            stop_token_ids: Vec::new(),
        },
        choice_count: 3,
        seed: 42,
        logprobs: Some(2),
        prompt_logprobs: Some(1),
        prefix_salt: None,
        cache_tenant: None,
        report_kv_hashes: true,
        share: None,
        priority: 0,
        lane: Lane::Interactive,
        time_limit: Duration::from_secs(60),
    };
    let admission = Admission {
        request: Arc::new(request),
        attempt: Attempt(0),
        permits: 9,
        coordinator: NodeEpoch(1),
        work: Work::Whole,
    };
    scheduler.admit(Time::ZERO, admission).expect("fits");
    scheduler
}

/// Everything that a request is told, and the hashes of its prompt's blocks.
fn answer(kind: EngineKind) -> (Vec<SchedulerEvent>, Vec<u64>) {
    let mut engine = open_engine(options(kind)).expect("no file needed").engine;
    let kv = engine.kv().clone();
    let mut scheduler = scheduler(&kv, engine.model().vocab_size);
    let (mut told, mut hashes, mut step) = (Vec::new(), Vec::new(), Step::default());
    while let Some(plan) = scheduler.next_step(Time::ZERO) {
        step.fill(&plan);
        engine.submit(step);
        let completed = engine.complete().expect("one step is under way");
        step = completed.step;
        scheduler.step_done(Time::ZERO, &mut completed.result.expect("a good batch").sampled);
        while let Some(event) = scheduler.take_event() {
            match &event {
                SchedulerEvent::CopyBlock { from, to, .. } => kv.copy_block(*from, *to).expect("both are ours"),
                SchedulerEvent::HashPrompt { blocks, .. } => hashes = kv.prompt_hashes(blocks, 50).expect("whole"),
                _ => told.push(event),
            }
        }
    }
    assert!(engine.complete().is_none(), "no step is under way");
    (told, hashes)
}

#[test]
fn a_device_gives_the_tokens_logprobs_and_kv_of_the_host() {
    let on_host = answer(EngineKind::StandIn);
    assert_eq!(on_host.0.len(), 3 * 12 + 1, "three choices of 12 tokens, and the end");
    assert!(!on_host.1.is_empty());
    assert_eq!(answer(EngineKind::DeviceStandIn), on_host);
}

#[test]
fn claims_last_until_the_step_has_completed() {
    let config = StandInConfig::of(None, &options(EngineKind::DeviceStandIn)).unwrap();
    let mut engine = DeviceStandIn::new(config).unwrap();
    let kv = engine.kv().clone();
    let mut scheduler = scheduler(&kv, engine.facts.vocab_size);
    let plan = scheduler.next_step(Time::ZERO).expect("a prompt");
    let written = plan.block_table(0)[0];
    let mut step = Step::default();
    step.fill(&plan);
    // The device is busy with something else, so the step cannot have run.
    let (go, gate) = sync_channel::<()>(0);
    let busy = engine.device.launch(move |_| gate.recv());
    engine.submit(step);
    let block_bytes = kv.geometry().block_bytes();
    let mut bytes = vec![0; block_bytes];
    assert_eq!(
        kv.export_block(written, &mut bytes),
        Err(KvAccessError::Busy { block: written }),
        "the step has not completed"
    );
    go.send(()).unwrap();
    busy.wait().unwrap().unwrap();
    let completed = engine.complete().expect("it was submitted");
    completed.result.expect("a good batch");
    kv.export_block(written, &mut bytes).expect("free again");
    assert_ne!(bytes, vec![0; block_bytes], "the step has written to it");
}

#[test]
fn every_way_to_the_bytes_of_a_device_keeps_them() {
    let engine = open_engine(options(EngineKind::DeviceStandIn)).unwrap().engine;
    let (kv, block_bytes) = (engine.kv(), engine.kv().geometry().block_bytes());
    let pattern: Vec<u8> = (0..block_bytes).map(|at| (at * 31 + 7) as u8).collect();
    kv.import_block(BlockId(1), &pattern).unwrap();
    kv.copy_block(BlockId(1), BlockId(3)).unwrap();
    assert_eq!(
        kv.copy_block(BlockId(3), BlockId(3)),
        Err(KvAccessError::Busy { block: BlockId(3) })
    );
    let layer = kv.geometry().layer_bytes();
    kv.write_layers(BlockId(3), 1..2, |bytes| bytes[0] ^= 1).unwrap();
    let changed = kv.read_layers(BlockId(3), 0..2, <[u8]>::to_vec).unwrap();
    assert_eq!(changed[..layer], pattern[..layer]);
    assert_eq!(changed[layer], pattern[layer] ^ 1);
    let mut rest = vec![0; layer];
    kv.export_layers(BlockId(3), 2..3, &mut rest).unwrap();
    assert_eq!(rest, pattern[2 * layer..3 * layer]);
    assert_ne!(kv.block_hash(BlockId(3), 16), kv.block_hash(BlockId(1), 16));
    assert!(kv.descriptor().is_none(), "nobody can map a device's memory");
    assert_eq!(kv.host_pointer(BlockId(0)), Err(KvAccessError::NotOnHost));
}
