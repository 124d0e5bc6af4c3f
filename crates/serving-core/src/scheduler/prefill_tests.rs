//! Tests of the scheduler as a prefill node has it.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::test_kit::{key, limits, request, sample};
use super::*;
use crate::ids::{Attempt, NodeEpoch};
use crate::node::NodeState;
use crate::request::{AttemptKey, Lane, Request};
use crate::stage::Stage;
use crate::time::Time;

fn scheduler(kv_blocks: u32) -> Scheduler {
    Scheduler::new(SchedulerConfig::prefill(
        limits(kv_blocks),
        Duration::from_secs(5),
        None,
    ))
}

fn push(skip_blocks: u32) -> PushPlan {
    PushPlan {
        skip_blocks,
        is_streamed: false,
    }
}

fn command(request: Request, handoff_skip_blocks: Option<u32>) -> Admission {
    Admission {
        permits: u64::from(request.prompt_tokens()),
        request: Arc::new(request),
        attempt: Attempt(0),
        coordinator: NodeEpoch(1),
        work: Work::Prefill(handoff_skip_blocks.map(push)),
    }
}

fn step(scheduler: &mut Scheduler, now: Time) -> Vec<SchedulerEvent> {
    let limits = scheduler.config.limits;
    let Some(plan) = scheduler.next_step(now) else {
        return Vec::new();
    };
    let mut sampled = sample(&plan, &limits);
    scheduler.step_done(now, &mut sampled);
    drain(scheduler)
}

fn drain(scheduler: &mut Scheduler) -> Vec<SchedulerEvent> {
    std::iter::from_fn(|| scheduler.take_event()).collect()
}

#[test]
fn pushes_whole_blocks_per_chunk_and_the_partial_one_at_the_end() {
    let mut scheduler = scheduler(20);
    // 10 tokens are 3 blocks of 4; the decode node has the first; the budget is 8 tokens.
    scheduler
        .admit(Time::ZERO, command(request(1, 10, 5), Some(1)))
        .expect("fits");
    let first = step(&mut scheduler, Time::from_millis(1));
    let pushed = |events: &[SchedulerEvent]| -> Vec<u32> {
        let blocks = events.iter().filter_map(|event| match event {
            SchedulerEvent::BlocksReady { blocks, .. } => Some(blocks.iter().map(|block| block.ticket_index)),
            _ => None,
        });
        blocks.flatten().collect()
    };
    assert_eq!(pushed(&first), vec![0]);
    assert_eq!(scheduler.pool().counts().in_transfer, 1);
    let second = step(&mut scheduler, Time::from_millis(3));
    assert_eq!(pushed(&second), vec![1]);
    let [
        ..,
        SchedulerEvent::Token { event, .. },
        SchedulerEvent::Held { timings, .. },
    ] = &second[..]
    else {
        panic!("the first token comes after the last block: {second:?}");
    };
    assert_eq!(event.index.0, 0);
    assert_eq!(
        timings.get(crate::stage::Stage::PrefillForward),
        Some(Duration::from_millis(2))
    );
    assert!(scheduler.next_step(Time::from_millis(3)).is_none());
    scheduler.push_ended(key(1), PushEnd::Acked);
    assert!(matches!(
        drain(&mut scheduler)[..],
        [SchedulerEvent::Finished {
            outcome: Outcome::HandedOver,
            ..
        }]
    ));
    let counts = scheduler.pool().counts();
    assert_eq!((counts.cached, counts.free), (2, 18));
}

#[test]
fn the_wait_for_a_step_that_runs_is_told_apart_from_the_wait_for_a_place() {
    let mut scheduler = scheduler(20);
    let at = Time::from_millis;
    scheduler.admit(at(0), command(request(1, 3, 1), None)).expect("fits");
    let limits = scheduler.config.limits;
    let plan = scheduler.next_step(at(0)).expect("a step");
    let mut sampled = sample(&plan, &limits);
    scheduler.admit(at(2), command(request(2, 3, 1), None)).expect("fits");
    assert_eq!(
        scheduler.stages().collect::<Vec<_>>(),
        [Stage::PrefillForward, Stage::StepWait]
    );
    scheduler.step_done(at(10), &mut sampled);
    assert!(scheduler.stages().any(|stage| stage == Stage::PrefillQueue));
    let mut events = drain(&mut scheduler);
    events.extend(step(&mut scheduler, at(15)));
    let waits = |id| {
        let report = events.iter().find_map(|event| match event {
            SchedulerEvent::Finished { key: of, report, .. } if *of == key(id) => Some(report),
            _ => None,
        });
        let timings = &report.expect("it has ended").timings;
        [Stage::StepWait, Stage::PrefillQueue].map(|stage| timings.get(stage))
    };
    let ms = Duration::from_millis;
    assert_eq!(waits(1), [None, Some(ms(0))], "no step ran when it came");
    assert_eq!(waits(2), [Some(ms(8)), Some(ms(5))]);
}

