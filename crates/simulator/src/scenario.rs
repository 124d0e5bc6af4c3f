//! What goes in: nodes, policies, costs, a trace, and what happens to whom. Everything that a run depends on is in here.

use std::num::NonZeroU32;
use std::time::Duration;

use serving_core::cluster::ClusterConfig;
use serving_core::scheduler::{MIXED_STEP_TOKENS_ON_CPU, NodeLimits};
use thiserror::Error;
use workload::trace::Trace;

use crate::costs::{Costs, CostsError};
use crate::intervention::Intervention;
use crate::topology::SimulatedTopology;

/// One simulation. The same scenario gives the same outcome, to the byte.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The run's name in reports.
    pub name: String,
    pub topology: SimulatedTopology,
    pub nodes: SimulatedNodes,
    /// The coordinator's policies and limits: the product's own type.
    pub cluster: ClusterConfig,
    pub costs: Costs,
    pub trace: Trace,
    pub interventions: Vec<Intervention>,
    /// Requests before this time of the trace do not count.
    pub warm_up: Duration,
    /// Nor do those of so much time before its end.
    pub cool_down: Duration,
    /// Of the variation of steps and of the ids.
    pub seed: u64,
}

/// What every node is started with. The defaults are those of the programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimulatedNodes {
    pub limits: NodeLimits,
    /// As `--last-chunk-tokens` of prefill nodes; 0: off.
    pub last_chunk_tokens: u32,
    /// As `SchedulerConfig::step_target`.
    pub step_target: Option<Duration>,
    /// As `SchedulerConfig::mixed_step_tokens`.
    pub mixed_step_tokens: Option<NonZeroU32>,
    pub hold: Duration,
    pub reservation: Duration,
    /// Of a drain, what running requests get.
    pub drain_grace: Duration,
    /// From arrival to last token.
    pub request_time_limit: Duration,
}

/// Memory of `--kv-cache-memory` by default.
const KV_MEMORY_BYTES: u64 = 512 << 20;
const BLOCK_TOKENS: u32 = 16;

impl SimulatedNodes {
    /// As a node is that is told nothing: its KV memory holds so many bytes for each token.
    pub fn of_kv_bytes(kv_bytes_per_token: u64) -> Self {
        let block_bytes = kv_bytes_per_token.max(1).saturating_mul(u64::from(BLOCK_TOKENS));
        Self {
            limits: NodeLimits {
                kv_blocks: u32::try_from(KV_MEMORY_BYTES / block_bytes).unwrap_or(u32::MAX).max(1),
                block_tokens: BLOCK_TOKENS,
                max_batch_tokens: 512,
                max_sequences: 16,
                max_model_tokens: 8_192,
                vocab_size: 49_152,
                prefix_cache: true,
            },
            last_chunk_tokens: 32,
            step_target: None,
            mixed_step_tokens: Some(MIXED_STEP_TOKENS_ON_CPU),
            hold: Duration::from_secs(60),
            reservation: Duration::from_secs(60),
            // 10 s less the time for goodbyes (`service_runtime::shutdown`).
            drain_grace: Duration::from_millis(6_500),
            request_time_limit: Duration::from_secs(600),
        }
    }
}

/// Why a scenario cannot be run.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ScenarioError {
    #[error(transparent)]
    Costs(#[from] CostsError),
    #[error("the trace has no request; give one with --trace, or a shape")]
    EmptyTrace,
    #[error("the trace has {requests} requests, at most {most} can be simulated at once; take a part of it")]
    TooManyRequests { requests: usize, most: usize },
    #[error("request {index} arrives before the one ahead of it; a trace is in order of arrival")]
    NotInOrder { index: usize },
    #[error(
        "request {index} has {tokens} prompt and output tokens, a node takes {most}; raise --max-model-len, or make the requests shorter (those of a trace by --length-divisor or --shorten-to)"
    )]
    TooLong { index: usize, tokens: u64, most: u32 },
    #[error("there is no node `{name}`; nodes are called prefill-0, decode-0 and so on")]
    NoSuchNode { name: String },
    #[error("KV blocks of {block_tokens} tokens cannot be; a block has 1 to 4096 tokens")]
    BlockSize { block_tokens: u32 },
    #[error("{field} is 0; it must be at least 1")]
    Zero { field: &'static str },
}

/// A bound on memory: a record and the times of its tokens stay until the end.
const REQUESTS_MAX: usize = 5_000_000;

impl Scenario {
    /// # Errors
    /// What makes it impossible to run, named.
    pub(crate) fn check(&self) -> Result<(), ScenarioError> {
        self.costs.check()?;
        let limits = &self.nodes.limits;
        if !(1..=4_096).contains(&limits.block_tokens) {
            let block_tokens = limits.block_tokens;
            return Err(ScenarioError::BlockSize { block_tokens });
        }
        let sizes = [
            ("the number of KV blocks that --kv-cache-memory holds", limits.kv_blocks),
            ("--max-num-batched-tokens", limits.max_batch_tokens),
            ("--max-num-seqs", limits.max_sequences),
            ("--max-model-len", limits.max_model_tokens),
        ];
        if let Some((field, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(ScenarioError::Zero { field });
        }
        self.check_trace()?;
        let names: Vec<String> = self.topology.nodes().map(|(name, _)| name).collect();
        match self.interventions.iter().find(|i| !names.contains(&i.node)) {
            Some(unknown) => Err(ScenarioError::NoSuchNode {
                name: unknown.node.clone(),
            }),
            None => Ok(()),
        }
    }

    fn check_trace(&self) -> Result<(), ScenarioError> {
        let requests = &self.trace.requests;
        if requests.is_empty() {
            return Err(ScenarioError::EmptyTrace);
        }
        if requests.len() > REQUESTS_MAX {
            return Err(ScenarioError::TooManyRequests {
                requests: requests.len(),
                most: REQUESTS_MAX,
            });
        }
        if let Some(index) = requests.windows(2).position(|pair| pair[1].at < pair[0].at) {
            return Err(ScenarioError::NotInOrder { index: index + 1 });
        }
        let most = self.nodes.limits.max_model_tokens;
        let tokens = |index: usize| u64::from(requests[index].prompt_tokens) + u64::from(requests[index].output_tokens);
        match (0..requests.len()).find(|index| tokens(*index) > u64::from(most)) {
            Some(index) => Err(ScenarioError::TooLong {
                index,
                tokens: tokens(index),
                most,
            }),
            None => Ok(()),
        }
    }
}
