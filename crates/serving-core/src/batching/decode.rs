//! The decode node's brain: reservations and their timers, commit, local prefill, the running batch, preemption.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::batching::decode_entry::{ChoiceState, DecodeEntry, DecodePhase};
use crate::batching::permits::PermitCounters;
use crate::batching::{InvalidRequest, NodeFailure, NodeLimits, PlannedRow, Refusal};
use crate::ids::{Attempt, BlockId, Generation, NodeEpoch, TransferId};
use crate::kv::prefix_log::PrefixChanges;
use crate::kv::{BlockHandle, BlockPool, BlockUse};
use crate::node::{NodeState, NodeStatus};
use crate::request::{AttemptKey, LocalPrefillReason, Request, TokenEvent};
use crate::stage::{Stage, StageTimings};
use crate::time::Time;

#[derive(Clone, Copy, Debug)]
pub struct DecodeConfig {
    pub limits: NodeLimits,
    /// How long a reservation lives without a sign of its transfer, from the moment the prefill has begun. Before that
    /// it waits in the prefill node's queue, which says nothing about anybody's life (PROTOCOL rule 9): the request's
    /// deadline is the limit then, and the coordinator, which sees the prefill node die, closes the stream.
    /// Must exceed the prefill node's longest step: blocks come when a chunk is done.
    pub reservation: Duration,
}

/// Where the prompt's KV comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptSource {
    /// A prefill node pushes it; the shell draws the id at random.
    Handoff(TransferId),
    Local(LocalPrefillReason),
}

impl PromptSource {
    pub fn transfer(self) -> Option<TransferId> {
        match self {
            PromptSource::Handoff(transfer) => Some(transfer),
            PromptSource::Local(_) => None,
        }
    }
}

#[derive(Clone, Debug)]
pub struct OpenCommand {
    pub request: Arc<Request>,
    pub attempt: Attempt,
    /// Blocks of the permit this request takes.
    pub permit_blocks: u64,
    /// The life of the coordinator that holds the permits.
    pub coordinator: NodeEpoch,
    pub source: PromptSource,
}

/// A request that was let in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opened {
    /// Leading whole blocks of the prompt that are here already.
    pub prefix_blocks: u32,
    pub cached_tokens: u32,
    /// Blocks that the transfer must fill, in sequence order; empty with local prefill.
    pub ticket_blocks: Vec<(BlockId, Generation)>,
}

/// What the shell must do or tell, in order. `Finished` and `Failed` are terminal; a cancel has no event.
#[derive(Clone, Debug, PartialEq)]
pub enum DecodeEvent {
    /// Copy one block's bytes now, before the next call: the source may be given away by it.
    CopyBlock {
        key: AttemptKey,
        from: BlockId,
        to: BlockId,
    },
    /// The prompt's KV is complete; hash these blocks now, before the next call. Only when the request wants hashes.
    HashPrompt {
        key: AttemptKey,
        blocks: Vec<BlockId>,
    },
    /// The handoff is committed: acknowledge it.
    Committed {
        key: AttemptKey,
        transfer: TransferId,
        timings: StageTimings,
    },
    Token {
        key: AttemptKey,
        event: TokenEvent,
    },
    Finished {
        key: AttemptKey,
        report: Box<DecodeReport>,
    },
    Failed {
        key: AttemptKey,
        failure: NodeFailure,
    },
    /// Take no further frame of this transfer, then report `transfer_ended`: until then its blocks are quarantined.
    CloseTransfer {
        transfer: TransferId,
    },
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DecodeReport {
    pub timings: StageTimings,
    pub cached_tokens: u32,
    pub preemptions: u32,
}

/// Why a commit was refused. The request is untouched; the shell fails it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CommitError {
    #[error("no such request is here (any more)")]
    NotHere,
    #[error("the request is not waiting for this transfer")]
    NotReceiving,
    #[error("{0}")]
    Invalid(InvalidRequest),
}

