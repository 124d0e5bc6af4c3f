//! The parts of a local cluster, and the flags that each of its processes gets.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use coordinator::{FlightRecordTarget, TraceViewerUrl};
use cuda_engine::DeviceChoice;
use engine::WeightsFile;
use service_runtime::announce::Listening;

use super::flags::Flags;
use super::membership::LocalMembership;
use super::secret::ClusterSecret;
use crate::topology::Topology;

/// Loading 98 MB takes a second. A model ten times as large still loads within two minutes.
const START_WITHIN: Duration = Duration::from_secs(120);

/// The nodes' `shared_weights`.
const SHARED_WEIGHTS: &str = "BATON_SHARED_WEIGHTS";

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
    /// Each process's stderr is also written to `DIR/NAME.log`.
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
    /// KV cache memory of each node, such as 512MiB.
    #[arg(long, value_name = "SIZE")]
    pub kv_cache_memory: Option<String>,
    /// Tokens of a KV block: a multiple of 16, at most 256 [default: 16].
    #[arg(long, value_name = "TOKENS")]
    pub block_size: Option<u32>,
    /// Sequences a node runs at a time.
    #[arg(long, value_name = "N")]
    pub max_num_seqs: Option<u32>,
    /// Tokens of one engine step: the budget that prompts are chunked to.
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
    /// Prompts of which a decode node lacks fewer tokens than this are prefilled there.
    #[arg(long, value_name = "TOKENS")]
    pub local_prefill_below_tokens: Option<u32>,
    /// Arithmetic of the CPU engine: int8-blocks (default) or exact.
    #[arg(long, value_name = "NAME")]
    pub numerics: Option<String>,
    /// Kernels of the CPU engine: auto (default), portable, avx2, avx-vnni, avx512-vnni, neon-dotprod.
    #[arg(long, value_name = "NAME")]
    pub kernel: Option<String>,
    /// Keep finished prompts' KV blocks for prompts that start alike.
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

/// Which process of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ProcessKind {
    Coordinator,
    Prefill,
    Decode,
    /// A decode node that computes every prompt itself.
    CoLocated,
}

impl fmt::Display for ProcessKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Coordinator => "coordinator",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::CoLocated => "co-located",
        })
    }
}

impl ProcessKind {
    /// The verb that runs the process.
    pub fn verb(self) -> &'static str {
        match self {
            Self::Coordinator => "serve-coordinator",
            Self::Prefill => "serve-prefill",
            Self::Decode | Self::CoLocated => "serve-decode",
        }
    }
}

/// One process to start: its name and its whole command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessSpec {
    pub name: String,
    pub kind: ProcessKind,
    pub arguments: Vec<OsString>,
}

impl ProcessSpec {
    /// A coordinator's next life takes the addresses of its last one. A node's address is in its registration.
    pub(super) fn listen_again(&mut self, last: &Listening) {
        if self.kind != ProcessKind::Coordinator {
            return;
        }
        for (flag, address) in [("--listen=", &last.http), ("--control-listen=", &last.control)] {
            let is_flag = |argument: &&mut OsString| argument.to_string_lossy().starts_with(flag);
            if let (Some(argument), Some(address)) = (self.arguments.iter_mut().find(is_flag), address) {
                *argument = format!("{flag}{address}").into();
            }
        }
    }
}

/// An event of a process of the cluster, for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterEvent {
    EtcdStarted {
        address: String,
        pid: u32,
    },
    Started {
        name: String,
        kind: ProcessKind,
        pid: u32,
    },
    /// It has packed so much of its weights. Not sent when that is quick.
    Packing {
        name: String,
        done_bytes: u64,
        total_bytes: u64,
    },
    Listening {
        name: String,
        address: String,
    },
    Ready {
        name: String,
    },
    /// Every process has started. Sent when the list of what the cluster still lacks changes.
    Waiting {
        what: String,
    },
    /// One line of its stderr.
    Line {
        name: String,
        line: String,
    },
}

