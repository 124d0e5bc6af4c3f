//! One request on a prefill node: from accepted, over its chunks, to the acknowledged handoff.

use std::sync::Arc;

use crate::batching::sequence::Sequence;
use crate::kv::{BlockPool, BlockUse};
use crate::request::{AttemptKey, Request};
use crate::stage::{Stage, StageTimings};
use crate::time::Time;

use super::prefill::{HOLDS_MAX, PrefillCommand, PrefillConfig, PrefillEvent, PushBlock};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PrefillPhase {
    /// Accepted; no chunk has run.
    Waiting,
    Computing,
    /// First tokens are out; blocks are kept until the decode node acknowledges, at most until `until`, which moves on with
    /// every block that leaves.
    Held {
        since: Time,
        until: Time,
    },
}

#[derive(Debug)]
pub(super) struct PrefillEntry {
    pub key: AttemptKey,
    pub request: Arc<Request>,
    pub sequence: Sequence,
    pub phase: PrefillPhase,
    pub deadline: Time,
    pub cached_tokens: u32,
    pub timings: StageTimings,
    pub accepted_at: Time,
    first_chunk_at: Time,
    /// Set when the request is handed over: prompt blocks that the decode node has already.
    skip_blocks: Option<u32>,
    pub is_streamed: bool,
    /// Its last chunk has been cut off: what is left is computed in one step.
    pub is_cut: bool,
    /// Blocks below this have been given to the push, or are not wanted by it.
    pushed_to: u32,
    /// The push has at least one block and has not been reported as ended.
    pub is_pushing: bool,
}

impl PrefillEntry {
    pub fn new(now: Time, command: PrefillCommand, sequence: Sequence, cached_tokens: u32) -> Self {
        let skip_blocks = command.handoff_skip_blocks;
        Self {
            key: AttemptKey {
                request: command.request.id,
                attempt: command.attempt,
            },
            deadline: now + command.request.time_limit,
            request: command.request,
            sequence,
            phase: PrefillPhase::Waiting,
            cached_tokens,
            timings: StageTimings::default(),
            accepted_at: now,
            first_chunk_at: now,
            skip_blocks,
            is_streamed: command.is_streamed,
            is_cut: false,
            pushed_to: skip_blocks.unwrap_or(0),
            is_pushing: false,
        }
    }

    pub fn is_held(&self) -> bool {
        matches!(self.phase, PrefillPhase::Held { .. })
    }
    pub fn is_handed_over(&self) -> bool {
        self.skip_blocks.is_some()
    }
    /// Of the whole prompt, those whose KV has not been given to the push, computed or not.
    pub fn tokens_to_push(&self, block_tokens: u32) -> u32 {
        let pushed = self.pushed_to.saturating_mul(block_tokens);
        self.sequence.len().saturating_sub(pushed)
    }
    pub fn stage(&self) -> Stage {
        match self.phase {
            PrefillPhase::Waiting => Stage::PrefillQueue,
            PrefillPhase::Computing => Stage::PrefillForward,
            PrefillPhase::Held { .. } => Stage::TransferTail,
        }
    }
    /// Choices drawn after the last chunk; none when the request wants no output at all (`echo`).
    pub fn draws(&self) -> u32 {
        if self.request.remaining_tokens() == 0 {
            0
        } else {
            self.request.choice_count
        }
    }

    pub fn chunk_planned(&mut self, now: Time) {
        if self.phase == PrefillPhase::Waiting {
            self.phase = PrefillPhase::Computing;
            self.first_chunk_at = now;
            self.timings.push(Stage::PrefillQueue, now.since(self.accepted_at));
        }
    }

    /// The prompt is computed and its first tokens are drawn.
    pub fn first_tokens_drawn(&mut self, now: Time, config: &PrefillConfig) {
        self.timings.push(Stage::PrefillForward, now.since(self.first_chunk_at));
        self.phase = PrefillPhase::Held {
            since: now,
            until: now + config.hold,
        };
    }

    /// What left before the hold began says nothing more: the hold has its whole length then.
    pub fn push_progressed(&mut self, at: Time, config: &PrefillConfig) {
        if let PrefillPhase::Held { since, until } = &mut self.phase {
            let last = *since + config.hold.saturating_mul(HOLDS_MAX);
            *until = (at + config.hold).min(last).max(*until);
        }
    }

    /// Hands the blocks that became complete to the push; `is_last` also the partial one.
    pub fn push_complete(&mut self, pool: &mut BlockPool, is_last: bool) -> Option<PrefillEvent> {
        let skip = self.skip_blocks?;
        let complete = if is_last {
            self.sequence.table.len()
        } else {
            self.sequence.computed / pool.block_tokens()
        };
        if complete <= self.pushed_to {
            return None;
        }
        let range = self.pushed_to as usize..complete as usize;
        self.sequence.table.change(pool, range.clone(), BlockUse::InTransfer);
        let ids = &self.sequence.table.ids()[range];
        let blocks = ids.iter().zip(self.pushed_to - skip..);
        let blocks = blocks
            .map(|(block, ticket_index)| PushBlock {
                ticket_index,
                block: *block,
            })
            .collect();
        self.pushed_to = complete;
        self.is_pushing = true;
        Some(PrefillEvent::BlocksReady { key: self.key, blocks })
    }
}
