//! What a node computes next: one scheduler over sequences that compute their prompt in chunks, decode, wait for KV that a peer
//! sends, or are held for a push. A node's role is a configuration of it.
//! Read first: `README.md` here; then `interface`, and the way of a request: `admission`, `step`, `step_results`, `ending`.

mod admission;
mod drafts;
mod ending;
mod entry;
mod handoff_in;
mod handoff_out;
mod interface;
pub mod permit_shares;
pub mod permits;
mod preemption;
mod push;
mod refusal;
mod sequence;
mod status;
mod step;
mod step_cost;
pub mod step_plan;
mod step_results;

#[cfg(test)]
mod decode_tests;
#[cfg(test)]
mod mixed_step_tests;
#[cfg(test)]
mod prefill_tests;
#[cfg(test)]
mod property_tests;
#[cfg(test)]
mod test_kit;

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;
use std::time::Duration;

use crate::kv::prefix_log::PrefixChanges;
use crate::kv::{BlockHandle, BlockPool, CacheEvictions, CacheReset};
use crate::request::AttemptKey;
use crate::time::Time;

use ending::Quarantined;
use entry::Entry;
use permits::PermitCounters;
use step_cost::StepCost;

pub use handoff_in::{Commit, CommitError};
pub use interface::{
    Admission, Admitted, DraftCounts, Outcome, PushBlock, PushEnd, PushPlan, Report, SampledToken, SamplingFailed,
    SchedulerEvent, Work,
};
pub use refusal::{InvalidRequest, MOST_CHOICES, NodeFailure, Refusal};
pub use status::{BlockHolder, BlockReport, HoldCounts};
pub use step_plan::{PlannedRow, RowLogits, StepPlan};

/// What a node was given to work with; requests are checked against it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeLimits {
    pub kv_blocks: u32,
    pub block_tokens: u32,
    /// Rows of one step together, prompt chunks included.
    pub max_batch_tokens: u32,
    /// Sequences in one step.
    pub max_sequences: u32,
    /// Prompt and outputs together; a sequence that reaches it ends with `Length`.
    pub max_model_tokens: u32,
    pub vocab_size: u32,
    pub prefix_cache: bool,
}

impl NodeLimits {
    /// At least one of everything; a step never has more sequences than tokens.
    fn sane(self) -> Self {
        let max_batch_tokens = self.max_batch_tokens.max(1);
        Self {
            block_tokens: self.block_tokens.max(1),
            max_batch_tokens,
            max_sequences: self.max_sequences.clamp(1, max_batch_tokens),
            ..self
        }
    }
}

/// What a permit of this node is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PermitUnit {
    /// Prompt tokens: as many as two steps compute.
    PromptTokens,
    /// KV blocks that a request needs when it is let in.
    KvBlocks,
}

/// A role is a configuration: [`SchedulerConfig::prefill`] or [`SchedulerConfig::decode`].
#[derive(Clone, Copy, Debug)]
pub struct SchedulerConfig {
    pub limits: NodeLimits,
    pub permits: PermitUnit,
    /// Sequences that may be here for each place in a step.
    pub sequences_per_place: u32,
    /// How long computed blocks are kept for a decode node that neither takes any of them nor acknowledges. Each block that
    /// moves restarts it ([`Scheduler::push_progressed`]), at most until [`HOLDS_MAX`] times as long have passed.
    pub hold: Duration,
    /// How long a reservation lives without a sign of its transfer, from the moment the prefill has begun. Before that it waits
    /// in the prefill node's queue, which says nothing about anybody's life (PROTOCOL rule 9): the request's deadline is the
    /// limit then, and the coordinator, which sees the prefill node die, closes the stream.
    /// Must exceed the prefill node's longest step: blocks come when a chunk is done.
    pub reservation: Duration,
    /// Cuts the end of a prompt of several chunks that nothing else waits behind into a chunk of its own, at most this
    /// long: the rest of its KV moves while this chunk is computed, and only this chunk's KV is left between first and
    /// second token. A prompt of one chunk whose KV is streamed is cut in halves instead, unless it is short.
    pub last_chunk_tokens: Option<NonZeroU32>,
    /// How long a step may take while sequences decode: prompts get as many tokens of it as fit, by what earlier steps took, and at
    /// least eight. `None`: as many as the other limits leave.
    pub step_target: Option<Duration>,
    /// Tokens in a mixed step, one in which sequences decode, of prompts and of what preempted sequences compute again. Guesses do not
    /// count. `None`: as many as `max_batch_tokens` leaves.
    pub mixed_step_tokens: Option<NonZeroU32>,
    /// The most tokens that a sequence guesses at once, see `drafts.rs`. 0: it guesses none.
    pub speculative_tokens: u32,
    /// Cached blocks that one tenant keeps where blocks are needed.
    pub tenant_cached_blocks: u32,
}