/// See `batching/README.md`. Steps are in `decode_step.rs`.
#[derive(Debug)]
pub struct DecodeBatcher {
    pub(super) config: DecodeConfig,
    pub(super) pool: BlockPool,
    /// By order of arrival: the youngest is the last.
    pub(super) entries: BTreeMap<u64, DecodeEntry>,
    pub(super) keys: BTreeMap<AttemptKey, u64>,
    pub(super) quarantine: BTreeMap<TransferId, Vec<BlockHandle>>,
    pub(super) next_serial: u64,
    pub(super) plan: Vec<PlannedRow>,
    pub(super) running: Vec<(u64, u32)>,
    /// Ends that arrived while a step ran: its blocks must not be given away under it.
    pub(super) deferred: Vec<(u64, Option<NodeFailure>)>,
    pub(super) events: VecDeque<DecodeEvent>,
    permits: PermitCounters,
    is_paused: bool,
    pub(super) prefix_query_tokens: u64,
    pub(super) prefix_hit_tokens: u64,
    pub(super) preemptions: u64,
    pub(super) computed_tokens: u64,
}

impl DecodeBatcher {
    pub fn new(config: DecodeConfig) -> Self {
        let limits = config.limits.sane();
        let mut batcher = Self {
            config: DecodeConfig { limits, ..config },
            pool: BlockPool::new(limits.kv_blocks, limits.block_tokens, limits.prefix_cache),
            entries: BTreeMap::new(),
            keys: BTreeMap::new(),
            quarantine: BTreeMap::new(),
            next_serial: 0,
            plan: Vec::with_capacity(limits.max_sequences as usize),
            running: Vec::with_capacity(limits.max_sequences as usize),
            deferred: Vec::new(),
            events: VecDeque::new(),
            permits: PermitCounters::default(),
            is_paused: false,
            prefix_query_tokens: 0,
            prefix_hit_tokens: 0,
            preemptions: 0,
            computed_tokens: 0,
        };
        batcher.grant();
        batcher
    }

    /// Pins the prefix that is here and reserves the rest of the prompt plus growth of min(remaining, two blocks) per
    /// choice.
    ///
    /// # Errors
    /// A refusal holds nothing. The permit it carried counts as used either way.
    pub fn open(&mut self, now: Time, command: OpenCommand) -> Result<Opened, Refusal> {
        self.permits.receive(command.permit_blocks, command.coordinator);
        let opened = self.check_open(&command).and_then(|()| self.reserve(now, command));
        self.grant();
        opened
    }

    /// The prefill has begun: its queue is over, the reservation timer starts (PROTOCOL rule 9).
    pub fn prefill_began(&mut self, now: Time, key: AttemptKey) {
        if let Some(entry) = self.entry_mut(key)
            && let DecodePhase::Receiving { heard_at, .. } = &mut entry.phase
        {
            *heard_at = Some(now);
        }
    }

    /// Bytes of the transfer have arrived: its blocks are in transfer from now on, the timer starts anew.
    pub fn frame_arrived(&mut self, now: Time, key: AttemptKey) {
        let Some(serial) = self.keys.get(&key) else {
            return;
        };
        if let Some(entry) = self.entries.get_mut(serial)
            && let DecodePhase::Receiving {
                prefix_blocks,
                has_frames,
                heard_at,
                ..
            } = &mut entry.phase
        {
            *heard_at = Some(now);
            if !std::mem::replace(has_frames, true) {
                let table = &mut entry.choices[0].sequence.table;
                let blocks = *prefix_blocks as usize..table.len() as usize;
                table.change(&mut self.pool, blocks, BlockUse::InTransfer);
            }
        }
    }

    /// Every byte of the transfer is here and verified; `last_frame_at` is when the last frame was received.
    /// `first_tokens` are the tokens of the choices that go on; choices without one ended at their first token.
    ///
    /// # Errors
    /// Tokens that break the contract, or a request that is not receiving: nothing has changed.
    pub fn commit(&mut self, now: Time, commit: Commit) -> Result<(), CommitError> {
        let serial = *self.keys.get(&commit.key).ok_or(CommitError::NotHere)?;
        let vocab_size = self.config.limits.vocab_size;
        let entry = self.entries.get_mut(&serial).ok_or(CommitError::NotHere)?;
        let DecodePhase::Receiving {
            transfer,
            prefix_blocks,
            ..
        } = entry.phase
        else {
            return Err(CommitError::NotReceiving);
        };
        if transfer != commit.transfer {
            return Err(CommitError::NotReceiving);
        }
        check_first_tokens(entry, &commit.first_tokens, vocab_size).map_err(CommitError::Invalid)?;
        let leader = &mut entry.choices[0].sequence;
        let blocks = prefix_blocks as usize..leader.table.len() as usize;
        leader.table.change(&mut self.pool, blocks, BlockUse::Active);
        leader.computed = entry.request.prompt_tokens();
        leader.publish(&mut self.pool);
        entry.phase = DecodePhase::Decoding;
        entry.ready_at = now;
        entry.timings.push(Stage::Commit, now.since(commit.last_frame_at));
        let (key, timings) = (entry.key, entry.timings.clone());
        self.events.push_back(DecodeEvent::Committed { key, transfer, timings });
        self.first_tokens(serial, commit.first_tokens);
        self.grant();
        Ok(())
    }

