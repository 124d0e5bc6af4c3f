//! Tests of the scheduler as a decode node has it, co-located serving too.

use std::sync::Arc;
use std::time::Duration;

use super::test_kit::{key, limits, model, request, sample};
use super::*;
use crate::ids::{Attempt, ChoiceIndex, NodeEpoch, OutputIndex, PrefixSalt, TokenId, TransferId};
use crate::node::NodeState;
use crate::request::{Request, StopConditions, TokenEvent};
use crate::stage::Stage;
use crate::time::Time;

fn scheduler(kv_blocks: u32) -> Scheduler {
    Scheduler::new(SchedulerConfig::decode(limits(kv_blocks), Duration::from_secs(5)))
}

fn open(scheduler: &mut Scheduler, request: Request, work: Work) -> Result<Admitted, Refusal> {
    let admission = Admission {
        request: Arc::new(request),
        attempt: Attempt(0),
        permits: 1,
        coordinator: NodeEpoch(1),
        work,
    };
    scheduler.admit(Time::ZERO, admission)
}

const LOCAL: Work = Work::Whole;

fn handoff(id: u128) -> Work {
    Work::Decode(TransferId(id))
}

fn drain(scheduler: &mut Scheduler) -> Vec<SchedulerEvent> {
    let mut events = Vec::new();
    while let Some(event) = scheduler.take_event() {
        if let SchedulerEvent::CloseTransfer { transfer } = event {
            scheduler.transfer_ended(transfer);
        }
        events.push(event);
    }
    events
}

fn step(scheduler: &mut Scheduler) -> Vec<SchedulerEvent> {
    let limits = scheduler.config.limits;
    let Some(plan) = scheduler.next_step(Time::ZERO) else {
        return drain(scheduler);
    };
    let mut sampled = sample(&plan, &limits);
    scheduler.step_done(Time::ZERO, &mut sampled);
    drain(scheduler)
}

fn run(scheduler: &mut Scheduler, steps: usize) -> Vec<SchedulerEvent> {
    (0..steps).flat_map(|_| step(scheduler)).collect()
}

/// What the model says after `prompt`, in one choice.
fn expected(prompt: &[TokenId], choice: u32, count: usize) -> Vec<TokenId> {
    let mut history = prompt.to_vec();
    for _ in 0..count {
        history.push(model(&history, ChoiceIndex(choice)));
    }
    history.split_off(prompt.len())
}

fn tokens(events: &[SchedulerEvent], id: u128, choice: u32) -> Vec<TokenId> {
    let mut found = Vec::new();
    for event in events {
        if let SchedulerEvent::Token { key: of, event } = event
            && *of == key(id)
            && event.choice.0 == choice
        {
            assert_eq!(
                event.index,
                OutputIndex(found.len() as u32),
                "each index once and in order"
            );
            found.push(event.token);
        }
    }
    found
}

fn finished(events: &[SchedulerEvent], id: u128) -> usize {
    events
        .iter()
        .filter(|event| matches!(event, SchedulerEvent::Finished { key: of, .. } if *of == key(id)))
        .count()
}

fn has_failed(events: &[SchedulerEvent], id: u128, why: &NodeFailure) -> bool {
    events.iter().any(|event| match event {
        SchedulerEvent::Failed { key: of, failure, .. } => *of == key(id) && failure == why,
        _ => false,
    })
}

fn first_token(request: &Request, choice: u32) -> TokenEvent {
    TokenEvent {
        choice: ChoiceIndex(choice),
        index: OutputIndex(0),
        token: expected(&request.prompt, choice, 1)[0],
        logprobs: None,
        finish: None,
    }
}

fn commit(scheduler: &mut Scheduler, id: u128, first_tokens: Vec<TokenEvent>) -> Result<(), CommitError> {
    let (transfer, last_frame_at) = (TransferId(id), Time::ZERO);
    scheduler.commit(
        Time::ZERO,
        Commit {
            key: key(id),
            transfer,
            last_frame_at,
            first_tokens,
        },
    )
}

fn assert_quiet(scheduler: &Scheduler) {
    let counts = scheduler.pool.counts();
    scheduler.pool.check();
    assert_eq!(
        (counts.active, counts.reserved, counts.in_transfer, counts.quarantined),
        (0, 0, 0, 0)
    );
    assert_eq!(counts.free + counts.cached, counts.total());
}