#[test]
fn several_prompts_share_a_step_and_keep_their_order() {
    let mut scheduler = scheduler(20);
    for id in 1..=3 {
        scheduler
            .admit(Time::ZERO, command(request(id, 3, 1), None))
            .expect("fits");
    }
    let ended: Vec<AttemptKey> = (0..2)
        .flat_map(|_| step(&mut scheduler, Time::ZERO))
        .filter_map(|event| match event {
            SchedulerEvent::Finished { key, .. } => Some(key),
            _ => None,
        })
        .collect();
    assert_eq!(ended, vec![key(1), key(2), key(3)]);
}

#[test]
fn a_prefix_hit_saves_compute_but_not_for_prompt_logprobs() {
    let mut scheduler = scheduler(20);
    let cached = |admitted: Result<Admitted, Refusal>| admitted.expect("fits").cached_tokens;
    let again = |id: u128, logprobs: Option<u32>| {
        let mut same = request(1, 9, 1);
        same.id = crate::ids::RequestId(id);
        same.prompt_logprobs = logprobs;
        command(same, None)
    };
    assert_eq!(cached(scheduler.admit(Time::ZERO, again(1, None))), 0);
    step(&mut scheduler, Time::ZERO);
    step(&mut scheduler, Time::ZERO);
    assert_eq!(cached(scheduler.admit(Time::ZERO, again(2, None))), 8);
    assert_eq!(cached(scheduler.admit(Time::ZERO, again(3, Some(0)))), 0);
}

#[test]
fn cancel_during_a_push_quarantines_until_the_push_ended() {
    let mut scheduler = scheduler(20);
    scheduler
        .admit(Time::ZERO, command(request(1, 10, 5), Some(0)))
        .expect("fits");
    step(&mut scheduler, Time::ZERO);
    assert!(scheduler.cancel(key(1)));
    assert!(!scheduler.cancel(key(1)), "the second cancel finds nothing");
    assert_eq!(drain(&mut scheduler), vec![SchedulerEvent::AbortPush { key: key(1) }]);
    assert_eq!(scheduler.pool().counts().quarantined, 3);
    scheduler.push_ended(key(1), PushEnd::Aborted);
    let counts = scheduler.pool().counts();
    assert_eq!((counts.quarantined, counts.free + counts.cached), (0, 20));
    scheduler.push_ended(key(1), PushEnd::Aborted);
}

#[test]
fn cancel_while_a_step_runs_waits_for_the_step() {
    let mut scheduler = scheduler(20);
    scheduler
        .admit(Time::ZERO, command(request(1, 10, 5), None))
        .expect("fits");
    let limits = scheduler.config.limits;
    let mut sampled = sample(&scheduler.next_step(Time::ZERO).expect("work"), &limits);
    assert!(scheduler.cancel(key(1)));
    assert_eq!(scheduler.pool().counts().active, 3, "the engine still writes them");
    scheduler.step_done(Time::ZERO, &mut sampled);
    assert_eq!(scheduler.pool().counts().active, 0);
}

#[test]
fn a_hold_without_an_ack_ends_on_an_idle_and_on_a_full_node() {
    for others in [0, 3] {
        let mut scheduler = scheduler(12);
        scheduler
            .admit(Time::ZERO, command(request(1, 4, 5), Some(0)))
            .expect("fits");
        step(&mut scheduler, Time::ZERO);
        for id in 0..others {
            scheduler
                .admit(Time::ZERO, command(request(10 + id, 10, 5), Some(0)))
                .expect("fits");
        }
        assert!(
            scheduler
                .next_timer()
                .is_some_and(|timer| timer <= Time::from_millis(5000))
        );
        scheduler.tick(Time::from_millis(4999));
        assert!(drain(&mut scheduler).is_empty());
        scheduler.tick(Time::from_millis(5000));
        assert!(matches!(
            drain(&mut scheduler)[..],
            [
                SchedulerEvent::Failed {
                    failure: NodeFailure::HoldExpired { held_ms: 5000 },
                    ..
                },
                SchedulerEvent::AbortPush { .. },
            ]
        ));
        scheduler.push_ended(key(1), PushEnd::Aborted);
        assert_eq!(scheduler.pool().counts().quarantined, 0);
    }
}

