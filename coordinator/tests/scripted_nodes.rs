//! The coordinator without its HTTP edge, against scripted nodes over real gRPC.

#![forbid(unsafe_code)]

mod common;

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::*;
use coordinator::Coordinator;
use coordinator::api::EdgeMetrics as _;
use coordinator::control_handle::NodeOrder;
use coordinator::request_handle::{ClientEvent, Readiness, RequestSummary, Submit as _};
use proto::messages::{
    CoordinatorReport, DecodeEvent, DecodeFinished, Failed, NodeFault, NodeReport, Opened, PrefillEvent,
    PrefillFinished, PrefillOutcome, RefuseReason, Refused, TokenBatch,
};
use proto::v1::membership_service_client::MembershipServiceClient;
use service_runtime::clock::Clock;
use service_runtime::membership::{LostReason, MembershipEvent};
use serving_core::cluster::{ClusterEvent, LegEvent};
use serving_core::ids::{Attempt, TokenId};
use serving_core::node::NodeRole;
use serving_core::request::{LocalPrefillReason, RequestError, TokenEvent};
use serving_core::stage::{Stage, StageTimings};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use workload::flight_record::{Entry, Reader};

async fn send<E>(events: &mpsc::Sender<E>, event: E) {
    // The coordinator may have cancelled the leg; the script then runs on into nothing.
    let _ = events.send(event).await;
}

fn batch(tokens: Vec<TokenEvent>) -> TokenBatch {
    TokenBatch::handed_over(tokens, Clock::now())
}

fn opened(transfer: u128) -> DecodeEvent {
    DecodeEvent::Opened(Opened {
        ticket: Some(ticket(transfer)),
        prefix_blocks: 0,
        cached_tokens: 0,
        at: Clock::now(),
    })
}

fn opened_local() -> DecodeEvent {
    DecodeEvent::Opened(Opened {
        ticket: None,
        prefix_blocks: 0,
        cached_tokens: 16,
        at: Clock::now(),
    })
}

fn handed_over() -> PrefillEvent {
    PrefillEvent::Finished(PrefillFinished {
        outcome: PrefillOutcome::HandedOver,
        timings: StageTimings(vec![(Stage::TransferTail, Duration::from_millis(2))]),
        kv_bytes: 1234,
        transfer: Duration::from_millis(3),
        transport: "grpc".into(),
        cached_tokens: 0,
        kv_hashes: vec![],
    })
}

fn node_timings() -> StageTimings {
    StageTimings(vec![
        (Stage::PrefillQueue, Duration::from_micros(10)),
        (Stage::PrefillForward, Duration::from_micros(50)),
    ])
}

/// What the last frame of a handoff says of the prompt.
const CACHED: u32 = 32;

/// Where a prefill node says which attempt's KV it has handed over: the link between two scripted nodes.
type Pushed = Arc<watch::Sender<Option<Attempt>>>;

fn link() -> Pushed {
    Arc::new(watch::channel(None).0)
}

/// A prefill node that does its work and says so on the link.
fn good_prefill(pushed: Pushed) -> PrefillScript {
    prefill(move |work, events| {
        let pushed = pushed.clone();
        async move {
            let first = work.request.delivered_tokens();
            send(
                &events,
                PrefillEvent::Accepted {
                    cached_tokens: 0,
                    at: Clock::now(),
                },
            )
            .await;
            send(&events, PrefillEvent::Tokens(batch(vec![token(first, 100 + first)]))).await;
            send(
                &events,
                PrefillEvent::FirstToken {
                    timings: node_timings(),
                    sampled_at: Clock::now(),
                },
            )
            .await;
            pushed.send_replace(Some(work.attempt));
            send(&events, handed_over()).await;
        }
    })
}

