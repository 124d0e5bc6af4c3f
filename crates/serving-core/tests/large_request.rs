//! One request for nearly a whole pool, two coordinators, four decode nodes at 80 %: the others go on, and it gets its place.
//!
//! The coordinators are the real brains and the nodes divide their permits by the real rules; what a node does with its work
//! is reduced to blocks that are busy for a while. Time is virtual.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use serving_core::cluster::{Cluster, ClusterAction, ClusterConfig, ClusterEvent, LegEvent, PrefillOutcome, StreamId};
use serving_core::compatibility::CompatibilityHash;
use serving_core::ids::{NodeEpoch, NodeId, NodeName, RequestId, TokenId, TransferId};
use serving_core::node::{
    KvBlockCounts, NodeCapacity, NodeRecord, NodeRole, NodeState, NodeStatus, PermitNote, Ticket,
};
use serving_core::request::{AttemptKey, Lane, Request, SamplingParams, StopConditions};
use serving_core::scheduler::permit_shares::{PermitShares, ShareId};
use serving_core::time::Time;

const COORDINATORS: usize = 2;
const BLOCK_TOKENS: u32 = 16;
const POOL_BLOCKS: u64 = 64;
const STEP: Duration = Duration::from_millis(10);
/// A status or a note is on its way for so many steps.
const DELAY_STEPS: usize = 1;
/// A small request: three blocks of prompt and one of growth, for one to five seconds.
const SMALL_PROMPT: u32 = 48;
const SMALL_BLOCKS: f64 = 4.0;
const SMALL_STEPS: u64 = 300;
const SMALL_STEPS_SPREAD: u64 = 200;
/// 60 of the 64 blocks.
const LARGE_PROMPT: u32 = 900;
const LARGE_ID: u128 = 1_000_000;
const LARGE_ARRIVES_STEP: u64 = 1_000;
/// Ten seconds: the age bound of the issue.
const WINDOW_STEPS: u64 = 1_000;

/// A node: permits by the real rules, work as blocks that are busy until a step.
struct Node {
    record: NodeRecord,
    shares: PermitShares,
    received_by: [u64; COORDINATORS],
    /// (coordinator, attempt, cost, ends at step); what ends never is ended by its request's end.
    work: Vec<(usize, AttemptKey, u64, u64)>,
    notes: VecDeque<(u64, usize, PermitNote)>,
}

impl Node {
    fn new(name: &str, role: NodeRole) -> Self {
        let record = NodeRecord {
            id: NodeId {
                name: NodeName::new(name),
                epoch: NodeEpoch(1),
            },
            role,
            is_co_located: false,
            address: format!("{name}:1"),
            kv_address: format!("{name}:1"),
            compatibility: CompatibilityHash([1; 32]).into(),
            transports: vec!["grpc".into()],
            version: "test".into(),
            capacity: NodeCapacity {
                kv_blocks: u32::try_from(POOL_BLOCKS).expect("small"),
                block_tokens: BLOCK_TOKENS,
                max_sequences: 1_000,
                max_batch_tokens: 2_048,
                max_model_tokens: 4_096,
                block_bytes: 1,
            },
            model_name: "smol".into(),
            state: NodeState::Ready,
            roles: Vec::new(),
        };
        let mut shares = PermitShares::default();
        for coordinator in 0..COORDINATORS {
            shares.connect(ShareId(coordinator as u64), NodeEpoch(coordinator as u64 + 1));
        }
        Self {
            record,
            shares,
            received_by: [0; COORDINATORS],
            work: Vec::new(),
            notes: VecDeque::new(),
        }
    }

    /// Prefill nodes are not what is scarce here: they have permits for many prompts at once.
    fn room(&self) -> u64 {
        let used: u64 = self.work.iter().map(|(_, _, cost, _)| cost).sum();
        match self.record.role {
            NodeRole::Prefill => 20_000 - used,
            NodeRole::Decode => POOL_BLOCKS - used,
        }
    }

    fn status(&self) -> NodeStatus {
        let received: u64 = self.received_by.iter().sum();
        NodeStatus {
            state: NodeState::Ready,
            permits_granted_total: received + self.room(),
            permits_received_total: received,
            permits_recalled_total: 0,
            permits_received_by: (0..COORDINATORS)
                .map(|c| (NodeEpoch(c as u64 + 1), self.received_by[c]))
                .collect(),
            coordinators: COORDINATORS as u32,
            kv_blocks: KvBlockCounts {
                free: u32::try_from(self.room().min(POOL_BLOCKS)).expect("small"),
                ..KvBlockCounts::default()
            },
            running_sequences: 0,
            waiting_sequences: 0,
            waiting_tokens: 0,
            prefix_query_tokens_total: 0,
            prefix_hit_tokens_total: 0,
            preemptions_total: 0,
            computed_tokens_total: 0,
            pairs: vec![],
        }
    }
}

