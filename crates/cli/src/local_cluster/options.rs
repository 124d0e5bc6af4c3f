//! What a local cluster is made of and how it is set.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use coordinator::{FlightRecordTarget, TraceViewerUrl};
use cuda_engine::DeviceChoice;
use engine::WeightsFile;

use super::events::Observer;
use super::membership::LocalMembership;
use super::secret::ClusterSecret;
use crate::topology::Topology;

/// Loading 98 MB takes a second. A model ten times as large still loads within two minutes.
const START_WITHIN: Duration = Duration::from_secs(120);

#[derive(Clone, Debug)]
pub struct LocalClusterOptions {
    /// The `baton` binary. It is started once per node.
    pub executable: PathBuf,
    pub topology: Topology,
    /// A GGUF file or a Hugging Face folder.
    pub model: PathBuf,
    /// Where the first coordinator's API listens; port 0 lets the OS pick. The others take any free port.
    pub listen: String,
    pub membership: LocalMembership,
    pub coordinator_count: u32,
    pub settings: ClusterSettings,
    /// Further flags, for settings that `ClusterSettings` does not name.
    pub coordinator_flags: Vec<OsString>,
    pub prefill_flags: Vec<OsString>,
    pub decode_flags: Vec<OsString>,
    /// Further flags for single processes, by name.
    pub flags_by_name: BTreeMap<String, Vec<OsString>>,
    /// Cores that single processes may use, by name. The others may use every core.
    pub cores_by_name: BTreeMap<String, Vec<u32>>,
    /// Environment of every process, on top of the inherited one.
    pub environment: Vec<(String, String)>,
    /// With it the nodes of this start trust each other with their KV memory.
    pub direct_secret: ClusterSecret,
    /// Memory for the packed weights of all nodes. `None`: each node has its own.
    pub weights: Option<Arc<WeightsFile>>,
    /// Each process's stderr is also written to `DIR/NAME.log`. A file that is there becomes `NAME.log.1`.
    pub log_dir: Option<PathBuf>,
    /// Bytes after which a log begins anew; what was in it is kept as `NAME.log.1`. `None`: logs grow.
    pub log_bytes_max: Option<u64>,
    /// From start to ready.
    pub start_within: Duration,
    pub observer: Observer,
}

impl LocalClusterOptions {
    /// Every setting has its process's own default, and every port is free to choose.
    pub fn new(executable: PathBuf, topology: Topology, model: PathBuf) -> Self {
        Self {
            executable,
            topology,
            model,
            listen: "127.0.0.1:0".to_owned(),
            membership: LocalMembership::default(),
            coordinator_count: 1,
            settings: ClusterSettings::default(),
            coordinator_flags: Vec::new(),
            prefill_flags: Vec::new(),
            decode_flags: Vec::new(),
            flags_by_name: BTreeMap::new(),
            cores_by_name: BTreeMap::new(),
            environment: Vec::new(),
            direct_secret: ClusterSecret::draw(),
            // Without such memory everything works, with more memory.
            weights: WeightsFile::create().ok().map(Arc::new),
            log_dir: None,
            log_bytes_max: None,
            start_within: START_WITHIN,
            observer: Observer::default(),
        }
    }
}

