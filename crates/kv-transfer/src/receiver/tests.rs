//! The receiver without a transport: what depends on the order of its calls, and the answers to hellos.

use identity::{Caller, PeerName, PeerRole};
use proto::messages::{Hello, HelloRefusedReason, KvFrame, KvReply, KvShard, LastFrame, PROTOCOL_VERSION};
use serving_core::ids::TransferId;
use serving_core::kv::reservation::Reservation;

use super::*;
use crate::conformance::*;

/// The order of the two calls matters, and only a direct call fixes it.
#[tokio::test]
async fn an_abort_that_came_before_the_last_frame_wins_over_the_commit() {
    let (prefill, decode) = (node("prefill-0", 11), node("decode-0", 22));
    let sink = Recorder::new(CommitAnswer::Accept);
    let receiver = Receiver::new(decode.clone(), compatibility(1), sink.clone());
    let transfer = TransferId(5);
    let reservation = Reservation {
        transfer,
        key: key(transfer),
        sender: prefill.clone(),
        blocks: Vec::new(),
        layer_count: LAYERS,
        layer_bytes: LAYER_BYTES,
    };
    sink.reservations.lock().unwrap().insert(transfer, reservation);
    let mut pair = IncomingPair::new(&receiver, crate::grpc::KIND, Caller::PlainText);
    let hello = Hello {
        from: prefill,
        to: decode,
        protocol_version: PROTOCOL_VERSION,
        compatibility: compatibility(1),
        shard: KvShard::WHOLE,
    };
    pair.frame(KvFrame::Hello(hello)).await.unwrap();
    pair.frame(KvFrame::Begin { transfer }).await.unwrap();
    assert!(receiver.abort(transfer, "cancelled"), "`ended` was promised");
    let last = LastFrame {
        transfer,
        request: key(transfer).request,
        attempt: key(transfer).attempt,
        block_count: 0,
        frame_count: 0,
        first_tokens: first_tokens(),
        traceparent: None,
        cached_tokens: None,
    };
    let reply = pair.frame(KvFrame::Last(last)).await.unwrap();
    assert!(matches!(reply, Some(KvReply::Aborted { .. })), "{reply:?}");
    assert_eq!(sink.commit_count(), 0);
    assert_eq!(
        sink.ends(),
        [(transfer, ReceiveEnd::AbortedHere("cancelled".to_owned()))]
    );
    assert!(!receiver.abort(transfer, "cancelled"));
}

/// A prefill node pushes in its own name only.
#[tokio::test]
async fn a_sender_is_who_its_certificate_names() {
    let decode = node("decode-0", 22);
    let receiver = Receiver::new(decode.clone(), compatibility(1), Recorder::new(CommitAnswer::Accept));
    let caller = |role, name: &str| {
        let cluster = "demo".to_owned();
        let name = name.to_owned();
        Caller::Named(vec![PeerName { cluster, role, name }])
    };
    for (caller, is_taken) in [
        (caller(PeerRole::Prefill, "prefill-0"), true),
        (caller(PeerRole::Prefill, "prefill-1"), false),
        (caller(PeerRole::Decode, "prefill-0"), false),
        (Caller::Nobody, false),
        (Caller::PlainText, true),
    ] {
        let hello = Hello {
            from: node("prefill-0", 11),
            to: decode.clone(),
            protocol_version: PROTOCOL_VERSION,
            compatibility: compatibility(1),
            shard: KvShard::WHOLE,
        };
        let mut pair = IncomingPair::new(&receiver, crate::grpc::KIND, caller.clone());
        let taken = pair.frame(KvFrame::Hello(hello)).await;
        assert_eq!(taken.is_ok(), is_taken, "{caller:?} {taken:?}");
    }
}

/// The answer to a hello of an older binary names both versions.
#[tokio::test]
async fn an_older_version_of_the_protocol_is_refused_by_name() {
    let (prefill, decode) = (node("prefill-0", 11), node("decode-0", 22));
    let receiver = Receiver::new(decode.clone(), compatibility(1), Recorder::new(CommitAnswer::Accept));
    let hello = Hello {
        from: prefill,
        to: decode,
        protocol_version: PROTOCOL_VERSION - 1,
        // Another version has another hash. It is not what the sender is told.
        compatibility: compatibility(9),
        shard: KvShard::WHOLE,
    };
    let mut pair = IncomingPair::new(&receiver, crate::grpc::KIND, Caller::PlainText);
    let error = pair.frame(KvFrame::Hello(hello)).await.unwrap_err();
    let Some(KvReply::Hello(reply)) = error.last_reply() else {
        panic!("{error}");
    };
    let refused = reply.refused.unwrap();
    assert_eq!(refused.reason, HelloRefusedReason::ProtocolVersion);
    let (ours, theirs) = (PROTOCOL_VERSION, PROTOCOL_VERSION - 1);
    for words in [format!("version {ours} of the protocol"), format!("version {theirs}")] {
        assert!(refused.detail.contains(&words), "{}", refused.detail);
    }
    assert_eq!(reply.offers, []);
}