fn request(id: u128, prompt_tokens: u32) -> Arc<Request> {
    let prompt: Vec<TokenId> = (0..prompt_tokens).map(TokenId).collect();
    Arc::new(Request {
        id: RequestId(id),
        prompt: Arc::from(prompt),
        client_prompt_tokens: prompt_tokens,
        constraint: Default::default(),
        sampling: SamplingParams::greedy(),
        stop: StopConditions {
            max_tokens: 16,
            min_tokens: 0,
            end_tokens: vec![],
            stop_token_ids: vec![],
        },
        choice_count: 1,
        seed: 1,
        logprobs: None,
        prompt_logprobs: None,
        prefix_salt: None,
        cache_tenant: None,
        report_kv_hashes: false,
        share: None,
        priority: 0,
        lane: Lane::Interactive,
        time_limit: Duration::from_secs(600),
    })
}

struct World {
    step: u64,
    clusters: Vec<Cluster>,
    nodes: Vec<Node>,
    /// (due at step, coordinator, node): statuses on their way.
    statuses: VecDeque<(u64, usize, usize, NodeStatus)>,
    placed_small: Vec<u64>,
    large_placed_step: Option<u64>,
}

impl World {
    fn new() -> Self {
        let config = || ClusterConfig {
            queue_requests_max: 10_000,
            queue_wait_max: Duration::from_secs(600),
            allow_local_prefill: false,
            ..ClusterConfig::default()
        };
        let mut nodes: Vec<Node> = (0..4).map(|i| Node::new(&format!("d{i}"), NodeRole::Decode)).collect();
        nodes.extend((0..2).map(|i| Node::new(&format!("p{i}"), NodeRole::Prefill)));
        let mut world = Self {
            step: 0,
            clusters: (0..COORDINATORS).map(|_| Cluster::new(config())).collect(),
            nodes,
            statuses: VecDeque::new(),
            placed_small: Vec::new(),
            large_placed_step: None,
        };
        for coordinator in 0..COORDINATORS {
            for node in 0..world.nodes.len() {
                let record = world.nodes[node].record.clone();
                let stream = StreamId(node as u64);
                world.apply(coordinator, ClusterEvent::NodeJoined { record, stream });
            }
        }
        world
    }

    fn now(&self) -> Time {
        Time::ZERO + STEP * u32::try_from(self.step).expect("short")
    }

    fn index_of(&self, node: &NodeId) -> usize {
        let is_it = |n: &Node| n.record.id == *node;
        self.nodes.iter().position(is_it).expect("a node of this world")
    }

    fn apply(&mut self, coordinator: usize, event: ClusterEvent) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let now = self.now();
            for action in self.clusters[coordinator].apply(now, event) {
                self.carry_out(coordinator, action, &mut events);
            }
        }
    }

    fn carry_out(&mut self, coordinator: usize, action: ClusterAction, events: &mut VecDeque<ClusterEvent>) {
        let leg = |key, event| ClusterEvent::Leg { key, event };
        match action {
            ClusterAction::Place { key, .. } => match key.request.0 {
                LARGE_ID => self.large_placed_step = Some(self.step),
                _ => self.placed_small.push(self.step),
            },
            ClusterAction::StartOpen {
                key,
                decode,
                permit_blocks,
                ..
            } => {
                let (index, cost) = (self.index_of(&decode.node), u64::from(permit_blocks));
                let shift = key.request.0.wrapping_mul(2_654_435_761) % u128::from(2 * SMALL_STEPS_SPREAD);
                let ends = self.step + SMALL_STEPS - SMALL_STEPS_SPREAD + u64::try_from(shift).expect("small");
                let node = &mut self.nodes[index];
                assert!(node.room() >= cost, "more work than {} has room for", decode.node);
                node.received_by[coordinator] += cost;
                node.work.push((coordinator, key, cost, ends));
                events.push_back(leg(
                    key,
                    LegEvent::Opened {
                        ticket: Some(ticket(&decode.node)),
                    },
                ));
            }
            ClusterAction::StartPrefill {
                key,
                prefill,
                permit_tokens,
                ..
            } => {
                let index = self.index_of(&prefill.node);
                self.nodes[index].received_by[coordinator] += u64::from(permit_tokens);
                events.push_back(leg(key, LegEvent::PrefillAccepted));
                events.push_back(leg(key, LegEvent::Committed));
                let outcome = PrefillOutcome::HandedOver;
                events.push_back(leg(key, LegEvent::PrefillFinished { outcome }));
            }
            ClusterAction::TellPermits { stream, note } => {
                let due = self.step + DELAY_STEPS as u64;
                let node = &mut self.nodes[usize::try_from(stream.0).expect("small")];
                node.notes.push_back((due, coordinator, note));
            }
            ClusterAction::Reject { request, reason, .. } => panic!("{request} was rejected: {}", reason.name()),
            ClusterAction::Fail { request, error } => panic!("{request} failed: {error}"),
            _ => {}
        }
    }

    fn run_step(&mut self) {
        self.step += 1;
        for index in 0..self.nodes.len() {
            let step = self.step;
            let ended: Vec<_> = self.nodes[index]
                .work
                .extract_if(.., |(_, _, _, ends)| *ends <= step)
                .collect();
            for (coordinator, key, _, _) in ended {
                self.apply(
                    coordinator,
                    ClusterEvent::Leg {
                        key,
                        event: LegEvent::DecodeFinished,
                    },
                );
            }
        }
        for index in 0..self.nodes.len() {
            self.divide(index);
        }
        while self.statuses.front().is_some_and(|(due, ..)| *due <= self.step) {
            let Some((_, coordinator, node, status)) = self.statuses.pop_front() else {
                break;
            };
            let (stream, read_at) = (StreamId(node as u64), self.now());
            self.apply(
                coordinator,
                ClusterEvent::NodeReported {
                    stream,
                    read_at,
                    status,
                },
            );
        }
        for coordinator in 0..COORDINATORS {
            self.apply(coordinator, ClusterEvent::Tick);
        }
    }

    /// Takes the coordinators' notes, divides the permits, and sends each coordinator its status.
    fn divide(&mut self, index: usize) {
        let (now, step) = (self.now(), self.step);
        let node = &mut self.nodes[index];
        while node.notes.front().is_some_and(|(due, ..)| *due <= step) {
            let Some((_, coordinator, note)) = node.notes.pop_front() else {
                break;
            };
            node.shares.note(now, ShareId(coordinator as u64), note);
        }
        let status = node.status();
        node.shares.divide(now, &status);
        for coordinator in 0..COORDINATORS {
            let said = node.shares.of(ShareId(coordinator as u64));
            let status = NodeStatus {
                permits_granted_total: said.granted_total,
                permits_received_total: said.received_total,
                permits_recalled_total: said.recalled_total,
                ..status.clone()
            };
            self.statuses
                .push_back((step + DELAY_STEPS as u64, coordinator, index, status));
        }
    }
}

