//! The CPU engine: opening a model, and the [`HostEngine`] contract around [`forward::Step`].
//!
//! `weights` and `panels` pack the file, `kernels` multiply, `layers` runs the phases of a step, `pool` divides the work between threads.

mod attention;
mod buffers;
mod forward;
mod kept;
mod kernels;
mod layers;
mod multiply;
mod packing;
mod panels;
mod plan;
mod pool;
mod rope;
mod shared_weights;
mod weights;

use std::sync::Arc;

use model_files::config::ModelConfig;
use model_files::model::Model;
use serving_core::ids::BlockId;

use crate::batch::BatchBounds;
use crate::kv_claims::StepClaim;
use crate::kv_geometry::check_block_tokens;
use crate::{
    Engine, EngineError, EngineLimits, HostEngine, KvBacking, KvGeometry, KvMemory, LogitsSink, ModelFacts, Numerics,
    OnHost, OpenError, OpenOptions, Rank, SequenceRows,
};

pub(crate) use buffers::ProductScratch;
pub(crate) use forward::LOGITS_ROWS;
pub use kept::KeptWeights;
pub(crate) use kernels::LANES;
pub(crate) use kernels::attend::{PARTITION, PARTS};
pub use packing::LoadProgress;
pub(crate) use plan::ATTENTION_ROWS;
pub use rope::rope_speeds;
pub use shared_weights::{NotShared, WeightsFile};

/// Which instruction set computes; all give the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum KernelChoice {
    /// The fastest that this CPU has.
    #[default]
    Auto,
    Portable,
    Avx2,
    AvxVnni,
    Avx512Vnni,
    NeonDotprod,
}

/// Size of the KV memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvSize {
    Blocks(u32),
    /// As many blocks as fit, at least one.
    Bytes(u64),
}

impl KvSize {
    fn blocks(self, geometry: KvGeometry) -> u32 {
        match self {
            KvSize::Blocks(blocks) => blocks,
            KvSize::Bytes(bytes) => u32::try_from(bytes / geometry.block_bytes().max(1) as u64)
                .unwrap_or(u32::MAX)
                .max(1),
        }
    }
}

/// How to run a model. There is no default, because each value is a decision of the node's configuration.
pub struct CpuEngineOptions<'a> {
    pub numerics: Numerics,
    /// The number of threads, including the thread that calls `step`.
    pub threads: usize,
    pub kernel: KernelChoice,
    pub limits: EngineLimits,
    /// Tokens of a KV block: see [`check_block_tokens`].
    pub block_tokens: u32,
    pub kv_size: KvSize,
    pub kv_backing: KvBacking,
    /// Called after each packed matrix.
    pub progress: Option<&'a mut dyn FnMut(LoadProgress)>,
}

impl std::fmt::Debug for CpuEngineOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuEngineOptions")
            .field("numerics", &self.numerics)
            .field("threads", &self.threads)
            .field("kernel", &self.kernel)
            .field("limits", &self.limits)
            .field("kv_size", &self.kv_size)
            .finish_non_exhaustive()
    }
}

/// A model on the CPU.
pub struct CpuEngine {
    facts: ModelFacts,
    config: ModelConfig,
    limits: EngineLimits,
    kernels: kernels::Kernels,
    weights: Arc<weights::Weights>,
    ropes: rope::LayerRopes,
    kv: Arc<KvMemory>,
    claim: StepClaim,
    plan: plan::StepLayout,
    scratch: forward::Scratch,
    pool: pool::Pool,
}

impl std::fmt::Debug for CpuEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuEngine")
            .field("facts", &self.facts)
            .field("kernel", &self.kernels.name)
            .field("threads", &self.pool.threads())
            .finish_non_exhaustive()
    }
}

/// Packs the weights and makes all memory that steps will use.
///
/// # Errors
/// A model or tensor type this engine has no code for, a kernel this CPU lacks, limits or sizes out of range.
pub fn open_cpu_engine(file: &Model, options: CpuEngineOptions<'_>) -> Result<CpuEngine, EngineError> {
    open_cpu_engine_with(&KeptWeights::default(), file, options)
}

