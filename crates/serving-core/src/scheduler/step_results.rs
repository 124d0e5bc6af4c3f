//! What a step has brought: chunks are computed, tokens are drawn, and sequences go on, are handed over, or end.

use crate::ids::BlockId;
use crate::kv::BlockPool;
use crate::request::{FinishReason, Request, TokenEvent};
use crate::scheduler::entry::{AfterPrompt, ChoiceState, Phase};
use crate::scheduler::sequence::Sequence;
use crate::scheduler::step_cost::StepSize;
use crate::scheduler::step_plan::prompt_tokens;
use crate::scheduler::{NodeFailure, Outcome, PlannedRow, SampledToken, Scheduler, SchedulerEvent};
use crate::time::Time;

pub(super) const ALL_DRAWS: &str = "the shell must give back every draw of the plan";

impl Scheduler {
    /// The step ran. `sampled` holds the plan's draws in order and is emptied.
    pub fn step_done(&mut self, now: Time, sampled: &mut Vec<SampledToken>) {
        let mut plan = std::mem::take(&mut self.plan);
        if let Some(began) = self.step_began.take() {
            let prompt_tokens = prompt_tokens(&plan);
            let decode_rows = plan.iter().filter(|row| !row.is_chunk()).count() as u32;
            let size = StepSize {
                decode_rows,
                prompt_tokens,
            };
            self.step_cost.learn(now.since(began), size);
        }
        let mut tokens = sampled.drain(..);
        for row in &plan {
            self.computed_tokens += u64::from(row.token_count);
            self.row_done(now, row, &mut tokens);
        }
        assert!(
            tokens.next().is_none(),
            "the shell gave back more draws than the plan has"
        );
        drop(tokens);
        plan.clear();
        self.plan = plan;
        self.step_ended(Some(now));
        self.end_deferred();
        self.grant();
    }

    /// The step did not run. Every request in it fails, and the others stay.
    pub fn step_failed(&mut self, detail: &str) {
        let mut plan = std::mem::take(&mut self.plan);
        self.step_began = None;
        for row in plan.drain(..) {
            let detail = detail.to_owned();
            self.end(row.serial, Some(NodeFailure::Engine { detail }));
        }
        self.plan = plan;
        self.step_ended(None);
        self.end_deferred();
    }

    fn step_ended(&mut self, at: Option<Time>) {
        self.entries.values_mut().for_each(|entry| entry.step_ended(at));
    }

    fn row_done(&mut self, now: Time, row: &PlannedRow, tokens: &mut impl Iterator<Item = SampledToken>) {
        // A request that was ended while the step ran takes nothing from it.
        let is_ending = self.is_ending(row.serial);
        let Some(entry) = self.entries.get_mut(&row.serial).filter(|_| !is_ending) else {
            let draws = row.draws * (1 + row.drafts);
            tokens.take(draws as usize).for_each(drop);
            return;
        };
        let sequence = &mut entry.choices[row.choice.0 as usize].sequence;
        sequence.computed += row.token_count - row.drafts;
        if let Phase::Prompt { .. } = entry.phase {
            sequence.publish(&mut self.pool);
            let is_whole = sequence.pending() == 0;
            self.events.extend(entry.push_complete(&mut self.pool));
            if is_whole {
                let drawn: Vec<SampledToken> = tokens.take(row.draws as usize).collect();
                assert_eq!(drawn.len(), row.draws as usize, "{ALL_DRAWS}");
                self.prompt_done(now, row.serial, drawn);
            }
        } else if row.drafts > 0 {
            self.drafts_done(now, row, tokens);
        } else if row.draws > 0 {
            self.token_drawn(now, row.serial, tokens.next().expect(ALL_DRAWS));
        }
    }

