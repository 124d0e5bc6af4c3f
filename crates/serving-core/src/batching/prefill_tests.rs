//! Tests of the prefill batcher.

use super::*;
use crate::batching::test_kit::{key, limits, request, sample};

fn batcher(kv_blocks: u32) -> PrefillBatcher {
    PrefillBatcher::new(PrefillConfig {
        limits: limits(kv_blocks),
        hold: Duration::from_secs(5),
        last_chunk_tokens: None,
    })
}

fn command(request: Request, handoff_skip_blocks: Option<u32>) -> PrefillCommand {
    let permit_tokens = u64::from(request.prompt_tokens());
    PrefillCommand {
        request: Arc::new(request),
        attempt: Attempt(0),
        permit_tokens,
        coordinator: NodeEpoch(1),
        handoff_skip_blocks,
        is_streamed: false,
    }
}

fn step(batcher: &mut PrefillBatcher, now: Time) -> Vec<PrefillEvent> {
    let limits = batcher.config.limits;
    let Some(plan) = batcher.next_step(now) else {
        return Vec::new();
    };
    let mut sampled = sample(&plan, &limits);
    batcher.step_done(now, &mut sampled);
    drain(batcher)
}

fn drain(batcher: &mut PrefillBatcher) -> Vec<PrefillEvent> {
    std::iter::from_fn(|| batcher.take_event()).collect()
}

#[test]
fn pushes_whole_blocks_per_chunk_and_the_partial_one_at_the_end() {
    let mut batcher = batcher(20);
    // 10 tokens are 3 blocks of 4; the decode node has the first; the budget is 8 tokens.
    batcher
        .accept(Time::ZERO, command(request(1, 10, 5), Some(1)))
        .expect("fits");
    let first = step(&mut batcher, Time::from_millis(1));
    let pushed = |events: &[PrefillEvent]| -> Vec<u32> {
        let blocks = events.iter().filter_map(|event| match event {
            PrefillEvent::BlocksReady { blocks, .. } => Some(blocks.iter().map(|block| block.ticket_index)),
            _ => None,
        });
        blocks.flatten().collect()
    };
    assert_eq!(pushed(&first), vec![0]);
    assert_eq!(batcher.pool().counts().in_transfer, 1);
    let second = step(&mut batcher, Time::from_millis(3));
    assert_eq!(pushed(&second), vec![1]);
    let Some(PrefillEvent::FirstTokens {
        tokens,
        timings,
        continues: true,
        ..
    }) = second.last()
    else {
        panic!("the first token comes after the last block: {second:?}");
    };
    assert_eq!((tokens.len(), tokens[0].index.0), (1, 0));
    assert_eq!(
        timings.get(crate::stage::Stage::PrefillForward),
        Some(Duration::from_millis(2))
    );
    assert!(batcher.next_step(Time::from_millis(3)).is_none());
    batcher.push_ended(key(1), PushEnd::Acked);
    assert!(matches!(
        drain(&mut batcher)[..],
        [PrefillEvent::Finished {
            outcome: PrefillOutcome::HandedOver,
            ..
        }]
    ));
    let counts = batcher.pool().counts();
    assert_eq!((counts.cached, counts.free), (2, 18));
}

#[test]
fn several_prompts_share_a_step_and_keep_their_order() {
    let mut batcher = batcher(20);
    for id in 1..=3 {
        batcher
            .accept(Time::ZERO, command(request(id, 3, 1), None))
            .expect("fits");
    }
    let ended: Vec<AttemptKey> = (0..2)
        .flat_map(|_| step(&mut batcher, Time::ZERO))
        .filter_map(|event| match event {
            PrefillEvent::Finished { key, .. } => Some(key),
            _ => None,
        })
        .collect();
    assert_eq!(ended, vec![key(1), key(2), key(3)]);
}

#[test]
fn a_prefix_hit_saves_compute_but_not_for_prompt_logprobs() {
    let mut batcher = batcher(20);
    let again = |id: u128, logprobs: Option<u32>| {
        let mut same = request(1, 9, 1);
        same.id = crate::ids::RequestId(id);
        same.prompt_logprobs = logprobs;
        command(same, None)
    };
    assert_eq!(batcher.accept(Time::ZERO, again(1, None)), Ok(0));
    step(&mut batcher, Time::ZERO);
    step(&mut batcher, Time::ZERO);
    assert_eq!(batcher.accept(Time::ZERO, again(2, None)), Ok(8));
    assert_eq!(batcher.accept(Time::ZERO, again(3, Some(0))), Ok(0));
}