#[test]
fn an_engine_error_fails_the_step_s_requests_only() {
    let mut scheduler = scheduler(20);
    scheduler
        .admit(Time::ZERO, command(request(1, 8, 5), None))
        .expect("fits");
    scheduler
        .admit(Time::ZERO, command(request(2, 8, 5), None))
        .expect("fits");
    assert_eq!(
        scheduler.next_step(Time::ZERO).expect("work").rows().len(),
        1,
        "the budget is one prompt"
    );
    scheduler.step_failed("a test says so");
    assert!(matches!(
        drain(&mut scheduler)[..],
        [SchedulerEvent::Failed {
            failure: NodeFailure::Engine { .. },
            ..
        }]
    ));
    assert_eq!(scheduler.keys().count(), 1);
}

#[test]
fn permits_follow_waiting_tokens_and_blocks() {
    let mut scheduler = scheduler(20);
    let outstanding = |scheduler: &Scheduler| {
        let status = scheduler.status(NodeState::Ready);
        status.permits_granted_total - status.permits_received_total
    };
    assert_eq!(outstanding(&scheduler), 16, "two step budgets");
    scheduler
        .admit(Time::ZERO, command(request(1, 10, 1), None))
        .expect("fits");
    assert_eq!(outstanding(&scheduler), 6);
    step(&mut scheduler, Time::ZERO);
    assert_eq!(outstanding(&scheduler), 14, "eight of ten tokens are computed");
    scheduler.pause_grants(true);
    step(&mut scheduler, Time::ZERO);
    assert_eq!(outstanding(&scheduler), 14, "a full push queue grants nothing");
    scheduler.pause_grants(false);
    assert_eq!(outstanding(&scheduler), 16);
}

#[test]
fn refusals_hold_nothing() {
    let mut scheduler = scheduler(4);
    let refused = |scheduler: &mut Scheduler, request: Request| {
        let before = scheduler.pool().counts();
        let refusal = scheduler
            .admit(Time::ZERO, command(request, None))
            .expect_err("must be refused");
        assert_eq!(scheduler.pool().counts(), before);
        refusal
    };
    assert!(matches!(refused(&mut scheduler, request(1, 0, 5)), Refusal::Invalid(_)));
    assert!(matches!(
        refused(&mut scheduler, request(1, 17, 5)),
        Refusal::NeverFits { needed_blocks: 5, .. }
    ));
    let mut hostile = request(1, 4, 5);
    hostile.prompt = vec![crate::ids::TokenId(u32::MAX)].into();
    hostile.client_prompt_tokens = 1;
    assert!(matches!(refused(&mut scheduler, hostile), Refusal::Invalid(_)));
    scheduler
        .admit(Time::ZERO, command(request(1, 9, 5), None))
        .expect("fits");
    assert!(matches!(refused(&mut scheduler, request(1, 4, 5)), Refusal::Duplicate));
    assert!(matches!(
        refused(&mut scheduler, request(2, 8, 5)),
        Refusal::NoBlocks { .. }
    ));
}

#[test]
fn prompt_logprobs_without_outputs_finish_with_no_token() {
    let mut scheduler = scheduler(20);
    let mut echo = request(1, 4, 0);
    echo.prompt_logprobs = Some(2);
    scheduler.admit(Time::ZERO, command(echo, None)).expect("fits");
    let plan = scheduler.next_step(Time::ZERO).expect("work");
    assert_eq!(plan.rows()[0].logits, RowLogits::All);
    assert_eq!(plan.draws(0).count(), 0);
    scheduler.step_done(Time::ZERO, &mut Vec::new());
    let events = drain(&mut scheduler);
    assert!(
        matches!(
            &events[..],
            [SchedulerEvent::Finished {
                outcome: Outcome::Complete,
                ..
            }]
        ),
        "{events:?}"
    );
}

/// Chunks of one prompt of `prompt` tokens under a budget of 64, with a last chunk of at most 6 tokens (blocks of 4).
fn chunks(prompt: u32, handoff_skip_blocks: Option<u32>, others: u32) -> Vec<u32> {
    chunks_over((prompt, false), handoff_skip_blocks, others)
}