    /// The whole prompt is computed and the first tokens of its choices are drawn.
    fn prompt_done(&mut self, now: Time, serial: u64, drawn: Vec<SampledToken>) {
        let Some(entry) = self.entries.get_mut(&serial) else {
            return;
        };
        entry.prompt_computed(now);
        let index = entry.choices[0]
            .sequence
            .next_output(entry.request.client_prompt_tokens);
        let mut tokens = Vec::with_capacity(drawn.len());
        for SampledToken {
            choice,
            token,
            logprobs,
            ..
        } in drawn
        {
            let token = match token {
                Ok(token) => token,
                // The request ends after the step, because its other rows are still to come.
                Err(failed) => return self.deferred.push((serial, Some(failed.into()))),
            };
            tokens.push(TokenEvent {
                choice,
                index,
                token,
                logprobs,
                finish: None,
            });
        }
        match entry.after_prompt {
            AfterPrompt::Decode => self.begin_decoding(serial, tokens),
            AfterPrompt::HandOver(_) | AfterPrompt::End => self.leave_after_prompt(now, serial, tokens),
        }
    }

    /// Takes the first tokens of a request whose other tokens, if there are any, are drawn on another node.
    fn leave_after_prompt(&mut self, now: Time, serial: u64, mut tokens: Vec<TokenEvent>) {
        let limit = self.config.limits.max_model_tokens;
        let Some(entry) = self.entries.get_mut(&serial) else {
            return;
        };
        let total = entry.choices[0].sequence.len() + 1;
        for event in &mut tokens {
            let outputs = event.index.0 + 1;
            event.finish = finish_reason(&entry.request, event, SequenceLength { outputs, total, limit });
        }
        let goes_on =
            tokens.iter().any(|event| event.finish.is_none()) && matches!(entry.after_prompt, AfterPrompt::HandOver(_));
        let key = entry.key;
        if entry.request.report_kv_hashes && !goes_on {
            let blocks = entry.choices[0].sequence.table.ids().to_vec();
            self.events.push_back(SchedulerEvent::HashPrompt { key, blocks });
        }
        let tokens = tokens.into_iter();
        self.events
            .extend(tokens.map(|event| SchedulerEvent::Token { key, event }));
        if goes_on {
            self.hold(now, serial);
        } else {
            self.finish(serial, Outcome::Complete);
        }
    }

    /// The KV of the prompt is complete in the blocks of choice 0. Gives each choice that goes on a sequence of its own. Choices without a
    /// token have ended on another node.
    pub(super) fn begin_decoding(&mut self, serial: u64, tokens: Vec<TokenEvent>) {
        let Some(entry) = self.entries.get_mut(&serial) else {
            return;
        };
        entry.phase = Phase::Decoding;
        let (key, choice_count) = (entry.key, entry.request.choice_count);
        if entry.request.report_kv_hashes {
            let blocks = entry.choices[0].sequence.table.ids().to_vec();
            self.events.push_back(SchedulerEvent::HashPrompt { key, blocks });
        }
        let (leader, others) = entry.choices.split_at_mut(1);
        for event in tokens.iter().filter(|event| event.choice.0 > 0) {
            let Some(choice) = others.get_mut(event.choice.0 as usize - 1) else {
                continue;
            };
            match fork(&leader[0].sequence, &mut choice.sequence, &mut self.pool) {
                Fork::Shared => {}
                Fork::Copied { from, to } => {
                    self.events.push_back(SchedulerEvent::CopyBlock { key, from, to });
                }
                Fork::NoBlock => choice.state = ChoiceState::Preempted,
            }
        }
        for choice in 0..choice_count {
            match tokens.iter().find(|event| event.choice.0 == choice) {
                Some(event) => self.push_token(serial, event.clone()),
                None => self.choice_done(serial, choice),
            }
        }
        self.finish_when_done(serial);
    }

