//! Steps on machines of known cost: how long those come to take that have prompts and rows that decode.

use super::*;
use crate::scheduler::test_kit::{admit_whole, key, limits, request, sample};
use crate::scheduler::{NodeLimits, Scheduler, SchedulerConfig};
use crate::time::Time;

const TARGET: Duration = Duration::from_millis(40);

/// Rows take so many milliseconds, a chunk 4 ms and each of its tokens half a millisecond.
fn took(rows_ms: u32, prompt_tokens: u32) -> Duration {
    let chunk_us = if prompt_tokens == 0 { 0 } else { 4_000 };
    Duration::from_micros(u64::from(1_000 * rows_ms + chunk_us + 500 * prompt_tokens))
}

fn size(prompt_tokens: u32) -> StepSize {
    StepSize {
        decode_rows: 4,
        prompt_tokens,
    }
}

/// Steps with as many prompt tokens as the target allows; how long each took, in milliseconds.
fn steps(cost: &mut StepCost, rows_ms: u32, count: usize) -> Vec<u128> {
    let one = |_| {
        let tokens = cost.prompt_tokens_within(TARGET);
        let took = took(rows_ms, tokens);
        cost.learn(took, size(tokens));
        took.as_millis()
    };
    (0..count).map(one).collect()
}

fn learned() -> StepCost {
    let mut cost = StepCost::new();
    cost.learn(took(8, 0), size(0));
    steps(&mut cost, 8, 40);
    cost
}

#[test]
fn steps_come_to_take_the_target() {
    // 8 + 4 + 0.5 x 56 = 40 ms, less what whole fours leave.
    assert!((52..=56).contains(&learned().prompt_tokens_within(TARGET)));
}

#[test]
fn a_prompt_goes_on_by_a_few_tokens_where_no_time_is_left() {
    assert_eq!(learned().prompt_tokens_within(Duration::from_millis(3)), 8);
    assert_eq!(StepCost::new().prompt_tokens_within(TARGET), 32, "nothing is known");
}

#[test]
fn no_step_is_much_longer_than_the_one_before_whatever_was_learned() {
    let mut free = StepCost::new();
    free.learn(Duration::ZERO, size(0));
    free.learn(Duration::ZERO, size(32));
    assert_eq!(free.prompt_tokens_within(TARGET), 64, "nothing costs anything");
    for _ in 0..20 {
        free.learn(Duration::from_millis(64), size(32));
    }
    assert_eq!(free.prompt_tokens_within(TARGET), 20, "it does after all");
}

#[test]
fn one_step_in_which_the_process_stood_still_changes_little() {
    let mut cost = learned();
    cost.learn(Duration::from_secs(5), size(56));
    assert!(cost.prompt_tokens_within(TARGET) >= 36);
}

#[test]
fn rows_that_get_cheaper_or_dearer_while_prompts_keep_coming_are_noticed() {
    let mut cost = StepCost::new();
    cost.learn(took(45, 0), size(0));
    let cheaper = steps(&mut cost, 4, 60);
    assert!(cheaper[40..].iter().all(|ms| (30..=44).contains(ms)), "{cheaper:?}");
    let dearer = steps(&mut cost, 20, 60);
    assert!(dearer.iter().all(|ms| *ms <= 60), "{dearer:?}");
    assert!(dearer[30..].iter().all(|ms| (30..=44).contains(ms)), "{dearer:?}");
}

#[test]
fn the_last_few_tokens_of_a_prompt_say_nothing_of_the_next_one() {
    let mut cost = learned();
    let before = cost.prompt_tokens_within(TARGET);
    for _ in 0..20 {
        cost.learn(took(8, 2), size(2));
    }
    assert_eq!(cost.prompt_tokens_within(TARGET), before);
}

/// A scheduler on a machine on which each row takes a millisecond.
struct Machine {
    scheduler: Scheduler,
    limits: NodeLimits,
    now: Time,
}

impl Machine {
    fn new(target_ms: u64) -> Self {
        let limits = NodeLimits {
            max_batch_tokens: 64,
            max_model_tokens: 400,
            ..limits(200)
        };
        let scheduler = Scheduler::new(SchedulerConfig {
            step_target: Some(Duration::from_millis(target_ms)),
            ..SchedulerConfig::decode(limits, Duration::from_secs(5))
        });
        Self {
            scheduler,
            limits,
            now: Time::ZERO,
        }
    }

    fn admit(&mut self, id: u128, prompt: u32, outputs: u32) {
        admit_whole(&mut self.scheduler, self.now, request(id, prompt, outputs));
    }

    /// For each step the tokens of the request.
    fn tokens_of(&mut self, id: u128, steps: usize) -> Vec<u32> {
        let one = |_| {
            let plan = self.scheduler.next_step(self.now).expect("there is work");
            let own = plan.rows().iter().filter(|row| row.key == key(id));
            let tokens = own.map(|row| row.token_count).sum();
            let took = Duration::from_millis(plan.token_count().into());
            let mut sampled = sample(&plan, &self.limits);
            self.now = self.now + took;
            self.scheduler.step_done(self.now, &mut sampled);
            tokens
        };
        (0..steps).map(one).collect()
    }
}

#[test]
fn a_prompt_gets_what_fits_beside_rows_that_decode_and_the_whole_step_when_it_is_alone() {
    let mut machine = Machine::new(20);
    machine.admit(1, 4, 8);
    // The prompt, which tells what a token costs, and two steps that only decode.
    assert_eq!(machine.tokens_of(1, 3), [4, 1, 1]);
    machine.admit(2, 150, 2);
    // 1 + 16 ms of 20, in whole fours, while the first request decodes; then all that the step takes.
    assert_eq!(machine.tokens_of(2, 7), [16, 16, 16, 16, 16, 64, 6]);
}

#[test]
fn prompts_use_the_whole_of_what_fits_to_their_end_and_in_order() {
    let mut machine = Machine::new(20);
    machine.admit(1, 4, 200);
    machine.tokens_of(1, 3);
    machine.admit(2, 40, 1);
    assert_eq!(machine.tokens_of(2, 3), [16, 16, 8]);
    machine.admit(3, 20, 1);
    machine.admit(4, 20, 1);
    // Its end is short, but older than what follows.
    assert_eq!(machine.tokens_of(3, 3), [16, 4, 0]);
}
