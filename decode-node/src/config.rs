//! Every key of a decode node: those of every node, and its own.

use std::time::Duration;

use clap::{ArgAction, Args};
use engine::{EngineLimits, KeptWeights, KvBacking, OpenError, OpenedEngine};
use kv_transfer::DirectSecret;
use node::{DecodeSettings, NodeConfig, NodeSettings, RoleSettings};
use serde::Serialize;
use service_runtime::freed_memory::FreedMemory;
use service_runtime::process::ProcessConfig;
use service_runtime::spans::flavor::OtelFlavor;

#[derive(Debug, Clone, Args, Serialize)]
#[command(
    mut_arg("name", |name| name.required(false).default_value("decode-0")),
    mut_arg("listen", |listen| listen.required(false).default_value("127.0.0.1:7420"))
)]
pub struct Config {
    #[command(flatten)]
    #[serde(flatten)]
    pub node: NodeConfig,
    /// host:port at which prefill nodes reach this node's handoff service, when KV travels over a network of its own;
    /// default: where everybody else reaches it
    #[arg(long)]
    pub kv_advertise: Option<String>,
    /// Always compute prompts here: a node of a co-located cluster
    #[arg(long, action = ArgAction::Set, default_value_t = false, num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pub co_located: bool,
    /// Sum what is written in place at both ends; without it a fault of memory or program goes unnoticed
    #[arg(long, action = ArgAction::Set, default_value_t = true)]
    pub direct_checksums: bool,
    /// How long a reservation lives without a sign of its transfer once its prefill has begun; must exceed the prefill
    /// node's longest step (512 tokens in exact numerics on a shared core: 40 s)
    #[arg(long, default_value_t = 60_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub reservation_ms_max: u64,
}

impl Config {
    pub fn settings(&self) -> NodeSettings {
        let role = RoleSettings::Decode(DecodeSettings {
            reservation: Duration::from_millis(self.reservation_ms_max),
            is_co_located: self.co_located,
            kv_advertise: self.kv_advertise.clone(),
            direct_secret: self.direct_secret().cloned(),
            direct_checksums: self.direct_checksums,
        });
        NodeSettings {
            config: self.node.clone(),
            version: crate::PROGRAM.version,
            role,
        }
    }

    /// As [`NodeConfig::open_engine`].
    ///
    /// # Errors
    /// The configuration's or the model file's fault.
    pub fn open_engine(&self, kept_weights: KeptWeights) -> Result<OpenedEngine, OpenError> {
        let kv_backing = match self.direct_secret() {
            Some(_) => KvBacking::Shareable,
            None => KvBacking::Private,
        };
        self.node.open_engine(self.engine_limits(), kv_backing, kept_weights)
    }

    pub fn engine_limits(&self) -> EngineLimits {
        EngineLimits {
            max_batch_tokens: self.node.max_num_batched_tokens,
            max_sequences: self.node.max_num_seqs,
        }
    }

    /// Trusted prefill nodes may write the KV memory in place: it must be made so that they can map it.
    fn direct_secret(&self) -> Option<&DirectSecret> {
        let secret = self.node.shm_direct_secret.as_ref();
        secret.filter(|_| kv_transfer::transports::write_in_place(&self.node.transports) && !self.co_located)
    }
}

impl ProcessConfig for Config {
    const SERVICE: &'static str = "baton-decode";
    const FREED_MEMORY: FreedMemory = FreedMemory::Kept;
    fn name(&self) -> &str {
        &self.node.name
    }
    fn otel_flavors(&self) -> &[OtelFlavor] {
        &self.node.otel.otel_flavor
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::Config;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        config: Config,
    }

    #[test]
    fn a_reservation_without_a_life_is_refused() {
        let parsed = |ms: &str| Flags::try_parse_from(["node", "--reservation-ms-max", ms]);
        assert_eq!(parsed("1").expect("a time").config.reservation_ms_max, 1);
        assert!(parsed("0").is_err());
    }
}
