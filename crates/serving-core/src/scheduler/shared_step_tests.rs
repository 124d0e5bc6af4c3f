//! Steps that several sequences share: how many tokens of prompts they have.

use std::sync::Arc;

use super::test_kit::{limits, request, sample};
use super::*;
use crate::ids::{Attempt, NodeEpoch};
use crate::scheduler::{Admission, Work};

const STEP: u32 = 100;
const SHARED: u32 = 40;

fn scheduler() -> Scheduler {
    let limits = NodeLimits {
        max_batch_tokens: STEP,
        max_model_tokens: 10_000,
        ..limits(2_000)
    };
    Scheduler::new(SchedulerConfig {
        shared_step_tokens: NonZeroU32::new(SHARED),
        ..SchedulerConfig::decode(limits, Duration::from_secs(5))
    })
}

fn admit(scheduler: &mut Scheduler, id: u128, prompt: u32, outputs: u32) {
    let admission = Admission {
        request: Arc::new(request(id, prompt, outputs)),
        attempt: Attempt(0),
        permits: 1,
        coordinator: NodeEpoch(1),
        work: Work::Whole,
    };
    scheduler.admit(Time::ZERO, admission).expect("it fits");
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
        assert_eq!(step(&mut scheduler), [(1, 1), (2, SHARED)]);
    }
    assert_eq!(step(&mut scheduler), [(2, 30)], "the answer is over");
}

#[test]
fn prompts_end_one_after_the_other_in_steps_that_they_share() {
    let mut scheduler = scheduler();
    for id in 1..=3 {
        admit(&mut scheduler, id, 30, 1);
    }
    assert_eq!(step(&mut scheduler), [(1, 30), (2, 10)]);
    // What is left of the second one is short, as measured by a whole step.
    assert_eq!(step(&mut scheduler), [(2, 20), (3, 20)]);
    assert_eq!(step(&mut scheduler), [(3, 10)]);
    for id in 4..=5 {
        admit(&mut scheduler, id, SHARED, 1);
    }
    assert_eq!(
        step(&mut scheduler),
        [(4, SHARED)],
        "the first one fills the step, and is no long one"
    );
}

#[test]
fn a_short_prompt_still_overtakes_a_long_one() {
    let mut scheduler = scheduler();
    admit(&mut scheduler, 1, 1_000, 1);
    assert_eq!(step(&mut scheduler), [(1, 100)]);
    admit(&mut scheduler, 2, 30, 1);
    // A fifth of the step, as long as it takes.
    for _ in 0..3 {
        assert_eq!(step(&mut scheduler), [(2, 8), (1, 32)]);
    }
    assert_eq!(step(&mut scheduler), [(2, 6), (1, 34)]);
    assert_eq!(step(&mut scheduler), [(1, 100)]);
}
