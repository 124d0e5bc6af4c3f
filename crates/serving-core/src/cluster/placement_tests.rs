//! Placement where decode nodes of both kinds are: one that computes its prompts, and one that gets KV from a prefill node.

use std::time::Duration;

use super::super::fixtures::{node_record, ready_status, request};
use super::super::{ClusterConfig, ClusterEvent, StreamId};
use super::*;

/// All nodes have been there for longer than they start slowly.
const NOW: Time = Time(20_000_000_000);
const CO_LOCATED: StreamId = StreamId(1);
const DECODE: StreamId = StreamId(2);
const PREFILL: StreamId = StreamId(3);

struct Mixed {
    cluster: Cluster,
    requests: u128,
}

impl Mixed {
    fn new() -> Self {
        let config = ClusterConfig {
            lease: Duration::from_secs(60),
            ..ClusterConfig::default()
        };
        let mut cluster = Cluster::new(config);
        for (stream, name, role) in [
            (CO_LOCATED, "c0", NodeRole::Decode),
            (DECODE, "d0", NodeRole::Decode),
            (PREFILL, "p0", NodeRole::Prefill),
        ] {
            let mut record = node_record(name, 1, role);
            record.is_co_located = stream == CO_LOCATED;
            cluster.apply(Time::ZERO, ClusterEvent::NodeJoined { record, stream });
        }
        Self { cluster, requests: 0 }
    }

    /// Each placement of the event: the request, its prefill node and its decode node.
    fn apply(&mut self, event: ClusterEvent) -> Vec<String> {
        let actions = self.cluster.apply(NOW, event);
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

    fn grant(&mut self, stream: StreamId, granted_total: u64, received_total: u64) -> Vec<String> {
        let mut status = ready_status(granted_total);
        status.permits_received_total = received_total;
        self.apply(ClusterEvent::NodeReported {
            stream,
            read_at: NOW,
            status,
        })
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
    mixed.grant(CO_LOCATED, 64, 0);
    mixed.grant(DECODE, 64, 0);
    mixed.grant(PREFILL, 40, 0);
    assert_eq!(mixed.ask(1), ["1: p0, none"]);
    assert_eq!(mixed.ask(1), ["2: none, c0"]);
    // Nor does it hold up a longer one, which needs no less.
    assert_eq!(mixed.ask(8), ["3: none, c0"]);
}

#[test]
fn a_request_of_one_token_that_waits_is_placed_by_the_first_node_that_has_permits() {
    for (first, granted, placed) in [(CO_LOCATED, 3, "1: none, c0"), (PREFILL, 40, "1: p0, none")] {
        let mut mixed = Mixed::new();
        mixed.grant(DECODE, 64, 0);
        assert!(mixed.ask(1).is_empty());
        let saving = mixed.cluster.saving.clone().expect("it lacks permits");
        assert_eq!(saving.decode, None, "it is answered where its prompt is computed");
        assert_eq!(
            saving.prefill.map(|kept| kept.node.name.to_string()).as_deref(),
            Some("p0")
        );
        assert_eq!(mixed.grant(first, granted, 0), [placed]);
    }
}
