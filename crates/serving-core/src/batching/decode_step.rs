//! The decode batcher's steps: who runs, growth and preemption, chunks of prompts, and what drawn tokens do.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::batching::decode::DecodeReport;
use crate::batching::decode_entry::{ChoiceState, DecodeEntry, DecodePhase};
use crate::batching::sequence::Sequence;
use crate::batching::step_plan::RowSource;
use crate::batching::{
    DecodeBatcher, DecodeEvent, NodeFailure, PlannedRow, RowLogits, SampledToken, SequenceLength, StepPlan,
    finish_reason,
};
use crate::ids::{BlockId, ChoiceIndex};
use crate::kv::{BlockPool, BlockUse};
use crate::request::{Request, TokenEvent};
use crate::stage::Stage;
use crate::time::Time;

impl RowSource for BTreeMap<u64, DecodeEntry> {
    fn sequence(&self, row: &PlannedRow) -> (&Sequence, &Arc<Request>) {
        let entry = &self[&row.serial];
        (&entry.choices[row.choice.0 as usize].sequence, &entry.request)
    }
}

impl DecodeBatcher {
    /// The next step: one row for each running sequence, then chunks of resumed sequences and of local prompts with
    /// the rest of the token budget. `None` when nothing can run. `step_done` or `step_failed` must follow.
    pub fn next_step(&mut self, now: Time) -> Option<StepPlan<'_>> {
        assert!(self.plan.is_empty(), "a step is planned while another runs");
        self.admit_to_batch();
        let budget = self.plan_decode_rows(now);
        let budget = self.plan_chunks(now, budget, true);
        self.plan_chunks(now, budget, false);
        self.grant();
        (!self.plan.is_empty()).then_some(StepPlan {
            rows: &self.plan,
            source: &self.entries,
        })
    }

    /// The step ran. `sampled` holds the plan's draws in order and is emptied.
    pub fn step_done(&mut self, now: Time, sampled: &mut Vec<SampledToken>) {
        let mut plan = std::mem::take(&mut self.plan);
        let mut tokens = sampled.drain(..);
        for row in &plan {
            self.computed_tokens += u64::from(row.token_count);
            let Some(entry) = self.entries.get_mut(&row.serial) else {
                tokens.by_ref().take(row.draws as usize).for_each(drop);
                continue;
            };
            let sequence = &mut entry.choices[row.choice.0 as usize].sequence;
            sequence.computed += row.token_count;
            match entry.phase {
                DecodePhase::LocalPrefill { .. } => {
                    sequence.publish(&mut self.pool);
                    if sequence.pending() == 0 {
                        let drawn = tokens.by_ref().take(row.draws as usize).collect();
                        self.local_prompt_done(now, row.serial, drawn);
                    }
                }
                _ if row.draws == 0 => {}
                _ => {
                    let drawn = tokens.next().expect("the shell must give back every draw of the plan");
                    self.token_drawn(now, row.serial, drawn);
                }
            }
        }
        assert!(
            tokens.next().is_none(),
            "the shell gave back more draws than the plan has"
        );
        drop(tokens);
        plan.clear();
        self.plan = plan;
        self.end_deferred();
        self.grant();
    }

    /// The step did not run: every request in it fails, the others stay.
    pub fn step_failed(&mut self, detail: &str) {
        let mut plan = std::mem::take(&mut self.plan);
        for row in plan.drain(..) {
            self.end(
                row.serial,
                Some(NodeFailure::Engine {
                    detail: detail.to_owned(),
                }),
            );
        }
        self.plan = plan;
        self.end_deferred();
    }

    fn end_deferred(&mut self) {
        for (serial, failure) in std::mem::take(&mut self.deferred) {
            self.end(serial, failure);
        }
    }

    /// Fills free places of the batch: preempted sequences first, then in order of arrival.
    fn admit_to_batch(&mut self) {
        let running: u32 = self
            .entries
            .values()
            .map(|entry| entry.count(ChoiceState::Running))
            .sum();
        let mut places = self.config.limits.max_sequences.saturating_sub(running);
        let mut may_resume = true;
        for state in [ChoiceState::Preempted, ChoiceState::Waiting] {
            for entry in self.entries.values_mut() {
                let last = match entry.phase {
                    DecodePhase::Receiving { .. } => 0,
                    DecodePhase::LocalPrefill { .. } => 1,
                    DecodePhase::Decoding => entry.choices.len(),
                };
                for choice in entry.choices[..last].iter_mut().filter(|choice| choice.state == state) {
                    if places == 0 {
                        return;
                    }
                    if state == ChoiceState::Preempted {
                        // In order: a younger one must not take the blocks that the older one waits for.
                        may_resume = may_resume && take_blocks_again(&mut choice.sequence, &mut self.pool);
                        if !may_resume {
                            continue;
                        }
                    }
                    choice.state = ChoiceState::Running;
                    places -= 1;
                }
            }
        }
    }

    /// One row for each running sequence that only lacks its newest token's KV. Returns what is left of the budget.
    fn plan_decode_rows(&mut self, now: Time) -> u32 {
        let mut budget = self.config.limits.max_batch_tokens;
        let mut running = std::mem::take(&mut self.running);
        running.clear();
        for (serial, entry) in self.entries.iter().filter(|(_, entry)| entry.is_committed()) {
            let choices = (0..).zip(&entry.choices);
            let rows =
                choices.filter(|(_, choice)| choice.state == ChoiceState::Running && choice.sequence.pending() == 1);
            running.extend(rows.map(|(choice, _)| (*serial, choice)));
        }
        for (serial, choice) in &running {
            if budget == 0 {
                break;
            }
            if !self.make_room(*serial, *choice) {
                continue;
            }
            let Some(entry) = self.entries.get_mut(serial) else {
                continue;
            };
            entry.decode_row_planned(now);
            budget -= 1;
            let first_position = entry.choices[*choice as usize].sequence.computed;
            self.plan.push(PlannedRow {
                key: entry.key,
                choice: ChoiceIndex(*choice),
                first_position,
                token_count: 1,
                logits: RowLogits::Last,
                draws: 1,
                serial: *serial,
            });
        }
        self.running = running;
        budget
    }

    /// Gets the block for a sequence's next row, preempting the youngest sequences until there is one. False when the
    /// sequence itself was (or had been) preempted.
    fn make_room(&mut self, serial: u64, choice: u32) -> bool {
        loop {
            let Some(entry) = self.entries.get_mut(&serial) else {
                return false;
            };
            let own = &mut entry.choices[choice as usize];
            if own.state != ChoiceState::Running {
                return false;
            }
            let end = own.sequence.len();
            if own.sequence.grow_to(&mut self.pool, end) {
                return true;
            }
            // Rows are planned oldest first, so the youngest is never one that is planned already; at the latest it
            // is this sequence itself, which ends the loop.
            self.preempt_youngest();
        }
    }

    fn preempt_youngest(&mut self) {
        for entry in self.entries.values_mut().rev().filter(|entry| entry.is_committed()) {
            let mut choices = entry.choices.iter_mut().rev();
            let victim = choices.find(|choice| {
                matches!(choice.state, ChoiceState::Running | ChoiceState::Waiting) && choice.sequence.holds_blocks()
            });
            if let Some(victim) = victim {
                victim.sequence.release(&mut self.pool);
                victim.state = ChoiceState::Preempted;
                entry.preemptions += 1;
                self.preemptions += 1;
                return;
            }
        }
    }

    /// Chunks for sequences that have more than their newest token to compute: resumed ones, or local prompts.
    fn plan_chunks(&mut self, now: Time, mut budget: u32, is_resumed: bool) -> u32 {
        for (serial, entry) in &mut self.entries {
            let is_prompt = matches!(entry.phase, DecodePhase::LocalPrefill { .. });
            if matches!(entry.phase, DecodePhase::Receiving { .. }) || is_prompt == is_resumed {
                continue;
            }
            for choice in 0..entry.choices.len() {
                if budget == 0 {
                    return 0;
                }
                let pending = entry.choices[choice].sequence.pending();
                let is_running = entry.choices[choice].state == ChoiceState::Running;
                if !is_running || (pending <= 1 && !is_prompt) {
                    continue;
                }
                entry.local_chunk_planned(now);
                let token_count = pending.min(budget);
                budget -= token_count;
                let draws = match (token_count == pending, is_prompt) {
                    (false, _) => 0,
                    (true, true) => entry.first_draws(),
                    (true, false) => 1,
                };
                let logits = match (is_prompt && entry.request.prompt_logprobs.is_some(), draws) {
                    (true, _) => RowLogits::All,
                    (false, 0) => RowLogits::None,
                    (false, _) => RowLogits::Last,
                };
                self.plan.push(PlannedRow {
                    key: entry.key,
                    choice: ChoiceIndex(choice as u32),
                    first_position: entry.choices[choice].sequence.computed,
                    token_count,
                    logits,
                    draws,
                    serial: *serial,
                });
            }
        }
        budget
    }

    fn local_prompt_done(&mut self, now: Time, serial: u64, drawn: Vec<SampledToken>) {
        let Some(entry) = self.entries.get_mut(&serial) else {
            return;
        };
        assert_eq!(
            drawn.len(),
            entry.first_draws() as usize,
            "the shell must give back every draw of the plan"
        );
        entry.local_prompt_done(now);
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
            let Ok(token) = token else {
                self.deferred.push((serial, Some(NodeFailure::Sampling)));
                return;
            };
            tokens.push(TokenEvent {
                choice,
                index,
                token,
                logprobs,
                finish: None,
            });
        }
        self.first_tokens(serial, tokens);
    }

    /// The prompt's KV is complete in choice 0's blocks: gives every choice that goes on its own sequence. Choices
    /// without a token have ended elsewhere.
    pub(super) fn first_tokens(&mut self, serial: u64, tokens: Vec<TokenEvent>) {
        let Some(entry) = self.entries.get_mut(&serial) else {
            return;
        };
        if entry.request.report_kv_hashes {
            let blocks = entry.choices[0].sequence.table.ids().to_vec();
            self.events
                .push_back(DecodeEvent::HashPrompt { key: entry.key, blocks });
        }
        let (leader, others) = entry.choices.split_at_mut(1);
        for event in tokens.iter().filter(|event| event.choice.0 > 0) {
            let Some(choice) = others.get_mut(event.choice.0 as usize - 1) else {
                continue;
            };
            match fork(&leader[0].sequence, &mut choice.sequence, &mut self.pool) {
                Fork::Shared => {}
                Fork::Copied { from, to } => {
                    self.events.push_back(DecodeEvent::CopyBlock {
                        key: entry.key,
                        from,
                        to,
                    });
                }
                Fork::NoBlock => choice.state = ChoiceState::Preempted,
            }
        }
        for choice in 0..self.entries[&serial].request.choice_count {
            match tokens.iter().find(|event| event.choice.0 == choice) {
                Some(event) => self.push_token(serial, event.clone()),
                None => self.choice_done(serial, choice),
            }
        }
        self.finish_when_done(serial, None);
    }

    fn token_drawn(&mut self, now: Time, serial: u64, drawn: SampledToken) {
        let SampledToken {
            choice,
            token,
            logprobs,
            ..
        } = drawn;
        let Some(entry) = self.entries.get_mut(&serial) else {
            return;
        };
        let Ok(token) = token else {
            // After the step: the request's other rows are still to come.
            self.deferred.push((serial, Some(NodeFailure::Sampling)));
            return;
        };
        let client_prompt_tokens = entry.request.client_prompt_tokens;
        let Some(own) = entry.choice_mut(choice.0) else {
            return;
        };
        let index = own.sequence.next_output(client_prompt_tokens);
        self.push_token(
            serial,
            TokenEvent {
                choice,
                index,
                token,
                logprobs,
                finish: None,
            },
        );
        self.finish_when_done(serial, Some(now));
    }

    /// Appends a token to its choice, tells it, and ends the choice when it is the last one.
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
        event.finish = finish_reason(&entry.request, event.token, length);
        let (ended, is_last, key) = (event.choice.0, event.finish.is_some(), entry.key);
        self.events.push_back(DecodeEvent::Token { key, event });
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

    fn finish_when_done(&mut self, serial: u64, last_token_at: Option<Time>) {
        if self.entries.get(&serial).is_none_or(|entry| entry.live_choices() > 0) {
            return;
        }
        if let Some(mut entry) = self.remove(serial) {
            if let (Some(joined), Some(last)) = (entry.joined_at, last_token_at) {
                entry.timings.push(Stage::Decode, last.since(joined));
            }
            let report = DecodeReport {
                timings: entry.timings,
                cached_tokens: entry.cached_tokens,
                preemptions: entry.preemptions,
            };
            self.events.push_back(DecodeEvent::Finished {
                key: entry.key,
                report: Box::new(report),
            });
        }
    }
}

/// Blocks for everything a preempted sequence must compute again, less what the prefix cache still has.
fn take_blocks_again(sequence: &mut Sequence, pool: &mut BlockPool) -> bool {
    let found = sequence.take_prefix(pool);
    let rest = pool.blocks_for(sequence.len()) - found;
    match pool.allocate(rest, BlockUse::Active) {
        Some(blocks) => {
            sequence.table.extend(blocks);
            true
        }
        None => {
            sequence.release(pool);
            false
        }
    }
}

enum Fork {
    Shared,
    Copied {
        from: BlockId,
        to: BlockId,
    },
    /// There is no block for the copy: the choice computes its prompt again later.
    NoBlock,
}

/// Copy-on-fork: whole prompt blocks are shared, the partial last one is copied.
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
