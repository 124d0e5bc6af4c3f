//! Every key of a prefill node: those of every node, and its own.

use std::num::NonZeroU32;
use std::time::Duration;

use clap::Args;
use engine::{EngineLimits, KeptWeights, KvBacking, OpenError, OpenedEngine};
use node::{NodeConfig, NodeSettings, PrefillSettings, RoleSettings};
use serde::Serialize;
use service_runtime::freed_memory::FreedMemory;
use service_runtime::process::ProcessConfig;
use service_runtime::spans::flavor::OtelFlavor;

#[derive(Clone, Debug, Args, Serialize)]
#[command(
    mut_arg("name", |name| name.required(false).default_value("prefill-0")),
    mut_arg("listen", |listen| listen.required(false).default_value("127.0.0.1:7410"))
)]
pub struct Config {
    #[command(flatten)]
    #[serde(flatten)]
    pub node: NodeConfig,
    /// The end of a prompt of several chunks that nothing else waits behind is a chunk of its own of at most this many
    /// tokens, so that most of its KV moves while the rest is computed; over gRPC a prompt of one chunk, from 8 times as
    /// many tokens on, is computed in two halves; 0: neither
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(0..=65_536))]
    pub last_chunk_tokens: u32,
    /// How long blocks are kept for a decode node that takes none of them and does not acknowledge; must exceed its longest
    /// step (a dead one is noticed by its connection). Each block that leaves restarts it, up to ten times as long in all
    #[arg(long, default_value_t = 60_000, value_parser = clap::value_parser!(u64).range(1..=600_000))]
    pub hold_ms_max: u64,
    /// Blocks waiting to be pushed before no further work is asked for; default: half the pool
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub push_queue_blocks_max: Option<u32>,
}

impl ProcessConfig for Config {
    const SERVICE: &'static str = "baton-prefill";
    const FREED_MEMORY: FreedMemory = FreedMemory::Kept;
    fn name(&self) -> &str {
        &self.node.name
    }
    fn otel_flavors(&self) -> &[OtelFlavor] {
        &self.node.otel.otel_flavor
    }
}

impl Config {
    pub fn settings(&self) -> NodeSettings {
        let role = RoleSettings::Prefill(PrefillSettings {
            hold: Duration::from_millis(self.hold_ms_max),
            last_chunk_tokens: NonZeroU32::new(self.last_chunk_tokens),
            direct_secret: self.node.shm_direct_secret.clone(),
            push_queue_blocks_max: self.push_queue_blocks_max,
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
        let limits = EngineLimits {
            max_batch_tokens: self.node.max_num_batched_tokens,
            // A step never has more sequences than tokens.
            max_sequences: self.node.max_num_seqs.min(self.node.max_num_batched_tokens),
        };
        self.node.open_engine(limits, KvBacking::Private, kept_weights)
    }
}
