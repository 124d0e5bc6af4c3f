//! The keys that every node has, whatever its role. A role's configuration flattens them and gives `name` and `listen` a default.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use clap::{ArgAction, Args};
use cuda_engine::{DeviceChoice, Mode};
use engine::{
    EngineKind, EngineLimits, KeptWeights, KernelChoice, KvBacking, MemoryNeed, Numerics, OpenError, OpenOptions,
    OpenedEngine, memory_need, open_engine, open_engine_by,
};
use identity::{Identity, TlsConfig};
use kv_transfer::DirectSecret;
use kv_transfer::choice::TransportKind;
use proto::messages::PROTOCOL_VERSION;
use serde::Serialize;
use service_runtime::config::ByteSize;
use service_runtime::http_guard::GuardConfig;
use service_runtime::membership::CoordinatorsAt;
use service_runtime::metrics::config::MetricsConfig;
use service_runtime::shutdown::{self, NODE_GOODBYE_TIME};
use service_runtime::spans::flavor::OtelConfig;
use serving_core::node::AssignedRole;
use serving_core::scheduler::MIXED_STEP_TOKENS_ON_CPU;

#[derive(Clone, Debug, Args, Serialize)]
pub struct NodeConfig {
    /// Name of this node, unique in the cluster; kept over restarts
    #[arg(long)]
    pub name: String,
    /// Address to listen on for gRPC, /metrics, /health and /ready; port 0 takes any free one
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: String,
    /// Address others reach this node at; default: the one it listens on
    #[arg(long, value_name = "HOST:PORT")]
    pub advertise: Option<String>,
    /// Where the coordinators are: host:port of each one's control port, or etcds://HOST:PORT/CLUSTER, where this node then
    /// registers too
    #[arg(long, default_value = "127.0.0.1:7400", value_name = "HOST:PORT,..|ETCD")]
    pub coordinators: Vec<CoordinatorsAt>,
    /// The model, a GGUF file or a Hugging Face folder; `baton serve-prefill` and `baton serve-decode` take names, too, as
    /// `baton up` does. The stand-in takes only vocabulary and context from it
    #[arg(long, value_name = "FILE|FOLDER")]
    pub model: Option<PathBuf>,
    /// The coordinator's names of the model. The node registers under the first one; the coordinator takes nodes of its own
    /// name only; default: the name of the model's file or folder
    #[arg(long, value_delimiter = ',', value_parser = NonEmptyStringValueParser::new(), value_name = "NAME,..")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub served_model_name: Vec<String>,
    /// What runs the model
    #[arg(long, value_enum, default_value = "cpu")]
    pub engine: EngineKind,
    /// Where the model is computed: auto, cpu or cuda:N, the N-th visible GPU. auto is the processors, because the GPU engine has
    /// not been run on hardware: `baton doctor --gpu` checks it first
    #[arg(long, default_value = "auto")]
    pub device: DeviceChoice,
    /// Sums of the GPU engine: invariant gives a token the same bits whatever runs beside it, fast may use cuBLASLt; all nodes of a
    /// cluster need the same
    #[arg(long, value_enum, default_value = "invariant")]
    pub gpu_numerics: Mode,
    /// Arithmetic of the CPU engine; all nodes of a cluster need the same
    #[arg(long, value_enum, default_value = "int8-blocks")]
    pub numerics: Numerics,
    /// Instruction set of the CPU engine; results do not depend on it
    #[arg(long, value_enum, default_value = "auto")]
    pub kernel: KernelChoice,
    /// Threads of the CPU engine; default: every core
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Memory for KV blocks
    #[arg(long, default_value = "512MiB")]
    pub kv_cache_memory: ByteSize,
    /// Tokens of a KV block: a multiple of 16, at most 256; all nodes of a cluster need the same
    #[arg(long, value_name = "TOKENS", default_value_t = engine::BLOCK_TOKENS)]
    pub block_size: u32,
    /// Sequences in one step; on a decode node as many again may wait
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub max_num_seqs: u32,
    /// Tokens in one step; longer prompts are computed in chunks
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_num_batched_tokens: u32,
    /// Tokens of prompts in a mixed step, one in which sequences decode, too: these wait for all of it, and the CPU gains
    /// little by more than 128. Default: 128 on the CPU, on GPUs no limit of its own
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(16..=65_536))]
    pub mixed_step_tokens: Option<u32>,
    /// How long a step may take while sequences decode: prompts get as many tokens of it as fit, by what the steps before took, and
    /// at least eight. The gaps of streams then stay near this time, and prompts take longer. Default: no target, only
    /// `mixed_step_tokens`
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub itl_target_ms: Option<u32>,
    /// The most tokens that a running answer guesses at once from what the prompt and the answer said before. One step checks
    /// them all, so text that repeats itself comes in fewer steps, and the tokens stay the same. 0: it guesses none. Not on GPUs
    #[arg(long, value_name = "TOKENS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=64))]
    pub speculative_tokens: u32,
    /// Prompt and outputs together; default: what the model was trained for
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_model_len: Option<u32>,
    /// Keep computed blocks for prompts that begin alike
    #[arg(long, action = ArgAction::Set, default_value_t = true, value_name = "true|false")]
    pub prefix_cache: bool,
    /// A tenant whose prompts have this percent of the KV blocks loses its own cached ones first where blocks are needed. Tenants are
    /// those of the clients' keys
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub tenant_cache_percent: u32,
    /// How KV may travel from prefill to decode nodes, best first: shm (same host, same user), grpc (anywhere; pairs meet over
    /// it); between GPUs also cuda-ipc (same host, same user, one secret) and nccl (anywhere), which have not been run on
    /// hardware. A pair without the one takes the next
    #[arg(long, value_enum, value_delimiter = ',', default_value = "shm,grpc")]
    pub transports: Vec<TransportKind>,
    /// Held by the nodes of one `baton up`, which draws it: prefill nodes write the KV blocks of decode nodes of the same host
    /// and user that hold the same in place over shm. Give it in the environment, where other users do not see it
    #[arg(long, value_name = "TEXT")]
    pub shm_direct_secret: Option<DirectSecret>,
    /// Memory in which the nodes of one `baton up` have their packed weights once; `up` makes it and names it. Without it, or
    /// if it holds other weights, a node packs its own
    #[arg(long, value_name = "PATH")]
    pub shared_weights: Option<String>,
    /// How long a drain takes at most. Running requests get it less 3.5 s for goodbyes, or half of it; then they are given up
    /// and go on elsewhere
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(0..=3_600_000))]
    pub drain_ms_max: u64,
    /// What this process can become when it is asked to: the program says it, no setting
    #[arg(skip)]
    #[serde(skip)]
    pub roles: Vec<AssignedRole>,
    /// Who this process is to the others: what `tls` holds, once it has been read
    #[arg(skip)]
    #[serde(skip)]
    pub identity: Identity,
    #[command(flatten)]
    #[serde(flatten)]
    pub tls: TlsConfig,
    #[command(flatten)]
    #[serde(flatten)]
    pub guard: GuardConfig,
    #[command(flatten)]
    #[serde(flatten)]
    pub otel: OtelConfig,
    #[command(flatten)]
    #[serde(flatten)]
    pub metrics: MetricsConfig,
}

