//! The KV of a prompt on its way out: which blocks are ready to be pushed, and how long they are kept for the decode node.

use crate::kv::{BlockPool, BlockUse};
use crate::request::AttemptKey;
use crate::scheduler::entry::{AfterPrompt, ChoiceState, Phase};
use crate::scheduler::sequence::Sequence;
use crate::scheduler::{HOLDS_MAX, NodeFailure, Outcome, PushBlock, PushEnd, PushPlan, Scheduler, SchedulerEvent};
use crate::time::Time;

/// A push and how far it is.
#[derive(Debug)]
pub(super) struct Push {
    pub plan: PushPlan,
    /// The last chunk has been cut off: what is left is computed in one step.
    pub is_cut: bool,
    /// Blocks below this have been given to the push, or are not wanted by it.
    pushed_to: u32,
    /// The push has at least one block and has not been reported as ended.
    pub is_pushing: bool,
}

impl Push {
    pub fn new(plan: PushPlan) -> Self {
        Self {
            plan,
            is_cut: false,
            pushed_to: plan.skip_blocks,
            is_pushing: false,
        }
    }

    /// Of the whole prompt, those whose KV has not been given to the push, computed or not.
    pub fn tokens_left(&self, sequence: &Sequence, block_tokens: u32) -> u32 {
        let pushed = self.pushed_to.saturating_mul(block_tokens);
        sequence.len().saturating_sub(pushed)
    }

    /// Hands on the blocks that became complete; with the last chunk also the partial one.
    pub fn complete(&mut self, sequence: &mut Sequence, pool: &mut BlockPool) -> Option<Vec<PushBlock>> {
        let complete = match sequence.pending() {
            0 => sequence.table.len(),
            _ => sequence.computed / pool.block_tokens(),
        };
        if complete <= self.pushed_to {
            return None;
        }
        let range = self.pushed_to as usize..complete as usize;
        sequence.table.change(pool, range.clone(), BlockUse::InTransfer);
        let blocks = sequence.table.ids()[range].iter();
        let blocks = blocks.zip(self.pushed_to - self.plan.skip_blocks..);
        let blocks = blocks.map(|(block, ticket_index)| PushBlock {
            ticket_index,
            block: *block,
        });
        let blocks = blocks.collect();
        self.pushed_to = complete;
        self.is_pushing = true;
        Some(blocks)
    }
}

impl Scheduler {
    /// The first tokens of a request that goes on elsewhere are drawn: its blocks stay until the decode node has them.
    pub(super) fn hold(&mut self, now: Time, serial: u64) {
        let hold = self.config.hold;
        if let Some(entry) = self.entries.get_mut(&serial) {
            entry.phase = Phase::Held {
                since: now,
                until: now + hold,
            };
            entry.choices[0].state = ChoiceState::Held;
            let (key, timings) = (entry.key, entry.timings.clone());
            self.events.push_back(SchedulerEvent::Held { key, timings });
        }
    }

    /// A block of the request's push left for the decode node at `at`: the decode node is there, and its hold starts anew.
    /// What left before the hold began says nothing more: the hold has its whole length then.
    pub fn push_progressed(&mut self, at: Time, key: AttemptKey) {
        let hold = self.config.hold;
        if let Some(entry) = self.entry_mut(key)
            && let Phase::Held { since, until } = &mut entry.phase
        {
            let last = *since + hold.saturating_mul(HOLDS_MAX);
            *until = (at + hold).min(last).max(*until);
        }
    }

    /// The push of a request has ended: its blocks are released, or it is the end of their quarantine. An
    /// acknowledgement that comes before the first tokens were handed on is a broken peer and fails the request.
    pub fn push_ended(&mut self, key: AttemptKey, end: PushEnd) {
        self.leave_quarantine(&super::Quarantined::Push(key));
        if let Some(serial) = self.keys.get(&key).copied()
            && let Some(entry) = self.entries.get_mut(&serial)
            && let AfterPrompt::HandOver(push) = &mut entry.after_prompt
        {
            push.is_pushing = false;
            let is_held = matches!(entry.phase, Phase::Held { .. });
            match end {
                PushEnd::Acked if is_held => self.finish(serial, Outcome::HandedOver),
                PushEnd::Failed { reason, detail } => self.end(serial, Some(NodeFailure::Transfer { reason, detail })),
                PushEnd::Acked | PushEnd::Aborted => {
                    let (reason, detail) = ("protocol".to_owned(), "the push ended before its last frame".to_owned());
                    self.end(serial, Some(NodeFailure::Transfer { reason, detail }));
                }
            }
        }
        self.grant();
    }
}
