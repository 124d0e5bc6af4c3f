//! Tests of leases, lives and suspicion.

use super::super::fixtures::{node_record, ready_status};
use super::super::member::NodeHealth;
use super::*;
use crate::node::PairHealth;

const LEASE: Duration = Duration::from_secs(5);

fn members() -> Membership {
    Membership::new(LEASE, Some("smol".into()))
}

fn ms(ms: u64) -> Time {
    Time::from_millis(ms)
}

#[test]
fn a_status_renews_the_lease_and_silence_ends_it() {
    let mut m = members();
    let record = node_record("d0", 1, NodeRole::Decode);
    assert_eq!(m.join(ms(0), record.clone(), StreamId(1)), Ok(Joined::New));
    assert!(m.report(ms(3_000), (StreamId(1), ms(3_000)), ready_status(64)));
    assert_eq!(m.expired(ms(7_999)), vec![]);
    assert_eq!(m.next_wake(), Some(ms(8_000)));
    assert_eq!(m.expired(ms(8_000)), vec![record.id.clone()]);
    m.lose(&record.id, Life::Lost { since: ms(8_000) });
    assert_eq!(m.get(&record.id).map(Node::health), Some(NodeHealth::Lost));
    assert!(
        !m.report(ms(8_001), (StreamId(1), ms(8_001)), ready_status(64)),
        "a lost life does not come back by itself"
    );
    m.check_invariants();
}

#[test]
fn a_live_name_is_taken_and_a_disconnected_one_is_replaced() {
    let mut m = members();
    let old = node_record("d0", 1, NodeRole::Decode);
    let new = node_record("d0", 2, NodeRole::Decode);
    assert_eq!(m.join(ms(0), old.clone(), StreamId(1)), Ok(Joined::New));
    assert_eq!(m.join(ms(1), new.clone(), StreamId(2)), Err(JoinRefusal::NameTaken));
    assert_eq!(m.disconnect(StreamId(1)), Some(old.id.clone()));
    assert_eq!(
        m.join(ms(2), new.clone(), StreamId(3)),
        Ok(Joined::Replaced(old.id.clone()))
    );
    assert!(m.get(&old.id).is_none());
    assert!(m.get(&new.id).is_some());
    m.check_invariants();
}

#[test]
fn a_life_that_reconnects_keeps_its_sequences_and_loses_its_permits() {
    let mut m = members();
    let record = node_record("d0", 1, NodeRole::Decode);
    assert_eq!(m.join(ms(0), record.clone(), StreamId(1)), Ok(Joined::New));
    assert!(m.report(ms(1), (StreamId(1), ms(1)), ready_status(64)));
    if let Some(node) = m.get_mut(&record.id) {
        node.sequences = 3;
    }
    m.disconnect(StreamId(1));
    assert!(
        m.get(&record.id)
            .is_some_and(|n| !n.is_live() && n.permits.available() == 0)
    );
    assert_eq!(m.join(ms(2), record.clone(), StreamId(2)), Ok(Joined::Again));
    assert_eq!(
        m.get(&record.id).map(|n| (n.sequences, n.permits.available())),
        Some((3, 0))
    );
}

#[test]
fn wrong_records_are_refused_with_the_field() {
    let mut m = members();
    let mut record = node_record("d0", 1, NodeRole::Decode);
    record.capacity.block_tokens = 0;
    let refusal = JoinRefusal::Invalid {
        field: "capacity.block_tokens".into(),
    };
    assert_eq!(m.join(ms(0), record, StreamId(1)), Err(refusal));
    let mut other = node_record("d0", 1, NodeRole::Decode);
    other.model_name = "llama".into();
    let refused = m.join(ms(0), other, StreamId(1));
    assert_eq!(refused.map_err(|r| r.name()), Err("incompatible_model"));
}

