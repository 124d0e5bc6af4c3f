//! Runs the model. Owns: the [`Engine`] contract, KV memory, the CPU transformer, sampling, the stand-in engine.
//!
//! Never does: scheduling, block accounting, networking, text. The scheduler decides what a step runs, this crate runs it.
//! A step is submitted and completes later, so that an engine may compute it on a device. The engine draws the tokens: logits
//! need not come to the host.
//! Promise: a token's KV and logits depend on its own sequence only, not on batch mates, chunk
//! boundaries, threads, instruction set or phase. `numerics.rs` defines the arithmetic that makes this hold.
//! Read first: this file, then `step.rs`, `on_host.rs`, `kv_memory.rs`, `numerics.rs`, `cpu/mod.rs`.
//! Tests: beside the code, and `tests/` for the whole model (goldens, invariance).

mod allowed;
mod batch;
pub mod cpu;
mod device_stand_in;
mod error;
pub mod for_devices;
mod kv_claims;
mod kv_geometry;
pub mod kv_memory;
mod kv_store;
pub mod machine;
pub mod math;
mod memory;
mod memory_need;
pub mod numerics;
mod on_host;
mod open;
pub mod sample;
pub mod stand_in;
mod step;

use std::sync::Arc;

use serving_core::ids::{BlockId, TokenId};

pub use allowed::{Allowed, AllowedTokens, is_set};
pub use batch::EngineLimits;
pub use cpu::{
    CpuEngine, CpuEngineOptions, KeptWeights, KernelChoice, KvSize, LoadProgress, NotShared, WeightsFile,
    open_cpu_engine, open_cpu_engine_with, weights_bytes,
};
pub use error::EngineError;
pub use kv_geometry::{BLOCK_TOKENS, KvDtype, KvGeometry};
pub use kv_memory::{KvAccessError, KvBacking, KvMemory, KvMemoryError, LentBytes};
pub use kv_store::{DeviceError, DeviceMemory, DevicePool};
pub use memory_need::{MemoryNeed, MemoryRoom, NotEnoughMemory};
pub use numerics::Numerics;
pub use on_host::OnHost;
pub use open::{
    EngineKind, OpenError, OpenOptions, OpenedEngine, compatibility, memory_need, open_engine, open_engine_by,
};
pub use sample::{SampleError, SampleInput, Sampled, Sampler, prompt_logprob};
pub use stand_in::{StandInConfig, StandInEngine};
pub use step::{CompletedStep, Draws, PromptLogprobsChunk, Step, StepOutput, StepRow};

/// The facts about the loaded model that a node needs. [`compatibility`] makes of them what decides whether two nodes are a pair
/// (PROTOCOL rule 13).
#[derive(Clone, Debug, PartialEq)]
pub struct ModelFacts {
    /// For people; not part of compatibility.
    pub name: String,
    pub vocab_size: u32,
    /// Positions 0..context_length can be computed.
    pub context_length: u32,
    /// Backend, numeric definition and its version. Equal ids promise equal bits.
    pub numerics_id: String,
    /// SHA-256 of the weight file's content.
    pub weights_sha256: [u8; 32],
    pub kv: KvGeometry,
    pub rope_base: f32,
    pub rank: Rank,
}

/// The place of an engine in a group that shares one model: every rank holds some of the heads. `kv` counts the heads of this
/// rank only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    pub index: u32,
    pub count: u32,
}

impl Rank {
    /// An engine that holds the whole model.
    pub const WHOLE: Self = Self { index: 0, count: 1 };
}

/// What an engine has of its device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemoryUse {
    pub weights_bytes: u64,
    /// What steps compute in.
    pub buffers_bytes: u64,
    pub kv_bytes: u64,
    /// Of the whole device, whoever uses the rest.
    pub free_bytes: u64,
}

/// One model, loaded, with its KV memory. It is used by one thread; the KV memory is shared with the handoff.
///
/// A step is submitted, and its completion is asked for afterwards. Between the two an engine may compute elsewhere. At most one
/// step is under way.
pub trait Engine: Send {
    fn model(&self) -> &ModelFacts;

    fn limits(&self) -> EngineLimits;

    fn kv(&self) -> &Arc<KvMemory>;

    /// Asks the device's driver. `None`: the engine computes on the host, or the device has failed.
    fn device_memory(&self) -> Option<DeviceMemoryUse> {
        None
    }

    /// Whether it takes rows with guessed tokens, and draws from each of them.
    fn checks_guesses(&self) -> bool {
        false
    }

    /// Starts one mixed batch: it writes the KV of every row and draws the tokens that the rows ask for, by the definition in
    /// [`sample`]. The blocks of the step are claimed until it has completed, which may be after this call has returned.
    fn submit(&mut self, step: Step);

    /// Waits until the submitted step has completed. `None` when no step is under way.
    fn complete(&mut self) -> Option<CompletedStep>;
}

/// An engine that computes on the calling thread and whose logits come to the host. [`OnHost`] makes it an [`Engine`].
pub trait HostEngine: Send {
    fn model(&self) -> &ModelFacts;

    fn limits(&self) -> EngineLimits;

    fn kv(&self) -> &Arc<KvMemory>;

    /// Runs one mixed batch: writes the KV of every row, then calls `sink` once per row that asked for logits, in
    /// batch order. Allocates nothing.
    ///
    /// # Errors
    /// A batch that breaks the contract (size, token ids, block tables), or a block that another user holds, is refused
    /// before anything is written. No error leaves a claim on a block behind.
    fn step(&mut self, batch: &[SequenceRows<'_>], sink: &mut dyn LogitsSink) -> Result<(), EngineError>;
}

/// The rows of one sequence in a step: a chunk of its prompt, or its newest token and guesses.
#[derive(Clone, Copy, Debug)]
pub struct SequenceRows<'a> {
    /// At least one; they occupy positions `first_position..`.
    pub tokens: &'a [TokenId],
    /// All earlier positions are in the KV blocks already.
    pub first_position: u32,
    /// Covers positions 0 to the end of `tokens`. Further blocks are ignored. A block that a step writes to must appear
    /// once in the whole batch.
    pub block_table: &'a [BlockId],
    pub logits: LogitsWanted,
}

impl SequenceRows<'_> {
    /// One past the last position, saturating.
    pub(crate) fn end_position(&self) -> u32 {
        self.first_position
            .saturating_add(u32::try_from(self.tokens.len()).unwrap_or(u32::MAX))
    }
}

/// The rows of a sequence that need the LM head. It costs about a quarter of a small model's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsWanted {
    /// A chunk that is not the prompt's last.
    None,
    /// The row that predicts the next token.
    Last,
    /// `echo` with logprobs, and a decode row with guesses.
    All,
}

/// Receives logits while a step runs. The row is scratch memory: the sink may change it, and it is gone after the call.
pub trait LogitsSink {
    /// `sequence` is the index in the batch, `position` the row's token position, `logits` has `vocab_size` values.
    fn row(&mut self, sequence: usize, position: u32, logits: &mut [f32]);
}

impl<F: FnMut(usize, u32, &mut [f32])> LogitsSink for F {
    fn row(&mut self, sequence: usize, position: u32, logits: &mut [f32]) {
        self(sequence, position, logits);
    }
}