/// A decode node that waits for the KV and then streams the whole answer, index 0 included.
fn good_decode(pushed: Pushed) -> DecodeScript {
    decode(move |open, events| {
        let pushed = pushed.clone();
        async move {
            let (first, max) = (open.request.delivered_tokens(), open.request.stop.max_tokens);
            if open.local_prefill.is_some() {
                send(&events, opened_local()).await;
            } else {
                send(&events, opened(u128::from(open.attempt.0) + 1)).await;
                let mut seen = pushed.subscribe();
                let _ = seen.wait_for(|attempt| *attempt == Some(open.attempt)).await;
                let timings = StageTimings(vec![(Stage::Commit, Duration::from_millis(1))]);
                send(
                    &events,
                    DecodeEvent::Committed {
                        timings,
                        cached_tokens: Some(CACHED),
                    },
                )
                .await;
            }
            for index in first..max {
                let token = if index + 1 == max {
                    last_token(index, 100 + index)
                } else {
                    token(index, 100 + index)
                };
                send(&events, DecodeEvent::Tokens(batch(vec![token]))).await;
            }
            let timings = StageTimings(vec![(Stage::Decode, Duration::from_millis(9))]);
            send(
                &events,
                DecodeEvent::Finished(DecodeFinished {
                    timings,
                    ..DecodeFinished::default()
                }),
            )
            .await;
        }
    })
}

fn expected(max: u32) -> Vec<(u32, u32)> {
    (0..max).map(|i| (i, 100 + i)).collect()
}

/// What the last event says of the whole.
fn summary(events: &[ClientEvent]) -> &RequestSummary {
    match events.last() {
        Some(ClientEvent::Done(summary)) => summary,
        other => panic!("last came {other:?}"),
    }
}

