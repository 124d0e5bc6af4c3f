//! One request on a node and its choices: from admission to its last token here.

use std::sync::Arc;

use crate::ids::TransferId;
use crate::kv::BlockPool;
use crate::request::{AttemptKey, Request};
use crate::scheduler::push::Push;
use crate::scheduler::sequence::Sequence;
use crate::scheduler::{DraftCounts, Report, SchedulerEvent};
use crate::stage::{Stage, StageTimings};
use crate::time::Time;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// A ticket is out. Blocks from `prefix_blocks` on belong to the transfer.
    Receiving {
        transfer: TransferId,
        prefix_blocks: u32,
        has_frames: bool,
        /// `None` until the prefill has begun.
        heard_at: Option<Time>,
    },
    /// Choice 0 computes the prompt here.
    Prompt { first_chunk_at: Option<Time> },
    /// The prompt's KV is here and every choice has its first token.
    Decoding,
    /// First tokens are out; blocks are kept until the decode node acknowledges, at most until `until`, which moves on with
    /// every block that leaves.
    Held { since: Time, until: Time },
}

/// The step that ran when a request was let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StepAtAdmission {
    None,
    Running,
    Ended(Time),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChoiceState {
    /// Holds its blocks, has no place in the batch yet.
    Waiting,
    /// Has a place in the batch.
    Running,
    /// Lost its blocks; computes everything again once there are blocks.
    Preempted,
    /// Is computed; its blocks are kept for a push.
    Held,
    Done,
}

#[derive(Debug)]
pub(super) struct Choice {
    pub sequence: Sequence,
    pub state: ChoiceState,
    /// The most tokens that it guesses at once.
    pub draft_tokens: u32,
}

/// What follows the first tokens of a prompt that is computed here.
#[derive(Debug)]
pub(super) enum AfterPrompt {
    Decode,
    HandOver(Push),
    End,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub key: AttemptKey,
    pub request: Arc<Request>,
    pub phase: Phase,
    pub after_prompt: AfterPrompt,
    pub deadline: Time,
    pub choices: Vec<Choice>,
    pub cached_tokens: u32,
    pub preemptions: u32,
    pub drafts: DraftCounts,
    pub timings: StageTimings,
    pub admitted_at: Time,
    pub step_at_admission: StepAtAdmission,
    /// First tokens known, by commit or by a prompt computed here.
    pub ready_at: Time,
    pub joined_at: Option<Time>,
    /// Of the tokens that it drew while it decoded.
    pub last_token_at: Option<Time>,
}

impl Entry {
    pub fn stage(&self) -> Stage {
        match self.phase {
            Phase::Receiving { .. } | Phase::Held { .. } => Stage::TransferTail,
            Phase::Prompt { first_chunk_at: None } => match self.step_at_admission {
                StepAtAdmission::Running => Stage::StepWait,
                StepAtAdmission::None | StepAtAdmission::Ended(_) => Stage::PrefillQueue,
            },
            Phase::Prompt {
                first_chunk_at: Some(_),
            } => Stage::PrefillForward,
            Phase::Decoding if self.joined_at.is_none() => Stage::DecodeQueue,
            Phase::Decoding => Stage::Decode,
        }
    }

    /// The transfer that fills its blocks, until it is committed.
    pub fn transfer(&self) -> Option<TransferId> {
        match self.phase {
            Phase::Receiving { transfer, .. } => Some(transfer),
            Phase::Prompt { .. } | Phase::Decoding | Phase::Held { .. } => None,
        }
    }

    /// Choices that may be preempted, or have been.
    pub fn is_committed(&self) -> bool {
        self.phase == Phase::Decoding
    }
    pub fn is_prompt(&self) -> bool {
        matches!(self.phase, Phase::Prompt { .. })
    }

    /// Choices that may have a place in the batch: a prompt is computed once, in choice 0.
    pub fn schedulable(&self) -> usize {
        match self.phase {
            Phase::Receiving { .. } | Phase::Held { .. } => 0,
            Phase::Prompt { .. } => 1,
            Phase::Decoding => self.choices.len(),
        }
    }

    pub fn live_choices(&self) -> u32 {
        let live = self.choices.iter().filter(|choice| choice.state != ChoiceState::Done);
        u32::try_from(live.count()).unwrap_or(u32::MAX)
    }
    pub fn count(&self, state: ChoiceState) -> u32 {
        let found = self.choices.iter().filter(|choice| choice.state == state);
        u32::try_from(found.count()).unwrap_or(u32::MAX)
    }