#[test]
fn cancel_during_a_push_quarantines_until_the_push_ended() {
    let mut batcher = batcher(20);
    batcher
        .accept(Time::ZERO, command(request(1, 10, 5), Some(0)))
        .expect("fits");
    step(&mut batcher, Time::ZERO);
    assert!(batcher.cancel(key(1)));
    assert!(!batcher.cancel(key(1)), "the second cancel finds nothing");
    assert_eq!(drain(&mut batcher), vec![PrefillEvent::AbortPush { key: key(1) }]);
    assert_eq!(batcher.pool().counts().quarantined, 3);
    batcher.push_ended(key(1), PushEnd::Aborted);
    let counts = batcher.pool().counts();
    assert_eq!((counts.quarantined, counts.free + counts.cached), (0, 20));
    batcher.push_ended(key(1), PushEnd::Aborted);
}

#[test]
fn cancel_while_a_step_runs_waits_for_the_step() {
    let mut batcher = batcher(20);
    batcher
        .accept(Time::ZERO, command(request(1, 10, 5), None))
        .expect("fits");
    let limits = batcher.config.limits;
    let mut sampled = sample(&batcher.next_step(Time::ZERO).expect("work"), &limits);
    assert!(batcher.cancel(key(1)));
    assert_eq!(batcher.pool().counts().active, 3, "the engine still writes them");
    batcher.step_done(Time::ZERO, &mut sampled);
    assert_eq!(batcher.pool().counts().active, 0);
}

#[test]
fn a_hold_without_an_ack_ends_on_an_idle_and_on_a_full_node() {
    for others in [0, 3] {
        let mut batcher = batcher(12);
        batcher
            .accept(Time::ZERO, command(request(1, 4, 5), Some(0)))
            .expect("fits");
        step(&mut batcher, Time::ZERO);
        for id in 0..others {
            batcher
                .accept(Time::ZERO, command(request(10 + id, 10, 5), Some(0)))
                .expect("fits");
        }
        assert!(
            batcher
                .next_timer()
                .is_some_and(|timer| timer <= Time::from_millis(5000))
        );
        batcher.tick(Time::from_millis(4999));
        assert!(drain(&mut batcher).is_empty());
        batcher.tick(Time::from_millis(5000));
        assert!(matches!(
            drain(&mut batcher)[..],
            [
                PrefillEvent::AbortPush { .. },
                PrefillEvent::Failed {
                    failure: NodeFailure::HoldExpired { held_ms: 5000 },
                    ..
                }
            ]
        ));
        batcher.push_ended(key(1), PushEnd::Aborted);
        assert_eq!(batcher.pool().counts().quarantined, 0);
    }
}

#[test]
fn an_engine_error_fails_the_step_s_requests_only() {
    let mut batcher = batcher(20);
    batcher
        .accept(Time::ZERO, command(request(1, 8, 5), None))
        .expect("fits");
    batcher
        .accept(Time::ZERO, command(request(2, 8, 5), None))
        .expect("fits");
    assert_eq!(
        batcher.next_step(Time::ZERO).expect("work").rows().len(),
        1,
        "the budget is one prompt"
    );
    batcher.step_failed("a test says so");
    assert!(matches!(
        drain(&mut batcher)[..],
        [PrefillEvent::Failed {
            failure: NodeFailure::Engine { .. },
            ..
        }]
    ));
    assert_eq!(batcher.open_requests(), 1);
}

