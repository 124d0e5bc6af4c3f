//! A prefill node as its coordinator and its decode nodes see it: every end of a request, and where its blocks are then.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test that unwraps fails, as it should")]

mod kit;

use std::time::{Duration, Instant};

use engine::{HostEngine, LogitsWanted, SequenceRows};
use kit::*;
use kv_transfer::receiver::ReceiveEnd;
use proto::messages::{Failed, NodeFault, PrefillEvent, PrefillFinished, PrefillOutcome, RefuseReason};
use serving_core::ids::{BlockId, NodeEpoch};
use serving_core::request::{FinishReason, Request, TokenEvent};
use serving_core::stage::Stage;

fn finished(events: &[PrefillEvent]) -> &PrefillFinished {
    match events.last() {
        Some(PrefillEvent::Finished(finished)) => finished,
        other => panic!("not finished: {other:?}"),
    }
}

fn failed(events: &[PrefillEvent]) -> &Failed {
    match events.last() {
        Some(PrefillEvent::Failed(failed)) => failed,
        other => panic!("not failed: {other:?}"),
    }
}

fn tokens(events: &[PrefillEvent]) -> Vec<TokenEvent> {
    let tokens = events.iter().filter_map(|event| match event {
        PrefillEvent::Tokens(batch) => Some(batch.tokens.clone()),
        _ => None,
    });
    tokens.flatten().collect()
}

