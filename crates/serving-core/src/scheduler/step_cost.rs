//! What steps cost on this node, learned from those that ran: how many prompt tokens fit into a step beside rows that decode, if
//! the step may take only so long.
//!
//! A step is modelled as the time of its decode rows and a time for each prompt token. The second one also holds what a chunk costs
//! as a whole, shared among its tokens. The budget is computed anew for each step, so it comes to the size of which a step takes the
//! target, even where the two parts are not told apart well.

use std::time::Duration;

/// Prompt tokens of a step before any step has told what they cost: two blocks of the default size.
const FIRST_PROMPT_TOKENS: u32 = 32;
/// A prompt goes on by so many tokens however slow the machine is. Fewer would cost more each: on two cores each token of a chunk of 8
/// takes 1.3 times as long as in a chunk of 16 (docs/measurements/latency.md).
const PROMPT_TOKENS_MIN: u32 = 8;
/// Prompt tokens come in fours. The engine computes rows by eights, fours and less.
const PROMPT_TOKENS_GRAIN: u32 = 4;
/// From one step to the next the prompt tokens grow at most so many times, so that a wrong average costs one long gap at most.
const GROWTH_MAX: u32 = 2;
/// The part of the newest step in the average. A prompt's tokens get dearer the further it has come, over tens of steps.
const NEWEST: f64 = 0.25;
/// A step that took longer than so many times what was expected counts as that long: a process that stood still says nothing of
/// costs.
const OUTLIER: f64 = 2.0;

/// Averages in seconds; `None` before the first step of that kind.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepCost {
    /// A step that only decodes.
    decode_rows: Option<f64>,
    /// Each prompt token that is added to it.
    prompt_token: Option<f64>,
    /// Of the last step that had both.
    last_prompt_tokens: u32,
}

/// What a step had.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepSize {
    pub decode_rows: u32,
    /// Tokens of prompts and of what preempted sequences compute again.
    pub prompt_tokens: u32,
}

impl StepCost {
    pub(super) fn new() -> Self {
        Self {
            decode_rows: None,
            prompt_token: None,
            last_prompt_tokens: FIRST_PROMPT_TOKENS,
        }
    }

    /// A step has ended.
    pub(super) fn learn(&mut self, took: Duration, size: StepSize) {
        // Where nothing has cost anything so far, any time is news.
        let expected = self.expected(size).filter(|expected| *expected > 0.0);
        let longest = expected.map_or(f64::INFINITY, |expected| OUTLIER * expected);
        let took = took.as_secs_f64().min(longest);
        let rows = if size.decode_rows > 0 { self.decode_rows } else { None };
        if size.prompt_tokens == 0 {
            return average(&mut self.decode_rows, took);
        }
        if size.decode_rows > 0 {
            self.last_prompt_tokens = size.prompt_tokens;
        }
        match rows.filter(|rows| took < *rows) {
            // The rows have got cheaper: fewer decode than when a step had no prompt. They take a part of this time; which one
            // matters little, since the rest is the tokens'.
            Some(_) => average(&mut self.decode_rows, took / 2.0),
            // Of a few tokens one cannot tell what they cost.
            None if size.prompt_tokens < PROMPT_TOKENS_MIN && self.prompt_token.is_some() => {}
            None => {
                let added = took - rows.unwrap_or(0.0);
                average(&mut self.prompt_token, added / f64::from(size.prompt_tokens));
            }
        }
    }

    /// What such a step takes. `None` when nothing is known of one of its parts.
    fn expected(&self, size: StepSize) -> Option<f64> {
        let rows = if size.decode_rows > 0 { self.decode_rows? } else { 0.0 };
        let each = if size.prompt_tokens > 0 {
            self.prompt_token?
        } else {
            0.0
        };
        Some(rows + f64::from(size.prompt_tokens) * each)
    }

    /// Prompt tokens for which a step beside decode rows takes `target`, and at least [`PROMPT_TOKENS_MIN`].
    pub(super) fn prompt_tokens_within(&self, target: Duration) -> u32 {
        let left = target.as_secs_f64() - self.decode_rows.unwrap_or(0.0);
        let tokens = match self.prompt_token {
            // A conversion that saturates: no cost at all allows any number, and no time left none.
            Some(each) => (left / each) as u32,
            None => FIRST_PROMPT_TOKENS,
        };
        let most = self
            .last_prompt_tokens
            .max(FIRST_PROMPT_TOKENS)
            .saturating_mul(GROWTH_MAX);
        let tokens = tokens.min(most);
        (tokens - tokens % PROMPT_TOKENS_GRAIN).max(PROMPT_TOKENS_MIN)
    }
}

fn average(mean: &mut Option<f64>, newest: f64) {
    *mean = Some(mean.map_or(newest, |mean| mean + NEWEST * (newest - mean)));
}

#[cfg(test)]
#[path = "step_cost_tests.rs"]
mod tests;
