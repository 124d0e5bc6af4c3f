//! The next step: a row for each sequence that decodes, then chunks of resumed sequences and of prompts, in one token budget.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::ids::ChoiceIndex;
use crate::request::{Lane, Request};
use crate::scheduler::entry::{AfterPrompt, ChoiceState, Entry, Phase};
use crate::scheduler::permits::{permits_kept_for_short, share_of_short_prompts};
use crate::scheduler::sequence::Sequence;
use crate::scheduler::step_plan::RowSource;
use crate::scheduler::{NodeLimits, PlannedRow, RowLogits, Scheduler, StepPlan};
use crate::time::Time;

/// A prompt is computed in two halves only if each half pushes at least so many last chunks. One more step costs some 3 ms, and the
/// transfer of 512 tokens over gRPC takes 10 ms (docs/measurements/latency.md). At 256 tokens (two halves of four last chunks of 32) both
/// take the same time.
const HALF_IN_LAST_CHUNKS_MIN: u32 = 4;

impl RowSource for BTreeMap<u64, Entry> {
    fn sequence(&self, row: &PlannedRow) -> (&Sequence, &Arc<Request>) {
        let entry = &self[&row.serial];
        (&entry.choices[row.choice.0 as usize].sequence, &entry.request)
    }
}

impl Scheduler {
    /// The next step, or `None` when nothing can run. `step_done` or `step_failed` must follow.
    pub fn next_step(&mut self, now: Time) -> Option<StepPlan<'_>> {
        assert!(self.plan.is_empty(), "a step is planned while another runs");
        self.admit_to_batch();
        let mut budget = self.config.limits.max_batch_tokens;
        self.plan_decode_rows(now, &mut budget);
        let mut step_tokens = self.config.limits.max_batch_tokens;
        if let (Some(target), false) = (self.config.step_target, self.plan.is_empty()) {
            step_tokens = step_tokens.min(self.step_cost.prompt_tokens_within(target));
            budget = budget.min(step_tokens);
        }
        let whole_budget = budget;
        if let (Some(mixed), false) = (self.config.mixed_step_tokens, self.plan.is_empty()) {
            budget = budget.min(mixed.get());
        }
        let prompts_budget = budget;
        self.plan_resumed(&mut budget);
        let mut others = self.entries.values().filter(|entry| entry.schedulable() > 0);
        let is_alone = others.next().is_some() && others.next().is_none();
        if !is_alone {
            self.plan_short_prompts(now, &mut budget, step_tokens);
        }
        self.plan_prompts(now, &mut budget, is_alone);
        self.plan_drafts(whole_budget - (prompts_budget - budget));
        self.grant();
        self.step_began = self.config.step_target.map(|_| now);
        self.running_step()
    }

    /// The step that was planned and is not done.
    pub fn running_step(&self) -> Option<StepPlan<'_>> {
        (!self.plan.is_empty()).then_some(StepPlan {
            rows: &self.plan,
            source: &self.entries,
        })
    }

    /// One row for each running sequence that lacks only the KV of its newest token.
    fn plan_decode_rows(&mut self, now: Time, budget: &mut u32) {
        let mut running = std::mem::take(&mut self.running);
        running.clear();
        for (serial, entry) in self.entries.iter().filter(|(_, entry)| entry.is_committed()) {
            let choices = (0..).zip(&entry.choices);
            let rows =
                choices.filter(|(_, choice)| choice.state == ChoiceState::Running && choice.sequence.pending() == 1);
            running.extend(rows.map(|(choice, _)| (*serial, choice)));
        }
        for (serial, choice) in &running {
            if *budget == 0 {
                break;
            }
            if self.make_room(*serial, *choice)
                && let Some(entry) = self.entries.get_mut(serial)
            {
                entry.decode_row_planned(now);
                self.plan.push(entry.row((*serial, *choice), 1));
                *budget -= 1;
            }
        }
        self.running = running;
    }

    /// Chunks for sequences that lost their blocks and have more than their newest token to compute again.
    fn plan_resumed(&mut self, budget: &mut u32) {
        for (serial, entry) in self.entries.iter().filter(|(_, entry)| entry.is_committed()) {
            for (choice, own) in (0..).zip(&entry.choices) {
                let pending = own.sequence.pending();
                if *budget > 0 && own.state == ChoiceState::Running && pending > 1 {
                    let tokens = pending.min(*budget);
                    self.plan.push(entry.row((*serial, choice), tokens));
                    *budget -= tokens;
                }
            }
        }
    }

    /// Plans short prompts that are behind a long prompt, if the long one leaves them less of this step than their share. Interactive
    /// requests come first. Short prompts that came before all long ones lose nothing. A step without decode rows has room for `step_tokens`.
    fn plan_short_prompts(&mut self, now: Time, budget: &mut u32, step_tokens: u32) {
        let short = permits_kept_for_short(step_tokens);
        let whole_budget = *budget;
        let pending = |entry: &Entry| entry.choices[0].sequence.pending();
        let is_short = |pending: u32| u64::from(pending) <= short;
        let prompts = self.entries.values().filter(|entry| entry.is_running_prompt());
        let before_all_long: u32 = prompts.map(pending).take_while(|pending| is_short(*pending)).sum();
        // The share is taken from what the decode rows leave. The rest belongs to an older long prompt, which must not get less.
        let mut share = share_of_short_prompts(whole_budget).min(whole_budget.saturating_sub(before_all_long));
        for lane in [Lane::Interactive, Lane::Batch] {
            // Tokens of the prompts that came before this one.
            let mut ahead = 0_u32;
            for (serial, entry) in self.entries.iter_mut().filter(|(_, entry)| entry.is_running_prompt()) {
                let pending = pending(entry);
                // A prompt that is longer than the share is computed further in later steps.
                let tokens = pending.min(share);
                let gains = whole_budget.saturating_sub(ahead) < tokens;
                if entry.request.lane == lane && is_short(pending) && gains {
                    entry.chunk_planned(now);
                    self.plan.push(entry.row((*serial, 0), tokens));
                    share -= tokens;
                    *budget -= tokens;
                }
                ahead = ahead.saturating_add(pending);
            }
        }
    }

    /// Chunks of all other prompts, in order of arrival.
    fn plan_prompts(&mut self, now: Time, budget: &mut u32, is_alone: bool) {
        let (limits, last_chunk) = (self.config.limits, self.config.last_chunk_tokens);
        for (serial, entry) in &mut self.entries {
            if *budget == 0 {
                return;
            }
            if !entry.is_running_prompt() || self.plan.iter().any(|row| row.serial == *serial) {
                continue;
            }
            let pending = entry.choices[0].sequence.pending();
            let cut = match last_chunk {
                Some(last) if is_alone && pending <= *budget => entry.cut_before_last_chunk(&limits, last.get()),
                _ => None,
            };
            let tokens = cut.unwrap_or(pending).min(*budget);
            entry.chunk_planned(now);
            self.plan.push(entry.row((*serial, 0), tokens));
            *budget -= tokens;
        }
    }
}