#[test]
fn permits_follow_waiting_tokens_and_blocks() {
    let mut batcher = batcher(20);
    let outstanding = |batcher: &PrefillBatcher| {
        let status = batcher.status(NodeState::Ready);
        status.permits_granted_total - status.permits_received_total
    };
    assert_eq!(outstanding(&batcher), 16, "two step budgets");
    batcher
        .accept(Time::ZERO, command(request(1, 10, 1), None))
        .expect("fits");
    assert_eq!(outstanding(&batcher), 6);
    step(&mut batcher, Time::ZERO);
    assert_eq!(outstanding(&batcher), 14, "eight of ten tokens are computed");
    batcher.pause_grants(true);
    step(&mut batcher, Time::ZERO);
    assert_eq!(outstanding(&batcher), 14, "a full push queue grants nothing");
    batcher.pause_grants(false);
    assert_eq!(outstanding(&batcher), 16);
}

#[test]
fn refusals_hold_nothing() {
    let mut batcher = batcher(4);
    let refused = |batcher: &mut PrefillBatcher, request: Request| {
        let before = batcher.pool().counts();
        let refusal = batcher
            .accept(Time::ZERO, command(request, None))
            .expect_err("must be refused");
        assert_eq!(batcher.pool().counts(), before);
        refusal
    };
    assert!(matches!(refused(&mut batcher, request(1, 0, 5)), Refusal::Invalid(_)));
    assert!(matches!(
        refused(&mut batcher, request(1, 17, 5)),
        Refusal::NeverFits { needed_blocks: 5, .. }
    ));
    let mut hostile = request(1, 4, 5);
    hostile.prompt = vec![crate::ids::TokenId(u32::MAX)].into();
    hostile.client_prompt_tokens = 1;
    assert!(matches!(refused(&mut batcher, hostile), Refusal::Invalid(_)));
    batcher
        .accept(Time::ZERO, command(request(1, 9, 5), None))
        .expect("fits");
    assert!(matches!(refused(&mut batcher, request(1, 4, 5)), Refusal::Duplicate));
    assert!(matches!(
        refused(&mut batcher, request(2, 8, 5)),
        Refusal::NoBlocks { .. }
    ));
}

#[test]
fn prompt_logprobs_without_outputs_finish_with_no_token() {
    let mut batcher = batcher(20);
    let mut echo = request(1, 4, 0);
    echo.prompt_logprobs = Some(2);
    batcher.accept(Time::ZERO, command(echo, None)).expect("fits");
    let plan = batcher.next_step(Time::ZERO).expect("work");
    assert!(plan.reports_prompt_logprobs(0));
    assert_eq!(plan.draws(0).count(), 0);
    batcher.step_done(Time::ZERO, &mut Vec::new());
    let events = drain(&mut batcher);
    assert!(
        matches!(&events[..], [
        PrefillEvent::FirstTokens { tokens, continues: false, .. },
        PrefillEvent::Finished { outcome: PrefillOutcome::EndedAtFirstToken, .. },
    ] if tokens.is_empty()),
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
    let mut batcher = PrefillBatcher::new(PrefillConfig {
        limits,
        hold: Duration::from_secs(5),
        last_chunk_tokens: NonZeroU32::new(6),
    });
    for id in 0..=others {
        let accepted = batcher.accept(
            Time::ZERO,
            PrefillCommand {
                is_streamed,
                ..command(request(u128::from(id) + 1, prompt, 5), handoff_skip_blocks)
            },
        );
        accepted.expect("it fits");
    }
    let mut chunks = Vec::new();
    while let Some(plan) = batcher.next_step(Time::ZERO) {
        chunks.extend(
            plan.rows()
                .iter()
                .filter(|row| row.key == key(1))
                .map(|row| row.token_count),
        );
        let mut sampled = sample(&plan, &limits);
        batcher.step_done(Time::ZERO, &mut sampled);
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
    let mut batcher = PrefillBatcher::new(PrefillConfig {
        limits,
        hold: Duration::from_secs(5),
        last_chunk_tokens: NonZeroU32::new(6),
    });
    for (id, prompt) in [(1, 40), (2, 48)] {
        let accepted = batcher.accept(Time::ZERO, command(request(id, prompt, 5), Some(0)));
        accepted.expect("it fits");
    }
    let mut steps = Vec::new();
    while let Some(plan) = batcher.next_step(Time::ZERO) {
        steps.push(plan.rows().iter().map(|row| row.token_count).collect::<Vec<_>>());
        let mut sampled = sample(&plan, &limits);
        batcher.step_done(Time::ZERO, &mut sampled);
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