/// Gets every [`ClusterEvent`], in order for each process. It must not block, because it runs on the readers' tasks.
#[derive(Clone, Default)]
pub struct Observer(Option<Arc<Observe>>);

type Observe = dyn Fn(&ClusterEvent) + Send + Sync;

impl Observer {
    pub fn new(observe: impl Fn(&ClusterEvent) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(observe)))
    }

    pub fn tell(&self, event: &ClusterEvent) {
        if let Some(observe) = &self.0 {
            observe(event);
        }
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Observer").field(&self.0.is_some()).finish()
    }
}

impl LocalClusterOptions {
    /// A single coordinator is called `coordinator`. Several coordinators have numbers.
    pub(super) fn coordinators(&self) -> Vec<ProcessSpec> {
        let name = |index| match self.coordinator_count {
            1 => "coordinator".to_owned(),
            _ => format!("coordinator-{index}"),
        };
        let listen = |index| {
            if index == 0 {
                self.listen.as_str()
            } else {
                "127.0.0.1:0"
            }
        };
        let spec = |index| self.coordinator(name(index), listen(index));
        (0..self.coordinator_count).map(spec).collect()
    }

    fn coordinator(&self, name: String, listen: &str) -> ProcessSpec {
        let mut flags = self.flags_of_all(&name, listen);
        let record = self
            .settings
            .flight_record
            .as_ref()
            .map(|target| match self.coordinator_count {
                1 => target.clone(),
                _ => target.of_process(&name),
            });
        flags.set_some("flight-record", &record);
        if let Some(file) = &self.settings.slo_config {
            flags.set("slo-config", file);
        }
        if let Some(folder) = self.settings.certs.as_ref().filter(|_| self.settings.api_tls) {
            flags.set("api-tls-cert", folder.join("api.crt"));
            flags.set("api-tls-key", folder.join("api.key"));
        }
        flags.set_true("trace-content", self.settings.trace_content);
        flags.set_some("trace-viewer-url", &self.settings.trace_viewer_url);
        if let LocalMembership::Etcd(address) = &self.membership {
            flags.set("membership", address);
        }
        flags.set("control-listen", "127.0.0.1:0");
        flags.set_some("max-queue-requests", &self.settings.max_queue_requests);
        flags.set_some("local-prefill-below-tokens", &self.settings.local_prefill_below_tokens);
        self.spec(ProcessKind::Coordinator, name, flags)
    }

    /// The flags that a process of any kind has.
    fn flags_of_all(&self, name: &str, listen: &str) -> Flags {
        let settings = &self.settings;
        let mut flags = Flags::default();
        flags.set("name", name);
        flags.set("listen", listen);
        flags.set("model", &self.model);
        let names = settings.served_model_name.join(",");
        flags.set_some("served-model-name", &Some(names).filter(|names| !names.is_empty()));
        flags.set_some("max-model-len", &settings.max_model_len);
        if let Some(folder) = &settings.certs {
            flags.set("tls-cert", folder.join(format!("{name}.crt")));
            flags.set("tls-key", folder.join(format!("{name}.key")));
            flags.set("tls-ca", folder.join("ca.crt"));
        }
        flags.set_true("vllm-metrics", settings.vllm_metrics);
        flags.set_some("otel-flavor", &settings.otel_flavor);
        flags
    }

    /// The nodes, with the addresses at which the coordinators' membership endpoints listen.
    pub(super) fn nodes(&self, control_addresses: &str) -> Vec<ProcessSpec> {
        let coordinators = match &self.membership {
            LocalMembership::Etcd(address) => address.as_str(),
            _ => control_addresses,
        };
        let pools = match self.topology {
            Topology::Disaggregated {
                prefill_count,
                decode_count,
            } => vec![
                (ProcessKind::Prefill, "prefill", prefill_count),
                (ProcessKind::Decode, "decode", decode_count),
            ],
            Topology::CoLocated { node_count } => vec![(ProcessKind::CoLocated, "decode", node_count)],
        };
        let nodes = pools
            .into_iter()
            .flat_map(|(kind, word, count)| (0..count).map(move |index| (kind, format!("{word}-{index}"))));
        let devices = &self.settings.devices;
        let device = |index: usize| {
            if devices.len() == 1 {
                devices.first()
            } else {
                devices.get(index)
            }
        };
        let nodes = nodes.enumerate();
        nodes
            .map(|(index, node)| self.node(node, device(index), coordinators))
            .collect()
    }

