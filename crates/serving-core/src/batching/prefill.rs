//! The prefill node's brain: admission, chunks under a token budget, what to push, what to hold and until when.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use crate::batching::permits::{PermitCounters, prefill_capacity_tokens};
use crate::batching::prefill_entry::{PrefillEntry, PrefillPhase};
use crate::batching::sequence::Sequence;
use crate::batching::{NodeFailure, NodeLimits, PlannedRow, Refusal, check_request};
use crate::ids::{Attempt, BlockId, NodeEpoch};
use crate::kv::block_table::BlockTable;
use crate::kv::prefix_log::PrefixChanges;
use crate::kv::{BlockPool, BlockUse};
use crate::node::{NodeCapacity, NodeState, NodeStatus};
use crate::request::{AttemptKey, Request, TokenEvent};
use crate::stage::{Stage, StageTimings};
use crate::time::Time;

#[derive(Clone, Copy, Debug)]
pub struct PrefillConfig {
    pub limits: NodeLimits,
    /// How long computed blocks are kept for a decode node that neither takes any of them nor acknowledges. Each block that
    /// moves restarts it ([`PrefillBatcher::push_progressed`]), at most until [`HOLDS_MAX`] times as long have passed.
    pub hold: Duration,
    /// Cuts the end of a prompt of several chunks that nothing else waits behind into a chunk of its own, at most this
    /// long: the rest of its KV moves while this chunk is computed, and only this chunk's KV is left between first and
    /// second token. A prompt of one chunk whose KV is streamed is cut in halves instead, unless it is short.
    pub last_chunk_tokens: Option<NonZeroU32>,
}

/// A hold that progress restarts ends after this many times its length all the same, or with its request's deadline: a decode
/// node that takes a block now and then must not keep the others for ever. With the default of one minute these are the ten
/// minutes that a request has in all.
pub const HOLDS_MAX: u32 = 10;

#[derive(Clone, Debug)]
pub struct PrefillCommand {
    pub request: Arc<Request>,
    pub attempt: Attempt,
    /// Prompt tokens of the permit this request takes.
    pub permit_tokens: u64,
    /// The life of the coordinator that holds the permits.
    pub coordinator: NodeEpoch,
    /// The ticket's `prefix_blocks`; `None` when nothing is handed over.
    pub handoff_skip_blocks: Option<u32>,
    /// Its KV goes over a stream, which takes as long as some decode steps, and not through memory that both nodes map.
    pub is_streamed: bool,
}

/// A block whose bytes are complete and will not change until the push has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PushBlock {
    pub ticket_index: u32,
    pub block: BlockId,
}

/// What the shell must do or tell, in order. `Finished` and `Failed` are terminal; a cancel has no event.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillEvent {
    /// Give these to the push. Never waits: a push queue that is full is reported with `pause_grants`.
    BlocksReady {
        key: AttemptKey,
        blocks: Vec<PushBlock>,
    },
    /// After the last `BlocksReady`: send the first tokens to the coordinator, and the last frame with the tokens
    /// that go on when `continues`. Then report `push_ended`.
    FirstTokens {
        key: AttemptKey,
        tokens: Vec<TokenEvent>,
        timings: StageTimings,
        continues: bool,
        /// All prompt blocks in order when the request wants KV hashes: hash them now, before the next call.
        hash_blocks: Vec<BlockId>,
    },
    /// Stop the push, then report `push_ended`: until then its blocks are quarantined. Said again with every tick until then.
    AbortPush {
        key: AttemptKey,
    },
    Finished {
        key: AttemptKey,
        outcome: PrefillOutcome,
        cached_tokens: u32,
        timings: StageTimings,
    },
    Failed {
        key: AttemptKey,
        failure: NodeFailure,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillOutcome {
    HandedOver,
    EndedAtFirstToken,
}

/// How a push came to its end. Whatever it was, nothing reads the blocks any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PushEnd {
    /// The decode node has committed.
    Acked,
    Failed {
        reason: String,
        detail: String,
    },
    /// Answer to `AbortPush`.
    Aborted,
}