/// The lines of the gauge that are not 0.
fn busy_stages(cluster: &Coordinator) -> Vec<String> {
    let text = cluster.metrics.render();
    let lines = text
        .lines()
        .filter_map(|line| line.strip_prefix("baton_stage_requests"));
    let (mut all, mut busy) = (0, Vec::new());
    for line in lines {
        all += 1;
        busy.extend((!line.ends_with(" 0.0")).then(|| line.to_owned()));
    }
    assert_eq!(all, 9, "{text}");
    busy
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_counted_in_their_stages_and_none_when_all_have_ended() {
    let cluster = coordinator(&[]).await;
    let pushed = link();
    let pushed_too = pushed.clone();
    let go = Arc::new(watch::channel(false).0);
    let gate = go.clone();
    // Accepts, and computes nothing before it is told to.
    let held = prefill(move |work, events| {
        let (mut gate, pushed) = (gate.subscribe(), pushed.clone());
        async move {
            let accepted = PrefillEvent::Accepted {
                cached_tokens: 0,
                at: Clock::now(),
            };
            send(&events, accepted).await;
            let _ = gate.wait_for(|go| *go).await;
            send(&events, PrefillEvent::Tokens(batch(vec![token(0, 100)]))).await;
            pushed.send_replace(Some(work.attempt));
            send(&events, handed_over()).await;
        }
    });
    let _d = decode_node(&cluster, "d0", good_decode(pushed_too)).await;
    let _p = prefill_node(&cluster, "p0", held).await;
    until_up(&cluster, "decode", 1).await;
    until_up(&cluster, "prefill", 1).await;
    assert_eq!(busy_stages(&cluster), [""; 0]);
    let mut handle = submit(&cluster, request(1, 3)).await;
    until_metric(
        &cluster,
        r#"baton_stage_requests{stage="prefill_forward",phase="ttft"} 1.0"#,
    )
    .await;
    assert_eq!(busy_stages(&cluster).len(), 1, "it is in one stage");
    go.send_replace(true);
    let events = collect(&mut handle).await;
    assert!(matches!(events.last(), Some(ClientEvent::Done(_))), "{events:?}");
    until("all stages are empty", || busy_stages(&cluster).is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_goes_through_both_nodes_and_each_token_comes_once() {
    let cluster = coordinator(&[]).await;
    let pushed = link();
    let _d = decode_node(&cluster, "d0", good_decode(pushed.clone())).await;
    let _p = prefill_node(&cluster, "p0", good_prefill(pushed)).await;
    until_up(&cluster, "decode", 1).await;
    until_up(&cluster, "prefill", 1).await;
    assert!(
        matches!(cluster.handle.readiness(), Readiness::Ready(reach) if reach.prefill_nodes == 1 && reach.decode_nodes == 1)
    );
    let started = Instant::now();
    let mut handle = submit(&cluster, request(1, 5)).await;
    let events = collect(&mut handle).await;
    let total = started.elapsed();
    let ClientEvent::Placed(placement) = &events[0] else {
        panic!("first came {:?}", events[0]);
    };
    assert_eq!(placement.prefill_node.as_ref().map(|n| n.as_str()), Some("p0"));
    assert_eq!(placement.decode_node.as_ref().map(|n| n.as_str()), Some("d0"));
    assert_eq!(token_ids(&events), expected(5), "index 0 came through both doors");
    let summary = summary(&events);
    assert_eq!(
        (summary.attempts, summary.kv_bytes, summary.transport.as_deref()),
        (1, 1234, Some("grpc"))
    );
    for stage in [
        Stage::Queue,
        Stage::Route,
        Stage::Reserve,
        Stage::Dispatch,
        Stage::PrefillForward,
        Stage::FirstTokenReturn,
    ] {
        assert!(
            summary.timings.get(stage).is_some(),
            "{} is missing: {:?}",
            stage.name(),
            summary.timings
        );
    }
    for (stage, ms) in [(Stage::TransferTail, 2), (Stage::Commit, 1), (Stage::Decode, 9)] {
        assert_eq!(
            summary.timings.get(stage),
            Some(Duration::from_millis(ms)),
            "{}",
            stage.name()
        );
    }
    let ttft: Duration = summary
        .timings
        .0
        .iter()
        // What the scripted node says of its forward is made up, and may be longer than it really took.
        .filter(|(s, _)| s.is_before_first_token() && *s != Stage::PrefillForward)
        .map(|(_, d)| *d)
        .sum();
    assert!(ttft <= total, "{ttft:?} of {total:?}");
    until_metric(
        &cluster,
        r#"baton_handoffs_total{transport="grpc",outcome="committed"} 1"#,
    )
    .await;
    until_metric(
        &cluster,
        r#"baton_kv_blocks{node="d0",role="decode",state="free"} 200.0"#,
    )
    .await;
    until_metric(&cluster, "baton_unfinished_requests 0.0").await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_overtakes_the_prefill_nodes_word_says_what_was_cached() {
    let cluster = coordinator(&[]).await;
    let pushed = link();
    let _d = decode_node(&cluster, "d0", good_decode(pushed.clone())).await;
    // Its KV arrives, and it says nothing as long as somebody listens.
    let silent = prefill(move |work, events| {
        let pushed = pushed.clone();
        async move {
            pushed.send_replace(Some(work.attempt));
            events.closed().await;
        }
    });
    let _p = prefill_node(&cluster, "p0", silent).await;
    until_up(&cluster, "decode", 1).await;
    until_up(&cluster, "prefill", 1).await;
    let mut handle = submit(&cluster, request(1, 3)).await;
    let events = collect(&mut handle).await;
    assert_eq!(token_ids(&events), expected(3));
    let summary = summary(&events);
    assert_eq!(summary.cached_tokens, CACHED);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_request_is_queued_again_and_served() {
    let cluster = coordinator(&[]).await;
    let calls = Arc::new(AtomicU32::new(0));
    let counted = calls.clone();
    let then = good_decode(link());
    let script = decode(move |open, events| {
        let is_first = counted.fetch_add(1, Ordering::SeqCst) == 0;
        let then = then.clone();
        async move {
            if is_first {
                let refused = Refused {
                    reason: RefuseReason::NoCapacity,
                    detail: "scripted".into(),
                };
                send(&events, DecodeEvent::Refused(refused)).await;
            } else {
                then(open, events).await;
            }
        }
    });
    let _d = decode_node(&cluster, "d0", script).await;
    until_up(&cluster, "decode", 1).await;
    let mut handle = submit(&cluster, request(1, 3)).await;
    let events = collect(&mut handle).await;
    assert_eq!(token_ids(&events), expected(3));
    assert_eq!(calls.load(Ordering::SeqCst), 2);
    until_metric(&cluster, r#"baton_node_refusals_total{reason="no_capacity"} 1"#).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_node_that_dies_before_the_first_token_is_only_latency() {
    let cluster = coordinator(&[]).await;
    let pushed = link();
    let _d = decode_node(&cluster, "d0", good_decode(pushed.clone())).await;
    // Its stream ends in the middle of the work, as that of a killed process does.
    let dying = prefill(|_, events| async move {
        send(
            &events,
            PrefillEvent::Accepted {
                cached_tokens: 0,
                at: Clock::now(),
            },
        )
        .await
    });
    let _p0 = prefill_node(&cluster, "p0", dying).await;
    let _p1 = prefill_node(&cluster, "p1", good_prefill(pushed)).await;
    until_up(&cluster, "decode", 1).await;
    until_up(&cluster, "prefill", 2).await;
    let mut handle = submit(&cluster, request(1, 4)).await;
    let events = collect(&mut handle).await;
    assert_eq!(token_ids(&events), expected(4));
    let summary = summary(&events);
    assert_eq!(summary.attempts, 2);
    until_metric(&cluster, r#"baton_handoff_retries_total{reason="connection_lost"} 1"#).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_node_that_dies_in_mid_stream_is_replaced_without_gap_or_repeat() {
    let cluster = coordinator(&[]).await;
    type Prompts = Vec<(Vec<TokenId>, u32)>;
    let seen: Arc<Mutex<Prompts>> = Arc::default();
    let dying = decode(|_, events| async move {
        send(&events, opened_local()).await;
        send(&events, DecodeEvent::Tokens(batch(vec![token(0, 100), token(1, 101)]))).await;
        let failed = Failed {
            fault: NodeFault::Draining,
            reason: "draining".into(),
            detail: "scripted".into(),
        };
        send(&events, DecodeEvent::Failed(failed)).await;
    });
    let then = good_decode(link());
    let record = seen.clone();
    let second = decode(move |open, events| {
        record
            .lock()
            .expect("lock")
            .push((open.request.prompt.to_vec(), open.request.client_prompt_tokens));
        then(open, events)
    });
    let _d0 = decode_node(&cluster, "d0", dying).await;
    let _d1 = decode_node(&cluster, "d1", second).await;
    until_up(&cluster, "decode", 2).await;
    let mut handle = submit(&cluster, request(1, 6)).await;
    let events = collect(&mut handle).await;
    assert_eq!(token_ids(&events), expected(6));
    let seen = seen.lock().expect("lock").clone();
    let (prompt, client_prompt) = seen.first().expect("the second node was asked");
    assert_eq!((prompt.len(), *client_prompt), (42, 40));
    assert_eq!(prompt[40..], [TokenId(100), TokenId(101)]);
    until_metric(&cluster, r#"baton_migrations_total{outcome="started"} 1"#).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_away_cancels_both_legs_within_a_second() {
    let cluster = coordinator(&[]).await;
    let (closed, mut seen) = mpsc::channel(4);
    let (d_closed, p_closed) = (closed.clone(), closed);
    let hanging_decode = decode(move |_, events| {
        let closed = d_closed.clone();
        async move {
            send(&events, opened(1)).await;
            events.closed().await;
            send(&closed, "decode").await;
        }
    });
    let hanging_prefill = prefill(move |_, events| {
        let closed = p_closed.clone();
        async move {
            send(
                &events,
                PrefillEvent::Accepted {
                    cached_tokens: 0,
                    at: Clock::now(),
                },
            )
            .await;
            send(&events, PrefillEvent::Tokens(batch(vec![token(0, 100)]))).await;
            events.closed().await;
            send(&closed, "prefill").await;
        }
    });
    let _d = decode_node(&cluster, "d0", hanging_decode).await;
    let _p = prefill_node(&cluster, "p0", hanging_prefill).await;
    until_up(&cluster, "decode", 1).await;
    until_up(&cluster, "prefill", 1).await;
    let mut handle = submit(&cluster, request(1, 4)).await;
    loop {
        let event = tokio::time::timeout(PATIENCE, handle.next())
            .await
            .expect("in time")
            .expect("an event");
        if matches!(event, ClientEvent::Token(..)) {
            break;
        }
    }
    let gone = Instant::now();
    drop(handle);
    let mut legs = Vec::new();
    for _ in 0..2 {
        legs.push(
            tokio::time::timeout(PATIENCE, seen.recv())
                .await
                .expect("in time")
                .expect("closed"),
        );
    }
    assert!(gone.elapsed() < Duration::from_secs(1), "took {:?}", gone.elapsed());
    legs.sort_unstable();
    assert_eq!(legs, ["decode", "prefill"]);
    until_metric(&cluster, "baton_unfinished_requests 0.0").await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_string_ends_the_request_and_the_node_and_the_owner_are_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let record = folder.path().join("record");
    let cluster = coordinator(&[&format!("--flight-record={}", record.display())]).await;
    let (closed, mut seen) = mpsc::channel(1);
    let endless = decode(move |_, events| {
        let closed = closed.clone();
        async move {
            send(&events, opened_local()).await;
            send(&events, DecodeEvent::Tokens(batch(vec![token(0, 100), token(1, 101)]))).await;
            events.closed().await;
            send(&closed, ()).await;
        }
    });
    let _d = decode_node(&cluster, "d0", endless).await;
    until_up(&cluster, "decode", 1).await;
    let mut handle = submit(&cluster, request(1, 400)).await;
    while !matches!(handle.next().await, Some(ClientEvent::Token(..))) {}
    handle.finish_choice(
        serving_core::ids::ChoiceIndex(0),
        serving_core::request::FinishReason::StopString,
    );
    let events = collect(&mut handle).await;
    assert!(matches!(events.last(), Some(ClientEvent::Done(_))), "{events:?}");
    tokio::time::timeout(PATIENCE, seen.recv())
        .await
        .expect("the leg was closed in time");
    cluster.stop().await;
    assert_eq!(
        tokens_that_are_work(&record),
        2,
        "they came within the time between two words on them"
    );
}

/// Output tokens of which the brain heard.
fn tokens_that_are_work(flight_record: &Path) -> u32 {
    let file = std::fs::File::open(flight_record).expect("a flight record");
    let mut reader = Reader::open(file).expect("a header");
    let mut tokens = 0;
    while let Some(entry) = reader.next_entry().expect("an entry") {
        let Entry::Event(recorded) = entry else { continue };
        tokens += match recorded.event {
            ClusterEvent::TokensCounted { count, .. } => count,
            ClusterEvent::Leg {
                event: LegEvent::TokensDelivered { count, .. },
                ..
            } => count,
            _ => 0,
        };
    }
    tokens
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_step_that_fails_twice_is_a_typed_error() {
    let cluster = coordinator(&[]).await;
    let broken = decode(|_, events| async move {
        send(&events, opened_local()).await;
        let failed = Failed {
            fault: NodeFault::Engine,
            reason: "nan".into(),
            detail: "logits are not finite".into(),
        };
        send(&events, DecodeEvent::Failed(failed)).await;
    });
    let _d = decode_node(&cluster, "d0", broken).await;
    until_up(&cluster, "decode", 1).await;
    let mut handle = submit(&cluster, request(1, 4)).await;
    let events = collect(&mut handle).await;
    let Some(ClientEvent::Failed(RequestError::EngineFailed { node, detail })) = events.last() else {
        panic!("{:?}", events.last());
    };
    assert_eq!((node.as_str(), detail.as_str()), ("d0", "logits are not finite"));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_nobody_listens_on_is_suspected_and_the_other_serves() {
    let cluster = coordinator(&[]).await;
    let pushed = link();
    let d0 = decode_node(&cluster, "d0", good_decode(pushed.clone())).await;
    let _d1 = decode_node(&cluster, "d1", good_decode(pushed)).await;
    until_up(&cluster, "decode", 2).await;
    // Its port goes away while its membership stays.
    d0.stop.request();
    until("the port is closed", || {
        std::net::TcpStream::connect(&d0.record.address).is_err()
    })
    .await;
    let mut handle = submit(&cluster, request(1, 3)).await;
    let events = collect(&mut handle).await;
    assert_eq!(token_ids(&events), expected(3));
    until_metric(&cluster, r#"baton_handoff_retries_total{reason="unreachable"} 1"#).await;
    until_metric(&cluster, r#"baton_local_prefills_total{reason="no_prefill_node"} 2"#).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_is_not_renewed_ends_and_the_node_is_no_longer_counted_on() {
    let cluster = coordinator(&["--lease-ms=300"]).await;
    let mut client = MembershipServiceClient::connect(format!("http://{}", cluster.control_address))
        .await
        .expect("connects");
    let (reports, outgoing) = mpsc::channel(4);
    send(&reports, NodeReport::Register(record("d0", 1, NodeRole::Decode)).into()).await;
    let mut incoming = client
        .join(ReceiverStream::new(outgoing))
        .await
        .expect("joined")
        .into_inner();
    let first = incoming.message().await.expect("a report").expect("open");
    let CoordinatorReport::Welcome(welcome) = first.try_into().expect("valid") else {
        panic!("not welcomed");
    };
    assert_eq!(welcome.lease, Duration::from_millis(300));
    let status = NodeReport::Status {
        epoch: record("d0", 1, NodeRole::Decode).id.epoch,
        status: status(64),
    };
    send(&reports, status.into()).await;
    until_metric(&cluster, r#"baton_node_up{role="decode",state="ready"} 1.0"#).await;
    // Nothing more is said, the stream stays open.
    until_metric(&cluster, r#"baton_node_up{role="decode",state="lost"} 1.0"#).await;
    assert!(matches!(cluster.handle.readiness(), Readiness::NotReady(_)));
    let ended = tokio::time::timeout(PATIENCE, async { while let Ok(Some(_)) = incoming.message().await {} }).await;
    assert!(ended.is_ok(), "the lost node's stream is closed");
    cluster.stop().await;
}

/// The node's process stands still, or the network does: nothing of what it is told gets through.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_reads_late_keeps_its_stream_and_finds_the_latest_of_what_it_was_told() {
    /// Each asks permits back, and is answered with a note. Twice as many notes do not fit the window and a queue of 32.
    const RECALLS: u64 = 200;
    const WINDOW_BYTES: u32 = 256;
    let cluster = coordinator(&["--lease-ms=60000"]).await;
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", cluster.control_address))
        .expect("an address")
        .initial_stream_window_size(WINDOW_BYTES);
    let mut client = MembershipServiceClient::new(channel.connect().await.expect("connects"));
    let (reports, outgoing) = mpsc::channel(4);
    let node = record("d0", 1, NodeRole::Decode);
    send(&reports, NodeReport::Register(node.clone()).into()).await;
    let joined = client.join(ReceiverStream::new(outgoing)).await.expect("joined");
    let mut incoming = joined.into_inner();
    let mut next = async || -> CoordinatorReport {
        let report = tokio::time::timeout(PATIENCE, incoming.message()).await;
        let report = report.expect("in time").expect("a stream that stands");
        report.expect("an open stream").try_into().expect("valid")
    };
    assert!(matches!(next().await, CoordinatorReport::Welcome(_)));
    for permits_recalled_total in 1..=RECALLS {
        let status = serving_core::node::NodeStatus {
            permits_recalled_total,
            coordinators: 2,
            ..status(2 * RECALLS)
        };
        let epoch = node.id.epoch;
        send(&reports, NodeReport::Status { epoch, status }.into()).await;
    }
    let left = format!(r#"baton_node_permits_available{{node="d0",role="decode"}} {RECALLS}.0"#);
    until_metric(&cluster, &left).await;
    // It is the only decode node, and is meant to go all the same.
    let order = NodeOrder {
        name: node.id.name.clone(),
        next_role: None,
        is_forced: true,
    };
    cluster.handle.drain_node(order).await.expect("taken");

    let (mut returned, mut is_drained) = (0, false);
    while returned < RECALLS || !is_drained {
        match next().await {
            CoordinatorReport::Permits(note) => returned = note.returned_total,
            CoordinatorReport::Drain { next_role, .. } => is_drained = next_role.is_none(),
            _ => {}
        }
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_is_taken_and_a_wrong_model_are_refused() {
    let cluster = coordinator(&[]).await;
    let script = good_decode(link());
    let _d0 = decode_node(&cluster, "d0", script.clone()).await;
    until_up(&cluster, "decode", 1).await;
    let mut twin = decode_node(&cluster, "d0", script).await;
    let event = tokio::time::timeout(PATIENCE, twin.membership.next_event())
        .await
        .expect("in time");
    let Some(MembershipEvent::ConnectionLost {
        reason: LostReason::Refused { reason, .. },
        ..
    }) = event
    else {
        panic!("{event:?}");
    };
    assert_eq!(reason.name(), "name_taken");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_of_one_token_never_meets_the_decode_node() {
    let cluster = coordinator(&[]).await;
    let never = decode(|_, _| async { panic!("the decode node was asked") });
    let alone = prefill(|work, events| async move {
        assert!(work.ticket.is_none());
        send(
            &events,
            PrefillEvent::Accepted {
                cached_tokens: 0,
                at: Clock::now(),
            },
        )
        .await;
        send(&events, PrefillEvent::Tokens(batch(vec![last_token(0, 100)]))).await;
        let PrefillEvent::Finished(finished) = handed_over() else {
            return;
        };
        let outcome = PrefillOutcome::EndedAtFirstToken;
        send(&events, PrefillEvent::Finished(PrefillFinished { outcome, ..finished })).await;
    });
    let _d = decode_node(&cluster, "d0", never).await;
    let _p = prefill_node(&cluster, "p0", alone).await;
    until_up(&cluster, "decode", 1).await;
    until_up(&cluster, "prefill", 1).await;
    let mut handle = submit(&cluster, request(1, 1)).await;
    let events = collect(&mut handle).await;
    assert_eq!(token_ids(&events), expected(1));
    assert!(matches!(events.last(), Some(ClientEvent::Done(_))), "{events:?}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_transfer_ends_in_local_prefill() {
    let cluster = coordinator(&[]).await;
    let then = good_decode(link());
    let placed: Arc<Mutex<Vec<Option<LocalPrefillReason>>>> = Arc::default();
    let record = placed.clone();
    let script = decode(move |open, events| {
        record.lock().expect("lock").push(open.local_prefill);
        let then = then.clone();
        async move {
            if open.local_prefill.is_some() {
                return then(open, events).await;
            }
            send(&events, opened(1)).await;
            let failed = Failed {
                fault: NodeFault::Transfer,
                reason: "checksum".into(),
                detail: "scripted".into(),
            };
            send(&events, DecodeEvent::Failed(failed)).await;
        }
    });
    let idle = prefill(|_, events| async move {
        send(
            &events,
            PrefillEvent::Accepted {
                cached_tokens: 0,
                at: Clock::now(),
            },
        )
        .await;
        events.closed().await;
    });
    let _d = decode_node(&cluster, "d0", script).await;
    let _p = prefill_node(&cluster, "p0", idle).await;
    until_up(&cluster, "decode", 1).await;
    until_up(&cluster, "prefill", 1).await;
    let mut handle = submit(&cluster, request(1, 3)).await;
    let events = collect(&mut handle).await;
    assert_eq!(token_ids(&events), expected(3));
    assert_eq!(
        *placed.lock().expect("lock"),
        [None, Some(LocalPrefillReason::TransferFailed)]
    );
    until_metric(&cluster, r#"baton_handoffs_total{transport="grpc",outcome="failed"} 1"#).await;
    cluster.stop().await;
}