#[test]
fn a_handoff_reserves_receives_commits_and_decodes() {
    let mut scheduler = scheduler(20);
    let wanted = request(1, 10, 4);
    let opened = open(&mut scheduler, wanted.clone(), handoff(1)).expect("fits");
    assert_eq!((opened.prefix_blocks, opened.ticket_blocks.len()), (0, 3));
    // 10 tokens fill 2.5 blocks of 4: growth for 4 more is one block.
    assert_eq!(scheduler.pool.counts().reserved, 4);
    scheduler.frame_arrived(Time::ZERO, key(1));
    assert_eq!(
        (scheduler.pool.counts().in_transfer, scheduler.pool.counts().reserved),
        (3, 1)
    );
    assert!(scheduler.next_step(Time::ZERO).is_none());
    commit(&mut scheduler, 1, vec![first_token(&wanted, 0)]).expect("as promised");
    let mut events = drain(&mut scheduler);
    assert!(matches!(events[0], SchedulerEvent::Committed { .. }));
    events.extend(run(&mut scheduler, 3));
    assert_eq!(tokens(&events, 1, 0), expected(&wanted.prompt, 0, 4));
    assert_eq!(finished(&events, 1), 1);
    assert_quiet(&scheduler);
}

#[test]
fn local_prefill_gives_the_same_tokens_in_chunks_beside_decode_rows() {
    let mut scheduler = scheduler(40);
    let first = request(1, 3, 10);
    let second = request(2, 15, 3);
    open(&mut scheduler, first.clone(), LOCAL).expect("fits");
    let mut events = run(&mut scheduler, 1);
    open(&mut scheduler, second.clone(), LOCAL).expect("fits");
    let plan = scheduler.next_step(Time::ZERO).expect("work");
    let shape: Vec<(u32, u32)> = plan.rows().iter().map(|row| (row.token_count, row.draws)).collect();
    assert_eq!(
        shape,
        vec![(1, 1), (7, 0)],
        "the decode row first, the prompt takes the rest of the budget"
    );
    let mut sampled = sample(&plan, &limits(40));
    scheduler.step_done(Time::ZERO, &mut sampled);
    events.extend(drain(&mut scheduler));
    events.extend(run(&mut scheduler, 9));
    assert_eq!(tokens(&events, 1, 0), expected(&first.prompt, 0, 10));
    assert_eq!(tokens(&events, 2, 0), expected(&second.prompt, 0, 3));
    assert_quiet(&scheduler);
}

#[test]
fn choices_share_whole_blocks_and_copy_the_partial_one() {
    let mut scheduler = scheduler(40);
    let mut wanted = request(1, 6, 5);
    wanted.choice_count = 3;
    open(&mut scheduler, wanted.clone(), handoff(1)).expect("fits");
    let firsts = (0..3).map(|choice| first_token(&wanted, choice)).collect();
    commit(&mut scheduler, 1, firsts).expect("as promised");
    let mut events = drain(&mut scheduler);
    let copies: Vec<_> = events
        .iter()
        .filter(|event| matches!(event, SchedulerEvent::CopyBlock { .. }))
        .collect();
    assert_eq!(copies.len(), 2);
    events.extend(run(&mut scheduler, 5));
    for choice in 0..3 {
        assert_eq!(tokens(&events, 1, choice), expected(&wanted.prompt, choice, 5));
    }
    assert_eq!(finished(&events, 1), 1);
    assert_quiet(&scheduler);
}

#[test]
fn a_choice_that_ended_at_its_first_token_is_not_decoded() {
    let mut scheduler = scheduler(40);
    let mut wanted = request(1, 6, 5);
    wanted.choice_count = 2;
    open(&mut scheduler, wanted.clone(), handoff(1)).expect("fits");
    commit(&mut scheduler, 1, vec![first_token(&wanted, 1)]).expect("as promised");
    let mut events = drain(&mut scheduler);
    events.extend(run(&mut scheduler, 5));
    assert_eq!(tokens(&events, 1, 0), vec![]);
    assert_eq!(tokens(&events, 1, 1), expected(&wanted.prompt, 1, 5));
    assert_quiet(&scheduler);
}