impl PushEnd {
    /// Closed label for the event log.
    pub fn name(&self) -> &'static str {
        match self {
            PushEnd::Acked => "acked",
            PushEnd::Failed { .. } => "failed",
            PushEnd::Aborted => "aborted",
        }
    }
}

/// See `batching/README.md`.
#[derive(Debug)]
pub struct PrefillBatcher {
    pub(super) config: PrefillConfig,
    pub(super) pool: BlockPool,
    /// By order of arrival.
    pub(super) entries: BTreeMap<u64, PrefillEntry>,
    keys: BTreeMap<AttemptKey, u64>,
    /// Blocks of requests that are gone while their push may still read them.
    pub(super) quarantine: BTreeMap<AttemptKey, BlockTable>,
    next_serial: u64,
    pub(super) plan: Vec<PlannedRow>,
    /// Ends that arrived while a step ran: its blocks must not be given away under it.
    deferred: Vec<(u64, Option<NodeFailure>)>,
    pub(super) events: VecDeque<PrefillEvent>,
    permits: PermitCounters,
    is_paused: bool,
    prefix_query_tokens: u64,
    prefix_hit_tokens: u64,
    pub(super) computed_tokens: u64,
}

impl PrefillBatcher {
    pub fn new(config: PrefillConfig) -> Self {
        let limits = config.limits.sane();
        let mut batcher = Self {
            config: PrefillConfig { limits, ..config },
            pool: BlockPool::new(limits.kv_blocks, limits.block_tokens, limits.prefix_cache),
            entries: BTreeMap::new(),
            keys: BTreeMap::new(),
            quarantine: BTreeMap::new(),
            next_serial: 0,
            plan: Vec::with_capacity(limits.max_sequences as usize),
            deferred: Vec::new(),
            events: VecDeque::new(),
            permits: PermitCounters::default(),
            is_paused: false,
            prefix_query_tokens: 0,
            prefix_hit_tokens: 0,
            computed_tokens: 0,
        };
        batcher.grant();
        batcher
    }

    /// Takes a request when its whole uncached prompt fits now; returns the prompt tokens found in the prefix cache.
    ///
    /// # Errors
    /// A refusal holds nothing. The permit it carried counts as used either way.
    pub fn accept(&mut self, now: Time, command: PrefillCommand) -> Result<u32, Refusal> {
        self.permits.receive(command.permit_tokens, command.coordinator);
        let accepted = self.admit(now, command);
        self.grant();
        accepted
    }

    fn admit(&mut self, now: Time, command: PrefillCommand) -> Result<u32, Refusal> {
        let request = &command.request;
        let key = AttemptKey {
            request: request.id,
            attempt: command.attempt,
        };
        check_request(request, &self.config.limits).map_err(Refusal::Invalid)?;
        if self.keys.contains_key(&key) || self.quarantine.contains_key(&key) {
            return Err(Refusal::Duplicate);
        }
        let needed = self.pool.blocks_for(request.prompt_tokens());
        if needed > self.pool.block_count() {
            return Err(Refusal::NeverFits {
                needed_blocks: needed,
                pool_blocks: self.pool.block_count(),
            });
        }
        let (open, limit) = (self.entries.len() as u32, self.most_requests());
        if open >= limit {
            return Err(Refusal::TooManySequences { open, limit });
        }
        let mut sequence = Sequence::empty();
        sequence.tokens = request.prompt.to_vec();
        let found = if request.prompt_logprobs.is_some() {
            0
        } else {
            sequence.take_prefix(&mut self.pool)
        };
        let Some(rest) = self.pool.allocate(needed - found, BlockUse::Active) else {
            let available_blocks = self.pool.available();
            sequence.table.release(&mut self.pool);
            return Err(Refusal::NoBlocks {
                needed_blocks: needed - found,
                available_blocks,
            });
        };
        sequence.table.extend(rest);
        let cached_tokens = sequence.computed;
        self.prefix_query_tokens += u64::from(request.prompt_tokens());
        self.prefix_hit_tokens += u64::from(cached_tokens);
        let serial = self.next_serial;
        self.next_serial += 1;
        self.keys.insert(key, serial);
        self.entries
            .insert(serial, PrefillEntry::new(now, command, sequence, cached_tokens));
        Ok(cached_tokens)
    }

