//! What steps cost on this node, learned from those that ran: how many prompt tokens fit into a step beside rows that decode, if
//! the step may take only so long.
//!
//! A step is modelled as the time of its decode rows and a time for each prompt token. The second one also holds what a chunk costs
//! as a whole, shared among its tokens. With a budget that is computed anew for each step this leads to the right size: where a
//! chunk of `n` tokens takes `a + c n`, the sizes converge to the `n` at which that is the time left.

use std::time::Duration;

/// Prompt tokens of a step before any step has told what they cost: two blocks of the default size.
const FIRST_PROMPT_TOKENS: u32 = 32;
/// The part of the newest step in the average. A prompt's tokens get dearer the further it has come, over tens of steps.
const NEWEST: f64 = 0.25;
/// A step that took longer than so many times the average counts as that long: a process that stood still says nothing of costs.
const OUTLIER: f64 = 2.0;

/// Averages in seconds; `None` before the first step of that kind.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StepCost {
    /// A step that only decodes.
    decode_rows: Option<f64>,
    /// Each prompt token that is added to it.
    prompt_token: Option<f64>,
}

impl StepCost {
    /// A step has ended. Its `prompt_tokens` are those of prompts and of what preempted sequences compute again.
    pub(super) fn learn(&mut self, took: Duration, prompt_tokens: u32) {
        let took = took.as_secs_f64();
        if prompt_tokens == 0 {
            average(&mut self.decode_rows, took);
        } else {
            let added = (took - self.decode_rows.unwrap_or(0.0)).max(0.0);
            average(&mut self.prompt_token, added / f64::from(prompt_tokens));
        }
    }

    /// Prompt tokens for which a step beside decode rows takes `target`: whole blocks, and at least one, so that a prompt goes on
    /// however slow the machine is.
    pub(super) fn prompt_tokens_within(&self, target: Duration, block_tokens: u32) -> u32 {
        let left = target.as_secs_f64() - self.decode_rows.unwrap_or(0.0);
        let tokens = match self.prompt_token {
            // A conversion that saturates: no cost at all allows any number, and no time left none.
            Some(each) => (left / each) as u32,
            None => FIRST_PROMPT_TOKENS,
        };
        (tokens - tokens % block_tokens).max(block_tokens)
    }
}

fn average(mean: &mut Option<f64>, newest: f64) {
    *mean = Some(match *mean {
        Some(mean) if mean > 0.0 => mean + NEWEST * (newest.min(mean * OUTLIER) - mean),
        _ => newest,
    });
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::ids::{Attempt, NodeEpoch};
    use crate::scheduler::test_kit::{limits, request, sample};
    use crate::scheduler::{Admission, NodeLimits, Scheduler, SchedulerConfig, Work};
    use crate::time::Time;

    const TARGET: Duration = Duration::from_millis(40);

    /// A machine on which decode rows take 8 ms, a chunk 4 ms and each of its tokens 0.5 ms.
    fn took(prompt_tokens: u32) -> Duration {
        let chunk = if prompt_tokens == 0 { 0 } else { 4_000 };
        Duration::from_micros(u64::from(8_000 + chunk + 500 * prompt_tokens))
    }

    fn learned() -> StepCost {
        let mut cost = StepCost::default();
        cost.learn(took(0), 0);
        for _ in 0..40 {
            let tokens = cost.prompt_tokens_within(TARGET, 4);
            cost.learn(took(tokens), tokens);
        }
        cost
    }

    #[test]
    fn steps_come_to_the_size_that_takes_the_target() {
        // 8 + 4 + 0.5 x 56 = 40 ms, less what whole blocks leave.
        assert!((52..=56).contains(&learned().prompt_tokens_within(TARGET, 4)));
        assert_eq!(learned().prompt_tokens_within(TARGET, 16), 48, "whole blocks");
    }

    #[test]
    fn a_prompt_goes_on_by_a_block_where_no_time_is_left() {
        assert_eq!(learned().prompt_tokens_within(Duration::from_millis(3), 16), 16);
        assert_eq!(
            StepCost::default().prompt_tokens_within(TARGET, 64),
            64,
            "nothing is known"
        );
        let mut free = StepCost::default();
        free.learn(Duration::ZERO, 10);
        assert!(
            free.prompt_tokens_within(TARGET, 16) > 1_000_000,
            "nothing costs anything"
        );
        free.learn(Duration::from_millis(20), 10);
        assert_eq!(free.prompt_tokens_within(TARGET, 16), 16, "it does after all");
    }

    #[test]
    fn one_step_in_which_the_process_stood_still_changes_little() {
        let mut cost = learned();
        cost.learn(Duration::from_secs(5), 56);
        assert!(cost.prompt_tokens_within(TARGET, 4) >= 44);
    }

    /// Runs steps on a machine on which each row takes a millisecond, and gives the longest chunk of each.
    fn chunks(scheduler: &mut Scheduler, now: &mut Time, steps: usize) -> Vec<u32> {
        let limits = scheduler.config.limits;
        let mut longest = Vec::new();
        for _ in 0..steps {
            let plan = scheduler.next_step(*now).expect("there is work");
            longest.push(plan.rows().iter().map(|row| row.token_count).max().unwrap_or(0));
            let took = Duration::from_millis(plan.token_count().into());
            let mut sampled = sample(&plan, &limits);
            *now = *now + took;
            scheduler.step_done(*now, &mut sampled);
        }
        longest
    }

    #[test]
    fn a_prompt_gets_what_fits_beside_rows_that_decode_and_the_whole_step_when_it_is_alone() {
        let limits = NodeLimits {
            max_batch_tokens: 64,
            ..limits(60)
        };
        let mut scheduler = Scheduler::new(SchedulerConfig {
            step_target: Some(Duration::from_millis(20)),
            ..SchedulerConfig::decode(limits, Duration::from_secs(5))
        });
        let mut now = Time::ZERO;
        for (id, prompt, outputs) in [(1, 4, 8), (2, 150, 2)] {
            let admission = Admission {
                request: Arc::new(request(id, prompt, outputs)),
                attempt: Attempt(0),
                permits: 1,
                coordinator: NodeEpoch(1),
                work: Work::Whole,
            };
            scheduler.admit(now, admission).expect("it fits");
            if id == 1 {
                // The prompt, which tells what a token costs, and two steps that only decode.
                assert_eq!(chunks(&mut scheduler, &mut now, 3), [4, 1, 1]);
            }
        }
        // 1 + 16 ms of 20, in whole blocks, while the first request decodes; then all that the step takes.
        assert_eq!(chunks(&mut scheduler, &mut now, 7), [16, 16, 16, 16, 16, 64, 6]);
    }
}
