//! One request on a decode node and its choices: from the reservation to the last token.

use std::sync::Arc;

use crate::batching::sequence::Sequence;
use crate::ids::TransferId;
use crate::request::{AttemptKey, Request};
use crate::stage::{Stage, StageTimings};
use crate::time::Time;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DecodePhase {
    /// A ticket is out. Blocks from `prefix_blocks` on belong to the transfer.
    Receiving {
        transfer: TransferId,
        prefix_blocks: u32,
        has_frames: bool,
        /// `None` until the prefill has begun.
        heard_at: Option<Time>,
    },
    /// Choice 0 computes the prompt here.
    LocalPrefill { first_chunk_at: Option<Time> },
    /// The prompt's KV is here and every choice has its first token.
    Decoding,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChoiceState {
    /// Holds its blocks, has no place in the batch yet.
    Waiting,
    /// Has a place in the batch.
    Running,
    /// Lost its blocks; computes everything again once there are blocks.
    Preempted,
    Done,
}

#[derive(Debug)]
pub(super) struct Choice {
    pub sequence: Sequence,
    pub state: ChoiceState,
}

#[derive(Debug)]
pub(super) struct DecodeEntry {
    pub key: AttemptKey,
    pub request: Arc<Request>,
    pub phase: DecodePhase,
    pub deadline: Time,
    pub choices: Vec<Choice>,
    pub cached_tokens: u32,
    pub preemptions: u32,
    pub timings: StageTimings,
    pub opened_at: Time,
    /// First tokens known, by commit or by local prefill.
    pub ready_at: Time,
    pub joined_at: Option<Time>,
}

impl DecodeEntry {
    pub fn stage(&self) -> Stage {
        match self.phase {
            DecodePhase::Receiving { .. } => Stage::TransferTail,
            DecodePhase::LocalPrefill { first_chunk_at: None } => Stage::PrefillQueue,
            DecodePhase::LocalPrefill {
                first_chunk_at: Some(_),
            } => Stage::PrefillForward,
            DecodePhase::Decoding if self.joined_at.is_none() => Stage::DecodeQueue,
            DecodePhase::Decoding => Stage::Decode,
        }
    }

    /// The transfer that fills its blocks, until it is committed.
    pub fn transfer(&self) -> Option<TransferId> {
        match self.phase {
            DecodePhase::Receiving { transfer, .. } => Some(transfer),
            DecodePhase::LocalPrefill { .. } | DecodePhase::Decoding => None,
        }
    }

    /// Last sign of the transfer, once its prefill has begun.
    pub fn heard_at(&self) -> Option<Time> {
        match self.phase {
            DecodePhase::Receiving { heard_at, .. } => heard_at,
            DecodePhase::LocalPrefill { .. } | DecodePhase::Decoding => None,
        }
    }
    /// Choices that may be preempted, or have been.
    pub fn is_committed(&self) -> bool {
        self.phase == DecodePhase::Decoding
    }
    pub fn live_choices(&self) -> u32 {
        let live = self.choices.iter().filter(|choice| choice.state != ChoiceState::Done);
        u32::try_from(live.count()).unwrap_or(u32::MAX)
    }
    pub fn count(&self, state: ChoiceState) -> u32 {
        let found = self.choices.iter().filter(|choice| choice.state == state);
        u32::try_from(found.count()).unwrap_or(u32::MAX)
    }
    /// Tokens to compute before this request draws again: prompts and resumed sequences.
    pub fn waiting_tokens(&self) -> u32 {
        match self.phase {
            DecodePhase::Receiving { .. } => 0,
            DecodePhase::LocalPrefill { .. } => self.choices[0].sequence.pending(),
            DecodePhase::Decoding => {
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

    pub fn decode_row_planned(&mut self, now: Time) {
        if self.joined_at.is_none() {
            self.joined_at = Some(now);
            self.timings.push(Stage::DecodeQueue, now.since(self.ready_at));
        }
    }

    pub fn local_chunk_planned(&mut self, now: Time) {
        if let DecodePhase::LocalPrefill {
            first_chunk_at: first @ None,
        } = &mut self.phase
        {
            *first = Some(now);
            self.timings.push(Stage::PrefillQueue, now.since(self.opened_at));
        }
    }

    /// The prompt is computed here and its first tokens are drawn.
    pub fn local_prompt_done(&mut self, now: Time) {
        if let DecodePhase::LocalPrefill {
            first_chunk_at: Some(first),
        } = self.phase
        {
            self.timings.push(Stage::PrefillForward, now.since(first));
        }
        self.phase = DecodePhase::Decoding;
        self.ready_at = now;
    }

    /// Index range check for tokens that come from a peer.
    pub fn choice_mut(&mut self, choice: u32) -> Option<&mut Choice> {
        self.choices.get_mut(choice as usize)
    }
}