/// Settings that are handed on to the processes. `None` leaves a process's own default. The names are those of the
/// processes' configurations.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
pub struct ClusterSettings {
    /// Threads of each node's engine [default: every core, on each node].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads_per_node: Option<u32>,
    /// KV cache memory of each node, such as 2GiB [default: 512MiB].
    #[arg(long, value_name = "SIZE")]
    pub kv_cache_memory: Option<String>,
    /// Tokens of a KV block: a multiple of 16, at most 256 [default: 16].
    #[arg(long, value_name = "TOKENS")]
    pub block_size: Option<u32>,
    /// Sequences a node runs at a time [default: 16].
    #[arg(long, value_name = "N")]
    pub max_num_seqs: Option<u32>,
    /// Tokens of one engine step: the budget that prompts are chunked to [default: 512].
    #[arg(long, value_name = "N")]
    pub max_num_batched_tokens: Option<u32>,
    /// Tokens of prompts in a step in which sequences decode, too [default: 128 on the CPU, on GPUs no limit of its own].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(16..=65_536))]
    pub mixed_step_tokens: Option<u32>,
    /// How long a step may take while sequences decode, in milliseconds: prompts get what fits [default: no target].
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub itl_target_ms: Option<u32>,
    /// The most tokens that a running answer guesses at once from what was said before; the tokens stay the same [default: none].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(0..=64))]
    pub speculative_tokens: Option<u32>,
    /// Longest prompt and answer together, in tokens [default: what the model was trained for].
    #[arg(long, value_name = "TOKENS")]
    pub max_model_len: Option<u32>,
    /// The model's name in the API; several names, with commas or each with its own flag, are all served, and answers have the
    /// first one [default: from the file or folder].
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', value_parser = NonEmptyStringValueParser::new())]
    pub served_model_name: Vec<String>,
    /// Requests that may wait for a place; further ones get 429 [default: 2048].
    #[arg(long, value_name = "N")]
    pub max_queue_requests: Option<usize>,
    /// A decode node computes a prompt itself when fewer of the prompt's tokens than this are missing in its cache [default: 0: never
    /// for this reason].
    #[arg(long, value_name = "TOKENS")]
    pub local_prefill_below_tokens: Option<u32>,
    /// Arithmetic of the CPU engine: int8-blocks (default) or exact.
    #[arg(long, value_name = "NAME")]
    pub numerics: Option<String>,
    /// Kernels of the CPU engine: auto (default), portable, avx2, avx-vnni, avx512-vnni, neon-dotprod.
    #[arg(long, value_name = "NAME")]
    pub kernel: Option<String>,
    /// Keep finished prompts' KV blocks for prompts that start alike [default: true].
    #[arg(long, value_name = "BOOL")]
    pub prefix_cache: Option<bool>,
    /// A tenant whose prompts have this percent of a node's KV blocks (default 50) loses its own cached ones first where blocks are
    /// needed. Tenants are those of the clients' keys.
    #[arg(long, value_name = "PERCENT")]
    pub tenant_cache_percent: Option<u32>,
    /// cpu; or for tests, without weights: stand-in, device-stand-in (its KV is in memory that the host cannot address).
    #[arg(long, value_name = "NAME")]
    pub engine: Option<String>,
    /// Where each node computes the model, in the order in which `baton up` lists them: cuda:0,cuda:1. A single one is for all
    /// nodes [default: the processors]. The GPU engine has not been run on hardware.
    #[arg(long, value_name = "DEVICE,..", value_delimiter = ',')]
    pub devices: Vec<DeviceChoice>,
    /// How KV may travel between the nodes, best first: shm,grpc (default); between GPUs also cuda-ipc and nccl, which have not
    /// been run on hardware.
    #[arg(long, value_name = "NAME,..")]
    pub transports: Option<String>,
    /// Sums of the GPU engine: invariant (default) or fast.
    #[arg(long, value_name = "NAME")]
    pub gpu_numerics: Option<String>,
    /// Folder of certificates by which the processes know each other, as `baton certs init` makes it; on this machine they trust
    /// each other without [default: none].
    #[arg(long, value_name = "DIR")]
    pub certs: Option<PathBuf>,
    /// Serve the API with TLS: with api.crt and api.key of the folder of --certs (`baton certs issue DIR api/api`).
    #[arg(long, requires = "certs")]
    pub api_tls: bool,
    /// Expose metrics under vLLM's names too, on every process.
    #[arg(long)]
    pub vllm_metrics: bool,
    /// File that keeps every event and action of the placement for `baton replay`, without the content of requests; it ends at
    /// SIZE [default size: 256MiB]. With several coordinators each one's name is added to the path.
    #[arg(long, value_name = "FILE[:SIZE]")]
    pub flight_record: Option<FlightRecordTarget>,
    /// Address of a trace in your trace viewer, for a link in the console: https://jaeger.example/trace/{trace_id}
    #[arg(long, value_name = "URL")]
    pub trace_viewer_url: Option<TraceViewerUrl>,
    /// TOML file with the SLO profiles and the objective that judge requests [default: the built-in profiles].
    #[arg(long, value_name = "FILE")]
    pub slo_config: Option<PathBuf>,
    /// Naming conventions of span attributes: otel, vllm, openinference (Phoenix), or several [default: otel,vllm].
    #[arg(long, value_name = "NAMES")]
    pub otel_flavor: Option<String>,
    /// Put prompts, answers and tool calls into traces, 16 KiB of each at most.
    #[arg(long)]
    pub trace_content: bool,
}