impl Entry {
    fn is_running_prompt(&self) -> bool {
        self.is_prompt() && self.choices[0].state == ChoiceState::Running
    }

    /// The next tokens of a choice as a row.
    fn row(&self, (serial, choice): (u64, u32), token_count: u32) -> PlannedRow {
        let sequence = &self.choices[choice as usize].sequence;
        let draws = match token_count == sequence.pending() {
            false => 0,
            true if self.is_prompt() => self.first_draws(),
            true => 1,
        };
        let logits = match (self.is_prompt() && self.request.prompt_logprobs.is_some(), draws) {
            (true, _) => RowLogits::All,
            (false, 0) => RowLogits::None,
            (false, _) => RowLogits::Last,
        };
        PlannedRow {
            key: self.key,
            choice: ChoiceIndex(choice),
            first_position: sequence.computed,
            token_count,
            logits,
            draws,
            drafts: 0,
            draft_start: 0,
            serial,
        }
    }

    /// The number of tokens to compute now, so that a last chunk remains. The cut is at the end of a block, because only whole blocks can
    /// be pushed. `None` if what is left is too short to be worth one more step, or is not pushed at all.
    fn cut_before_last_chunk(&mut self, limits: &NodeLimits, last: u32) -> Option<u32> {
        let (Phase::Prompt { .. }, AfterPrompt::HandOver(push)) = (self.phase, &mut self.after_prompt) else {
            return None;
        };
        let sequence = &self.choices[0].sequence;
        let (end, pending) = (sequence.len(), sequence.pending());
        let to_push = push.tokens_left(sequence, limits.block_tokens);
        let last = match sequence.computed > self.cached_tokens {
            _ if push.is_cut => return None,
            true => last,
            // All bytes of a prompt of one chunk would move after the chunk. Of two halves one moves while the other is computed.
            // Through shared memory all bytes take less time than one more step.
            false if push.plan.is_streamed && to_push / 2 >= last.saturating_mul(HALF_IN_LAST_CHUNKS_MIN) => {
                to_push.min(pending) / 2
            }
            false => return None,
        };
        if pending < last.saturating_mul(2) {
            return None;
        }
        let cut = (end - last).next_multiple_of(limits.block_tokens);
        push.is_cut = sequence.computed < cut && cut < end;
        push.is_cut.then(|| cut - sequence.computed)
    }
}