    fn node(
        &self,
        (kind, name): (ProcessKind, String),
        device: Option<&DeviceChoice>,
        coordinators: &str,
    ) -> ProcessSpec {
        let settings = &self.settings;
        let mut flags = self.flags_of_all(&name, "127.0.0.1:0");
        flags.set_some("device", &device);
        flags.set_some("gpu-numerics", &settings.gpu_numerics);
        flags.set_some("transports", &settings.transports);
        flags.set("coordinators", coordinators);
        flags.set_some("threads", &settings.threads_per_node);
        flags.set_some("kv-cache-memory", &settings.kv_cache_memory);
        flags.set_some("block-size", &settings.block_size);
        flags.set_some("max-num-seqs", &settings.max_num_seqs);
        flags.set_some("max-num-batched-tokens", &settings.max_num_batched_tokens);
        flags.set_some("mixed-step-tokens", &settings.mixed_step_tokens);
        flags.set_some("itl-target-ms", &settings.itl_target_ms);
        flags.set_some("speculative-tokens", &settings.speculative_tokens);
        flags.set_some("numerics", &settings.numerics);
        flags.set_some("kernel", &settings.kernel);
        flags.set_some("prefix-cache", &settings.prefix_cache);
        flags.set_some("tenant-cache-percent", &settings.tenant_cache_percent);
        flags.set_some("engine", &settings.engine);
        flags.set_true("co-located", kind == ProcessKind::CoLocated);
        self.spec(kind, name, flags)
    }

    /// The environment that only this kind of process gets.
    pub(super) fn variables(&self, kind: ProcessKind) -> Vec<(&'static str, OsString)> {
        let hands_over = matches!(kind, ProcessKind::Prefill | ProcessKind::Decode);
        let secret = self.direct_secret.variable(&self.environment).filter(|_| hands_over);
        let mut all: Vec<_> = secret.map(|(name, value)| (name, value.into())).into_iter().collect();
        if kind != ProcessKind::Coordinator && !self.is_set(SHARED_WEIGHTS) {
            let weights = self.weights.as_ref();
            all.extend(weights.map(|weights| (SHARED_WEIGHTS, weights.path().into())));
        }
        all
    }

    /// Whether the nodes have one copy of the weights.
    pub(super) fn shares_weights(&self) -> bool {
        self.weights.is_some() && !self.is_set(SHARED_WEIGHTS)
    }

    /// Whoever sets a variable, even to nothing, decides.
    fn is_set(&self, variable: &str) -> bool {
        self.environment.iter().any(|(name, _)| name == variable) || std::env::var_os(variable).is_some()
    }

    fn spec(&self, kind: ProcessKind, name: String, flags: Flags) -> ProcessSpec {
        let extra = match kind {
            ProcessKind::Coordinator => &self.coordinator_flags,
            ProcessKind::Prefill => &self.prefill_flags,
            ProcessKind::Decode | ProcessKind::CoLocated => &self.decode_flags,
        };
        // The pipe at the process's stdin ends when this process does, however it dies. So no process outlives it.
        let arguments = [OsString::from(kind.verb()), OsString::from("--exit-with-stdin")];
        let own = self.flags_by_name.get(&name).into_iter().flatten();
        let extra = extra.iter().chain(own).cloned();
        let arguments = arguments.into_iter().chain(flags.0).chain(extra);
        ProcessSpec {
            name,
            kind,
            arguments: arguments.collect(),
        }
    }
}

#[cfg(test)]
#[path = "options_tests.rs"]
mod tests;
