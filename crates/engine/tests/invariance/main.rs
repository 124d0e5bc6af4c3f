//! A sequence's KV bytes and logits depend on its own tokens only: not on chunks, phase, batch mates, block ids,
//! threads or instruction set. Checked on the real model along a few schedules, on tiny ones along random schedules.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]
#[path = "../common/mod.rs"]
mod common;
mod opening;
mod real_model;
mod tiny_models;

use std::collections::BTreeMap;

use common::{Setup, feed, file_of, goldens, open, setup, table};
use engine::{
    BLOCK_TOKENS, CpuEngine, CpuEngineOptions, EngineError, EngineLimits, HostEngine, KeptWeights, KernelChoice,
    KvSize, LogitsWanted, NotShared, Numerics, SequenceRows, WeightsFile, open_cpu_engine, open_cpu_engine_with,
};
use model_files::arch::Architecture;
use model_files::gguf::{GgmlType, MetadataValue};
use model_files::model::Model;
use model_files::test_kit::{TINY_VOCAB_SIZE, TinyModel, golden_models};
use proptest::prelude::*;
use serving_core::ids::{BlockId, TokenId};

/// Bits of the logits at each position, and the hash of each block.
#[derive(PartialEq, Debug)]
struct Trace {
    logits: BTreeMap<u32, Vec<u32>>,
    blocks: Vec<u64>,
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

fn block_hashes(engine: &dyn HostEngine, table: &[BlockId], tokens: usize) -> Vec<u64> {
    let valid = |index: usize| (tokens - index * 16).min(16) as u32;
    table
        .iter()
        .enumerate()
        .map(|(i, block)| engine.kv().block_hash(*block, valid(i)).unwrap())
        .collect()
}

fn trace(engine: &mut dyn HostEngine, tokens: &[TokenId], first_block: u32, chunk: usize) -> Trace {
    let table = table(first_block, tokens.len());
    let mut logits = BTreeMap::new();
    feed(
        engine,
        (tokens, 0, &table),
        (chunk, LogitsWanted::All),
        |position, row| {
            logits.insert(position, bits(row));
        },
    );
    Trace {
        logits,
        blocks: block_hashes(engine, &table, tokens.len()),
    }
}

fn prose(length: usize) -> Vec<TokenId> {
    let cases = goldens();
    let case = cases.iter().find(|case| case.id == "long-prose-200").unwrap();
    case.prompt_token_ids[..length].iter().map(|id| TokenId(*id)).collect()
}

fn options(numerics: Numerics, threads: usize, kernel: KernelChoice) -> CpuEngineOptions<'static> {
    CpuEngineOptions {
        numerics,
        threads,
        kernel,
        limits: EngineLimits {
            max_batch_tokens: 96,
            max_sequences: 8,
        },
        block_tokens: BLOCK_TOKENS,
        kv_size: KvSize::Blocks(128),
        kv_backing: Default::default(),
        progress: None,
    }
}

fn tiny(model: &TinyModel, options: CpuEngineOptions<'_>) -> Result<CpuEngine, EngineError> {
    open_cpu_engine(&file_of(&model.build()), options)
}