/// What a node with the CPU engine has as `mixed_step_tokens` if nobody says otherwise. With SmolLM2-135M, chunks of 128 are computed as
/// fast as chunks of 512 with one thread, and about a sixth more slowly with two (docs/measurements/latency.md).
pub const MIXED_STEP_TOKENS_ON_CPU: NonZeroU32 = NonZeroU32::new(128).expect("not zero");

/// A hold that progress restarts ends after this many times its length all the same, or with its request's deadline: a decode
/// node that takes a block now and then must not keep the others for ever. With the default of one minute these are the ten
/// minutes that a request has in all.
pub const HOLDS_MAX: u32 = 10;

impl SchedulerConfig {
    /// Computes prompts and holds their KV for decode nodes. Held sequences are counted too, hence four for each place.
    pub fn prefill(limits: NodeLimits, hold: Duration, last_chunk_tokens: Option<NonZeroU32>) -> Self {
        Self {
            limits,
            permits: PermitUnit::PromptTokens,
            sequences_per_place: 4,
            hold,
            reservation: Duration::ZERO,
            last_chunk_tokens,
            step_target: None,
            mixed_step_tokens: None,
            speculative_tokens: 0,
            tenant_cached_blocks: limits.kv_blocks,
        }
    }

    /// Takes KV from prefill nodes, computes prompts itself when it is told to, and decodes. As many sequences may wait, or still
    /// receive, as may run: enough to refill the batch without a queue of its own.
    pub fn decode(limits: NodeLimits, reservation: Duration) -> Self {
        Self {
            limits,
            permits: PermitUnit::KvBlocks,
            sequences_per_place: 2,
            hold: Duration::ZERO,
            reservation,
            last_chunk_tokens: None,
            step_target: None,
            mixed_step_tokens: None,
            speculative_tokens: 0,
            tenant_cached_blocks: limits.kv_blocks,
        }
    }
}

/// See `README.md` in this folder.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    pool: BlockPool,
    /// By order of arrival: the youngest is the last.
    entries: BTreeMap<u64, Entry>,
    keys: BTreeMap<AttemptKey, u64>,
    /// Blocks of requests that are gone while a peer may still read or write them.
    quarantine: BTreeMap<Quarantined, Vec<BlockHandle>>,
    next_serial: u64,
    plan: Vec<PlannedRow>,
    /// When the planned step began, where steps have a target of time.
    step_began: Option<Time>,
    step_cost: StepCost,
    /// Kept between steps, so that planning does not allocate.
    running: Vec<(u64, u32)>,
    /// Ends that arrived while a step ran: its blocks must not be given away under it.
    deferred: Vec<(u64, Option<NodeFailure>)>,
    events: VecDeque<SchedulerEvent>,
    permits: PermitCounters,
    is_paused: bool,
    prefix_query_tokens: u64,
    prefix_hit_tokens: u64,
    preemptions: u64,
    drafts: DraftCounts,
    computed_tokens: u64,
}

impl Scheduler {
    pub fn new(config: SchedulerConfig) -> Self {
        let limits = config.limits.sane();
        let mut scheduler = Self {
            config: SchedulerConfig { limits, ..config },
            pool: BlockPool::new(limits.kv_blocks, limits.block_tokens, limits.prefix_cache)
                .with_tenant_share(config.tenant_cached_blocks),
            entries: BTreeMap::new(),
            keys: BTreeMap::new(),
            quarantine: BTreeMap::new(),
            next_serial: 0,
            plan: Vec::with_capacity(limits.max_sequences as usize),
            step_began: None,
            step_cost: StepCost::new(),
            running: Vec::with_capacity(limits.max_sequences as usize),
            deferred: Vec::new(),
            events: VecDeque::new(),
            permits: PermitCounters::default(),
            is_paused: false,
            prefix_query_tokens: 0,
            prefix_hit_tokens: 0,
            preemptions: 0,
            drafts: DraftCounts::default(),
            computed_tokens: 0,
        };
        scheduler.grant();
        scheduler
    }

    /// Next thing for the shell to do; ask until `None` after every call.
    pub fn take_event(&mut self) -> Option<SchedulerEvent> {
        self.events.pop_front()
    }

    /// As [`BlockPool::take_prefix_changes`].
    pub fn take_prefix_changes(&mut self) -> Option<PrefixChanges> {
        self.pool.take_prefix_changes()
    }

    /// As [`BlockPool::reset_prefix_cache`]. What a step computes or a peer reads is in use, so this may come at any time.
    pub fn reset_prefix_cache(&mut self) -> CacheReset {
        self.pool.reset_prefix_cache()
    }
    /// As [`BlockPool::evictions`].
    pub fn evictions(&self) -> CacheEvictions {
        self.pool.evictions()
    }
    /// Guesses since the start.
    pub fn draft_counts(&self) -> DraftCounts {
        self.drafts
    }
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }
    /// Requests that are here, in order of arrival.
    pub fn keys(&self) -> impl Iterator<Item = AttemptKey> {
        self.entries.values().map(|entry| entry.key)
    }

    fn entry_mut(&mut self, key: AttemptKey) -> Option<&mut Entry> {
        self.entries.get_mut(self.keys.get(&key)?)
    }
}