    /// The client or the coordinator is gone. Idempotent; false when the request is not here (any more).
    pub fn cancel(&mut self, key: AttemptKey) -> bool {
        let Some(serial) = self.keys.get(&key).copied() else {
            return false;
        };
        self.end(serial, None);
        true
    }

    /// Breaks a request off with an event.
    pub fn fail(&mut self, key: AttemptKey, failure: NodeFailure) {
        if let Some(serial) = self.keys.get(&key).copied() {
            self.end(serial, Some(failure));
        }
    }

    /// The push of a request has ended: its blocks are released, or it is the end of their quarantine. An
    /// acknowledgement that comes before the first tokens were handed on is a broken peer and fails the request.
    pub fn push_ended(&mut self, key: AttemptKey, end: PushEnd) {
        if let Some(mut table) = self.quarantine.remove(&key) {
            table.release(&mut self.pool);
        }
        if let Some(serial) = self.keys.get(&key).copied()
            && let Some(entry) = self.entries.get_mut(&serial)
        {
            let is_held = entry.is_held();
            entry.is_pushing = false;
            match end {
                PushEnd::Acked if is_held => self.finish(serial, PrefillOutcome::HandedOver),
                PushEnd::Failed { reason, detail } => self.end(serial, Some(NodeFailure::Transfer { reason, detail })),
                PushEnd::Acked | PushEnd::Aborted => {
                    let (reason, detail) = ("protocol".to_owned(), "the push ended before its last frame".to_owned());
                    self.end(serial, Some(NodeFailure::Transfer { reason, detail }));
                }
            }
        }
        self.grant();
    }

    /// A block of the request's push left for the decode node at `at`: the decode node is there, and its hold starts anew.
    pub fn push_progressed(&mut self, at: Time, key: AttemptKey) {
        if let Some(serial) = self.keys.get(&key)
            && let Some(entry) = self.entries.get_mut(serial)
        {
            entry.push_progressed(at, &self.config);
        }
    }

    /// Deadlines, holds, quarantine review. Call at least every second, whatever else happens.
    pub fn tick(&mut self, now: Time) {
        self.pool.reclaim_dropped();
        // Asking again is harmless, and a lost answer would otherwise keep the blocks for ever.
        let quarantined = self.quarantine.keys();
        self.events
            .extend(quarantined.map(|key| PrefillEvent::AbortPush { key: *key }));
        let mut late = Vec::new();
        for (serial, entry) in &self.entries {
            match entry.phase {
                PrefillPhase::Held { since, until } if until <= now => {
                    let held_ms = u64::try_from(now.since(since).as_millis()).unwrap_or(u64::MAX);
                    late.push((*serial, NodeFailure::HoldExpired { held_ms }));
                }
                _ if entry.deadline <= now => late.push((*serial, NodeFailure::Deadline { stage: entry.stage() })),
                _ => {}
            }
        }
        for (serial, failure) in late {
            self.end(serial, Some(failure));
        }
        self.grant();
    }

    /// When `tick` has something to do next.
    pub fn next_timer(&self) -> Option<Time> {
        let times = self.entries.values().map(|entry| match entry.phase {
            PrefillPhase::Held { until, .. } => until.min(entry.deadline),
            _ => entry.deadline,
        });
        times.min()
    }

    /// Next thing for the shell to do; ask until `None` after every call.
    pub fn take_event(&mut self) -> Option<PrefillEvent> {
        self.events.pop_front()
    }

    /// While the push queue is full no further permits are granted (PROTOCOL rule 7).
    pub fn pause_grants(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
        self.grant();
    }