/// The KV of a prompt as another engine of the same seed computes it, block by block.
fn computed_alone(request: &Request) -> Vec<Vec<u8>> {
    let mut engine = engine(NodeSpec {
        batch_tokens: 1024,
        ..NodeSpec::default()
    });
    let blocks = request.prompt_tokens().div_ceil(BLOCK_TOKENS);
    let table: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let rows = SequenceRows {
        tokens: &request.prompt,
        first_position: 0,
        block_table: &table,
        logits: LogitsWanted::None,
    };
    engine.step(&[rows], &mut |_: usize, _: u32, _: &mut [f32]| {}).unwrap();
    let export = |block: &BlockId| {
        let mut bytes = vec![0; GEOMETRY.block_bytes()];
        engine.kv().export_block(*block, &mut bytes).unwrap();
        bytes
    };
    table.iter().map(export).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_node_that_shares_memory_gets_the_same_blocks_through_it() {
    let mut prefill = Prefill::start(NodeSpec::default()).await;
    let mut decode = Decode::start_sharing(Script::Commit, prefill.compatibility.clone()).await;
    let request = request(1, 70, 8);
    let ticket = decode.ticket(&prefill, &request, 1);
    let message = prefill.message(request.clone(), Some(ticket.clone()));
    let events = prefill.send(message).await.rest().await;

    let alone = computed_alone(&request);
    decode.look(|recorded| {
        assert_eq!(recorded.blocks.len(), ticket.blocks.len());
        for ((block, _), bytes) in ticket.blocks.iter().zip(&alone[1..]) {
            assert!(recorded.blocks[block] == *bytes, "block {block} differs");
        }
    });
    assert_eq!(finished(&events).transport, "shm");
    let rest = prefill.until_at_rest(PATIENCE).await;
    assert_eq!(rest.pairs[0].transport.as_deref(), Some("shm"));
    let text = prefill.scrape();
    for line in [
        "baton_handoffs_total{transport=\"shm\",outcome=\"handed_over\"} 1",
        "baton_kv_transfer_seconds_count{transport=\"shm\",src_role=\"prefill\"} 1",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handoff_delivers_exactly_the_computed_blocks_while_later_chunks_compute() {
    let step = Duration::from_millis(60);
    let mut prefill = Prefill::start(NodeSpec {
        step,
        ..NodeSpec::default()
    })
    .await;
    let mut decode = Decode::start(Script::Commit, prefill.compatibility.clone()).await;
    // Five chunks of one block each, the last block partly filled; the decode node has the first block already.
    let request = request(1, 70, 8);
    let ticket = decode.ticket(&prefill, &request, 1);
    let mut stream = prefill
        .send(prefill.message(request.clone(), Some(ticket.clone())))
        .await;
    let mut events = Vec::new();
    let mut first_token_at = None;
    while let Some(event) = stream.next().await {
        if matches!(event, PrefillEvent::Tokens(_)) {
            first_token_at = Some(Instant::now());
        }
        events.push(event);
    }

    let alone = computed_alone(&request);
    decode.look(|recorded| {
        assert_eq!(recorded.begun, [ticket.transfer]);
        assert_eq!(recorded.blocks.len(), ticket.blocks.len());
        for ((block, _), bytes) in ticket.blocks.iter().zip(&alone[1..]) {
            assert!(recorded.blocks[block] == *bytes, "block {block} differs");
        }
        let arrived = &recorded.arrived[0];
        assert_eq!(arrived.first_tokens, tokens(&events));
        assert_eq!(arrived.key.request, request.id);
        // The second block is complete after the second chunk; three more steps follow before the first token.
        let lead = first_token_at.unwrap() - recorded.first_import.unwrap();
        assert!(lead > step, "the first frame came only {lead:?} before the first token");
    });
    assert!(matches!(events[0], PrefillEvent::Accepted { cached_tokens: 0, .. }));
    assert_eq!(tokens(&events).len(), 1);
    let finished = finished(&events);
    assert_eq!(finished.outcome, PrefillOutcome::HandedOver);
    assert_eq!(finished.kv_bytes, ticket.total_bytes);
    assert_eq!(finished.transport, "grpc");
    assert!(
        finished.timings.get(Stage::TransferTail).unwrap() < step,
        "the tail is one block"
    );
    assert!(finished.timings.get(Stage::PrefillForward).unwrap() >= step * 5);
    assert!(finished.timings.get(Stage::PrefillQueue).is_some());

    let rest = prefill.until_at_rest(PATIENCE).await;
    assert_eq!(rest.kv_blocks.cached, 4, "whole blocks stay in the prefix cache");
    assert_eq!(rest.computed_tokens_total, 70);
    let text = prefill.scrape();
    for line in [
        "baton_handoffs_total{transport=\"grpc\",outcome=\"handed_over\"} 1",
        "baton_kv_blocks{state=\"cached\"} 4",
        // This decode node shares no memory, which the prefill node would have preferred.
        "baton_kv_transport_fallbacks_total{transport=\"shm\",reason=\"disabled\"} 1",
        "baton_kv_transfer_seconds_count{transport=\"grpc\",src_role=\"prefill\"} 1",
        "baton_runtime_tasks ",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cached_prompt_is_handed_over_whole_and_gives_the_same_token() {
    let mut prefill = Prefill::start(NodeSpec::default()).await;
    let mut decode = Decode::start(Script::Commit, prefill.compatibility.clone()).await;
    let mut first = Vec::new();
    for id in [1, 2] {
        let mut request = request(1, 70, 8);
        request.id = serving_core::ids::RequestId(id);
        let ticket = decode.ticket(&prefill, &request, 0);
        let events = prefill
            .send(prefill.message(request.clone(), Some(ticket.clone())))
            .await
            .rest()
            .await;
        first.push(tokens(&events)[0].token);
        let cached = if id == 1 { 0 } else { 64 };
        assert_eq!(finished(&events).cached_tokens, cached);
        let alone = computed_alone(&request);
        decode.look(|recorded| {
            for ((block, _), bytes) in ticket.blocks.iter().zip(&alone) {
                assert!(
                    recorded.blocks[block] == *bytes,
                    "block {block} of request {id} differs"
                );
            }
        });
    }
    assert_eq!(first[0], first[1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_token_that_ends_the_request_aborts_the_ticket() {
    let mut prefill = Prefill::start(NodeSpec::default()).await;
    let mut decode = Decode::start(Script::Commit, prefill.compatibility.clone()).await;
    let alone = prefill
        .send(prefill.message(request(1, 40, 1), None))
        .await
        .rest()
        .await;
    assert_eq!(finished(&alone).outcome, PrefillOutcome::EndedAtFirstToken);
    let first = tokens(&alone)[0].clone();
    assert_eq!(first.finish, Some(FinishReason::Length));

    let mut ends = request(1, 40, 8);
    ends.id = serving_core::ids::RequestId(2);
    ends.stop.end_tokens = vec![first.token];
    let ticket = decode.ticket(&prefill, &ends, 0);
    let events = prefill
        .send(prefill.message(ends, Some(ticket.clone())))
        .await
        .rest()
        .await;
    assert_eq!(finished(&events).outcome, PrefillOutcome::EndedAtFirstToken);
    assert_eq!(tokens(&events)[0].finish, Some(FinishReason::EndToken));
    decode.until(|recorded| !recorded.ended.is_empty()).await;
    decode.look(|recorded| {
        let end = ReceiveEnd::AbortedBySender("ended_at_first_token".to_owned());
        assert_eq!(recorded.ended, [(ticket.transfer, end)]);
        assert!(recorded.arrived.is_empty());
    });
    prefill.until_at_rest(Duration::from_secs(1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn choices_that_go_on_travel_in_the_last_frame_and_the_others_end_here() {
    let mut prefill = Prefill::start(NodeSpec::default()).await;
    let mut decode = Decode::start(Script::Commit, prefill.compatibility.clone()).await;
    let mut several = request(1, 40, 8);
    several.choice_count = 4;
    several.sampling.temperature = 5.0;
    let ticket = decode.ticket(&prefill, &several, 0);
    let all = tokens(
        &prefill
            .send(prefill.message(several.clone(), Some(ticket)))
            .await
            .rest()
            .await,
    );
    assert_eq!(all.len(), 4);
    let ending = all[1].token;
    assert!(
        all.iter().any(|event| event.token != ending),
        "a hot draw gives different tokens"
    );

    several.id = serving_core::ids::RequestId(2);
    several.stop.stop_token_ids = vec![ending];
    let ticket = decode.ticket(&prefill, &several, 0);
    let events = prefill.send(prefill.message(several, Some(ticket))).await.rest().await;
    assert_eq!(finished(&events).outcome, PrefillOutcome::HandedOver);
    let (ended, going): (Vec<_>, Vec<_>) = tokens(&events).into_iter().partition(|event| event.finish.is_some());
    assert!(
        ended
            .iter()
            .all(|event| event.finish == Some(FinishReason::StopToken(ending)))
    );
    assert!(!ended.is_empty());
    decode.look(|recorded| assert_eq!(recorded.arrived[1].first_tokens, going));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_transfer_fails_the_request_and_frees_its_blocks() {
    let mut prefill = Prefill::start(NodeSpec {
        step: Duration::from_millis(20),
        ..NodeSpec::default()
    })
    .await;
    let mut decode = Decode::start(Script::Refuse, prefill.compatibility.clone()).await;
    let request = request(1, 160, 8);
    let ticket = decode.ticket(&prefill, &request, 0);
    let events = prefill.send(prefill.message(request, Some(ticket))).await.rest().await;
    let failed = failed(&events);
    assert_eq!(
        (failed.fault, failed.reason.as_str()),
        (NodeFault::Transfer, "unknown_transfer")
    );
    assert!(
        tokens(&events).is_empty(),
        "the refusal came with the first frame: the other chunks need not run"
    );
    prefill.until_at_rest(Duration::from_secs(1)).await;
    let failures =
        "baton_kv_transfer_failures_total{transport=\"grpc\",src_role=\"prefill\",reason=\"unknown_transfer\"} 1";
    assert!(prefill.scrape().contains(failures));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handoff_that_the_decode_node_ends_because_its_client_has_gone_has_not_failed() {
    let mut prefill = Prefill::start(NodeSpec {
        step: Duration::from_millis(50),
        ..NodeSpec::default()
    })
    .await;
    let mut decode = Decode::start(Script::Commit, prefill.compatibility.clone()).await;
    for (number, reason) in [(1, "cancelled"), (2, "reservation_expired")] {
        let request = request(number, 640, 8);
        let ticket = decode.ticket(&prefill, &request, 0);
        let events = prefill.send(prefill.message(request, Some(ticket.clone()))).await;
        decode.until(|recorded| recorded.begun.contains(&ticket.transfer)).await;
        assert!(decode.receiver.abort(ticket.transfer, reason));
        assert_eq!(failed(&events.rest().await).fault, NodeFault::Transfer);
        prefill.until_at_rest(Duration::from_secs(1)).await;
    }
    let page = prefill.scrape();
    let count = |name: &str| {
        let mut lines = page.lines().filter(|line| line.starts_with(name));
        lines.next().and_then(|line| line.rsplit(' ').next()).map(str::to_owned)
    };
    let failures =
        "baton_kv_transfer_failures_total{transport=\"grpc\",src_role=\"prefill\",reason=\"aborted_by_peer\"}";
    assert_eq!(count(failures).as_deref(), Some("1"), "{page}");
    let cancelled = "baton_handoffs_total{transport=\"grpc\",outcome=\"cancelled\"}";
    assert_eq!(count(cancelled).as_deref(), Some("1"), "{page}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_never_acks_runs_into_the_hold_deadline() {
    let mut prefill = Prefill::start(NodeSpec {
        hold_ms: 200,
        ..NodeSpec::default()
    })
    .await;
    let mut decode = Decode::start(Script::NeverAck, prefill.compatibility.clone()).await;
    let request = request(1, 70, 8);
    let ticket = decode.ticket(&prefill, &request, 0);
    let started = Instant::now();
    let events = prefill.send(prefill.message(request, Some(ticket))).await.rest().await;
    let failed = failed(&events);
    assert_eq!(
        (failed.fault, failed.reason.as_str()),
        (NodeFault::Transfer, "hold_expired")
    );
    assert_eq!(tokens(&events).len(), 1, "the first token was out long before");
    assert!(started.elapsed() >= Duration::from_millis(200));
    prefill.until_at_rest(Duration::from_secs(1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_decode_node_fails_the_transfer() {
    let mut prefill = Prefill::start(NodeSpec {
        step: Duration::from_millis(50),
        ..NodeSpec::default()
    })
    .await;
    let mut decode = Decode::start(Script::Commit, prefill.compatibility.clone()).await;
    let request = request(1, 640, 8);
    let ticket = decode.ticket(&prefill, &request, 0);
    let events = prefill.send(prefill.message(request, Some(ticket))).await;
    decode.until(|recorded| recorded.first_import.is_some()).await;
    decode.kill();
    let events = events.rest().await;
    assert_eq!(failed(&events).fault, NodeFault::Transfer, "{events:?}");
    prefill.until_at_rest(Duration::from_secs(1)).await;
    let reported = prefill
        .until(PATIENCE, |status| {
            status.pairs.iter().any(|pair| pair.unusable_reason.is_some())
        })
        .await;
    assert_eq!(reported.pairs[0].decode_node, decode.id);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_stream_cancels_between_chunks_and_frees_every_block_within_a_second() {
    let mut prefill = Prefill::start(NodeSpec {
        step: Duration::from_millis(50),
        ..NodeSpec::default()
    })
    .await;
    let mut decode = Decode::start(Script::Commit, prefill.compatibility.clone()).await;
    // 50 chunks: 2.5 seconds of work.
    let request = request(1, 800, 8);
    let ticket = decode.ticket(&prefill, &request, 0);
    let mut events = prefill.send(prefill.message(request, Some(ticket.clone()))).await;
    assert!(matches!(events.next().await, Some(PrefillEvent::Accepted { .. })));
    decode.until(|recorded| recorded.first_import.is_some()).await;
    drop(events);
    let rest = prefill.until_at_rest(Duration::from_secs(1)).await;
    assert!(
        rest.computed_tokens_total < 400,
        "compute stopped: {} tokens",
        rest.computed_tokens_total
    );
    decode.until(|recorded| !recorded.ended.is_empty()).await;
    let end = ReceiveEnd::AbortedBySender("cancelled".to_owned());
    decode.look(|recorded| assert_eq!(recorded.ended, [(ticket.transfer, end)]));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_is_refused_and_its_permit_comes_back() {
    let mut prefill = Prefill::start(NodeSpec {
        blocks: 8,
        step: Duration::from_millis(30),
        ..NodeSpec::default()
    })
    .await;
    let mut running = prefill.send(prefill.message(request(1, 96, 1), None)).await;
    assert!(matches!(running.next().await, Some(PrefillEvent::Accepted { .. })));
    let events = prefill
        .send(prefill.message(request(2, 64, 1), None))
        .await
        .rest()
        .await;
    let [PrefillEvent::Refused(refused)] = events.as_slice() else {
        panic!("not refused: {events:?}");
    };
    assert_eq!(refused.reason, RefuseReason::NoCapacity);
    assert_eq!(
        finished(&running.rest().await).outcome,
        PrefillOutcome::EndedAtFirstToken
    );
    let rest = prefill.until_at_rest(PATIENCE).await;
    // Two steps of 16 tokens ahead, nothing outstanding.
    assert_eq!(rest.permits_granted_total - rest.permits_received_total, 32);
}

#[tokio::test(flavor = "multi_thread")]
async fn duplicates_other_epochs_and_broken_tickets_are_refused() {
    let mut prefill = Prefill::start(NodeSpec {
        step: Duration::from_millis(30),
        ..NodeSpec::default()
    })
    .await;
    let mut decode = Decode::start(Script::Commit, prefill.compatibility.clone()).await;
    let mut running = prefill.send(prefill.message(request(1, 160, 1), None)).await;
    assert!(matches!(running.next().await, Some(PrefillEvent::Accepted { .. })));

    let mut other_life = prefill.message(request(2, 40, 1), None);
    other_life.node_epoch = NodeEpoch(other_life.node_epoch.0 ^ 1);
    let needs_ticket = prefill.message(request(3, 40, 8), None);
    let mut short = decode.ticket(&prefill, &request(4, 40, 8), 0);
    short.blocks.pop();
    let short = prefill.message(request(4, 40, 8), Some(short));
    let cases = [
        (prefill.message(request(1, 160, 1), None), RefuseReason::Duplicate),
        (other_life, RefuseReason::StaleEpoch),
        (needs_ticket, RefuseReason::Invalid),
        (short, RefuseReason::Invalid),
    ];
    for (message, reason) in cases {
        let events = prefill.send(message).await.rest().await;
        let [PrefillEvent::Refused(refused)] = events.as_slice() else {
            panic!("not refused: {events:?}");
        };
        assert_eq!(refused.reason, reason);
    }
    // The end of the refused duplicate's stream has not cancelled the request it resembles.
    assert_eq!(
        finished(&running.rest().await).outcome,
        PrefillOutcome::EndedAtFirstToken
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn echo_with_logprobs_scores_the_whole_prompt_and_samples_nothing() {
    let mut prefill = Prefill::start(NodeSpec::default()).await;
    let mut echo = request(1, 70, 0);
    echo.prompt_logprobs = Some(3);
    echo.report_kv_hashes = true;
    let events = prefill.send(prefill.message(echo.clone(), None)).await.rest().await;
    let mut next = 1;
    for event in &events {
        if let PrefillEvent::PromptLogprobs(part) = event {
            assert_eq!(part.first_position, next);
            assert!(part.tokens.iter().all(|token| token.top.len() == 3));
            next += part.tokens.len() as u32;
        }
    }
    assert_eq!(next, 70);
    assert!(tokens(&events).is_empty());
    let finished = finished(&events);
    assert_eq!(finished.kv_hashes.len(), 5);
    let again = prefill
        .send(prefill.message(
            Request {
                id: serving_core::ids::RequestId(2),
                ..echo
            },
            None,
        ))
        .await;
    assert_eq!(self::finished(&again.rest().await).kv_hashes, finished.kv_hashes);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_finishes_what_runs_refuses_what_comes_and_gives_up_what_is_late() {
    let mut prefill = Prefill::start(NodeSpec {
        step: Duration::from_millis(30),
        ..NodeSpec::default()
    })
    .await;
    let mut short = prefill.send(prefill.message(request(1, 40, 1), None)).await;
    let mut long = prefill.send(prefill.message(request(2, 900, 1), None)).await;
    for stream in [&mut short, &mut long] {
        assert!(matches!(stream.next().await, Some(PrefillEvent::Accepted { .. })));
    }
    let late = prefill.message(request(3, 40, 1), None);
    let mut client = prefill.client.clone();
    let mut status = prefill.node.status.clone();
    let refused = tokio::spawn(async move {
        status
            .wait_for(|status| status.state == serving_core::node::NodeState::Draining)
            .await
            .unwrap();
        let mut stream = client
            .prefill(proto::v1::PrefillRequest::from(late))
            .await
            .unwrap()
            .into_inner();
        PrefillEvent::try_from(stream.message().await.unwrap().unwrap()).unwrap()
    });
    prefill.node.drain(Duration::from_millis(300)).await;
    match refused.await.unwrap() {
        PrefillEvent::Refused(refused) => assert_eq!(refused.reason, RefuseReason::Draining),
        other => panic!("not refused: {other:?}"),
    }
    assert_eq!(finished(&short.rest().await).outcome, PrefillOutcome::EndedAtFirstToken);
    assert_eq!(failed(&long.rest().await).fault, NodeFault::Draining);
    prefill.until_at_rest(Duration::from_secs(1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_ends_a_request_that_waits_on_a_busy_node() {
    let mut prefill = Prefill::start(NodeSpec {
        step: Duration::from_millis(40),
        ..NodeSpec::default()
    })
    .await;
    let _busy = prefill.send(prefill.message(request(1, 640, 1), None)).await;
    let mut hurried = request(2, 40, 1);
    hurried.time_limit = Duration::from_millis(120);
    let events = prefill.send(prefill.message(hurried, None)).await.rest().await;
    assert_eq!(failed(&events).fault, NodeFault::Deadline);
}
