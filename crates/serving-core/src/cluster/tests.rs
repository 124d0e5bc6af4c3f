//! Random event orders against the whole brain: exactly one end for each request, permits and lost nodes respected.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::prelude::*;

use super::fixtures::{node_record, ready_status, request};
use super::*;
use crate::ids::{Attempt, NodeId, NodeName, TokenId, TransferId};
use crate::kv::ChainLink;
use crate::kv::prefix_log::{PrefixReport, prefix_keys};
use crate::node::NodeRole;
use crate::node::{NodeState, NodeStatus, Ticket};
use crate::request::AttemptKey;

/// One step of a random history. Numbers pick among what exists at that moment.
#[derive(Clone, Debug)]
enum Step {
    Arrive {
        prompt: u32,
        max_tokens: u32,
        choices: u32,
        is_batch: bool,
    },
    Leg {
        pick: usize,
        event: u8,
    },
    Wild {
        request: u8,
        attempt: u8,
        event: u8,
    },
    Edge {
        pick: usize,
        what: u8,
    },
    Join {
        node: usize,
        is_new_life: bool,
    },
    Report {
        node: usize,
        is_draining: bool,
    },
    Prefixes {
        node: usize,
        tokens: u32,
    },
    Disconnect {
        node: usize,
    },
    Leave {
        node: usize,
    },
    Pass {
        ms: u64,
    },
    StoodStill {
        ms: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1_u32..200, 1_u32..40, 1_u32..4, any::<bool>())
            .prop_map(|(prompt, max_tokens, choices, is_batch)| Step::Arrive { prompt, max_tokens, choices, is_batch }),
        12 => (any::<usize>(), 0_u8..16).prop_map(|(pick, event)| Step::Leg { pick, event }),
        1 => (any::<u8>(), 0_u8..3, 0_u8..16).prop_map(|(request, attempt, event)| Step::Wild { request, attempt, event }),
        1 => (any::<usize>(), 0_u8..4).prop_map(|(pick, what)| Step::Edge { pick, what }),
        2 => (0_usize..5, any::<bool>()).prop_map(|(node, is_new_life)| Step::Join { node, is_new_life }),
        5 => (0_usize..5, prop::bool::weighted(0.1)).prop_map(|(node, is_draining)| Step::Report { node, is_draining }),
        2 => (0_usize..5, 0_u32..200).prop_map(|(node, tokens)| Step::Prefixes { node, tokens }),
        1 => (0_usize..5).prop_map(|node| Step::Disconnect { node }),
        1 => (0_usize..5).prop_map(|node| Step::Leave { node }),
        4 => (1_u64..3_000).prop_map(|ms| Step::Pass { ms }),
        1 => (1_u64..20_000).prop_map(|ms| Step::StoodStill { ms }),
    ]
}

const NODES: [(&str, NodeRole); 5] = [
    ("d0", NodeRole::Decode),
    ("d1", NodeRole::Decode),
    ("d2", NodeRole::Decode),
    ("p0", NodeRole::Prefill),
    ("p1", NodeRole::Prefill),
];

/// The shell and the nodes as the checker sees them.
struct World {
    cluster: Cluster,
    now: Time,
    next_request: u128,
    next_stream: u64,
    epochs: [u64; 5],
    streams: [Option<StreamId>; 5],
    granted: BTreeMap<StreamId, u64>,
    used: BTreeMap<StreamId, u64>,
    alive: BTreeSet<RequestId>,
    ended: BTreeMap<RequestId, u32>,
    running: Vec<(AttemptKey, Leg)>,
    history: Vec<String>,
}

impl World {
    fn new(config: ClusterConfig) -> Self {
        Self {
            cluster: Cluster::new(config),
            now: Time::ZERO,
            next_request: 1,
            next_stream: 1,
            epochs: [1; 5],
            streams: [None; 5],
            granted: BTreeMap::new(),
            used: BTreeMap::new(),
            alive: BTreeSet::new(),
            ended: BTreeMap::new(),
            running: Vec::new(),
            history: Vec::new(),
        }
    }