    pub fn status(&self, state: NodeState) -> NodeStatus {
        let waiting = self
            .entries
            .values()
            .filter(|entry| entry.phase == PrefillPhase::Waiting)
            .count();
        let running = self
            .entries
            .values()
            .filter(|entry| entry.phase == PrefillPhase::Computing)
            .count();
        NodeStatus {
            state,
            permits_granted_total: self.permits.granted_total,
            permits_received_total: self.permits.received_total,
            permits_recalled_total: 0,
            permits_received_by: self.permits.received_by.clone(),
            coordinators: 0,
            kv_blocks: self.pool.counts(),
            running_sequences: running as u32,
            waiting_sequences: waiting as u32,
            waiting_tokens: u32::try_from(self.waiting_tokens()).unwrap_or(u32::MAX),
            prefix_query_tokens_total: self.prefix_query_tokens,
            prefix_hit_tokens_total: self.prefix_hit_tokens,
            preemptions_total: 0,
            computed_tokens_total: self.computed_tokens,
            pairs: Vec::new(),
        }
    }

    /// As [`BlockPool::take_prefix_changes`].
    pub fn take_prefix_changes(&mut self) -> Option<PrefixChanges> {
        self.pool.take_prefix_changes()
    }
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }
    /// The stage of every request that is here.
    pub fn stages(&self) -> impl Iterator<Item = Stage> {
        self.entries.values().map(PrefillEntry::stage)
    }
    /// Requests here, held ones included.
    pub fn open_requests(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn finish(&mut self, serial: u64, outcome: PrefillOutcome) {
        if let Some(entry) = self.remove(serial) {
            let (key, cached_tokens, timings) = (entry.key, entry.cached_tokens, entry.timings);
            self.events.push_back(PrefillEvent::Finished {
                key,
                outcome,
                cached_tokens,
                timings,
            });
        }
    }

    /// Ends a request early, with an event when it failed. While a step runs the end waits for the step.
    pub(super) fn end(&mut self, serial: u64, failure: Option<NodeFailure>) {
        if self.plan.iter().any(|row| row.serial == serial) {
            self.deferred.push((serial, failure));
            return;
        }
        if let Some(entry) = self.remove(serial)
            && let Some(failure) = failure
        {
            self.events.push_back(PrefillEvent::Failed {
                key: entry.key,
                failure,
            });
        }
        self.grant();
    }

    pub(super) fn end_deferred(&mut self) {
        for (serial, failure) in std::mem::take(&mut self.deferred) {
            self.end(serial, failure);
        }
    }

    /// The only way out of the tables: blocks go back, or to quarantine while the push may read them.
    fn remove(&mut self, serial: u64) -> Option<PrefillEntry> {
        let mut entry = self.entries.remove(&serial)?;
        self.keys.remove(&entry.key);
        if entry.is_pushing {
            let mut table = std::mem::take(&mut entry.sequence.table);
            let all = 0..table.len() as usize;
            table.change(&mut self.pool, all, BlockUse::Quarantined);
            self.quarantine.insert(entry.key, table);
            self.events.push_back(PrefillEvent::AbortPush { key: entry.key });
        } else {
            entry.sequence.release(&mut self.pool);
        }
        self.grant();
        Some(entry)
    }

    fn waiting_tokens(&self) -> u64 {
        let waiting = self.entries.values().filter(|entry| !entry.is_held());
        waiting.map(|entry| u64::from(entry.sequence.pending())).sum()
    }

    /// Requests that may be here at once, held ones included: bounds the tables when prompts are tiny.
    fn most_requests(&self) -> u32 {
        self.config.limits.max_sequences.saturating_mul(4)
    }

    pub(super) fn grant(&mut self) {
        if self.is_paused || self.entries.len() as u32 >= self.most_requests() {
            return;
        }
        let limits = &self.config.limits;
        let capacity = prefill_capacity_tokens(&NodeCapacity {
            kv_blocks: limits.kv_blocks,
            block_tokens: limits.block_tokens,
            max_sequences: limits.max_sequences,
            max_batch_tokens: limits.max_batch_tokens,
            max_model_tokens: limits.max_model_tokens,
            block_bytes: 0,
        });
        let room = u64::from(self.pool.available()) * u64::from(limits.block_tokens);
        self.permits
            .grant(capacity.saturating_sub(self.waiting_tokens()).min(room));
    }
}

#[cfg(test)]
#[path = "prefill_tests.rs"]
mod tests;