#[test]
fn names_of_nodes_that_are_gone_keep_no_new_node_out() {
    let mut m = members();
    let record = |number: usize| node_record(&format!("d{number}"), 1, NodeRole::Decode);
    for number in 0..NODES_MAX {
        let stream = StreamId(number as u64);
        assert_eq!(m.join(ms(0), record(number), stream), Ok(Joined::New));
    }
    let stream = StreamId(NODES_MAX as u64);
    assert!(
        m.join(ms(1), record(NODES_MAX), stream).is_err(),
        "all of them are here"
    );
    for (number, at) in [(7, 3), (5, 2)] {
        m.lose(&record(number).id, Life::Left { since: ms(at) });
    }
    assert_eq!(m.join(ms(4), record(NODES_MAX), stream), Ok(Joined::New));
    assert!(m.get(&record(5).id).is_none(), "it was gone for longest");
    assert!(m.get(&record(7).id).is_some());
    m.check_invariants();
}

#[test]
fn what_carries_a_pairs_kv_is_what_its_prefill_node_says() {
    let mut m = members();
    let (mut prefill, mut decode) = (
        node_record("p0", 1, NodeRole::Prefill),
        node_record("d0", 1, NodeRole::Decode),
    );
    for record in [&mut prefill, &mut decode] {
        record.transports = vec!["shm".into(), "grpc".into()];
    }
    assert_eq!(m.transport_of(&prefill.id, &decode.id), "none");
    assert_eq!(m.join(ms(0), prefill.clone(), StreamId(1)), Ok(Joined::New));
    assert_eq!(m.join(ms(0), decode.clone(), StreamId(2)), Ok(Joined::New));
    assert_eq!(
        m.transport_of(&prefill.id, &decode.id),
        "shm",
        "nothing better is known"
    );
    for (said, expected) in [
        ("grpc", "grpc"),
        ("shm", "shm"),
        ("shm-direct", "shm-direct"),
        ("carrier_pigeon", "shm"),
    ] {
        let mut status = ready_status(64);
        status.pairs = vec![PairHealth {
            decode_node: decode.id.clone(),
            unusable_reason: None,
            transport: Some(said.into()),
        }];
        assert!(m.report(ms(1), (StreamId(1), ms(1)), status));
        assert_eq!(m.transport_of(&prefill.id, &decode.id), expected, "it said {said}");
    }
}

#[test]
fn a_link_is_what_the_last_report_says_of_it() {
    let mut m = members();
    let prefill = node_record("p0", 1, NodeRole::Prefill);
    let decode: Vec<NodeId> = ["d0", "d1", "d2"]
        .map(|name| node_record(name, 1, NodeRole::Decode).id)
        .into();
    let other_life = node_record("d0", 2, NodeRole::Decode).id;
    let said = |pairs: &[(usize, Option<&str>)]| -> Vec<PairHealth> {
        let of = |(at, reason): &(usize, Option<&str>)| PairHealth {
            decode_node: decode[*at].clone(),
            unusable_reason: reason.map(str::to_owned),
            transport: None,
        };
        pairs.iter().map(of).collect()
    };
    m.join(ms(0), prefill.clone(), StreamId(1)).expect("it joins");
    let reports = [
        said(&[]),
        said(&[(0, None), (1, Some("broken"))]),
        said(&[(0, None), (1, Some("broken"))]),
        // One node named twice is both.
        said(&[(2, Some("broken")), (2, None)]),
        said(&[(0, Some("broken"))]),
        said(&[]),
    ];
    for (at, pairs) in (1..).zip(reports) {
        let mut status = ready_status(64);
        status.pairs = pairs.clone();
        assert!(m.report(ms(at), (StreamId(1), ms(at)), status));
        let node = m.get(&prefill.id).expect("it has joined");
        for id in decode.iter().chain([&other_life]) {
            let says = |is_usable: bool| {
                let mut of_pair = pairs.iter().filter(|pair| pair.decode_node == *id);
                of_pair.any(|pair| pair.unusable_reason.is_none() == is_usable)
            };
            assert_eq!(node.pair_is_usable(id), !says(false), "report {at} of {id}");
            assert_eq!(node.pair_is_reported_usable(id), says(true), "report {at} of {id}");
        }
    }
    // The next stream of the same life begins without a report.
    let mut status = ready_status(64);
    status.pairs = said(&[(0, Some("broken"))]);
    assert!(m.report(ms(9), (StreamId(1), ms(9)), status));
    assert_eq!(m.join(ms(10), prefill.clone(), StreamId(2)), Ok(Joined::Again));
    let node = m.get(&prefill.id).expect("it has joined");
    assert!(node.pair_is_usable(&decode[0]));
}