fn chunks_over((prompt, is_streamed): (u32, bool), handoff_skip_blocks: Option<u32>, others: u32) -> Vec<u32> {
    let limits = NodeLimits {
        max_batch_tokens: 64,
        ..limits(100)
    };
    let mut scheduler = Scheduler::new(SchedulerConfig::prefill(
        limits,
        Duration::from_secs(5),
        NonZeroU32::new(6),
    ));
    for id in 0..=others {
        let accepted = scheduler.admit(
            Time::ZERO,
            Admission {
                work: Work::Prefill(handoff_skip_blocks.map(|skip_blocks| PushPlan {
                    skip_blocks,
                    is_streamed,
                })),
                ..command(request(u128::from(id) + 1, prompt, 5), None)
            },
        );
        accepted.expect("it fits");
    }
    let mut chunks = Vec::new();
    while let Some(plan) = scheduler.next_step(Time::ZERO) {
        chunks.extend(
            plan.rows()
                .iter()
                .filter(|row| row.key == key(1))
                .map(|row| row.token_count),
        );
        let mut sampled = sample(&plan, &limits);
        scheduler.step_done(Time::ZERO, &mut sampled);
    }
    chunks
}

#[test]
fn the_end_of_a_lonely_prompt_is_a_chunk_of_its_own() {
    // The budget cuts first; the rest is cut where a block ends, so that at most 6 remain.
    assert_eq!(chunks(94, Some(0), 0), [64, 24, 6]);
    assert_eq!(chunks(93, Some(0), 0), [64, 24, 5]);
    assert_eq!(chunks(91, Some(0), 0), [64, 24, 3]);
    assert_eq!(chunks(100, Some(0), 0), [64, 32, 4]);
}

#[test]
fn a_lonely_prompt_of_one_chunk_that_is_streamed_is_cut_in_halves() {
    assert_eq!(chunks_over((48, true), Some(0), 0), [24, 24]);
    assert_eq!(chunks_over((63, true), Some(0), 0), [32, 31]);
    assert_eq!(chunks_over((64, true), Some(0), 0), [32, 32]);
    assert_eq!(chunks_over((94, true), Some(0), 0), [64, 24, 6], "several chunks");
    assert_eq!(chunks_over((47, true), Some(0), 0), [47], "a short one");
    assert_eq!(chunks_over((64, true), Some(0), 1), [64], "another prompt waits");
    assert_eq!(chunks_over((64, true), None, 0), [64], "it stays here");
}

#[test]
fn halves_are_of_what_must_be_pushed() {
    assert_eq!(chunks_over((64, true), Some(3), 0), [40, 24], "52 tokens to push");
    assert_eq!(chunks_over((64, true), Some(5), 0), [64], "44: too few");
    assert_eq!(chunks_over((64, true), Some(16), 0), [64], "none");
}

#[test]
fn a_prompt_that_others_have_cut_has_its_last_chunk_all_the_same() {
    let limits = NodeLimits {
        max_batch_tokens: 64,
        ..limits(100)
    };
    let mut scheduler = Scheduler::new(SchedulerConfig::prefill(
        limits,
        Duration::from_secs(5),
        NonZeroU32::new(6),
    ));
    for (id, prompt) in [(1, 40), (2, 48)] {
        let accepted = scheduler.admit(Time::ZERO, command(request(id, prompt, 5), Some(0)));
        accepted.expect("it fits");
    }
    let mut steps = Vec::new();
    while let Some(plan) = scheduler.next_step(Time::ZERO) {
        steps.push(plan.rows().iter().map(|row| row.token_count).collect::<Vec<_>>());
        let mut sampled = sample(&plan, &limits);
        scheduler.step_done(Time::ZERO, &mut sampled);
    }
    assert_eq!(steps, [vec![40, 24], vec![20], vec![4]]);
}

#[test]
fn short_crowded_or_kept_prompts_are_not_cut_again() {
    assert_eq!(chunks(30, Some(0), 0), [30], "one chunk");
    assert_eq!(chunks(64, Some(0), 0), [64], "one chunk");
    assert_eq!(chunks(75, Some(0), 0), [64, 11], "a short rest");
    assert_eq!(chunks(94, Some(0), 1), [64, 30], "another prompt waits");
    assert_eq!(chunks(94, None, 0), [64, 30], "it stays here");
}

/// Requests 2 and on, one for each step while request 1, a batch prompt of `long` tokens, computes: the step of each end.
fn steps_beside_a_long_prompt(long: u32, short: u32, count: u32) -> Vec<usize> {
    let limits = NodeLimits {
        max_batch_tokens: 100,
        max_model_tokens: 10_000,
        ..limits(2_000)
    };
    let mut scheduler = Scheduler::new(SchedulerConfig::prefill(limits, Duration::from_secs(5), None));
    let mut batch = request(1, long, 1);
    batch.lane = Lane::Batch;
    scheduler.admit(Time::ZERO, command(batch, None)).expect("fits");
    let mut ended = vec![0; count as usize + 1];
    for step in 1.. {
        let Some(plan) = scheduler.next_step(Time::ZERO) else {
            return ended;
        };
        let mut sampled = sample(&plan, &limits);
        // Comes while the step runs.
        if step <= count as usize {
            let next = request(u128::from(step as u32) + 1, short, 1);
            scheduler.admit(Time::ZERO, command(next, None)).expect("fits");
        }
        scheduler.step_done(Time::ZERO, &mut sampled);
        for event in drain(&mut scheduler) {
            if let SchedulerEvent::Finished { key, .. } = event {
                ended[key.request.0 as usize - 1] = step;
            }
        }
    }
    unreachable!("the steps end")
}

