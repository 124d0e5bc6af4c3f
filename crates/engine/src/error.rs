//! Every error between a batch and its logits.

use model_files::gguf::GgufError;
use thiserror::Error;

use crate::kv_memory::{KvAccessError, KvMemoryError};
use crate::kv_store::DeviceError;

/// Why an engine could not be opened or a step could not run.
#[derive(Debug, Error)]
pub enum EngineError {
    /// The caller's bug: the scheduler must keep the limits that it was given.
    #[error(
        "batch has {tokens} tokens in {sequences} sequences, over the limit of {max_tokens} tokens and {max_sequences} sequences; split it"
    )]
    BatchTooLarge {
        tokens: usize,
        sequences: usize,
        max_tokens: u32,
        max_sequences: u32,
    },
    #[error("sequence {sequence} of the batch has no tokens; leave it out")]
    EmptySequence { sequence: usize },
    #[error(
        "sequence {sequence} of the batch holds token {token}, but the vocabulary has {vocab_size}; the request is invalid"
    )]
    TokenOutOfVocabulary {
        sequence: usize,
        token: u32,
        vocab_size: u32,
    },
    #[error(
        "sequence {sequence} of the batch ends at position {end}, beyond the model's context of {context_length}; the request is too long"
    )]
    BeyondContext {
        sequence: usize,
        end: u32,
        context_length: u32,
    },
    #[error("sequence {sequence} of the batch needs {needed} KV blocks, its block table has {got}")]
    BlockTableTooShort { sequence: usize, needed: usize, got: usize },
    /// Either a bug in the block accounting, or a transfer that still runs. The step wrote nothing and may be repeated.
    #[error("the step could not take its KV blocks: {0}")]
    KvAccess(#[from] KvAccessError),
    #[error("the KV memory could not be made: {0}")]
    KvMemory(#[from] KvMemoryError),
    #[error(
        "engine limits must be at least one token and one sequence, and at most {most}; got {max_batch_tokens} tokens and {max_sequences} sequences"
    )]
    BadLimits {
        max_batch_tokens: u32,
        max_sequences: u32,
        most: u32,
    },
    /// The device failed: nobody knows what was written, and the engine runs no step any more.
    #[error("{0}; this engine ends: start the node again, or run it with --device cpu")]
    Device(DeviceError),
    /// The caller's bug: at most one step is under way.
    #[error("a step was submitted before the last one had completed; it was not run")]
    StillRunning,
    #[error("the model file cannot be read: {0}")]
    ModelFile(#[from] GgufError),
    /// The file is sound, but this engine has no code for it.
    #[error("tensor {tensor} of type {kind} is not supported: {why}")]
    UnsupportedTensor {
        tensor: String,
        kind: &'static str,
        why: &'static str,
    },
    #[error("a head dimension of {head_dim} is not supported: it must be a multiple of 16; choose another model")]
    UnsupportedHeadDim { head_dim: usize },
    #[error("the {kernel} kernel needs {needs}, which this CPU lacks; choose another --kernel, such as auto")]
    KernelUnsupported { kernel: &'static str, needs: &'static str },
    #[error("an engine runs on 1 to {most} threads, not {threads}; change --threads")]
    BadThreadCount { threads: usize, most: usize },
    #[error("the system started no further thread: {source}; lower --threads or raise the process limit")]
    ThreadStart { source: std::io::Error },
    #[error(
        "the system refused {bytes} bytes for weights or scratch memory; use a smaller model, --max-num-batched-tokens or --max-num-seqs"
    )]
    OutOfMemory { bytes: usize },
}
