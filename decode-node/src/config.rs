//! The decode node's configuration: one struct, every key documented where `--help` takes it from.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args};
use engine::{
    EngineKind, EngineLimits, KeptWeights, KernelChoice, KvBacking, Numerics, OpenError, OpenOptions, OpenedEngine,
    open_engine,
};
use kv_transfer::DirectSecret;
use kv_transfer::choice::TransportKind;
use node::{DecodeSettings, NodeSettings, RoleSettings};
use proto::messages::PROTOCOL_VERSION;
use serde::Serialize;
use service_runtime::freed_memory::FreedMemory;
use service_runtime::http_guard::GuardConfig;
use service_runtime::membership::CoordinatorsAt;
use service_runtime::metrics::config::MetricsConfig;
use service_runtime::process::ProcessConfig;
use service_runtime::shutdown::{self, NODE_GOODBYE_TIME};
use service_runtime::spans::flavor::{OtelConfig, OtelFlavor};
use service_runtime::units::ByteSize;
use serving_core::node::AssignedRole;

#[derive(Debug, Clone, Args, Serialize)]
pub struct Config {
    /// Name of this node in its cluster; unique, kept over restarts
    #[arg(long, default_value = "decode-0")]
    pub name: String,
    /// host:port for gRPC, /metrics, /health and /ready; port 0 takes any
    #[arg(long, default_value = "127.0.0.1:7420")]
    pub listen: String,
    /// host:port at which others reach this node, when it is not the listen address
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advertise: Option<String>,
    /// host:port at which prefill nodes reach this node's handoff service, when KV travels over a network of its own;
    /// default: where everybody else reaches it
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_advertise: Option<String>,
    /// Where the coordinators are: host:port of each one's control port, or etcd://HOST:PORT/CLUSTER, where this node then
    /// registers too
    #[arg(long, default_value = "127.0.0.1:7400", value_name = "HOST:PORT,..|ETCD")]
    pub coordinators: Vec<CoordinatorsAt>,
    /// GGUF file
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<PathBuf>,
    /// Model name to register under; the coordinator takes nodes of its own name only
    #[arg(long, default_value = "smollm2-135m")]
    pub served_model_name: String,
    /// What computes
    #[arg(long, value_enum, default_value = "cpu")]
    pub engine: EngineKind,
    /// Arithmetic of the cpu engine; all nodes of a cluster need the same
    #[arg(long, value_enum, default_value = "int8-blocks")]
    pub numerics: Numerics,
    /// Instruction set of the cpu engine; all give the same bits
    #[arg(long, value_enum, default_value = "auto")]
    pub kernel: KernelChoice,
    /// Threads of the engine; default: one per core
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Memory for KV blocks
    #[arg(long, default_value = "512MiB")]
    pub kv_cache_memory: ByteSize,
    /// Tokens of a KV block: a multiple of 16, at most 256; all nodes of a cluster need the same
    #[arg(long, value_name = "TOKENS", default_value_t = engine::BLOCK_TOKENS)]
    pub block_size: u32,
    /// Most sequences in one step; as many again may wait
    #[arg(long, default_value_t = 16)]
    pub max_num_seqs: u32,
    /// Most tokens in one step, prompt chunks included
    #[arg(long, default_value_t = 512)]
    pub max_num_batched_tokens: u32,
    /// Most tokens of prompt and output together; default: the model's context
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<u32>,
    /// Keep finished blocks for prompts that start alike
    #[arg(long, action = ArgAction::Set, default_value_t = true)]
    pub prefix_cache: bool,
    /// Always compute prompts here: a node of a co-located cluster
    #[arg(long, action = ArgAction::Set, default_value_t = false, num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pub co_located: bool,
    /// How KV may come in: shm offers prefill nodes of the same host and user to share memory; grpc is always there, since
    /// pairs meet over it
    #[arg(long, value_enum, value_delimiter = ',', default_value = "shm,grpc")]
    pub transports: Vec<TransportKind>,
    /// Held by the nodes of one `baton up`, which draws it: prefill nodes of this host and user that hold the same write this
    /// node's KV blocks in place over shm. Give it in the environment, where other users do not see it
    #[arg(long, value_name = "TEXT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shm_direct_secret: Option<DirectSecret>,
    /// Sum what is written in place at both ends; without it a fault of memory or program goes unnoticed
    #[arg(long, action = ArgAction::Set, default_value_t = true)]
    pub direct_checksums: bool,
    /// How long a reservation lives without a sign of its transfer once its prefill has begun; must exceed the prefill
    /// node's longest step (512 tokens in exact numerics on a shared core: 40 s)
    #[arg(long, default_value_t = 60_000)]
    pub reservation_ms_max: u64,
    /// How long a drain takes at most. Running requests get it less 3.5 s for goodbyes, or half of it; then they are given up
    /// and go on elsewhere
    #[arg(long, default_value_t = 10_000)]
    pub drain_ms_max: u64,
    /// What this process can become when it is asked to: the program says it, no setting
    #[arg(skip)]
    #[serde(skip)]
    pub roles: Vec<AssignedRole>,
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

impl Config {
    pub fn settings(&self) -> NodeSettings {
        NodeSettings {
            name: self.name.clone(),
            listen: self.listen.clone(),
            advertise: self.advertise.clone(),
            coordinators: self.coordinators.clone(),
            served_model_name: self.served_model_name.clone(),
            max_model_len: self.max_model_len,
            prefix_cache: self.prefix_cache,
            transports: self.transports.clone(),
            drain: self.drain(),
            roles: self.roles.clone(),
            guard: self.guard.clone(),
            metrics: self.metrics,
            version: crate::PROGRAM.version,
            role: RoleSettings::Decode(DecodeSettings {
                reservation: self.reservation(),
                is_co_located: self.co_located,
                kv_advertise: self.kv_advertise.clone(),
                direct_secret: self.direct_secret().cloned(),
                direct_checksums: self.direct_checksums,
            }),
        }
    }

