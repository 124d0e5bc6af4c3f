//! Which requests one round over the queue looks at, and where they go where some decode nodes compute prompts and others get KV.

use std::sync::Arc;
use std::time::Duration;

use super::super::fixtures::{node_record, ready_status, request};
use super::super::{ClusterAction, ClusterConfig, ClusterEvent, Delivered, Leg, LegEvent, RefuseReason, StreamId};
use super::*;
use crate::compatibility::CompatibilityHash;
use crate::ids::Attempt;
use crate::node::PairHealth;
use crate::request::AttemptKey;

/// All nodes have been there for longer than they start slowly.
const NOW: Time = Time(20_000_000_000);
const CO_LOCATED: StreamId = StreamId(1);
const DECODE: StreamId = StreamId(2);
const PREFILL: StreamId = StreamId(3);

struct Mixed {
    cluster: Cluster,
    now: Time,
    requests: u128,
}

fn config() -> ClusterConfig {
    ClusterConfig {
        lease: Duration::from_secs(60),
        ..ClusterConfig::default()
    }
}

impl Mixed {
    fn new() -> Self {
        let mut cluster = Cluster::new(config());
        for (stream, name, role) in [
            (CO_LOCATED, "c0", NodeRole::Decode),
            (DECODE, "d0", NodeRole::Decode),
            (PREFILL, "p0", NodeRole::Prefill),
        ] {
            let mut record = node_record(name, 1, role);
            record.is_co_located = stream == CO_LOCATED;
            cluster.apply(Time::ZERO, ClusterEvent::NodeJoined { record, stream });
        }
        Self {
            cluster,
            now: NOW,
            requests: 0,
        }
    }

    /// Each placement of the event: the request, its prefill node and its decode node.
    fn apply(&mut self, event: ClusterEvent) -> Vec<String> {
        let actions = self.cluster.apply(self.now, event);
        let name = |id: Option<NodeId>| id.map_or("none".to_owned(), |id| id.name.to_string());
        let placed = actions.into_iter().filter_map(|action| match action {
            ClusterAction::Place { key, placement } => {
                let (prefill, decode) = (name(placement.prefill), name(placement.decode));
                Some(format!("{}: {prefill}, {decode}", key.request.0))
            }
            _ => None,
        });
        placed.collect()
    }

    fn grant(&mut self, stream: StreamId, granted_total: u64) -> Vec<String> {
        self.apply(ClusterEvent::NodeReported {
            stream,
            read_at: self.now,
            status: ready_status(granted_total),
        })
    }

    /// The prefill node's link to `d0` is broken.
    fn break_pair(&mut self) {
        let mut status = ready_status(64);
        status.pairs = vec![PairHealth {
            decode_node: node_record("d0", 1, NodeRole::Decode).id,
            unusable_reason: Some("broken".to_owned()),
            transport: None,
        }];
        self.apply(ClusterEvent::NodeReported {
            stream: PREFILL,
            read_at: self.now,
            status,
        });
    }

    /// A prompt of three blocks.
    fn ask(&mut self, max_tokens: u32) -> Vec<String> {
        self.requests += 1;
        let request = Arc::new(request(self.requests, 40, max_tokens));
        self.apply(ClusterEvent::RequestArrived { request })
    }
}

#[test]
fn a_request_of_one_token_goes_to_the_prefill_node_and_without_permits_there_to_a_co_located_node() {
    let mut mixed = Mixed::new();
    mixed.grant(CO_LOCATED, 64);
    mixed.grant(DECODE, 64);
    mixed.grant(PREFILL, 40);
    assert_eq!(mixed.ask(1), ["1: p0, none"]);
    assert_eq!(mixed.ask(1), ["2: none, c0"]);
    // Nor does it hold up a longer one, which needs no less.
    assert_eq!(mixed.ask(8), ["3: none, c0"]);
}

#[test]
fn a_request_of_one_token_that_waits_is_placed_by_the_first_node_that_has_permits() {
    for (first, granted, placed) in [(CO_LOCATED, 3, "1: none, c0"), (PREFILL, 40, "1: p0, none")] {
        let mut mixed = Mixed::new();
        mixed.grant(DECODE, 64);
        assert!(mixed.ask(1).is_empty());
        let saving = mixed.cluster.saving.clone().expect("it lacks permits");
        assert_eq!(saving.decode, None, "it is answered where its prompt is computed");
        assert_eq!(
            saving.prefill.map(|kept| kept.node.name.to_string()).as_deref(),
            Some("p0")
        );
        assert_eq!(mixed.grant(first, granted), [placed]);
    }
}