#[test]
fn out_of_blocks_the_youngest_is_preempted_and_loses_no_token() {
    // Two sequences of 4 + 20 tokens need 12 blocks; there are 8.
    let mut scheduler = scheduler(8);
    let wanted = [request(1, 4, 20), request(2, 4, 20)];
    for request in &wanted {
        open(&mut scheduler, request.clone(), LOCAL).expect("fits for now");
    }
    let mut events = Vec::new();
    let mut refused_while_preempted = false;
    for _ in 0..100 {
        events.extend(step(&mut scheduler));
        if scheduler.has_preempted() {
            refused_while_preempted |= open(&mut scheduler, request(3, 1, 1), LOCAL) == Err(Refusal::Preempting);
        }
    }
    assert!(refused_while_preempted, "a resume comes before any new request");
    for (id, request) in (1..).zip(&wanted) {
        assert_eq!(tokens(&events, id, 0), expected(&request.prompt, 0, 20));
        assert_eq!(finished(&events, id), 1);
    }
    let preempted: Vec<u32> = events
        .iter()
        .filter_map(|event| match event {
            SchedulerEvent::Finished { report, .. } => Some(report.preemptions),
            _ => None,
        })
        .collect();
    assert_eq!(preempted[0], 0, "the older one is never preempted for the younger");
    assert!(preempted[1] > 0);
    assert_quiet(&scheduler);
}

#[test]
fn a_request_finds_only_blocks_of_its_own_salt_also_where_one_was_preempted() {
    // As above: the younger one is preempted, resumes, and publishes its blocks.
    let mut scheduler = scheduler(8);
    let salted = |id, salt: Option<u64>| Request {
        prefix_salt: salt.map(PrefixSalt),
        ..request(id, 4, 20)
    };
    for request in [salted(1, None), salted(2, Some(7))] {
        open(&mut scheduler, request, LOCAL).expect("fits for now");
    }
    let mut was_preempted = false;
    for _ in 0..100 {
        step(&mut scheduler);
        was_preempted |= scheduler.has_preempted();
    }
    assert!(was_preempted);
    let first = request(2, 4, 20);
    let all: Vec<TokenId> = first
        .prompt
        .iter()
        .copied()
        .chain(expected(&first.prompt, 0, 20))
        .collect();
    for (id, salt, is_found) in [(3, Some(7), true), (4, Some(8), false), (5, None, false)] {
        let again = Request {
            client_prompt_tokens: 24,
            prompt: all.clone().into(),
            ..salted(id, salt)
        };
        let again = Request {
            stop: StopConditions {
                max_tokens: 1,
                ..again.stop.clone()
            },
            ..again
        };
        let admitted = open(&mut scheduler, again, LOCAL).expect("fits");
        assert_eq!(admitted.prefix_blocks > 0, is_found, "{salt:?}");
        scheduler.cancel(key(id));
        drain(&mut scheduler);
    }
    assert_quiet(&scheduler);
}

#[test]
fn cancel_in_each_state_brings_every_block_home() {
    type Advance = fn(&mut Scheduler);
    let states: [(&str, Work, Advance); 6] = [
        ("reserved", handoff(1), |_| {}),
        ("in transfer", handoff(1), |b| b.frame_arrived(Time::ZERO, key(1))),
        ("committed", handoff(1), |b| {
            commit(b, 1, vec![first_token(&request(1, 10, 8), 0)]).expect("as promised");
        }),
        ("waiting for local prefill", LOCAL, |_| {}),
        ("between chunks", LOCAL, |b| drop(step(b))),
        ("decoding", LOCAL, |b| drop(run(b, 4))),
    ];
    for (state, source, advance) in states {
        let mut scheduler = scheduler(20);
        open(&mut scheduler, request(1, 10, 8), source).expect("fits");
        advance(&mut scheduler);
        drain(&mut scheduler);
        assert!(scheduler.cancel(key(1)), "{state}");
        assert!(!scheduler.cancel(key(1)), "{state}: idempotent");
        let terminal = drain(&mut scheduler);
        assert!(
            terminal
                .iter()
                .all(|event| matches!(event, SchedulerEvent::CloseTransfer { .. })),
            "{state}"
        );
        assert_quiet(&scheduler);
    }
}