    /// The shell's answer to `CloseTransfer`: no frame is being written and none will be.
    pub fn transfer_ended(&mut self, transfer: TransferId) {
        for handle in self.quarantine.remove(&transfer).into_iter().flatten() {
            self.pool.release(handle);
        }
        self.grant();
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

    /// Deadlines, silent reservations, quarantine review. Call at least every second, whatever else happens.
    pub fn tick(&mut self, now: Time) {
        self.pool.reclaim_dropped();
        let mut late = Vec::new();
        for (serial, entry) in &self.entries {
            if let Some(heard_at) = entry.heard_at()
                && heard_at + self.config.reservation <= now
            {
                let waited_ms = u64::try_from(now.since(heard_at).as_millis()).unwrap_or(u64::MAX);
                late.push((*serial, NodeFailure::ReservationExpired { waited_ms }));
            } else if entry.deadline <= now {
                late.push((*serial, NodeFailure::Deadline { stage: entry.stage() }));
            }
        }
        for (serial, failure) in late {
            self.end(serial, Some(failure));
        }
        // Asking again is harmless, and a lost answer would otherwise keep the blocks for ever.
        self.events.extend(
            self.quarantine
                .keys()
                .map(|id| DecodeEvent::CloseTransfer { transfer: *id }),
        );
        self.grant();
    }

    /// When `tick` has something to do next.
    pub fn next_timer(&self) -> Option<Time> {
        let times = self.entries.values().map(|entry| {
            let silent = entry.heard_at().map(|heard_at| heard_at + self.config.reservation);
            silent.map_or(entry.deadline, |until| until.min(entry.deadline))
        });
        times.min()
    }

    /// Next thing for the shell to do; ask until `None` after every call.
    pub fn take_event(&mut self) -> Option<DecodeEvent> {
        self.events.pop_front()
    }

    /// While paused (the node drains) no further permits are granted.
    pub fn pause_grants(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
        self.grant();
    }

    pub fn status(&self, state: NodeState) -> NodeStatus {
        let sum = |count: fn(&DecodeEntry) -> u32| self.entries.values().map(count).sum();
        NodeStatus {
            state,
            permits_granted_total: self.permits.granted_total,
            permits_received_total: self.permits.received_total,
            permits_recalled_total: 0,
            permits_received_by: self.permits.received_by.clone(),
            coordinators: 0,
            kv_blocks: self.pool.counts(),
            running_sequences: sum(|entry| entry.count(ChoiceState::Running)),
            waiting_sequences: sum(|entry| match entry.phase {
                DecodePhase::Receiving { .. } => 0,
                DecodePhase::LocalPrefill { .. } => 1 - entry.count(ChoiceState::Running).min(1),
                DecodePhase::Decoding => entry.count(ChoiceState::Waiting) + entry.count(ChoiceState::Preempted),
            }),
            waiting_tokens: sum(DecodeEntry::waiting_tokens),
            prefix_query_tokens_total: self.prefix_query_tokens,
            prefix_hit_tokens_total: self.prefix_hit_tokens,
            preemptions_total: self.preemptions,
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
        self.entries.values().map(DecodeEntry::stage)
    }
    /// Requests that are here, in order of arrival.
    pub fn keys(&self) -> impl Iterator<Item = AttemptKey> {
        self.entries.values().map(|entry| entry.key)
    }

    fn entry_mut(&mut self, key: AttemptKey) -> Option<&mut DecodeEntry> {
        self.entries.get_mut(self.keys.get(&key)?)
    }

    /// Ends a request early, with an event when it failed. While it is in a running step the end waits for the step.
    pub(super) fn end(&mut self, serial: u64, failure: Option<NodeFailure>) {
        if self.plan.iter().any(|row| row.serial == serial) {
            self.deferred.push((serial, failure));
            return;
        }
        if let Some(entry) = self.remove(serial)
            && let Some(failure) = failure
        {
            self.events.push_back(DecodeEvent::Failed {
                key: entry.key,
                failure,
            });
        }
        self.grant();
    }

    /// The only way out of the tables. Blocks that a peer may be writing go to quarantine first.
    pub(super) fn remove(&mut self, serial: u64) -> Option<DecodeEntry> {
        let mut entry = self.entries.remove(&serial)?;
        self.keys.remove(&entry.key);
        if let DecodePhase::Receiving {
            transfer,
            prefix_blocks,
            ..
        } = entry.phase
        {
            let mut blocks = entry.choices[0].sequence.table.split_off(prefix_blocks as usize);
            for handle in &mut blocks {
                self.pool.change(handle, BlockUse::Quarantined);
            }
            self.quarantine.insert(transfer, blocks);
            self.events.push_back(DecodeEvent::CloseTransfer { transfer });
        }
        for choice in &mut entry.choices {
            choice.sequence.release(&mut self.pool);
        }
        Some(entry)
    }

    /// How often a request has lost its blocks to older ones until now.
    pub fn preemptions_of(&self, key: AttemptKey) -> u32 {
        let entry = self.keys.get(&key).and_then(|serial| self.entries.get(serial));
        entry.map_or(0, |entry| entry.preemptions)
    }

    pub(super) fn has_preempted(&self) -> bool {
        self.entries
            .values()
            .any(|entry| entry.count(ChoiceState::Preempted) > 0)
    }
    pub(super) fn open_sequences(&self) -> u32 {
        self.entries.values().map(DecodeEntry::live_choices).sum()
    }
    /// As many may wait, or still receive, as may run: enough to refill the batch without a queue of its own.
    pub(super) fn most_sequences(&self) -> u32 {
        self.config.limits.max_sequences.saturating_mul(2)
    }

    /// Free and cached blocks less one for each sequence that has no growth left: those come before new requests.
    pub(super) fn grant(&mut self) {
        if self.is_paused || self.open_sequences() >= self.most_sequences() || self.has_preempted() {
            return;
        }
        let growing = self.entries.values().filter(|entry| entry.is_committed());
        let promised = growing
            .flat_map(|entry| &entry.choices)
            .filter(|choice| choice.state != ChoiceState::Done && choice.sequence.spare.is_empty());
        let promised = u32::try_from(promised.count()).unwrap_or(u32::MAX);
        self.permits
            .grant(u64::from(self.pool.available().saturating_sub(promised)));
    }
}

/// The end of a transfer, as the handoff hands it to the loop.
#[derive(Clone, Debug, PartialEq)]
pub struct Commit {
    pub key: AttemptKey,
    pub transfer: TransferId,
    pub last_frame_at: Time,
    pub first_tokens: Vec<TokenEvent>,
}

/// Each token belongs to a choice of its own, has the next output index, and goes on.
fn check_first_tokens(entry: &DecodeEntry, tokens: &[TokenEvent], vocab_size: u32) -> Result<(), InvalidRequest> {
    let expected = entry.choices[0]
        .sequence
        .next_output(entry.request.client_prompt_tokens);
    for (i, event) in tokens.iter().enumerate() {
        if event.token.0 >= vocab_size {
            return Err(InvalidRequest::TokenOutOfVocabulary {
                token: event.token,
                vocab_size,
            });
        }
        let is_repeated = tokens[..i].iter().any(|earlier| earlier.choice == event.choice);
        let exists = event.choice.0 < entry.request.choice_count;
        if is_repeated || !exists || event.index != expected || event.finish.is_some() {
            return Err(InvalidRequest::FirstTokens);
        }
    }
    if tokens.is_empty() {
        Err(InvalidRequest::FirstTokens)
    } else {
        Ok(())
    }
}

#[cfg(test)]
#[path = "decode_tests.rs"]
mod tests;