    /// Sequences of which something is being computed.
    pub fn running_sequences(&self) -> u32 {
        match self.phase {
            Phase::Prompt { first_chunk_at: None } => 0,
            _ => self.count(ChoiceState::Running),
        }
    }

    /// Sequences that could be computed: they have no place in the batch, or nothing of their prompt was planned yet.
    pub fn waiting_sequences(&self) -> u32 {
        if let Phase::Prompt { first_chunk_at: None } = self.phase {
            return 1;
        }
        let schedulable = self.choices[..self.schedulable()].iter();
        let waiting =
            schedulable.filter(|choice| matches!(choice.state, ChoiceState::Waiting | ChoiceState::Preempted));
        u32::try_from(waiting.count()).unwrap_or(u32::MAX)
    }

    /// Tokens to compute before this request draws again: prompts and resumed sequences.
    pub fn waiting_tokens(&self) -> u32 {
        match self.phase {
            Phase::Receiving { .. } | Phase::Held { .. } => 0,
            Phase::Prompt { .. } => self.choices[0].sequence.pending(),
            Phase::Decoding => {
                let resuming = self.choices.iter().filter(|choice| choice.state != ChoiceState::Done);
                resuming.map(|choice| choice.sequence.pending().saturating_sub(1)).sum()
            }
        }
    }

    /// Choices drawn after the prompt's last chunk; none when the request wants no output at all (`echo`).
    pub fn first_draws(&self) -> u32 {
        if self.request.remaining_tokens() == 0 {
            0
        } else {
            self.request.choice_count
        }
    }

    /// When the peer of its handoff is late: a silent transfer, or a hold that is over.
    pub fn peer_limit(&self, reservation: std::time::Duration) -> Option<Time> {
        match self.phase {
            Phase::Receiving { heard_at, .. } => heard_at.map(|heard_at| heard_at + reservation),
            Phase::Held { until, .. } => Some(until),
            Phase::Prompt { .. } | Phase::Decoding => None,
        }
    }

    pub fn decode_row_planned(&mut self, now: Time) {
        if self.joined_at.is_none() {
            self.joined_at = Some(now);
            self.timings.push(Stage::DecodeQueue, now.since(self.ready_at));
        }
    }

    pub fn chunk_planned(&mut self, now: Time) {
        if let Phase::Prompt {
            first_chunk_at: first @ None,
        } = &mut self.phase
        {
            *first = Some(now);
            let queued_since = match self.step_at_admission {
                StepAtAdmission::Ended(ended) => {
                    self.timings.push(Stage::StepWait, ended.since(self.admitted_at));
                    // A step may have ended a moment before anybody heard of its end.
                    ended.max(self.admitted_at)
                }
                StepAtAdmission::None | StepAtAdmission::Running => self.admitted_at,
            };
            self.timings.push(Stage::PrefillQueue, now.since(queued_since));
        }
    }

    /// The step that was running has ended; `None`: it failed, and nobody noted when.
    pub fn step_ended(&mut self, at: Option<Time>) {
        if self.step_at_admission == StepAtAdmission::Running {
            self.step_at_admission = at.map_or(StepAtAdmission::None, StepAtAdmission::Ended);
        }
    }

    /// The prompt is computed here.
    pub fn prompt_computed(&mut self, now: Time) {
        if let Phase::Prompt {
            first_chunk_at: Some(first),
        } = self.phase
        {
            self.timings.push(Stage::PrefillForward, now.since(first));
        }
        self.ready_at = now;
    }

    /// What it has come to until now.
    pub fn report(&self) -> Report {
        let mut timings = self.timings.clone();
        // A choice that found no block for its copy may draw before the request joins.
        if let (Some(joined), Some(last)) = (self.joined_at, self.last_token_at)
            && last >= joined
        {
            timings.push(Stage::Decode, last.since(joined));
        }
        Report {
            timings,
            cached_tokens: self.cached_tokens,
            preemptions: self.preemptions,
            drafts: self.drafts,
        }
    }

    /// Blocks that became complete, for the push, if there is one; with the last chunk also the partial block.
    pub fn push_complete(&mut self, pool: &mut BlockPool) -> Option<SchedulerEvent> {
        let AfterPrompt::HandOver(push) = &mut self.after_prompt else {
            return None;
        };
        let blocks = push.complete(&mut self.choices[0].sequence, pool)?;
        Some(SchedulerEvent::BlocksReady { key: self.key, blocks })
    }

    /// Index range check for tokens that come from a peer.
    pub fn choice_mut(&mut self, choice: u32) -> Option<&mut Choice> {
        self.choices.get_mut(choice as usize)
    }
}
