//! Guesses of the next tokens, so that one step may bring several. Off unless the node's configuration asks for it.
//!
//! The guess is what followed the newest tokens when they came before, in the prompt or in the answer: summaries, edits and code say
//! much again (prompt lookup decoding, Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding). The engine computes the
//! guessed tokens as further rows of the sequence and draws from each row. As long as the drawn token equals the guessed one, the next
//! row counts, too. So the tokens are the same as without guesses; only the number of steps is smaller.

use std::ops::Range;

use crate::ids::TokenId;
use crate::scheduler::entry::{ChoiceState, Entry};
use crate::scheduler::step_results::ALL_DRAWS;
use crate::scheduler::{PlannedRow, RowLogits, SampledToken, Scheduler};
use crate::time::Time;

/// So many of the newest tokens must have been there before. After two, more guesses are wrong than right.
const AGREEING_TOKENS: usize = 3;
/// How far back the tokens are searched: some ten microseconds of a row, before each step.
const SEARCHED_TOKENS_MAX: usize = 8192;

/// Where the guess stands among `tokens`, at most `most` of them. Empty: there is none.
fn guess(tokens: &[TokenId], most: u32) -> Range<u32> {
    let Some(before_newest) = tokens.len().checked_sub(AGREEING_TOKENS).filter(|_| most > 0) else {
        return 0..0;
    };
    let newest = &tokens[before_newest..];
    let first = tokens.len().saturating_sub(SEARCHED_TOKENS_MAX);
    // At least one token follows what is found.
    let searched = &tokens[first..tokens.len() - 1];
    let Some(found) = searched.windows(AGREEING_TOKENS).rposition(|before| before == newest) else {
        return 0..0;
    };
    let start = (first + found + AGREEING_TOKENS) as u32;
    start..start.saturating_add(most).min(tokens.len() as u32)
}

impl Scheduler {
    /// Gives guesses to decode rows that are planned. They take what of the step's `budget` nobody else wants, and blocks that no
    /// running sequence needs next, so nothing is preempted for a guess.
    pub(super) fn plan_drafts(&mut self, mut budget: u32) {
        if self.config.speculative_tokens == 0 {
            return;
        }
        let limits = self.config.limits;
        // A preempted sequence needs all its blocks at once.
        let mut free_blocks = match self.has_preempted() {
            true => 0,
            false => self.grantable_blocks(),
        };
        for row in &mut self.plan {
            let Some(entry) = self.entries.get_mut(&row.serial).filter(|entry| entry.may_guess()) else {
                continue;
            };
            let request = entry.request.clone();
            let choice = &mut entry.choices[row.choice.0 as usize];
            let sequence = &mut choice.sequence;
            if row.is_chunk() || row.draws == 0 {
                continue;
            }
            // The row itself draws one token, and a guess must not go beyond the last one.
            let outputs = sequence.next_output(request.client_prompt_tokens).0;
            let wanted = request.stop.max_tokens.saturating_sub(outputs + 1);
            let positions = limits.max_model_tokens.saturating_sub(sequence.len() + 1);
            let own_blocks = sequence.table.len() + sequence.spare.len() as u32;
            let blocks = own_blocks + u32::from(free_blocks > 0);
            let room = (blocks * limits.block_tokens).saturating_sub(sequence.len());
            let most = choice.draft_tokens.min(wanted).min(positions).min(room).min(budget);
            let guess = guess(&sequence.tokens, most);
            if guess.is_empty() || !sequence.grow_to(&mut self.pool, sequence.len() + guess.len() as u32) {
                continue;
            }
            free_blocks -= u64::from(sequence.table.len() > own_blocks);
            row.drafts = guess.len() as u32;
            row.draft_start = guess.start;
            row.token_count += row.drafts;
            row.logits = RowLogits::All;
            budget -= row.drafts;
        }
    }

    /// A row with guesses is computed. Its drawn tokens count up to the first that differs from its guess.
    pub(super) fn drafts_done(&mut self, now: Time, row: &PlannedRow, drawn: &mut impl Iterator<Item = SampledToken>) {
        self.count_drafts(row, (row.drafts, 0));
        let mut accepted = 0;
        let mut goes_on = true;
        for nth in 0..=row.drafts {
            let sampled = drawn.next().expect(ALL_DRAWS);
            if !goes_on {
                continue;
            }
            let is_right = nth < row.drafts && sampled.token == Ok(self.guessed(row, nth));
            if is_right {
                accepted += 1;
                self.count_drafts(row, (0, 1));
            }
            self.token_drawn(now, row.serial, sampled);
            // The guess has its KV already.
            goes_on = is_right && self.computed_one_more(row);
        }
        let most = self.config.speculative_tokens;
        let choice = self
            .entries
            .get_mut(&row.serial)
            .and_then(|entry| entry.choice_mut(row.choice.0));
        if let Some(choice) = choice {
            // Wrong guesses cost time, so a sequence that guesses wrong guesses less at once.
            choice.draft_tokens = match accepted == row.drafts {
                true => choice.draft_tokens.saturating_mul(2).min(most),
                false => accepted.max(1),
            };
        }
    }

    /// Before a token is told that may be the request's last: its report has the counts.
    fn count_drafts(&mut self, row: &PlannedRow, (drafted, accepted): (u32, u32)) {
        let of_request = self.entries.get_mut(&row.serial).map(|entry| &mut entry.drafts);
        for counts in of_request.into_iter().chain([&mut self.drafts]) {
            counts.drafted += u64::from(drafted);
            counts.accepted += u64::from(accepted);
        }
    }

    fn guessed(&self, row: &PlannedRow, nth: u32) -> TokenId {
        let sequence = &self.entries[&row.serial].choices[row.choice.0 as usize].sequence;
        sequence.tokens[(row.draft_start + nth) as usize]
    }

    /// False when the choice has ended.
    fn computed_one_more(&mut self, row: &PlannedRow) -> bool {
        let entry = self.entries.get_mut(&row.serial);
        let choice = entry.and_then(|entry| entry.choice_mut(row.choice.0));
        let choice = choice.filter(|choice| choice.state == ChoiceState::Running);
        choice.map(|choice| choice.sequence.computed += 1).is_some()
    }
}

impl Entry {
    /// What a constraint allows after a guess is not known before the guess is right.
    fn may_guess(&self) -> bool {
        self.is_committed() && self.request.constraint.is_none()
    }
}

#[cfg(test)]
#[path = "drafts_tests.rs"]
mod tests;
