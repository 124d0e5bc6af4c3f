//! Tests of guesses: what is guessed, what counts of it, and that no token depends on it.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::ids::ChoiceIndex;
use crate::request::{OutputConstraint, Request};
use crate::scheduler::test_kit::{Model, admit_whole, limits, model, repetitive, request, sample_by};
use crate::scheduler::{DraftCounts, SchedulerConfig, SchedulerEvent};

fn ids(numbers: &[u32]) -> Vec<TokenId> {
    numbers.iter().copied().map(TokenId).collect()
}

#[test]
fn the_guess_is_what_followed_the_newest_tokens_when_they_came_last() {
    let text = ids(&[1, 2, 3, 9, 9, 1, 2, 3, 4, 5, 6, 1, 2, 3]);
    assert_eq!(guess(&text, 2), 8..10);
    assert_eq!(guess(&text, 100), 8..14, "at most to the end of the text");
    assert_eq!(guess(&text, 0), 0..0);
    // What overlaps with the newest tokens counts, too: a text of one token repeats it.
    assert_eq!(guess(&ids(&[7, 7, 7, 7]), 5), 3..4);
    for none in [&[][..], &[1, 2], &[1, 2, 3], &[1, 2, 4, 1, 2, 3], &[5, 1, 2, 3]] {
        assert_eq!(guess(&ids(none), 4), 0..0, "{none:?}");
    }
}

#[test]
fn what_is_too_far_back_is_not_found() {
    let mut text: Vec<TokenId> = (0..SEARCHED_TOKENS_MAX as u32 + 4).map(TokenId).collect();
    text.extend(ids(&[0, 1, 2]));
    assert_eq!(guess(&text, 4), 0..0);
    text.truncate(text.len() - 3);
    text.extend(ids(&[20, 21, 22]));
    assert_eq!(guess(&text, 4), 23..27);
}

fn scheduler(speculative_tokens: u32) -> Scheduler {
    Scheduler::new(SchedulerConfig {
        speculative_tokens,
        ..SchedulerConfig::decode(limits(60), Duration::from_secs(5))
    })
}

fn admit(scheduler: &mut Scheduler, request: Request) {
    admit_whole(scheduler, Time::ZERO, request);
}

/// What came of the requests: their tokens in order, the counts of their reports, and how many steps it took.
fn run(scheduler: &mut Scheduler, model: Model) -> (Vec<TokenId>, Vec<DraftCounts>, usize) {
    let limits = scheduler.config.limits;
    let (mut tokens, mut counts) = (Vec::new(), Vec::new());
    for steps in 0.. {
        while let Some(event) = scheduler.take_event() {
            match event {
                SchedulerEvent::Token { event, .. } => tokens.push(event.token),
                SchedulerEvent::Finished { report, .. } => counts.push(report.drafts),
                _ => {}
            }
        }
        let Some(plan) = scheduler.next_step(Time::ZERO) else {
            return (tokens, counts, steps);
        };
        let mut sampled = sample_by(model, &plan, &limits);
        scheduler.step_done(Time::ZERO, &mut sampled);
    }
    unreachable!("a request ends")
}

#[test]
fn guesses_bring_the_same_tokens_in_fewer_steps() {
    let outcome = |speculative_tokens| {
        let mut scheduler = scheduler(speculative_tokens);
        admit(&mut scheduler, request(1, 6, 60));
        let outcome = run(&mut scheduler, repetitive);
        (outcome, scheduler.draft_counts())
    };
    let ((without, none, steps_without), _) = outcome(0);
    let ((with, counts, steps), total) = outcome(4);
    assert_eq!((without.len(), none), (60, vec![DraftCounts::default()]));
    assert_eq!(with, without);
    assert_eq!(counts, [total], "the report has the counts of its request");
    // Each right guess saves a step, but for one that was right and whose sequence had ended with it.
    assert!(total.accepted > 10 && total.accepted < total.drafted, "{total:?}");
    assert!(
        steps_without - steps <= total.accepted as usize,
        "{steps} {steps_without} {total:?}"
    );
    assert!(steps * 4 < steps_without * 3, "{steps} of {steps_without} steps");
}

#[test]
fn a_text_that_repeats_nothing_is_computed_as_without_guesses() {
    let mut scheduler = scheduler(4);
    admit(&mut scheduler, request(1, 6, 30));
    let (tokens, counts, _) = run(&mut scheduler, model);
    assert_eq!((tokens.len(), counts), (30, vec![DraftCounts::default()]));
}

/// Always the same token, which a guess therefore has right.
fn monotone(_: &[TokenId], _: ChoiceIndex) -> TokenId {
    TokenId(7)
}

#[test]
fn nothing_is_told_after_the_last_token() {
    // Ended by its length, by a stop token amid right guesses, and by the model's last position.
    let by_length = request(1, 6, 21);
    let mut by_token = request(2, 6, 100);
    by_token.stop.stop_token_ids = vec![TokenId(8)];
    let late: Model = |history, _| TokenId(if history.len() > 17 { 8 } else { 7 });
    for (request, model, wanted) in [
        (by_length, monotone as Model, 21),
        (by_token, late, 13),
        (request(3, 6, 1000), monotone, 194),
    ] {
        let mut scheduler = scheduler(4);
        admit(&mut scheduler, request);
        let (tokens, counts, steps) = run(&mut scheduler, model);
        assert_eq!((tokens.len(), counts.len()), (wanted, 1));
        assert!(steps < wanted, "{steps}");
        scheduler.pool.check();
        let blocks = scheduler.pool.counts();
        assert_eq!((blocks.active, blocks.reserved), (0, 0));
    }
}

#[test]
fn a_constrained_request_guesses_nothing() {
    let mut scheduler = scheduler(4);
    let constraint = Arc::new(OutputConstraint {
        allowed_tokens: vec![TokenId(7)],
        ..OutputConstraint::default()
    });
    admit(
        &mut scheduler,
        Request {
            constraint,
            ..request(1, 6, 20)
        },
    );
    let (tokens, counts, _) = run(&mut scheduler, monotone);
    assert_eq!((tokens.len(), counts), (20, vec![DraftCounts::default()]));
}

#[test]
fn prompts_come_before_guesses_and_a_step_keeps_to_its_budget() {
    let mut scheduler = scheduler(4);
    let limits = scheduler.config.limits;
    admit(&mut scheduler, request(1, 6, 60));
    for _ in 0..20 {
        let plan = scheduler.next_step(Time::ZERO).expect("it decodes");
        let mut sampled = sample_by(monotone, &plan, &limits);
        scheduler.step_done(Time::ZERO, &mut sampled);
    }
    admit(&mut scheduler, request(2, 40, 1));
    let plan = scheduler.next_step(Time::ZERO).expect("both run");
    let sizes: Vec<(u32, u32)> = plan.rows().iter().map(|row| (row.token_count, row.drafts)).collect();
    assert_eq!(sizes, [(1, 0), (7, 0)]);
    assert_eq!(plan.prompt_token_count(), 7);
}
