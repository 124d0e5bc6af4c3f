//! Tests of readiness: which few nodes make a cluster ready or unsplit, and which of them may drain.

use super::super::fixtures::{node_record, ready_status};
use super::*;
use crate::cluster::{ClusterConfig, ClusterEvent, StreamId};
use crate::compatibility::test_kit::facts;
use crate::compatibility::{Compatibility, CompatibilityFacts, CompatibilityHash};
use crate::node::{AssignedRole, NodeRecord, PairHealth};

const NOW: Time = Time::ZERO;

struct Nodes {
    cluster: Cluster,
    streams: u64,
}

impl Nodes {
    fn of(records: Vec<NodeRecord>) -> Self {
        Self::with(ClusterConfig::default(), records)
    }

    fn with(config: ClusterConfig, records: Vec<NodeRecord>) -> Self {
        let cluster = Cluster::new(config);
        let mut nodes = Self { cluster, streams: 0 };
        for record in records {
            nodes.streams += 1;
            let stream = StreamId(nodes.streams);
            nodes.cluster.apply(NOW, ClusterEvent::NodeJoined { record, stream });
        }
        nodes
    }

    fn reach(&self) -> Result<Reach, String> {
        self.cluster.readiness(NOW)
    }

    /// The node on the first stream says whether its link to `decode` works.
    fn pair(&mut self, decode: &NodeRecord, unusable_reason: Option<&str>) {
        let mut status = ready_status(0);
        status.pairs = vec![PairHealth {
            decode_node: decode.id.clone(),
            unusable_reason: unusable_reason.map(str::to_owned),
            transport: None,
        }];
        let stream = StreamId(1);
        self.cluster.apply(
            NOW,
            ClusterEvent::NodeReported {
                stream,
                read_at: NOW,
                status,
            },
        );
    }

    fn drain(&mut self, name: &str, next_role: Option<AssignedRole>) -> Result<(), LastDecodeNode> {
        let name = NodeName::new(name);
        let checked = self.cluster.check_drain(NOW, &name);
        if checked.is_ok() {
            self.cluster.apply(NOW, ClusterEvent::DrainNode { name, next_role });
        }
        checked
    }
}

fn prefill(name: &str) -> NodeRecord {
    node_record(name, 1, NodeRole::Prefill)
}

fn decode(name: &str) -> NodeRecord {
    node_record(name, 1, NodeRole::Decode)
}

#[test]
fn a_cluster_without_prefill_node_or_usable_pair_is_unsplit() {
    let unsplit = |nodes: &Nodes| nodes.reach().expect("ready").unsplit;
    let mut nodes = Nodes::of(vec![prefill("p"), decode("d")]);
    assert_eq!(
        unsplit(&nodes),
        Some(Unsplit::NoUsablePair(None)),
        "it has not said so yet"
    );
    nodes.pair(&decode("d"), None);
    assert_eq!(unsplit(&nodes), None);
    nodes.pair(&decode("d"), Some("handshake refused"));
    assert_eq!(unsplit(&nodes), Some(Unsplit::NoUsablePair(None)));
    nodes.pair(&decode("d"), None);
    nodes.drain("p", None).expect("others decode");
    assert_eq!(unsplit(&nodes), Some(Unsplit::NoPrefillNode { known: 1 }));
}

#[test]
fn who_has_no_pair_that_fits_hears_which_fact_differs() {
    let with_blocks_of = |record: NodeRecord, block_tokens| {
        let facts = CompatibilityFacts {
            block_tokens,
            ..facts()
        };
        let hash = CompatibilityHash([u8::try_from(block_tokens).expect("small"); 32]);
        NodeRecord {
            compatibility: Compatibility {
                hash,
                facts: Some(Box::new(facts)),
            },
            ..record
        }
    };
    let nodes = || vec![with_blocks_of(prefill("p"), 32), with_blocks_of(decode("d"), 16)];
    let unsplit = Nodes::of(nodes()).reach().expect("ready").unsplit;
    let words = unsplit.expect("no pair fits").to_string();
    let difference = "incompatible: block_tokens is 32 on p and 16 on d";
    assert!(words.contains(difference), "{words}");
    let config = ClusterConfig {
        allow_local_prefill: false,
        ..ClusterConfig::default()
    };
    let missing = Nodes::with(config, nodes()).reach().expect_err("no way to prefill");
    assert!(missing.contains(difference), "{missing}");
    let mut three = nodes();
    three.push(with_blocks_of(prefill("q"), 8));
    let words = Nodes::of(three)
        .reach()
        .expect("ready")
        .unsplit
        .expect("none fits")
        .to_string();
    assert!(words.contains("2 pairs are incompatible"), "{words}");
}

#[test]
fn co_located_nodes_are_not_meant_to_split() {
    let co_located = |name| NodeRecord {
        is_co_located: true,
        ..decode(name)
    };
    let nodes = Nodes::of(vec![co_located("c0"), co_located("c1")]);
    assert_eq!(nodes.reach().expect("ready").unsplit, None);
    let mixed = Nodes::of(vec![co_located("c0"), decode("d")]);
    assert!(mixed.reach().expect("ready").unsplit.is_some());
}

#[test]
fn a_setting_decides_what_unsplit_counts_as() {
    let reach = Nodes::of(vec![decode("d")]).reach().expect("ready");
    assert_eq!(reach.clone().counted(WhenUnsplit::Ready), Ok(reach.clone()));
    assert!(reach.counted(WhenUnsplit::NotReady).is_err());
    let mut split = Nodes::of(vec![prefill("p"), decode("d")]);
    split.pair(&decode("d"), None);
    let reach = split.reach().expect("ready");
    assert!(reach.counted(WhenUnsplit::NotReady).is_ok());
}

#[test]
fn the_last_node_that_decodes_stays_unless_it_goes_already() {
    let mut nodes = Nodes::of(vec![prefill("p"), decode("d0"), decode("d1")]);
    assert_eq!(nodes.drain("d0", None), Ok(()));
    let refused = Err(LastDecodeNode { requests: 0 });
    assert_eq!(nodes.drain("d1", None), refused);
    assert_eq!(nodes.drain("d1", Some(AssignedRole::CoLocated)), refused);
    assert_eq!(nodes.drain("d0", None), Ok(()), "it drains already");
    assert_eq!(nodes.drain("p", None), Ok(()), "it decodes nothing");
    assert_eq!(nodes.drain("nobody", None), Ok(()));
}

#[test]
fn a_suspected_node_is_named_and_is_nobody_to_fall_back_on() {
    let mut nodes = Nodes::of(vec![decode("d0"), decode("d1")]);
    assert_eq!(nodes.reach().expect("ready").suspected, []);
    let id = decode("d1").id;
    nodes
        .cluster
        .members
        .get_mut(&id)
        .expect("there")
        .suspicion
        .failed(NOW, NOW);
    assert_eq!(nodes.reach().expect("ready").suspected, [NodeName::new("d1")]);
    assert!(nodes.drain("d0", None).is_err());
}