#[test]
fn a_node_that_starts_slowly_takes_what_no_other_node_can_take() {
    let mut mixed = Mixed::new();
    mixed.now = Time::from_millis(1_000);
    mixed.grant(CO_LOCATED, 64);
    // It has room, and its prefill node has no permits.
    mixed.grant(DECODE, 64);
    assert_eq!(mixed.ask(8), ["1: none, c0"]);
    assert_eq!(
        mixed.ask(8),
        ["2: none, c0"],
        "one request is its share of the first second"
    );
    mixed.grant(PREFILL, 40);
    assert_eq!(mixed.ask(8), ["3: p0, d0"]);
}

#[test]
fn a_request_saves_up_where_it_would_be_placed() {
    let mut mixed = Mixed::new();
    // It has room, and nobody who prefills for it.
    mixed.grant(DECODE, 64);
    mixed.break_pair();
    assert!(mixed.ask(8).is_empty());
    let saving = mixed.cluster.saving.clone().expect("it lacks permits");
    assert_eq!(
        saving.decode.map(|kept| kept.node.name.to_string()).as_deref(),
        Some("c0")
    );
    assert_eq!(saving.prefill, None);
    assert_eq!(mixed.grant(CO_LOCATED, 3), ["1: none, c0"]);
}

#[test]
fn a_request_that_keeps_to_its_group_holds_up_nobody_that_can_go_elsewhere() {
    let mut mixed = Mixed {
        cluster: Cluster::new(config()),
        now: NOW,
        requests: 0,
    };
    for (stream, name, group) in [(CO_LOCATED, "c0", 1), (DECODE, "c1", 2)] {
        let mut record = node_record(name, 1, NodeRole::Decode);
        record.is_co_located = true;
        record.compatibility = CompatibilityHash([group; 32]).into();
        mixed
            .cluster
            .apply(Time::ZERO, ClusterEvent::NodeJoined { record, stream });
    }
    mixed.grant(CO_LOCATED, 64);
    assert_eq!(mixed.ask(8), ["1: none, c0"]);
    let key = AttemptKey {
        request: RequestId(1),
        attempt: Attempt(0),
    };
    let event = LegEvent::Refused {
        leg: Leg::Decode,
        reason: RefuseReason::NoCapacity,
    };
    mixed.apply(ClusterEvent::Leg { key, event });
    let delivered = Delivered {
        tokens: Vec::new(),
        token_count: 0,
        is_complete: false,
    };
    mixed.apply(ClusterEvent::AttemptEnded { key, delivered });
    assert!(mixed.grant(DECODE, 64).is_empty(), "it waits for its own group");
    assert_eq!(mixed.ask(8), ["2: none, c1"]);
}

/// A decode node without permits and a prefill node, for which three requests wait.
fn full_cluster(allow_local_prefill: bool) -> Cluster {
    let mut cluster = Cluster::new(ClusterConfig {
        allow_local_prefill,
        ..ClusterConfig::default()
    });
    for (stream, name, role) in [(1, "d0", NodeRole::Decode), (2, "p0", NodeRole::Prefill)] {
        let (record, stream) = (node_record(name, 1, role), StreamId(stream));
        cluster.apply(Time::ZERO, ClusterEvent::NodeJoined { record, stream });
    }
    for id in 1..=3 {
        let request = Arc::new(request(id, 40, 8));
        cluster.apply(Time::ZERO, ClusterEvent::RequestArrived { request });
    }
    cluster
}

/// How many requests one round looks at.
fn looked_at(cluster: &mut Cluster, now: Time) -> usize {
    let (mut round, mut looked_at) = (Round::default(), 0);
    let mut walk = cluster.queue.walk(None);
    while let Some(id) = walk.next(&cluster.queue) {
        looked_at += 1;
        if cluster.look_at(now, id, &mut round).is_break() {
            break;
        }
    }
    looked_at
}

#[test]
fn no_second_request_is_looked_at_while_no_node_can_take_any() {
    let now = Time::from_millis(2);
    let mut cluster = full_cluster(true);
    assert_eq!(looked_at(&mut cluster, now), 3, "they wait for permits");
    assert!(cluster.saving.is_some());
    let decode = node_record("d0", 1, NodeRole::Decode).id;
    let node = cluster.members.get_mut(&decode).expect("it has joined");
    node.suspicion.failed(Time::from_millis(1), Time::ZERO);
    assert_eq!(looked_at(&mut cluster, now), 1, "the only decode node is suspected");
    cluster.place_waiting(now);
    assert_eq!(cluster.saving, None);
}

#[test]
fn without_local_prefill_a_prefill_node_has_to_be_there() {
    let now = Time::from_millis(2);
    for (allow_local_prefill, count) in [(true, 3), (false, 1)] {
        let mut cluster = full_cluster(allow_local_prefill);
        assert_eq!(looked_at(&mut cluster, now), 3);
        cluster.apply(now, ClusterEvent::NodeDisconnected { stream: StreamId(2) });
        assert_eq!(looked_at(&mut cluster, now), count);
    }
}
