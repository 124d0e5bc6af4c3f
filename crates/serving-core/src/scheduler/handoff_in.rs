//! The KV of a prompt that comes from a prefill node: what shows that its transfer goes on, its commit, and its end.

use thiserror::Error;

use crate::ids::TransferId;
use crate::kv::BlockUse;
use crate::request::{AttemptKey, TokenEvent};
use crate::scheduler::entry::{Entry, Phase};
use crate::scheduler::{InvalidRequest, Quarantined, Scheduler, SchedulerEvent};
use crate::stage::Stage;
use crate::time::Time;

/// The end of a transfer, as the handoff hands it to the loop.
#[derive(Clone, Debug, PartialEq)]
pub struct Commit {
    pub key: AttemptKey,
    pub transfer: TransferId,
    pub last_frame_at: Time,
    pub first_tokens: Vec<TokenEvent>,
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

impl Scheduler {
    /// The prefill has begun. The request no longer waits in the prefill node's queue, and the reservation timer starts (PROTOCOL rule 9).
    pub fn prefill_began(&mut self, now: Time, key: AttemptKey) {
        if let Some(entry) = self.entry_mut(key)
            && let Phase::Receiving { heard_at, .. } = &mut entry.phase
        {
            *heard_at = Some(now);
        }
    }

    /// Bytes of the transfer have arrived. From now on its blocks are in transfer, and the timer starts anew.
    pub fn frame_arrived(&mut self, now: Time, key: AttemptKey) {
        let Some(serial) = self.keys.get(&key) else {
            return;
        };
        if let Some(entry) = self.entries.get_mut(serial)
            && let Phase::Receiving {
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
    /// The tokens break the contract, or the request is not receiving. Nothing has changed then.
    pub fn commit(&mut self, now: Time, commit: Commit) -> Result<(), CommitError> {
        let serial = *self.keys.get(&commit.key).ok_or(CommitError::NotHere)?;
        let vocab_size = self.config.limits.vocab_size;
        let entry = self.entries.get_mut(&serial).ok_or(CommitError::NotHere)?;
        let Phase::Receiving {
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
        entry.ready_at = now;
        entry.timings.push(Stage::Commit, now.since(commit.last_frame_at));
        let (key, timings) = (entry.key, entry.timings.clone());
        self.events
            .push_back(SchedulerEvent::Committed { key, transfer, timings });
        self.begin_decoding(serial, commit.first_tokens);
        self.grant();
        Ok(())
    }

    /// The loop's answer to `CloseTransfer`: no frame is being written and none will be.
    pub fn transfer_ended(&mut self, transfer: TransferId) {
        self.leave_quarantine(&Quarantined::Transfer(transfer));
        self.grant();
    }
}

/// Each token belongs to a choice of its own, has the next output index, and goes on.
fn check_first_tokens(entry: &Entry, tokens: &[TokenEvent], vocab_size: u32) -> Result<(), InvalidRequest> {
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