#[test]
fn a_short_prompt_does_not_wait_behind_a_long_one_and_a_flood_of_them_does_not_stop_it() {
    // Alone the long prompt takes 20 steps of 100 tokens.
    let ended = steps_beside_a_long_prompt(2_000, 20, 5);
    assert_eq!(
        ended[1..],
        [2, 3, 4, 5, 6],
        "each is whole in the step after the one that ran when it came"
    );
    let flood = steps_beside_a_long_prompt(2_000, 20, 200);
    assert_eq!(flood[0], 25, "1.25 times as long beside one short prompt a step");
    let two_shares = steps_beside_a_long_prompt(2_000, 40, 1);
    assert_eq!(two_shares, [21, 3], "in the two steps after it came");
    let flood = steps_beside_a_long_prompt(2_000, 40, 200);
    assert!(flood[0] <= 25, "1.25 times as long at most: {}", flood[0]);
    let too_long_to_be_short = steps_beside_a_long_prompt(2_000, 41, 1);
    assert_eq!(too_long_to_be_short, [20, 21], "in order of arrival");
}

#[test]
fn a_long_prompt_leaves_permits_for_short_ones() {
    let limits = NodeLimits {
        max_batch_tokens: 100,
        max_model_tokens: 10_000,
        ..limits(2_000)
    };
    let mut scheduler = Scheduler::new(SchedulerConfig::prefill(limits, Duration::from_secs(5), None));
    let outstanding = |scheduler: &Scheduler| {
        let status = scheduler.status(NodeState::Ready);
        status.permits_granted_total - status.permits_received_total
    };
    assert_eq!(outstanding(&scheduler), 200);
    let long = Admission {
        permits: 200,
        ..command(request(1, 2_000, 1), None)
    };
    scheduler.admit(Time::ZERO, long).expect("fits");
    assert_eq!(outstanding(&scheduler), 40, "two steps' shares");
    scheduler
        .admit(Time::ZERO, command(request(2, 20, 1), None))
        .expect("fits");
    assert_eq!(outstanding(&scheduler), 20);
    step(&mut scheduler, Time::ZERO);
    assert_eq!(outstanding(&scheduler), 40);
}

#[test]
fn prompts_just_too_long_to_be_short_take_their_permits_whole() {
    let limits = NodeLimits {
        max_batch_tokens: 100,
        max_sequences: 16,
        max_model_tokens: 10_000,
        ..limits(4_000)
    };
    let mut scheduler = Scheduler::new(SchedulerConfig::prefill(limits, Duration::from_secs(5), None));
    let mut admit = |id, tokens: u32| {
        let admission = Admission {
            permits: u64::from(tokens.min(100)),
            ..command(request(id, tokens, 1), None)
        };
        scheduler.admit(Time::ZERO, admission).expect("fits");
        let status = scheduler.status(NodeState::Ready);
        status
            .permits_granted_total
            .saturating_sub(status.permits_received_total)
    };
    assert_eq!(admit(1, 5_000), 100, "what was granted before is still out");
    assert_eq!(admit(2, 30), 70);
    assert_eq!(admit(3, 30), 40);
    assert_eq!(
        admit(4, 30),
        10,
        "the shares of two steps hold one of them, not one after the other"
    );
    assert_eq!(admit(5, 10), 0);
}

#[test]
fn a_prompt_waits_until_its_first_chunk_is_planned() {
    let mut scheduler = Scheduler::new(SchedulerConfig::prefill(limits(100), Duration::from_secs(5), None));
    let counts = |scheduler: &Scheduler| {
        let status = scheduler.status(NodeState::Ready);
        (status.running_sequences, status.waiting_sequences)
    };
    for id in 1..=2 {
        scheduler
            .admit(Time::ZERO, command(request(id, 40, 1), None))
            .expect("fits");
    }
    assert_eq!(counts(&scheduler), (0, 2));
    scheduler.next_step(Time::ZERO).expect("two prompts");
    let running = scheduler.running_step().expect("the same").rows().len() as u32;
    assert_eq!(counts(&scheduler), (running, 2 - running));
}