    pub(super) fn token_drawn(&mut self, now: Time, serial: u64, drawn: SampledToken) {
        let SampledToken {
            choice,
            token,
            logprobs,
            ..
        } = drawn;
        let Some(entry) = self.entries.get_mut(&serial) else {
            return;
        };
        let token = match token {
            Ok(token) => token,
            // The request ends after the step, because its other rows are still to come.
            Err(failed) => return self.deferred.push((serial, Some(failed.into()))),
        };
        entry.last_token_at = Some(now);
        let client_prompt_tokens = entry.request.client_prompt_tokens;
        let Some(own) = entry.choice_mut(choice.0) else {
            return;
        };
        let event = TokenEvent {
            choice,
            index: own.sequence.next_output(client_prompt_tokens),
            token,
            logprobs,
            finish: None,
        };
        self.push_token(serial, event);
        self.finish_when_done(serial);
    }

    /// Appends a token to its choice, reports it, and ends the choice if it is the last token.
    fn push_token(&mut self, serial: u64, mut event: TokenEvent) {
        let limit = self.config.limits.max_model_tokens;
        let Some(entry) = self.entries.get_mut(&serial) else {
            return;
        };
        let Some(choice) = entry.choices.get_mut(event.choice.0 as usize) else {
            return;
        };
        choice.sequence.tokens.push(event.token);
        let length = SequenceLength {
            outputs: event.index.0 + 1,
            total: choice.sequence.len(),
            limit,
        };
        event.finish = finish_reason(&entry.request, &event, length);
        let (ended, is_last, key) = (event.choice.0, event.finish.is_some(), entry.key);
        self.events.push_back(SchedulerEvent::Token { key, event });
        if is_last {
            self.choice_done(serial, ended);
        }
    }

    fn choice_done(&mut self, serial: u64, choice: u32) {
        if let Some(choice) = self.entries.get_mut(&serial).and_then(|entry| entry.choice_mut(choice)) {
            choice.sequence.release(&mut self.pool);
            choice.state = ChoiceState::Done;
        }
    }

    fn finish_when_done(&mut self, serial: u64) {
        let entry = self.entries.get(&serial);
        if entry.is_some_and(|entry| entry.live_choices() == 0) {
            self.finish(serial, Outcome::Complete);
        }
    }
}

/// Lengths of a sequence with its newest token.
#[derive(Clone, Copy, Debug)]
struct SequenceLength {
    /// Counted over all attempts.
    outputs: u32,
    total: u32,
    limit: u32,
}

/// Why a sequence ends with this token, if it does. An end token wins over a stop token, both win over length.
fn finish_reason(request: &Request, event: &TokenEvent, length: SequenceLength) -> Option<FinishReason> {
    let token = event.token;
    if request.stop.end_tokens.contains(&token) {
        Some(FinishReason::EndToken)
    } else if request.stop.stop_token_ids.contains(&token) {
        Some(FinishReason::StopToken(token))
    } else if length.outputs >= request.stop.max_tokens || length.total >= length.limit {
        Some(FinishReason::Length)
    } else {
        None
    }
}

enum Fork {
    Shared,
    Copied {
        from: BlockId,
        to: BlockId,
    },
    /// There is no free block for the copy. The choice computes its prompt again later.
    NoBlock,
}

/// Gives a choice its part of the prompt: whole blocks are shared, and the partial last block is copied.
fn fork(leader: &Sequence, choice: &mut Sequence, pool: &mut BlockPool) -> Fork {
    let prompt = leader.computed as usize;
    choice.tokens.reserve_exact(leader.tokens.capacity());
    choice.tokens.extend_from_slice(&leader.tokens[..prompt]);
    choice.share_whole_blocks(leader, pool);
    let partial = choice.table.len() as usize;
    let Some(from) = leader.table.ids().get(partial).copied() else {
        return Fork::Shared;
    };
    if !choice.grow_to(pool, leader.computed) {
        choice.release(pool);
        return Fork::NoBlock;
    }
    Fork::Copied {
        from,
        to: choice.table.ids()[partial],
    }
}
