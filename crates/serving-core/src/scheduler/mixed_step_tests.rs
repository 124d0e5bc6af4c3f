//! Mixed steps, in which sequences decode and prompts are computed: how many tokens of prompts they have.

use super::test_kit::{admit_whole, limits, repetitive, request, sample, sample_by};
use super::*;
use crate::request::Lane;

const STEP: u32 = 100;
const MIXED: u32 = 40;

fn scheduler() -> Scheduler {
    let limits = NodeLimits {
        max_batch_tokens: STEP,
        max_model_tokens: 10_000,
        ..limits(2_000)
    };
    Scheduler::new(SchedulerConfig {
        mixed_step_tokens: NonZeroU32::new(MIXED),
        ..SchedulerConfig::decode(limits, Duration::from_secs(5))
    })
}

/// With a stream that decodes.
fn scheduler_that_decodes() -> Scheduler {
    let mut scheduler = scheduler();
    admit(&mut scheduler, 1, 4, 1_000);
    step(&mut scheduler);
    scheduler
}

fn admit(scheduler: &mut Scheduler, id: u128, prompt: u32, outputs: u32) {
    admit_whole(scheduler, Time::ZERO, request(id, prompt, outputs));
}

/// The requests of the next step, each with its tokens.
fn step(scheduler: &mut Scheduler) -> Vec<(u128, u32)> {
    let limits = scheduler.config.limits;
    let plan = scheduler.next_step(Time::ZERO).expect("there is work");
    let rows = plan.rows().iter().map(|row| (row.key.request.0, row.token_count));
    let rows = rows.collect();
    let mut sampled = sample(&plan, &limits);
    scheduler.step_done(Time::ZERO, &mut sampled);
    rows
}

#[test]
fn a_prompt_that_is_alone_fills_the_step_and_one_beside_an_answer_does_not() {
    let mut scheduler = scheduler();
    admit(&mut scheduler, 1, 150, 4);
    assert_eq!(step(&mut scheduler), [(1, 100)]);
    assert_eq!(step(&mut scheduler), [(1, 50)]);
    admit(&mut scheduler, 2, 150, 4);
    for _ in 0..3 {
        assert_eq!(step(&mut scheduler), [(1, 1), (2, MIXED)]);
    }
    assert_eq!(step(&mut scheduler), [(2, 30)], "the answer is over");
}

#[test]
fn short_prompts_overtake_a_long_one_by_the_share_of_each_step() {
    let mut scheduler = scheduler_that_decodes();
    admit(&mut scheduler, 2, 1_000, 1);
    assert_eq!(step(&mut scheduler), [(1, 1), (2, MIXED)]);
    admit(&mut scheduler, 3, 20, 1);
    admit(&mut scheduler, 4, 20, 1);
    // A fifth of the 40, as long as it takes; what the one leaves of it is the other's.
    assert_eq!(step(&mut scheduler), [(1, 1), (3, 8), (2, 32)]);
    assert_eq!(step(&mut scheduler), [(1, 1), (3, 8), (2, 32)]);
    assert_eq!(step(&mut scheduler), [(1, 1), (3, 4), (4, 4), (2, 32)]);
    assert_eq!(step(&mut scheduler), [(1, 1), (4, 8), (2, 32)]);
}

#[test]
fn the_rest_of_an_old_prompt_is_not_held_up_by_a_younger_long_one() {
    let mut scheduler = scheduler_that_decodes();
    admit(&mut scheduler, 2, 80, 1);
    assert_eq!(step(&mut scheduler), [(1, 1), (2, MIXED)]);
    scheduler.config.mixed_step_tokens = NonZeroU32::new(20);
    admit(&mut scheduler, 3, 1_000, 1);
    // 40 tokens are left: a short prompt that fills two steps, but the oldest.
    assert_eq!(step(&mut scheduler), [(1, 1), (2, 20)]);
    assert_eq!(step(&mut scheduler), [(1, 1), (2, 20)]);
    assert_eq!(step(&mut scheduler), [(1, 1), (3, 20)]);
}

#[test]
fn short_prompts_overtake_no_short_ones_and_leave_no_room_unused() {
    let mut scheduler = scheduler_that_decodes();
    for id in 2..=4 {
        admit(&mut scheduler, id, 30, 1);
    }
    assert_eq!(step(&mut scheduler), [(1, 1), (2, 30), (3, 10)]);
    admit(&mut scheduler, 5, 1_000, 1);
    admit(&mut scheduler, 6, 20, 1);
    // Of the second, 20 are left. Those before the long one have all of the step.
    assert_eq!(step(&mut scheduler), [(1, 1), (3, 20), (4, 20)]);
    assert_eq!(step(&mut scheduler), [(1, 1), (6, 8), (4, 10), (5, 22)]);
}

#[test]
fn interactive_prompts_take_the_share_before_batch_ones() {
    let mut scheduler = scheduler_that_decodes();
    admit(&mut scheduler, 2, 1_000, 1);
    step(&mut scheduler);
    let mut batch = request(3, 20, 1);
    batch.lane = Lane::Batch;
    admit_whole(&mut scheduler, Time::ZERO, batch);
    admit(&mut scheduler, 4, 6, 1);
    assert_eq!(step(&mut scheduler), [(1, 1), (4, 6), (3, 2), (2, 32)]);
}

#[test]
fn guesses_have_what_the_whole_step_leaves() {
    let mut scheduler = Scheduler::new(SchedulerConfig {
        mixed_step_tokens: NonZeroU32::new(2),
        speculative_tokens: 8,
        ..scheduler().config
    });
    admit(&mut scheduler, 1, 4, 1_000);
    admit(&mut scheduler, 2, 1_000, 1);
    let guessed = (0..60).any(|_| {
        let limits = scheduler.config.limits;
        let plan = scheduler.next_step(Time::ZERO).expect("there is work");
        let drafts = plan.rows().iter().map(|row| row.drafts).max();
        let is_mixed = plan.rows().len() == 2 && plan.prompt_token_count() == 2;
        let mut sampled = sample_by(repetitive, &plan, &limits);
        scheduler.step_done(Time::ZERO, &mut sampled);
        is_mixed && drafts > Some(2)
    });
    assert!(guessed, "more guesses in a step than it has tokens of prompts");
}