fn ticket(node: &NodeId) -> Ticket {
    Ticket {
        transfer: TransferId(1),
        decode_node: node.clone(),
        decode_address: "d:1".into(),
        blocks: vec![],
        prefix_blocks: 0,
        total_bytes: 0,
        expires_in: Duration::from_secs(5),
    }
}

/// Small requests by a fixed random sequence, at 80 % of what the decode nodes can hold; the coordinators take turns.
fn run(with_large: bool, seed: u64) -> World {
    let mut world = World::new();
    let per_step = 0.8 * 4.0 * POOL_BLOCKS as f64 / SMALL_BLOCKS / SMALL_STEPS as f64;
    let mut random = seed;
    let mut due = BTreeMap::new();
    let (mut at, mut id) = (0.0_f64, 0_u128);
    while at < (LARGE_ARRIVES_STEP + WINDOW_STEPS) as f64 {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let uniform = ((random >> 11) as f64 + 1.0) / (1_u64 << 53) as f64;
        at -= uniform.ln() / per_step;
        id += 1;
        due.entry(at as u64).or_insert_with(Vec::new).push(id);
    }
    for step in 0..LARGE_ARRIVES_STEP + WINDOW_STEPS {
        for id in due.remove(&step).unwrap_or_default() {
            let request = request(id, SMALL_PROMPT);
            world.apply((id % 2) as usize, ClusterEvent::RequestArrived { request });
        }
        if with_large && step == LARGE_ARRIVES_STEP {
            let request = request(LARGE_ID, LARGE_PROMPT);
            world.apply(0, ClusterEvent::RequestArrived { request });
        }
        world.run_step();
    }
    world
}

#[test]
fn a_request_for_nearly_a_whole_pool_gets_its_place_and_the_others_go_on() {
    for seed in 1..=5 {
        let (without, with) = (run(false, seed), run(true, seed));
        let placed_step = with.large_placed_step.expect("the large request is never placed");
        let waited_ms = (placed_step - LARGE_ARRIVES_STEP) * 10;
        let while_it_waits = |world: &World| {
            let is_in = |step: &&u64| (LARGE_ARRIVES_STEP..placed_step).contains(*step);
            world.placed_small.iter().filter(is_in).count() as f64
        };
        let share = while_it_waits(&with) / while_it_waits(&without);
        println!("seed {seed}: placed after {waited_ms} ms; meanwhile {share:.3} of the others' placements");
        assert!(waited_ms <= 10_000, "seed {seed}: placed after {waited_ms} ms");
        assert!(share >= 0.9, "seed {seed}: {share:.3} of the placements without it");
    }
}