#[test]
fn what_a_request_has_come_to_is_known_before_a_cancel_and_told_with_a_failure() {
    let mut scheduler = scheduler(20);
    let (at, ms) = (Time::from_millis, Duration::from_millis);
    let step_at = |scheduler: &mut Scheduler, begins: u64, ends: u64| {
        let limits = scheduler.config.limits;
        let plan = scheduler.next_step(at(begins)).expect("a step");
        let mut sampled = sample(&plan, &limits);
        scheduler.step_done(at(ends), &mut sampled);
    };
    let passed = |scheduler: &Scheduler| {
        let timings = scheduler.report_of(key(1)).expect("it is here").timings;
        [Stage::PrefillForward, Stage::DecodeQueue, Stage::Decode].map(|stage| timings.get(stage))
    };
    open(&mut scheduler, request(1, 4, 8), LOCAL).expect("fits");
    assert_eq!(passed(&scheduler), [None, None, None]);
    step_at(&mut scheduler, 0, 10);
    assert_eq!(passed(&scheduler), [Some(ms(10)), None, None]);
    step_at(&mut scheduler, 15, 20);
    assert_eq!(passed(&scheduler), [Some(ms(10)), Some(ms(5)), Some(ms(5))]);
    step_at(&mut scheduler, 22, 30);
    drain(&mut scheduler);
    // The step that runs when it is broken off brings it nothing.
    assert!(scheduler.next_step(at(32)).is_some());
    let known = scheduler.report_of(key(1));
    assert_eq!(passed(&scheduler), [Some(ms(10)), Some(ms(5)), Some(ms(15))]);
    scheduler.fail(key(1), NodeFailure::Draining);
    let limits = scheduler.config.limits;
    let mut sampled = sample(&scheduler.running_step().expect("it runs"), &limits);
    scheduler.step_done(at(40), &mut sampled);
    let told = drain(&mut scheduler).into_iter().find_map(|event| match event {
        SchedulerEvent::Failed { report, .. } => Some(*report),
        _ => None,
    });
    assert_eq!(told, known);
    assert_eq!(scheduler.report_of(key(1)), None);
}

#[test]
fn blocks_of_a_cancelled_transfer_are_not_reused_before_it_has_ended() {
    let mut scheduler = scheduler(4);
    open(&mut scheduler, request(1, 10, 2), handoff(1)).expect("fits");
    scheduler.frame_arrived(Time::ZERO, key(1));
    scheduler.cancel(key(1));
    assert_eq!(
        scheduler.take_event(),
        Some(SchedulerEvent::CloseTransfer {
            transfer: TransferId(1)
        })
    );
    assert_eq!(scheduler.pool.counts().quarantined, 3);
    assert!(matches!(
        open(&mut scheduler, request(2, 10, 2), handoff(2)),
        Err(Refusal::NoBlocks { .. })
    ));
    scheduler.tick(Time::ZERO);
    assert_eq!(
        scheduler.take_event(),
        Some(SchedulerEvent::CloseTransfer {
            transfer: TransferId(1)
        }),
        "asked again"
    );
    scheduler.transfer_ended(TransferId(1));
    open(&mut scheduler, request(2, 10, 2), handoff(2)).expect("the blocks are back");
}

/// Every border of prompt and outputs with the 4-token blocks of these tests, in a pool with not one block to spare.
#[test]
fn a_request_that_fills_the_pool_to_the_last_block_says_what_it_says_anywhere() {
    for (prompt, max_tokens) in (1..=9).flat_map(|prompt| (1..=9).map(move |max| (prompt, max))) {
        for (choices, is_local) in [(1, true), (1, false), (3, true), (3, false)] {
            if max_tokens == 1 && !is_local {
                continue;
            }
            let mut wanted = request(1, prompt, max_tokens);
            wanted.choice_count = choices;
            let mut scheduler = scheduler(prompt / 4 + (prompt % 4 + max_tokens).div_ceil(4) * choices);
            let source = if is_local { LOCAL } else { handoff(1) };
            open(&mut scheduler, wanted.clone(), source).expect("an empty pool takes it");
            if !is_local {
                let firsts = (0..choices).map(|choice| first_token(&wanted, choice)).collect();
                commit(&mut scheduler, 1, firsts).expect("commits");
            }
            let mut events = drain(&mut scheduler);
            events.extend(run(&mut scheduler, 80));
            let case = format!("prompt {prompt}, max_tokens {max_tokens}, n {choices}, local {is_local}");
            for choice in 0..choices {
                let said = tokens(&events, 1, choice);
                assert_eq!(said, expected(&wanted.prompt, choice, max_tokens as usize), "{case}");
            }
            assert_eq!(finished(&events, 1), 1, "{case}");
            let preempted = scheduler.status(NodeState::Ready).preemptions_total;
            assert_eq!(preempted, 0, "there is a block for each token: {case}");
            assert_quiet(&scheduler);
        }
    }
}

#[test]
fn waiting_in_the_prefill_nodes_queue_does_not_expire_a_reservation() {
    let mut scheduler = scheduler(20);
    open(&mut scheduler, request(1, 10, 8), handoff(1)).expect("fits");
    assert_eq!(scheduler.next_timer(), Some(Time::from_millis(60_000)), "the deadline");
    scheduler.tick(Time::from_millis(59_999));
    assert!(drain(&mut scheduler).is_empty());
    scheduler.tick(Time::from_millis(60_000));
    let failure = NodeFailure::Deadline {
        stage: Stage::TransferTail,
    };
    assert!(has_failed(&drain(&mut scheduler), 1, &failure));
    assert_quiet(&scheduler);
}