impl NodeConfig {
    /// Opens the configured engine. Takes seconds for a real model: call it off the async threads.
    ///
    /// # Errors
    /// The configuration's or the model file's fault.
    pub fn open_engine(
        &self,
        limits: EngineLimits,
        kv_backing: KvBacking,
        kept_weights: KeptWeights,
    ) -> Result<OpenedEngine, OpenError> {
        let shared = self.shared_weights.as_deref().filter(|path| !path.is_empty());
        let kept_weights = kept_weights.shared_at(shared.map(Path::new));
        let options = self.open_options(limits, kv_backing, kept_weights.clone());
        if let (EngineKind::StandIn | EngineKind::DeviceStandIn, DeviceChoice::Cuda(_)) = (self.engine, self.device) {
            return Err(OpenError::NoSuchDevice {
                engine: self.engine,
                device: self.device.to_string(),
            });
        }
        self.warn_of_settings_without_effect();
        let opened = match self.gpu() {
            Some(ordinal) => open_engine_by(options, |file, options, fits| {
                cuda_engine::open((ordinal, self.gpu_numerics), file, (options, fits))
            })?,
            None => open_engine(options)?,
        };
        if let Some(why) = kept_weights.take_not_shared() {
            tracing::warn!(%why, "the weights are packed for this process alone");
        }
        Ok(opened)
    }

    /// The memory that the engine is going to take.
    ///
    /// # Errors
    /// The model file's fault.
    pub fn memory_need(&self) -> Result<MemoryNeed, OpenError> {
        if self.gpu().is_some() {
            // That engine compares with the memory of its device.
            return Ok(MemoryNeed::default());
        }
        let limits = EngineLimits {
            max_batch_tokens: self.max_num_batched_tokens,
            max_sequences: self.max_num_seqs,
        };
        memory_need(&self.open_options(limits, KvBacking::default(), KeptWeights::default()))
    }

    fn warn_of_settings_without_effect(&self) {
        // `baton up` gives each node its threads, so they say nothing about what the user wanted.
        let is_of_cpu = self.numerics != Numerics::Int8Blocks || self.kernel != KernelChoice::Auto;
        match self.gpu() {
            Some(_) if is_of_cpu => {
                tracing::warn!("numerics and kernel are of the CPU engine: they have no effect on a GPU");
            }
            None if self.gpu_numerics != Mode::Invariant => {
                tracing::warn!("gpu_numerics has no effect without --device cuda:N");
            }
            _ => {}
        }
    }

    /// The GPU that computes the model. Stand-ins have none.
    fn gpu(&self) -> Option<u32> {
        match (self.engine, self.device) {
            (EngineKind::Cpu, DeviceChoice::Cuda(ordinal)) => Some(ordinal),
            _ => None,
        }
    }

    fn open_options(&self, limits: EngineLimits, kv_backing: KvBacking, kept_weights: KeptWeights) -> OpenOptions<'_> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        OpenOptions {
            kind: self.engine,
            model: self.model.as_deref(),
            numerics: self.numerics,
            kernel: self.kernel,
            threads: self.threads.map_or(cores, |threads| threads as usize),
            block_tokens: self.block_size,
            kv_bytes: self.kv_cache_memory.bytes(),
            kv_backing,
            limits,
            protocol_version: PROTOCOL_VERSION,
            kept_weights,
            progress: None,
        }
    }

    /// As `SchedulerConfig::mixed_step_tokens`.
    pub(crate) fn mixed_step_tokens(&self) -> Option<NonZeroU32> {
        let of_engine = self.gpu().is_none().then_some(MIXED_STEP_TOKENS_ON_CPU);
        self.mixed_step_tokens.and_then(NonZeroU32::new).or(of_engine)
    }

    /// Of a drain's time, what running requests get.
    pub fn drain(&self) -> Duration {
        shutdown::time_for_requests(Duration::from_millis(self.drain_ms_max), NODE_GOODBYE_TIME)
    }
}
