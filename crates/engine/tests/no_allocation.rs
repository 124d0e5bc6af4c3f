//! A step, and a draw without log-probabilities, allocate nothing: all memory is made when the engine is opened.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use engine::{
    BLOCK_TOKENS, CpuEngineOptions, EngineLimits, HostEngine, KernelChoice, KvSize, LogitsWanted, Numerics,
    SampleInput, Sampler, SequenceRows, open_cpu_engine,
};
use model_files::model::Model;
use model_files::test_kit::{TINY_VOCAB_SIZE, TinyModel};
use serving_core::ids::{BlockId, ChoiceIndex, OutputIndex, TokenId};
use serving_core::request::{SamplingParams, StopConditions};

struct Counting;
static COUNTED: AtomicUsize = AtomicUsize::new(0);
static ON: AtomicBool = AtomicBool::new(false);

// SAFETY: passes every call on to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if ON.load(Ordering::Relaxed) {
            COUNTED.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ROUNDS: usize = 8;

/// The only test of this file: another one's allocations would be counted too.
#[test]
fn steps_and_draws_allocate_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    let model = TinyModel {
        context_length: 600,
        ..TinyModel::default()
    };
    model.build().write(&path).unwrap();
    let options = CpuEngineOptions {
        numerics: Numerics::Int8Blocks,
        threads: 3,
        kernel: KernelChoice::Auto,
        limits: EngineLimits {
            max_batch_tokens: 64,
            max_sequences: 4,
        },
        block_tokens: BLOCK_TOKENS,
        kv_size: KvSize::Blocks(72),
        kv_backing: Default::default(),
        progress: None,
    };
    let mut engine = open_cpu_engine(&Model::open(&path).unwrap(), options).unwrap();
    let mut sampler = Sampler::new(TINY_VOCAB_SIZE as u32).unwrap();
    let params = SamplingParams {
        temperature: 0.8,
        top_p: 0.9,
        min_p: 0.01,
        repetition_penalty: 1.1,
        presence_penalty: 0.2,
        ..SamplingParams::greedy()
    };
    let stop = StopConditions {
        max_tokens: 9,
        min_tokens: 2,
        end_tokens: vec![TokenId(2)],
        stop_token_ids: vec![],
    };
    let tokens: Vec<TokenId> = (0..60).map(TokenId).collect();
    let tables: Vec<Vec<BlockId>> = (0..2u32)
        .map(|s| (s * 36..s * 36 + 36).map(BlockId).collect())
        .collect();
    let mut draws = 0;
    // What a step allocates it allocates every time; a thread's first start-up or the harness's own thread may fall
    // into one round, not into all of them.
    let mut fewest = usize::MAX;
    for _ in 0..ROUNDS {
        ON.store(true, Ordering::SeqCst);
        let before = COUNTED.load(Ordering::SeqCst);
        // The last rows' contexts are shared by the threads. What is stored there does not matter here.
        for (first, count) in [(0, 30), (30, 1), (31, 20), (51, 1), (52, 2), (560, 1)] {
            let rows = |s: usize, logits| SequenceRows {
                tokens: &tokens[..count],
                first_position: first as u32,
                block_table: &tables[s],
                logits,
            };
            let batch = [rows(0, LogitsWanted::All), rows(1, LogitsWanted::Last)];
            let mut sink = |_: usize, position: u32, logits: &mut [f32]| {
                let input = SampleInput {
                    params: &params,
                    stop: &stop,
                    seed: 1,
                    choice: ChoiceIndex(0),
                    output_index: OutputIndex(position),
                    prompt: &tokens[..9],
                    outputs: &tokens[..9],
                    logprobs: None,
                    allowed: None,
                };
                sampler.sample(&input, logits).unwrap();
                draws += 1;
            };
            engine.step(&batch, &mut sink).unwrap();
        }
        let counted = COUNTED.load(Ordering::SeqCst) - before;
        ON.store(false, Ordering::SeqCst);
        fewest = fewest.min(counted);
    }
    assert_eq!(draws, ROUNDS * (55 + 6));
    assert_eq!(fewest, 0);
}
