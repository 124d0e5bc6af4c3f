//! A decode node over real gRPC: handoffs, local prefill, refusals, cancels and the drain.

#![forbid(unsafe_code)]

mod kit;

use std::time::Duration;

use kit::{CACHED, Pusher, TestNode, block_frame, compute, last_frame, prefill_node, request, tokens};
use proto::messages::{DecodeEvent, DecodeFinished, KvFrame, KvReply, NodeFault, RefuseReason};
use proto::v1;
use proto::v1::cache_service_client::CacheServiceClient;
use serving_core::compatibility::CompatibilityHash;
use serving_core::ids::{Generation, NodeEpoch, NodeId, NodeName, RequestId};
use serving_core::stage::Stage;

fn finished(events: &[DecodeEvent]) -> &DecodeFinished {
    match events.last() {
        Some(DecodeEvent::Finished(finished)) => finished,
        other => panic!("not finished: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handoff_gives_the_tokens_and_the_kv_of_local_prefill() {
    let node = TestNode::start(&["--prefix-cache", "false"]).await;
    for choices in [1, 3] {
        let mut wanted = request(1, 100, 20);
        wanted.choice_count = choices;
        let mut local = node.open(node.open_request(wanted.clone(), None)).await;
        let local = local.rest().await;

        let computed = compute(&node, &wanted);
        let mut events = node.open(node.open_request(wanted.clone(), Some(prefill_node()))).await;
        let ticket = events.ticket().await;
        assert_eq!((ticket.blocks.len(), ticket.prefix_blocks), (7, 0));
        let mut pusher = Pusher::connect(&node).await;
        pusher.push(&ticket, &wanted, &computed).await;
        assert_eq!(
            pusher.reply().await,
            Some(KvReply::Ack {
                transfer: ticket.transfer
            })
        );
        let handed = events.rest().await;
        let DecodeEvent::Committed { cached_tokens, .. } = &handed[0] else {
            panic!("{handed:?}");
        };
        assert_eq!(*cached_tokens, Some(CACHED), "it passes on what the last frame said");
        for choice in 0..choices {
            assert_eq!(tokens(&handed, choice).len(), 20);
            assert_eq!(tokens(&handed, choice), tokens(&local, choice));
        }
        let (local, handed) = (finished(&local), finished(&handed));
        assert_eq!(handed.kv_hashes.len(), 7);
        assert_eq!(handed.kv_hashes, local.kv_hashes);
        assert_eq!(handed.kv_bytes, ticket.total_bytes);
        for stage in [Stage::Commit, Stage::DecodeQueue, Stage::Decode] {
            assert!(handed.timings.get(stage).is_some(), "{stage:?}");
        }
        for stage in [Stage::PrefillQueue, Stage::PrefillForward, Stage::Decode] {
            assert!(local.timings.get(stage).is_some(), "{stage:?}");
        }
        node.assert_blocks_home().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_the_node_lacks_is_asked_for() {
    let node = TestNode::start(&[]).await;
    let first = request(1, 100, 4);
    let mut events = node.open(node.open_request(first, None)).await;
    let local = events.rest().await;
    let again = request(2, 100, 4);
    let computed = compute(&node, &again);
    let mut events = node.open(node.open_request(again.clone(), Some(prefill_node()))).await;
    let ticket = events.ticket().await;
    assert_eq!((ticket.blocks.len(), ticket.prefix_blocks), (1, 6));
    let pusher = Pusher::connect(&node).await;
    pusher.push(&ticket, &again, &computed).await;
    let handed = events.rest().await;
    assert_eq!(tokens(&handed, 0), tokens(&local, 0));
    assert_eq!(finished(&handed).kv_hashes, finished(&local).kv_hashes);
    assert_eq!(finished(&handed).cached_tokens, 96);
    node.assert_blocks_home().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_order_empties_the_prefix_cache() {
    let node = TestNode::start(&[]).await;
    let mut events = node.open(node.open_request(request(1, 100, 4), None)).await;
    let first = events.rest().await;
    node.wait_for(|status| status.kv_blocks.cached >= 6 && status.kv_blocks.active == 0)
        .await;
    let cached = node.status.borrow().kv_blocks.cached;
    let mut client = CacheServiceClient::new(node.channel.clone());
    let reply = client.reset_prefix_cache(v1::ResetPrefixCacheRequest {}).await;
    let reply = reply.expect("an answer").into_inner();
    assert_eq!((reply.dropped_blocks, reply.kept_blocks), (cached, 0));
    node.wait_for(|status| status.kv_blocks.cached == 0).await;
    let mut events = node.open(node.open_request(request(2, 100, 4), None)).await;
    let again = events.rest().await;
    assert_eq!(finished(&again).cached_tokens, 0);
    assert_eq!(tokens(&again, 0), tokens(&first, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_as_promised_is_refused_and_the_blocks_come_home() {
    let node = TestNode::start(&[]).await;
    let mut id = 0;
    for label in [
        "checksum",
        "stale_generation",
        "wrong_block_count",
        "wrong_frame_count",
        "wrong_request",
        "bad_first_tokens",
    ] {
        id += 1;
        let wanted = request(id, 40, 8);
        let computed = compute(&node, &wanted);
        let mut events = node.open(node.open_request(wanted.clone(), Some(prefill_node()))).await;
        let ticket = events.ticket().await;
        let mut pusher = Pusher::connect(&node).await;
        let mut blocks: Vec<_> = (0..ticket.blocks.len())
            .map(|i| block_frame(&ticket, &computed, i))
            .collect();
        let mut last = last_frame(&ticket, &wanted, &computed);
        match label {
            "checksum" => blocks[1].checksum ^= 1,
            "stale_generation" => blocks[0].generation = Generation(blocks[0].generation.0.wrapping_sub(1)),
            "wrong_block_count" => last.block_count -= 1,
            "wrong_frame_count" => drop(blocks.pop()),
            "wrong_request" => last.request = RequestId(999),
            _ => last.first_tokens[0].index.0 = 3,
        }
        for block in blocks {
            pusher.send(KvFrame::Block(block)).await;
        }
        pusher.send(KvFrame::Last(last)).await;
        match pusher.reply().await {
            Some(KvReply::Refused { transfer, reason, .. }) => {
                assert_eq!((transfer, &*reason), (ticket.transfer, label))
            }
            other => panic!("{label}: {other:?}"),
        }
        match events.rest().await.last() {
            Some(DecodeEvent::Failed(failed)) => {
                assert_eq!((failed.fault, &*failed.reason), (NodeFault::Transfer, label))
            }
            other => panic!("{label}: {other:?}"),
        }
        node.assert_blocks_home().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_get_no_reservation() {
    let node = TestNode::start(&[]).await;
    let wanted = request(1, 40, 8);
    let mut events = node.open(node.open_request(wanted.clone(), Some(prefill_node()))).await;
    let ticket = events.ticket().await;
    let [mut stale, mut incompatible] = [kit::hello(&node), kit::hello(&node)];
    stale.to.epoch = NodeEpoch(stale.to.epoch.0.wrapping_add(1));
    incompatible.compatibility = CompatibilityHash([0; 32]).into();
    for (hello, label) in [(stale, "stale_epoch"), (incompatible, "incompatible")] {
        let mut pusher = Pusher::connect_as(&node, hello).await;
        match pusher.reply().await {
            Some(KvReply::Hello(hello)) => assert_eq!(hello.refused.map(|refused| refused.reason.name()), Some(label)),
            other => panic!("{label}: {other:?}"),
        }
    }
    let is_unknown = |reply: &Option<KvReply>| matches!(reply, Some(KvReply::Refused { reason, .. }) if reason == "unknown_transfer");
    let computed = compute(&node, &wanted);
    // They know the whole ticket, as if they had read it somewhere, and send all that it asks for.
    for (name, epoch) in [("prefill-1", 77), ("prefill-0", 78)] {
        let mut thief = kit::hello(&node);
        thief.from = NodeId {
            name: NodeName::new(name),
            epoch: NodeEpoch(epoch),
        };
        let mut pusher = Pusher::connect_as(&node, thief).await;
        assert!(matches!(pusher.reply().await, Some(KvReply::Hello(_))));
        pusher.push(&ticket, &wanted, &computed).await;
        // It is not told that there is such a ticket.
        assert!(is_unknown(&pusher.reply().await), "{name}");
    }
    let mut pusher = Pusher::connect(&node).await;
    pusher
        .send(KvFrame::Begin {
            transfer: serving_core::ids::TransferId(4),
        })
        .await;
    assert!(is_unknown(&pusher.reply().await));
    // The true owner still gets through, and only once.
    pusher.push(&ticket, &wanted, &computed).await;
    assert_eq!(
        pusher.reply().await,
        Some(KvReply::Ack {
            transfer: ticket.transfer
        })
    );
    pusher.push(&ticket, &wanted, &computed).await;
    assert!(is_unknown(&pusher.reply().await));
    finished(&events.rest().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_frees_its_blocks_in_every_state() {
    let node = TestNode::start(&["--max-model-len", "4000"]).await;
    for state in ["reserved", "receiving", "decoding", "local"] {
        let wanted = request(1, 40, 1500);
        let source = (state != "local").then(prefill_node);
        let mut events = node.open(node.open_request(wanted.clone(), source)).await;
        let mut pusher = None;
        if state == "local" {
            node.wait_for(|status| status.running_sequences == 1).await;
        } else {
            let ticket = events.ticket().await;
            node.wait_for(|status| status.kv_blocks.reserved > 0).await;
            if state != "reserved" {
                let computed = compute(&node, &wanted);
                let pair = Pusher::connect(&node).await;
                if state == "receiving" {
                    pair.send(KvFrame::Block(block_frame(&ticket, &computed, 0))).await;
                    node.wait_for(|status| status.kv_blocks.in_transfer == 3).await;
                } else {
                    pair.push(&ticket, &wanted, &computed).await;
                    node.wait_for(|status| status.running_sequences == 1).await;
                }
                pusher = Some((pair, ticket));
            }
        }
        drop(events);
        node.assert_blocks_home().await;
        if let Some((mut pair, ticket)) = pusher {
            let told = pair.reply().await;
            let expected = match state {
                "receiving" => matches!(&told, Some(KvReply::Aborted { transfer, .. }) if *transfer == ticket.transfer),
                _ => {
                    told == Some(KvReply::Ack {
                        transfer: ticket.transfer,
                    })
                }
            };
            assert!(expected, "{state}: {told:?}");
        }
    }
}

/// A request that the node computes whole, some tokens into its answer.
async fn decoding(node: &TestNode, id: u128) -> kit::Events {
    let mut events = node.open(node.open_request(request(id, 40, 1500), None)).await;
    let mut steps = 0;
    while steps < 3 {
        let event = events.next().await.expect("it goes on");
        steps += usize::from(matches!(event, DecodeEvent::Tokens(_)));
    }
    events
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stages_of_a_leg_that_is_cancelled_or_fails_are_counted_once() {
    let mut node = TestNode::start(&["--max-model-len", "4000"]).await;
    let counted = |node: &TestNode| {
        ["decode_queue", "decode"].map(|stage| {
            let series = format!("baton_stage_seconds_count{{stage=\"{stage}\",phase=\"rest\"}} ");
            node.count(&series)
        })
    };
    drop(decoding(&node, 1).await);
    node.assert_blocks_home().await;
    assert_eq!(counted(&node), [1, 1]);
    let mut given_up = decoding(&node, 2).await;
    node.node.drain(Duration::ZERO).await;
    match given_up.rest().await.last() {
        Some(DecodeEvent::Failed(_)) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(counted(&node), [2, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_pair_fails_the_request_and_a_polite_abort_waits_for_the_coordinator() {
    let node = TestNode::start(&[]).await;
    let wanted = request(1, 40, 8);
    let computed = compute(&node, &wanted);
    let mut events = node.open(node.open_request(wanted.clone(), Some(prefill_node()))).await;
    let ticket = events.ticket().await;
    let pusher = Pusher::connect(&node).await;
    pusher.send(KvFrame::Block(block_frame(&ticket, &computed, 0))).await;
    node.wait_for(|status| status.kv_blocks.in_transfer == 3).await;
    drop(pusher);
    match events.rest().await.last() {
        Some(DecodeEvent::Failed(failed)) => assert_eq!(failed.reason, "pair_lost"),
        other => panic!("{other:?}"),
    }
    node.assert_blocks_home().await;

    let ended_at_first = request(2, 40, 8);
    let mut events = node.open(node.open_request(ended_at_first, Some(prefill_node()))).await;
    let ticket = events.ticket().await;
    let mut pusher = Pusher::connect(&node).await;
    pusher
        .send(KvFrame::Begin {
            transfer: ticket.transfer,
        })
        .await;
    pusher
        .send(KvFrame::Abort {
            transfer: ticket.transfer,
            reason: "ended_at_first_token".to_owned(),
        })
        .await;
    assert!(matches!(pusher.reply().await, Some(KvReply::Aborted { .. })));
    let silence = tokio::time::timeout(Duration::from_millis(100), events.next()).await;
    assert!(silence.is_err(), "not a failure: {silence:?}");
    drop(events);
    node.assert_blocks_home().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_prefill_node_expires_the_reservation() {
    let node = TestNode::start(&["--reservation-ms-max", "200"]).await;
    let mut events = node
        .open(node.open_request(request(1, 40, 8), Some(prefill_node())))
        .await;
    let ticket = events.ticket().await;
    let pusher = Pusher::connect(&node).await;
    // Before this the request waits in the prefill node's queue, and the timer does not run.
    pusher
        .send(KvFrame::Begin {
            transfer: ticket.transfer,
        })
        .await;
    match events.rest().await.last() {
        Some(DecodeEvent::Failed(failed)) => {
            assert_eq!(
                (failed.fault, &*failed.reason),
                (NodeFault::Peer, "reservation_expired")
            );
        }
        other => panic!("{other:?}"),
    }
    node.assert_blocks_home().await;
    assert_eq!((node.handoffs("failed"), node.handoffs("cancelled")), (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handoff_that_is_cancelled_or_ends_at_its_first_token_has_not_failed_whoever_aborts_it() {
    let node = TestNode::start(&[]).await;
    let mut pusher = Pusher::connect(&node).await;
    for (id, reason) in [(1, "ended_at_first_token"), (2, "cancelled")] {
        let mut events = node
            .open(node.open_request(request(id, 40, 8), Some(prefill_node())))
            .await;
        let transfer = events.ticket().await.transfer;
        pusher.send(KvFrame::Begin { transfer }).await;
        let reason = reason.to_owned();
        pusher.send(KvFrame::Abort { transfer, reason }).await;
        assert!(matches!(pusher.reply().await, Some(KvReply::Aborted { .. })));
        drop(events);
        node.assert_blocks_home().await;
    }
    let computed = compute(&node, &request(3, 40, 8));
    let mut events = node
        .open(node.open_request(request(3, 40, 8), Some(prefill_node())))
        .await;
    let ticket = events.ticket().await;
    pusher.send(KvFrame::Block(block_frame(&ticket, &computed, 0))).await;
    node.wait_for(|status| status.kv_blocks.in_transfer == 3).await;
    drop(events);
    let (transfer, reason) = (ticket.transfer, "cancelled".to_owned());
    assert_eq!(pusher.reply().await, Some(KvReply::Aborted { transfer, reason }));
    node.assert_blocks_home().await;
    assert_eq!(node.handoffs("ended_at_first_token"), 1);
    assert_eq!(node.handoffs("cancelled"), 2);
    assert_eq!(node.handoffs("failed"), 0);
    assert_eq!(node.count("baton_kv_transfer_failures_total{"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_are_typed() {
    let mut node = TestNode::start(&[]).await;
    let refused = async |open| {
        let events = node.open(open).await.rest().await;
        match &events[..] {
            [DecodeEvent::Refused(refused)] => refused.reason,
            other => panic!("{other:?}"),
        }
    };
    let mut stale = node.open_request(request(1, 40, 8), None);
    stale.node_epoch = NodeEpoch(stale.node_epoch.0.wrapping_add(1));
    assert_eq!(refused(stale).await, RefuseReason::StaleEpoch);
    assert_eq!(
        refused(node.open_request(request(1, 40, 8000), None)).await,
        RefuseReason::Invalid
    );
    let keep = node
        .open(node.open_request(request(1, 40, 500), Some(prefill_node())))
        .await;
    assert_eq!(
        refused(node.open_request(request(1, 40, 8), None)).await,
        RefuseReason::Duplicate
    );
    drop(keep);
    node.assert_blocks_home().await;
    let most = (0..60).map(|id| node.open_request(request(100 + id, 100, 100), Some(prefill_node())));
    let mut kept = Vec::new();
    let mut is_full = false;
    for open in most {
        let mut events = node.open(open).await;
        match events.next().await {
            Some(DecodeEvent::Opened(_)) => kept.push(events),
            Some(DecodeEvent::Refused(refused)) => is_full |= refused.reason == RefuseReason::NoCapacity,
            other => panic!("{other:?}"),
        }
    }
    assert!(is_full && !kept.is_empty());
    drop(kept);
    node.assert_blocks_home().await;
    node.node.drain(Duration::from_secs(1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_finishes_what_runs_and_gives_up_what_does_not() {
    let mut node = TestNode::start(&[]).await;
    let mut runs = node.open(node.open_request(request(1, 40, 200), None)).await;
    let mut waits = node
        .open(node.open_request(request(2, 40, 8), Some(prefill_node())))
        .await;
    waits.ticket().await;
    // Long enough for 200 steps on a machine that is busy with other tests.
    node.node.drain(Duration::from_secs(4)).await;
    assert_eq!(tokens(&runs.rest().await, 0).len(), 200);
    match waits.rest().await.last() {
        Some(DecodeEvent::Failed(failed)) => assert_eq!(failed.fault, NodeFault::Draining),
        other => panic!("{other:?}"),
    }
    let refused = node.open(node.open_request(request(3, 40, 8), None)).await.rest().await;
    assert!(matches!(refused[..], [DecodeEvent::Refused(_)]));
    node.assert_blocks_home().await;
}