#[test]
fn a_silent_reservation_expires_and_each_sign_of_life_restarts_it() {
    let mut scheduler = scheduler(20);
    open(&mut scheduler, request(1, 10, 8), handoff(1)).expect("fits");
    scheduler.prefill_began(Time::from_millis(4000), key(1));
    assert_eq!(scheduler.next_timer(), Some(Time::from_millis(9000)));
    scheduler.frame_arrived(Time::from_millis(8000), key(1));
    scheduler.tick(Time::from_millis(12_999));
    assert!(drain(&mut scheduler).is_empty());
    scheduler.tick(Time::from_millis(13_000));
    let events = drain(&mut scheduler);
    let expired = NodeFailure::ReservationExpired { waited_ms: 5000 };
    assert!(has_failed(&events, 1, &expired), "{events:?}");
    assert_quiet(&scheduler);
}

#[test]
fn a_hostile_commit_changes_nothing() {
    let mut scheduler = scheduler(20);
    let wanted = request(1, 10, 8);
    open(&mut scheduler, wanted.clone(), handoff(1)).expect("fits");
    let good = first_token(&wanted, 0);
    let broken = [
        vec![],
        vec![good.clone(), good.clone()],
        vec![TokenEvent {
            choice: ChoiceIndex(1),
            ..good.clone()
        }],
        vec![TokenEvent {
            index: OutputIndex(1),
            ..good.clone()
        }],
        vec![TokenEvent {
            token: TokenId(u32::MAX),
            ..good.clone()
        }],
    ];
    for tokens in broken {
        assert!(matches!(
            commit(&mut scheduler, 1, tokens),
            Err(CommitError::Invalid(_))
        ));
    }
    let other = Commit {
        key: key(1),
        transfer: TransferId(2),
        last_frame_at: Time::ZERO,
        first_tokens: vec![good.clone()],
    };
    assert_eq!(scheduler.commit(Time::ZERO, other), Err(CommitError::NotReceiving));
    assert_eq!(commit(&mut scheduler, 2, vec![good.clone()]), Err(CommitError::NotHere));
    commit(&mut scheduler, 1, vec![good.clone()]).expect("still receiving");
    assert_eq!(
        commit(&mut scheduler, 1, vec![good]),
        Err(CommitError::NotReceiving),
        "only once"
    );
}

#[test]
fn a_migrated_request_counts_its_delivered_tokens() {
    let mut scheduler = scheduler(20);
    let mut wanted = request(1, 6, 5);
    wanted.client_prompt_tokens = 4;
    open(&mut scheduler, wanted.clone(), LOCAL).expect("fits");
    let events = run(&mut scheduler, 10);
    let indices: Vec<u32> = events
        .iter()
        .filter_map(|event| match event {
            SchedulerEvent::Token { event, .. } => Some(event.index.0),
            _ => None,
        })
        .collect();
    assert_eq!(indices, vec![2, 3, 4], "two were delivered before");
    assert_eq!(finished(&events, 1), 1);
}

#[test]
fn prefix_is_pinned_at_open_and_whole_blocks_only() {
    let mut scheduler = scheduler(20);
    open(&mut scheduler, request(1, 8, 1), LOCAL).expect("fits");
    run(&mut scheduler, 2);
    let mut again = request(1, 8, 3);
    again.id = crate::ids::RequestId(2);
    let opened = open(&mut scheduler, again, handoff(2)).expect("fits");
    assert_eq!(
        (opened.prefix_blocks, opened.cached_tokens, opened.ticket_blocks.len()),
        (1, 4, 1)
    );
    let status = scheduler.status(NodeState::Ready);
    assert_eq!(
        (status.prefix_query_tokens_total, status.prefix_hit_tokens_total),
        (16, 4)
    );
}

#[test]
fn draining_grants_nothing_more() {
    let mut scheduler = scheduler(20);
    let granted = |scheduler: &Scheduler| scheduler.status(NodeState::Ready).permits_granted_total;
    assert_eq!(granted(&scheduler), 20);
    scheduler.pause_grants(true);
    open(&mut scheduler, request(1, 3, 1), LOCAL).expect("what was granted may still come");
    run(&mut scheduler, 2);
    assert_eq!(granted(&scheduler), 20);
    scheduler.pause_grants(false);
    assert_eq!(granted(&scheduler), 21);
}
