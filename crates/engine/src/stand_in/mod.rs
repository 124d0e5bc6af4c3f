//! The stand-in engine: the same contract without weights, for emulated clusters, load tests and protocol tests.
//!
//! It makes KV errors visible. The KV bytes of a position are a function of the token there and of the KV bytes of the
//! position before it, **read back from memory**, so they depend on every token so far. The logits of a row hash every KV
//! byte of its sequence. A lost, swapped, stale or corrupt block therefore changes the next tokens, while chunking,
//! batching and phase do not. Equal token ids across two topologies mean that the KV arrived. Time is modelled: a step
//! waits until its cost has passed.

mod cells;

use std::sync::Arc;
use std::time::{Duration, Instant};

use model_files::model::Model;
use serving_core::ids::BlockId;

use crate::batch::BatchBounds;
use crate::kv_claims::StepClaim;
use crate::kv_geometry::check_block_tokens;
use crate::{
    BLOCK_TOKENS, Engine, EngineError, EngineLimits, HostEngine, KvAccessError, KvBacking, KvDtype, KvGeometry,
    KvMemory, LogitsSink, ModelFacts, OnHost, OpenError, OpenOptions, Rank, SequenceRows,
};

pub(crate) use cells::{BlockBytes, Cells};

/// Everything that defines a stand-in. Two stand-ins with equal geometry, vocabulary and seed give equal tokens.
#[derive(Clone, Debug)]
pub struct StandInConfig {
    pub geometry: KvGeometry,
    pub vocab_size: u32,
    pub context_length: u32,
    pub block_count: u32,
    pub kv_backing: KvBacking,
    pub limits: EngineLimits,
    /// Modelled cost of each row of a step; 0 runs as fast as the machine can.
    pub nanoseconds_per_token: u64,
    /// Modelled cost of a step for any number of rows: reading the weights once.
    pub nanoseconds_per_step: u64,
    /// Stands for the weights. Another seed is another model.
    pub seed: u64,
}

/// Context of a stand-in without a model file, and its vocabulary: those of SmolLM2.
const CONTEXT: u32 = 8192;
const VOCAB: u32 = 49_152;
/// A block has 2 KiB at 16 tokens, so handoffs stay cheap and still move real bytes.
const GEOMETRY: KvGeometry = KvGeometry {
    layer_count: 4,
    kv_head_count: 1,
    head_dim: 8,
    block_tokens: BLOCK_TOKENS,
    dtype: KvDtype::F16,
};
const SEED: u64 = 0xba70;

pub(crate) fn open(file: Option<&Model>, options: OpenOptions<'_>) -> Result<Box<dyn Engine>, OpenError> {
    let engine = StandInEngine::new(StandInConfig::of(file, &options)?)?;
    Ok(Box::new(OnHost::new(engine)?))
}

impl StandInConfig {
    /// For a node's settings, as fast as the machine can.
    ///
    /// # Errors
    /// A model file or a block size that nothing can be made of.
    pub(crate) fn of(file: Option<&Model>, options: &OpenOptions<'_>) -> Result<Self, EngineError> {
        let (vocab_size, context_length) = match file {
            Some(file) => {
                let config = file.config();
                (config.vocab_size as u32, config.context_length as u32)
            }
            None => (VOCAB, CONTEXT),
        };
        check_block_tokens(options.block_tokens)?;
        let geometry = KvGeometry {
            block_tokens: options.block_tokens,
            ..GEOMETRY
        };
        let blocks = options.kv_bytes / geometry.block_bytes() as u64;
        // Blocks are tiny, so as many as a real model's pool would have are enough.
        const MOST_BLOCKS: u64 = 4096;
        Ok(Self {
            geometry,
            vocab_size,
            context_length,
            block_count: blocks.clamp(1, MOST_BLOCKS) as u32,
            kv_backing: options.kv_backing,
            limits: options.limits,
            nanoseconds_per_token: 0,
            nanoseconds_per_step: 0,
            seed: SEED,
        })
    }

    pub(crate) fn facts(&self) -> ModelFacts {
        let mut weights_sha256 = [0; 32];
        weights_sha256[..8].copy_from_slice(&self.seed.to_le_bytes());
        ModelFacts {
            name: "stand-in".to_owned(),
            vocab_size: self.vocab_size,
            context_length: self.context_length,
            numerics_id: "stand-in/1".to_owned(),
            weights_sha256,
            kv: self.geometry,
            rope_base: 0.0,
            rank: Rank::WHOLE,
        }
    }

    pub(crate) fn bounds(&self) -> BatchBounds {
        BatchBounds {
            limits: self.limits,
            vocab_size: self.vocab_size,
            context_length: self.context_length,
            geometry: self.geometry,
        }
    }

    pub(crate) fn cells(&self) -> Cells {
        Cells {
            geometry: self.geometry,
            seed: self.seed,
        }
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct StandInEngine {
    config: StandInConfig,
    facts: ModelFacts,
    kv: Arc<KvMemory>,
    claim: StepClaim,
    logits: Vec<f32>,
}

impl StandInEngine {
    pub fn new(config: StandInConfig) -> Result<Self, EngineError> {
        config.limits.check()?;
        let kv = Arc::new(KvMemory::backed(
            config.geometry,
            config.block_count,
            config.kv_backing,
        )?);
        let facts = config.facts();
        let logits = vec![0.0; config.vocab_size as usize];
        Ok(Self {
            config,
            facts,
            claim: StepClaim::new(kv.clone()),
            kv,
            logits,
        })
    }
}

impl HostEngine for StandInEngine {
    fn model(&self) -> &ModelFacts {
        &self.facts
    }

    fn limits(&self) -> EngineLimits {
        self.config.limits
    }

    fn kv(&self) -> &Arc<KvMemory> {
        &self.kv
    }

    fn step(&mut self, batch: &[SequenceRows<'_>], sink: &mut dyn LogitsSink) -> Result<(), EngineError> {
        let started = Instant::now();
        self.config.bounds().check(batch)?;
        self.claim.take(batch)?;
        let cells = self.config.cells();
        let tokens = cells.write_rows(&mut self.claim, batch)?;
        wait_until(
            started,
            self.config.nanoseconds_per_step + tokens * self.config.nanoseconds_per_token,
        );
        cells.logits(&self.claim, batch, &mut self.logits, sink)?;
        self.claim.release();
        Ok(())
    }
}

impl BlockBytes for StepClaim {
    fn bytes(&self, block: BlockId) -> Result<&[u8], KvAccessError> {
        self.block(block)
    }
    fn bytes_mut(&mut self, block: BlockId) -> Result<&mut [u8], KvAccessError> {
        self.block_mut(block)
    }
}

fn wait_until(started: Instant, cost_nanoseconds: u64) {
    let left = Duration::from_nanos(cost_nanoseconds).saturating_sub(started.elapsed());
    if !left.is_zero() {
        std::thread::sleep(left);
    }
}

#[cfg(test)]
mod tests;