    fn apply(&mut self, event: ClusterEvent) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let actions = self.cluster.apply(self.now, event);
            self.cluster.check_invariants();
            for action in actions {
                self.history.push(format!("{action:?}"));
                if let Some(answer) = self.carry_out(action) {
                    events.push(answer);
                }
            }
        }
    }

    fn check_target(&mut self, node: &NodeId, cost: u32) {
        let index = NODES
            .iter()
            .position(|(n, _)| *n == node.name.as_str())
            .expect("known node");
        assert_eq!(node.epoch.0, self.epochs[index], "work for an old life of {node}");
        let stream = self.streams[index].unwrap_or_else(|| panic!("work for {node}, which has no stream"));
        let used = self.used.entry(stream).or_insert(0);
        *used += u64::from(cost);
        let granted = self.granted.get(&stream).copied().unwrap_or(0);
        assert!(*used <= granted, "{node}: used {used} of {granted}");
    }

    fn carry_out(&mut self, action: ClusterAction) -> Option<ClusterEvent> {
        match action {
            ClusterAction::StartOpen {
                key,
                decode,
                permit_blocks,
                ..
            } => {
                self.check_target(&decode.node, permit_blocks);
                self.running.push((key, Leg::Decode));
            }
            ClusterAction::StartPrefill {
                key,
                prefill,
                permit_tokens,
                ..
            } => {
                // Its permit was taken with the decode permit; the node may have lost its stream since then.
                let index = NODES
                    .iter()
                    .position(|(n, _)| *n == prefill.node.name.as_str())
                    .expect("known node");
                assert_eq!(prefill.node.epoch.0, self.epochs[index]);
                assert!(permit_tokens > 0);
                self.running.push((key, Leg::Prefill));
            }
            ClusterAction::CancelLeg { key, leg } | ClusterAction::FailLeg { key, leg, .. } => {
                self.running.retain(|r| *r != (key, leg))
            }
            ClusterAction::EndAttempt { key } => {
                assert!(
                    !self.running.iter().any(|(k, _)| *k == key),
                    "a leg of an ended attempt still runs"
                );
                let delivered = Delivered {
                    tokens: vec![TokenId(9)],
                    token_count: u64::from(self.next_request.is_multiple_of(2)),
                    is_complete: self.next_request.is_multiple_of(7),
                };
                return Some(ClusterEvent::AttemptEnded { key, delivered });
            }
            ClusterAction::Reject { request, .. }
            | ClusterAction::Fail { request, .. }
            | ClusterAction::Complete { request, .. }
            | ClusterAction::Forget { request } => {
                *self.ended.entry(request).or_insert(0) += 1;
                self.alive.remove(&request);
                assert!(
                    !self.running.iter().any(|(k, _)| k.request == request),
                    "{request} ended with a leg open"
                );
            }
            ClusterAction::RefuseNode { stream, .. } => {
                for slot in &mut self.streams {
                    if *slot == Some(stream) {
                        *slot = None;
                    }
                }
            }
            ClusterAction::DropNode { node, .. } => {
                let index = NODES
                    .iter()
                    .position(|(n, _)| *n == node.name.as_str())
                    .expect("known node");
                if self.epochs[index] == node.epoch.0 {
                    self.streams[index] = None;
                }
            }
            ClusterAction::Place { .. }
            | ClusterAction::WelcomeNode { .. }
            | ClusterAction::RenewLease { .. }
            | ClusterAction::SendPeers { .. }
            | ClusterAction::TellPermits { .. }
            | ClusterAction::RequestDrain { .. } => {}
        }
        None
    }

    fn leg_event(&self, leg: Leg, event: u8) -> LegEvent {
        let ticket = Ticket {
            transfer: TransferId(1),
            decode_node: node_record("d0", 1, NodeRole::Decode).id,
            decode_address: "d0:1".into(),
            blocks: vec![],
            prefix_blocks: 0,
            total_bytes: 0,
            expires_in: Duration::from_secs(1),
        };
        let failed = |fault| LegError::Node {
            fault,
            reason: "r".into(),
            detail: "d".into(),
        };
        match event {
            0 | 1 if leg == Leg::Decode => LegEvent::Opened { ticket: Some(ticket) },
            2 if leg == Leg::Decode => LegEvent::Opened { ticket: None },
            0..=2 => LegEvent::PrefillAccepted,
            3 | 4 => LegEvent::FirstToken { leg },
            5 | 6 if leg == Leg::Decode => LegEvent::Committed,
            5 => LegEvent::PrefillFinished {
                outcome: PrefillOutcome::HandedOver,
            },
            6 => LegEvent::PrefillFinished {
                outcome: PrefillOutcome::EndedAtFirstToken,
            },
            7 | 8 => LegEvent::TokensDelivered { leg, count: 1 },
            9 | 10 if leg == Leg::Decode => LegEvent::DecodeFinished,
            9 | 10 => LegEvent::PrefillFinished {
                outcome: PrefillOutcome::HandedOver,
            },
            11 => LegEvent::Refused {
                leg,
                reason: RefuseReason::NoCapacity,
            },
            12 => LegEvent::Failed {
                leg,
                error: LegError::Unreachable { detail: "x".into() },
            },
            13 => LegEvent::Failed {
                leg,
                error: failed(NodeFault::Transfer),
            },
            14 => LegEvent::Failed {
                leg,
                error: failed(NodeFault::Draining),
            },
            _ => LegEvent::Failed {
                leg,
                error: LegError::ConnectionLost { detail: "x".into() },
            },
        }
    }

    fn status(&mut self, node: usize, is_draining: bool) -> Option<ClusterEvent> {
        let stream = self.streams[node]?;
        let used = self.used.get(&stream).copied().unwrap_or(0);
        let granted = self.granted.entry(stream).or_insert(0);
        *granted = (*granted).max(used + 300);
        let state = if is_draining {
            NodeState::Draining
        } else {
            NodeState::Ready
        };
        let status = NodeStatus {
            state,
            permits_received_total: used,
            ..ready_status(*granted)
        };
        let read_at = self.now;
        Some(ClusterEvent::NodeReported {
            stream,
            read_at,
            status,
        })
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Arrive {
                prompt,
                max_tokens,
                choices,
                is_batch,
            } => {
                let mut r = request(self.next_request, prompt, max_tokens);
                r.choice_count = choices;
                r.lane = if is_batch { Lane::Batch } else { Lane::Interactive };
                self.next_request += 1;
                self.alive.insert(r.id);
                self.apply(ClusterEvent::RequestArrived { request: Arc::new(r) });
            }
            Step::Leg { pick, event } if !self.running.is_empty() => {
                let (key, leg) = self.running[pick % self.running.len()];
                let event = self.leg_event(leg, event);
                let ends = matches!(
                    event,
                    LegEvent::Failed { .. }
                        | LegEvent::Refused { .. }
                        | LegEvent::DecodeFinished
                        | LegEvent::PrefillFinished { .. }
                );
                if ends {
                    self.running.retain(|r| *r != (key, leg));
                }
                self.apply(ClusterEvent::Leg { key, event });
            }
            Step::Leg { .. } => {}
            Step::Wild {
                request,
                attempt,
                event,
            } => {
                let key = AttemptKey {
                    request: RequestId(u128::from(request)),
                    attempt: Attempt(u32::from(attempt)),
                };
                // Only what a node could have sent late for an attempt that is over.
                if !self.running.iter().any(|(k, _)| *k == key) {
                    let event = self.leg_event(Leg::Decode, event);
                    self.apply(ClusterEvent::Leg { key, event });
                }
            }
            Step::Edge { pick, what } => self.edge(pick, what),
            Step::Join { node, is_new_life } => {
                if is_new_life {
                    let has_stream = self.streams[node].is_some();
                    if let Some(stream) = self.streams[node].take() {
                        self.apply(ClusterEvent::NodeDisconnected { stream });
                    }
                    self.epochs[node] += u64::from(has_stream);
                }
                let stream = StreamId(self.next_stream);
                self.next_stream += 1;
                self.streams[node] = Some(stream);
                let record = node_record(NODES[node].0, self.epochs[node], NODES[node].1);
                self.apply(ClusterEvent::NodeJoined { record, stream });
            }
            Step::Report { node, is_draining } => {
                if let Some(event) = self.status(node, is_draining) {
                    self.apply(event);
                }
            }
            Step::Prefixes { node, tokens } => {
                if let Some(stream) = self.streams[node] {
                    let prompt = request(0, tokens, 1).prompt;
                    let report = PrefixReport::Whole(prefix_keys(ChainLink::ROOT, &prompt, 16).collect());
                    self.apply(ClusterEvent::PrefixesReported { stream, report });
                }
            }
            Step::Disconnect { node } => {
                if let Some(stream) = self.streams[node].take() {
                    self.apply(ClusterEvent::NodeDisconnected { stream });
                }
            }
            Step::Leave { node } => {
                if let Some(stream) = self.streams[node].take() {
                    self.apply(ClusterEvent::NodeLeft { stream });
                }
            }
            Step::StoodStill { ms } => {
                let stillness = Duration::from_millis(ms);
                self.now = self.now + stillness;
                self.apply(ClusterEvent::StoodStill { stillness });
            }
            Step::Pass { ms } => {
                self.now = self.now + Duration::from_millis(ms);
                self.apply(ClusterEvent::Tick);
                assert!(
                    self.cluster.next_wake().is_none_or(|t| t > self.now),
                    "a timer that is due stays"
                );
            }
        }
    }

    fn edge(&mut self, pick: usize, what: u8) {
        let Some(request) = self.alive.iter().nth(pick % self.alive.len().max(1)).copied() else {
            return;
        };
        let event = match what {
            0 => ClusterEvent::ClientGone { request },
            1 => {
                let error = RequestError::SlowReader {
                    behind_tokens: 1,
                    waited_ms: 1,
                };
                ClusterEvent::StreamBroken { request, error }
            }
            by => {
                let by = if by == 2 { FinishedBy::Edge } else { FinishedBy::Node };
                ClusterEvent::ChoiceFinished {
                    request,
                    choice: ChoiceIndex(0),
                    by,
                }
            }
        };
        self.apply(event);
    }
}

