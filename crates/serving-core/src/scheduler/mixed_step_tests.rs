//! Mixed steps, in which sequences decode and prompts are computed: how many tokens of prompts they have.

use std::sync::Arc;

use super::test_kit::{limits, request, sample};
use super::*;
use crate::ids::{Attempt, NodeEpoch};
use crate::scheduler::{Admission, Work};

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
        assert_eq!(step(&mut scheduler), [(1, 1), (2, MIXED)]);
    }
    assert_eq!(step(&mut scheduler), [(2, 30)], "the answer is over");
}

#[test]
fn short_prompts_overtake_a_long_one_by_the_share_of_each_step() {
    let mut scheduler = scheduler();
    admit(&mut scheduler, 1, 4, 1_000);
    step(&mut scheduler);
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
    let mut scheduler = scheduler();
    admit(&mut scheduler, 1, 4, 1_000);
    step(&mut scheduler);
    admit(&mut scheduler, 2, 70, 1);
    assert_eq!(step(&mut scheduler), [(1, 1), (2, MIXED)]);
    admit(&mut scheduler, 3, 1_000, 1);
    // 30 tokens are left: a short prompt, but the oldest.
    assert_eq!(step(&mut scheduler), [(1, 1), (2, 30), (3, 10)]);
}
