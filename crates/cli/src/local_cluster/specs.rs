//! The processes of a local cluster, and the flags and the environment that each of them gets.

use std::ffi::OsString;

use cuda_engine::DeviceChoice;
use service_runtime::announce::Listening;

use super::flags::Flags;
use super::kind::ProcessKind;
use super::membership::LocalMembership;
use super::options::LocalClusterOptions;
use crate::topology::Topology;

/// The nodes' `shared_weights`.
const SHARED_WEIGHTS: &str = "BATON_SHARED_WEIGHTS";

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
#[path = "specs_tests.rs"]
mod tests;