    /// Opens the configured engine. Takes seconds for a real model: call it off the async threads.
    ///
    /// # Errors
    /// The configuration's or the model file's fault.
    pub fn open_engine(&self, kept_weights: KeptWeights) -> Result<OpenedEngine, OpenError> {
        open_engine(OpenOptions {
            kind: self.engine,
            model: self.model.as_deref(),
            numerics: self.numerics,
            kernel: self.kernel,
            threads: self.threads(),
            block_tokens: self.block_size,
            kv_bytes: self.kv_cache_memory.bytes(),
            kv_backing: match self.direct_secret() {
                Some(_) => KvBacking::Shareable,
                None => KvBacking::Private,
            },
            limits: self.engine_limits(),
            protocol_version: PROTOCOL_VERSION,
            kept_weights,
            progress: None,
        })
    }

    pub fn engine_limits(&self) -> EngineLimits {
        EngineLimits {
            max_batch_tokens: self.max_num_batched_tokens,
            max_sequences: self.max_num_seqs,
        }
    }
    pub fn threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.threads.unwrap_or_else(cores)
    }
    /// Trusted prefill nodes may write the KV memory in place: it must be made so that they can map it.
    pub fn direct_secret(&self) -> Option<&DirectSecret> {
        let secret = self.shm_direct_secret.as_ref();
        secret.filter(|_| self.transports.contains(&kv_transfer::shm::KIND) && !self.co_located)
    }
    pub fn reservation(&self) -> Duration {
        Duration::from_millis(self.reservation_ms_max)
    }
    /// Of a drain's time, what running requests get.
    pub fn drain(&self) -> Duration {
        shutdown::time_for_requests(Duration::from_millis(self.drain_ms_max), NODE_GOODBYE_TIME)
    }
}

impl ProcessConfig for Config {
    const SERVICE: &'static str = "baton-decode";
    const FREED_MEMORY: FreedMemory = FreedMemory::Kept;
    fn name(&self) -> &str {
        &self.name
    }
    fn otel_flavors(&self) -> &[OtelFlavor] {
        &self.otel.otel_flavor
    }
}