fn config() -> ClusterConfig {
    ClusterConfig {
        queue_requests_max: 4,
        local_prefill_below_tokens: 24,
        on_illegal_transition: OnIllegalTransition::Panic,
        ..ClusterConfig::default()
    }
}

fn run(steps: &[Step], config: ClusterConfig) -> World {
    let mut world = World::new(config);
    for node in 0..NODES.len() {
        world.step(Step::Join {
            node,
            is_new_life: false,
        });
        world.step(Step::Report {
            node,
            is_draining: false,
        });
    }
    for step in steps {
        world.step(step.clone());
    }
    world
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn each_request_ends_exactly_once_whatever_happens(
        steps in prop::collection::vec(step(), 1..160),
        allow_local_prefill in any::<bool>(),
    ) {
        let config = ClusterConfig { allow_local_prefill, ..config() };
        let mut world = run(&steps, config);
        // Nothing may outlive its deadline.
        world.step(Step::Pass { ms: 61_000 });
        prop_assert_eq!(world.cluster.unfinished(), 0);
        prop_assert!(world.alive.is_empty(), "{:?} never ended", world.alive);
        for (request, ends) in &world.ended {
            prop_assert_eq!(*ends, 1, "{} ended {} times", request, ends);
        }
        prop_assert_eq!(world.cluster.stats().illegal_transitions, 0);
    }

    #[test]
    fn the_same_events_make_the_same_history(steps in prop::collection::vec(step(), 1..80)) {
        let one = run(&steps, config());
        let two = run(&steps, config());
        prop_assert_eq!(one.history, two.history);
    }
}

#[test]
fn an_unknown_drain_and_a_double_arrival_change_nothing() {
    let mut world = run(&[], config());
    let r = Arc::new(request(1, 40, 8));
    world.alive.insert(r.id);
    world.apply(ClusterEvent::RequestArrived { request: r.clone() });
    let before = world.cluster.unfinished();
    world.apply(ClusterEvent::RequestArrived { request: r });
    world.apply(ClusterEvent::DrainNode {
        name: NodeName::new("nobody"),
        next_role: None,
    });
    assert_eq!(world.cluster.unfinished(), before);
    assert!(world.ended.is_empty());
}