/// The same with weights that an earlier engine has packed, if they are of this file and these numerics.
///
/// # Errors
/// As [`open_cpu_engine`].
pub fn open_cpu_engine_with(
    kept: &KeptWeights,
    file: &Model,
    options: CpuEngineOptions<'_>,
) -> Result<CpuEngine, EngineError> {
    options.limits.check()?;
    check_block_tokens(options.block_tokens)?;
    let kernels = kernels::choose(options.kernel)?;
    let config = file.config().clone();
    let head_dim = config.head_dim;
    if !head_dim.is_multiple_of(kernels::LANES) {
        return Err(EngineError::UnsupportedHeadDim { head_dim });
    }
    let mut pool = pool::Pool::new(options.threads)?;
    let geometry = KvGeometry {
        layer_count: config.layer_count as u32,
        kv_head_count: config.kv_head_count as u32,
        head_dim: config.head_dim as u32,
        block_tokens: options.block_tokens,
        dtype: options.numerics.kv_dtype(),
    };
    let block_count = options.kv_size.blocks(geometry);
    let kv = Arc::new(KvMemory::backed(geometry, block_count, options.kv_backing)?);
    let identity = || kept::WeightsIdentity {
        sha256: file.content_sha256(),
        numerics: options.numerics,
    };
    let content = || file.content_sha256();
    let mut report = |progress| kept.report(progress);
    let weights = kept.get_or_load(identity, |destination| {
        let mut packing = packing::Packing {
            pool: &mut pool,
            shared: destination.shared,
            not_shared: destination.not_shared,
            content: &content,
            progress: match options.progress {
                Some(progress) => progress,
                None => &mut report,
            },
        };
        weights::Weights::load(file, &config, options.numerics, &mut packing)
    })?;
    let context_blocks = geometry.blocks_for(config.context_length as u32) as usize;
    let partitions = plan::PartitionLimits::new(&geometry, context_blocks.min(block_count as usize), options.threads);
    let computing = (options.numerics, &kernels);
    let scratch = forward::Scratch::new(&config, computing, options.limits, (pool.threads(), partitions));
    let facts = ModelFacts {
        name: file.name(),
        vocab_size: config.vocab_size as u32,
        context_length: config.context_length as u32,
        numerics_id: options.numerics.id().to_owned(),
        weights_sha256: file.content_sha256(),
        kv: geometry,
        rope_base: config.rope.base,
        rank: Rank::WHOLE,
    };
    Ok(CpuEngine {
        facts,
        limits: options.limits,
        kernels,
        weights,
        ropes: rope::LayerRopes::new(&config),
        claim: StepClaim::new(kv.clone()),
        kv,
        plan: plan::StepLayout::with_capacity(options.limits, context_blocks, partitions),
        scratch,
        pool,
        config,
    })
}

/// The bytes that the packed weights take. Nothing is packed.
///
/// # Errors
/// The model has a tensor that this engine has no code for.
pub fn weights_bytes(file: &Model, numerics: Numerics) -> Result<u64, EngineError> {
    weights::Weights::packed_bytes(file, file.config(), numerics).map(|bytes| bytes as u64)
}

impl CpuEngine {
    /// Name of the kernels in use, for logs.
    pub fn kernel_name(&self) -> &'static str {
        self.kernels.name
    }
}

pub(crate) fn open(file: Option<&Model>, options: OpenOptions<'_>) -> Result<Box<dyn Engine>, OpenError> {
    let file = file.ok_or(OpenError::NoModel)?;
    let engine = open_cpu_engine_with(
        &options.kept_weights,
        file,
        CpuEngineOptions {
            numerics: options.numerics,
            threads: options.threads,
            kernel: options.kernel,
            limits: options.limits,
            block_tokens: options.block_tokens,
            kv_size: KvSize::Bytes(options.kv_bytes),
            kv_backing: options.kv_backing,
            progress: options.progress,
        },
    )?;
    Ok(Box::new(OnHost::new(engine)?))
}

impl HostEngine for CpuEngine {
    fn model(&self) -> &ModelFacts {
        &self.facts
    }

    fn limits(&self) -> EngineLimits {
        self.limits
    }

    fn kv(&self) -> &Arc<KvMemory> {
        &self.kv
    }

    fn step(&mut self, batch: &[SequenceRows<'_>], sink: &mut dyn LogitsSink) -> Result<(), EngineError> {
        let bounds = BatchBounds {
            limits: self.limits,
            vocab_size: self.facts.vocab_size,
            context_length: self.facts.context_length,
            geometry: self.facts.kv,
        };
        bounds.check(batch)?;
        self.claim.take(batch)?;
        self.plan.fill(batch, &self.facts.kv);
        let step = forward::Step {
            config: &self.config,
            kernels: &self.kernels,
            weights: &self.weights,
            ropes: &self.ropes,
            plan: &self.plan,
            scratch: &self.scratch,
            geometry: self.facts.kv,
            kv: forward::KvBase(self.claim.block_pointer(BlockId(0))?),
        };
        step.run(&mut self.pool, sink);
        self.claim.release();
        Ok(())
    }
}
