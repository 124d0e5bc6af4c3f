//! The settings of simulated processes: those of the programs that a simulation depends on, and what happens to whom.

use std::num::NonZeroU32;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, Args};
use service_runtime::config::ByteSize;
use serving_core::cluster::ClusterConfig;
use serving_core::routing::RoutingPolicy;
use serving_core::scheduler::MIXED_STEP_TOKENS_ON_CPU;
use simulator::intervention::Intervention;
use simulator::scenario::SimulatedNodes;

/// As the flags of `baton up` and of the processes; the defaults are the same.
#[derive(Debug, Args)]
pub struct ClusterArgs {
    /// Which node of a pool gets a request
    #[arg(long, value_parser = routing_policies(), default_value = "least-loaded")]
    routing: RoutingPolicy,
    /// Prompts of which a decode node lacks fewer tokens than this are computed there; 0 switches it off
    #[arg(long, default_value_t = 0, value_name = "TOKENS")]
    local_prefill_below: u32,
    /// Requests that may wait for a place
    #[arg(long, default_value_t = 2048)]
    max_queue_requests: usize,
    /// Longest wait for a place; then 429
    #[arg(long, default_value_t = 60_000)]
    queue_wait_ms_max: u64,
    /// A node that is silent for this long is lost
    #[arg(long, default_value_t = 5_000, value_parser = clap::value_parser!(u64).range(100..=600_000))]
    lease_ms: u64,
    /// Memory for KV blocks, of each node
    #[arg(long, default_value = "512MiB")]
    kv_cache_memory: ByteSize,
    /// Tokens of a KV block
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4_096), value_name = "TOKENS")]
    block_size: u32,
    /// Sequences in one step
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4_096))]
    max_num_seqs: u32,
    /// Tokens in one step
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    max_num_batched_tokens: u32,
    /// Tokens of prompts in a step in which sequences decode, too; 0: no limit of its own, as on GPUs
    #[arg(long, default_value_t = MIXED_STEP_TOKENS_ON_CPU.get(), value_name = "TOKENS")]
    mixed_step_tokens: u32,
    /// How long a step may take while sequences decode; prompts get what fits
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..=60_000))]
    itl_target_ms: Option<u32>,
    /// Prompt and outputs together
    #[arg(long, default_value_t = 8_192, value_parser = clap::value_parser!(u32).range(1..))]
    max_model_len: u32,
    /// Last chunk of a long prompt; 0: none of its own
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(0..=65_536))]
    last_chunk_tokens: u32,
    /// Keep computed blocks for prompts that begin alike
    #[arg(long, action = ArgAction::Set, default_value_t = true, value_name = "true|false")]
    prefix_cache: bool,
    /// A node's process dies: NODE@TIME, or NODE@TIME+DOWN if it comes back; may be repeated
    #[arg(long, value_parser = Intervention::fail, value_name = "NODE@TIME")]
    fail: Vec<Intervention>,
    /// A node's process stands still: NODE@TIME+LENGTH
    #[arg(long, value_parser = Intervention::pause, value_name = "NODE@TIME+LENGTH")]
    pause: Vec<Intervention>,
    /// A node is drained: NODE@TIME
    #[arg(long, value_parser = Intervention::drain, value_name = "NODE@TIME")]
    drain: Vec<Intervention>,
    /// A node becomes another role's: NODE=ROLE@TIME
    #[arg(long, value_parser = Intervention::role, value_name = "NODE=ROLE@TIME")]
    role: Vec<Intervention>,
}

fn routing_policies() -> impl TypedValueParser<Value = RoutingPolicy> {
    let names = RoutingPolicy::ALL.iter().map(|policy| policy.name());
    PossibleValuesParser::new(names).try_map(|name| RoutingPolicy::by_name(&name).ok_or("no such policy"))
}

impl ClusterArgs {
    pub fn nodes(&self, kv_bytes_per_token: u64) -> SimulatedNodes {
        let mut nodes = SimulatedNodes::of_kv_bytes(kv_bytes_per_token);
        let block_bytes = kv_bytes_per_token.saturating_mul(u64::from(self.block_size)).max(1);
        let limits = &mut nodes.limits;
        limits.kv_blocks = u32::try_from(self.kv_cache_memory.bytes() / block_bytes).unwrap_or(u32::MAX);
        limits.block_tokens = self.block_size;
        limits.max_sequences = self.max_num_seqs;
        limits.max_batch_tokens = self.max_num_batched_tokens;
        limits.max_model_tokens = self.max_model_len;
        limits.prefix_cache = self.prefix_cache;
        nodes.last_chunk_tokens = self.last_chunk_tokens;
        nodes.mixed_step_tokens = NonZeroU32::new(self.mixed_step_tokens);
        nodes.step_target = self.itl_target_ms.map(|ms| Duration::from_millis(ms.into()));
        nodes
    }

    pub fn policy(&self) -> ClusterConfig {
        ClusterConfig {
            routing: self.routing,
            local_prefill_below_tokens: self.local_prefill_below,
            queue_requests_max: self.max_queue_requests,
            queue_wait_max: Duration::from_millis(self.queue_wait_ms_max),
            lease: Duration::from_millis(self.lease_ms),
            ..ClusterConfig::default()
        }
    }

    pub fn interventions(&self) -> Vec<Intervention> {
        let all = [&self.fail, &self.pause, &self.drain, &self.role];
        all.into_iter().flatten().cloned().collect()
    }
}
