//! A made-up cluster for the tests of records: a real core, and nodes and clients that do anything at random, faults included.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serving_core::cluster::{
    Cluster, ClusterAction, ClusterConfig, ClusterEvent, Delivered, DropCause, FinishedBy, JoinRefusal, Leg, LegError,
    LegEvent, NodeFault, PlacementFacts, PrefillOutcome, RefuseReason, StreamId, Target,
};
use serving_core::compatibility::CompatibilityHash;
use serving_core::ids::{Attempt, ChoiceIndex, NodeEpoch, NodeId, NodeName, RequestId, TokenId, TransferId};
use serving_core::kv::ChainLink;
use serving_core::kv::prefix_log::{PrefixReport, prefix_keys};
use serving_core::node::{
    AssignedRole, KvBlockCounts, NodeCapacity, NodeRecord, NodeRole, NodeState, NodeStatus, PairHealth, PermitNote,
    Ticket,
};
use serving_core::request::{
    AttemptKey, Lane, LocalPrefillReason, RejectReason, Request, RequestError, SamplingParams, StopConditions,
};
use serving_core::routing::RoutingPolicy;
use serving_core::time::Time;

use crate::flight_record::{EntryEncoder, Header, Note, file_start, frame_of};

/// Every token of a prompt is above it. So is no other number of the world, so that a token in a record would be found.
pub(super) const TOKEN_BASE: u32 = 0xabc0_0000;
const NODES: [(&str, NodeRole); 5] = [
    ("d0", NodeRole::Decode),
    ("d1", NodeRole::Decode),
    ("d2", NodeRole::Decode),
    ("p0", NodeRole::Prefill),
    ("p1", NodeRole::Prefill),
];
const BLOCK_TOKENS: u32 = 16;
const PREFIXES: u32 = 6;

#[derive(Default)]
struct NodeSide {
    epoch: u64,
    stream: Option<StreamId>,
    granted: u64,
    used: u64,
}

/// One life of a coordinator, and its record.
pub(super) struct World {
    rng: StdRng,
    now: Time,
    cluster: Cluster,
    encoder: EntryEncoder,
    record: Vec<u8>,
    nodes: [NodeSide; NODES.len()],
    next_stream: u64,
    next_request: u128,
    running: Vec<(AttemptKey, Leg)>,
    alive: Vec<RequestId>,
    pub events: u64,
}

impl World {
    pub(super) fn new(seed: u64, routing: RoutingPolicy) -> Self {
        let mut header = header();
        header.config.routing = routing;
        let mut world = Self {
            rng: StdRng::seed_from_u64(seed),
            now: Time::from_millis(1),
            cluster: Cluster::new(header.config.clone()),
            encoder: EntryEncoder::default(),
            record: file_start(&header).expect("a header"),
            nodes: Default::default(),
            next_stream: 0,
            next_request: 1 << 100,
            running: Vec::new(),
            alive: Vec::new(),
            events: 0,
        };
        (0..NODES.len()).for_each(|node| world.join(node));
        world
    }

    /// No node says anything until every lease has run out.
    pub(super) fn silence(mut self) -> Self {
        self.now = self.now + Duration::from_secs(60);
        self.apply(ClusterEvent::Tick);
        self
    }

    /// The record without an end mark.
    pub(super) fn run(mut self, events: u64) -> Vec<u8> {
        while self.events < events {
            self.now = self.now + Duration::from_micros(self.rng.random_range(0..20_000));
            self.step();
            if self.encoder.waiting_bytes() > 10_000 {
                let batch = self.encoder.take();
                self.record.extend(frame_of(&batch));
            }
        }
        let batch = self.encoder.take();
        self.record.extend(frame_of(&batch));
        self.record
    }

    fn step(&mut self) {
        match self.rng.random_range(0..100) {
            0..20 => self.arrive(),
            20..65 => self.leg(),
            65..80 => {
                let node = self.any_node();
                self.report(node);
            }
            80..85 => self.prefixes(),
            85..87 => self.break_node(),
            87..89 => {
                let node = self.any_node();
                self.join(node);
            }
            89..92 => self.client(),
            92..93 => self.order(),
            _ => self.apply(ClusterEvent::Tick),
        }
    }

    fn any_node(&mut self) -> usize {
        self.rng.random_range(0..NODES.len())
    }

    fn apply(&mut self, event: ClusterEvent) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            self.encoder.begin(self.now, &event);
            let actions = self.cluster.apply(self.now, event);
            self.encoder
                .finish(self.cluster.looked_up(), &actions)
                .expect("it can be encoded");
            self.events += 1;
            for action in actions {
                events.extend(self.carry_out(action));
            }
        }
    }

    fn carry_out(&mut self, action: ClusterAction) -> Option<ClusterEvent> {
        match action {
            ClusterAction::StartOpen {
                key,
                decode,
                permit_blocks,
                ..
            } => {
                self.spend(&decode.node, permit_blocks);
                self.running.push((key, Leg::Decode));
            }
            ClusterAction::StartPrefill {
                key,
                prefill,
                permit_tokens,
                ..
            } => {
                self.spend(&prefill.node, permit_tokens);
                self.running.push((key, Leg::Prefill));
            }
            ClusterAction::CancelLeg { key, leg } | ClusterAction::FailLeg { key, leg, .. } => {
                self.running.retain(|running| *running != (key, leg));
            }
            ClusterAction::EndAttempt { key } => {
                let count = self.rng.random_range(0..4);
                let delivered = Delivered {
                    tokens: (0..count).map(|i| TokenId(TOKEN_BASE + i)).collect(),
                    token_count: u64::from(count),
                    is_complete: self.rng.random_bool(0.1),
                };
                self.running.retain(|(running, _)| *running != key);
                return Some(ClusterEvent::AttemptEnded { key, delivered });
            }
            ClusterAction::Reject { request, .. }
            | ClusterAction::Fail { request, .. }
            | ClusterAction::Complete { request, .. }
            | ClusterAction::Forget { request } => {
                self.alive.retain(|alive| *alive != request);
                self.running.retain(|(key, _)| key.request != request);
                let output_tokens = 3;
                self.encoder.note(self.now, &Note::Delivered { request, output_tokens });
            }
            _ => {}
        }
        None
    }

    fn spend(&mut self, node: &NodeId, permits: u32) {
        let index = NODES.iter().position(|(name, _)| *name == node.name.as_str());
        if let Some(state) = index.map(|index| &mut self.nodes[index]) {
            state.used += u64::from(permits);
        }
    }

    fn prompt(&mut self) -> Vec<TokenId> {
        let prefix = self.rng.random_range(0..PREFIXES);
        let shared = self.rng.random_range(0..20) * BLOCK_TOKENS;
        let own = self.rng.random_range(1..60);
        let of_prefix = (0..shared).map(|i| TokenId(TOKEN_BASE + prefix * 1_000 + i));
        let own_start = TOKEN_BASE + 0x1_0000 + u32::try_from(self.events % 0xffff).expect("small");
        of_prefix.chain((0..own).map(|i| TokenId(own_start + i))).collect()
    }

    fn arrive(&mut self) {
        let prompt = self.prompt();
        self.next_request += self.rng.random_range(1..u128::from(u64::MAX));
        let id = RequestId(self.next_request);
        let mut request = request(id, prompt);
        request.stop.max_tokens = self.rng.random_range(1..40);
        request.choice_count = if self.rng.random_bool(0.1) { 2 } else { 1 };
        request.prompt_logprobs = self.rng.random_bool(0.05).then_some(1);
        request.time_limit = Duration::from_millis(self.rng.random_range(0..20_000));
        if self.rng.random_bool(0.3) {
            request.lane = Lane::Batch;
        }
        self.alive.push(id);
        self.apply(ClusterEvent::RequestArrived {
            request: Arc::new(request),
        });
    }

    fn leg(&mut self) {
        if self.running.is_empty() {
            return self.arrive();
        }
        let (key, leg) = self.running[self.rng.random_range(0..self.running.len())];
        let event = self.leg_event(leg);
        let ends = matches!(
            event,
            LegEvent::Failed { .. }
                | LegEvent::Refused { .. }
                | LegEvent::DecodeFinished
                | LegEvent::PrefillFinished { .. }
        );
        if ends {
            self.running.retain(|running| *running != (key, leg));
        }
        self.apply(ClusterEvent::Leg { key, event });
    }

    fn leg_event(&mut self, leg: Leg) -> LegEvent {
        let failed = |error| LegEvent::Failed { leg, error };
        match (self.rng.random_range(0..20), leg) {
            (0..5, Leg::Decode) => {
                let has_ticket = self.rng.random_bool(0.8);
                let ticket = has_ticket.then(|| ticket(self.rng.random()));
                LegEvent::Opened { ticket }
            }
            (0..5, Leg::Prefill) => LegEvent::PrefillAccepted,
            (5..9, _) => LegEvent::FirstToken { leg },
            (9..12, Leg::Decode) => LegEvent::Committed,
            (12..15, Leg::Decode) => LegEvent::DecodeFinished,
            (9..15, Leg::Prefill) => LegEvent::PrefillFinished {
                outcome: PrefillOutcome::HandedOver,
            },
            (15, _) => LegEvent::TokensDelivered { leg, count: 4 },
            (16, _) => LegEvent::Refused {
                leg,
                reason: RefuseReason::NoCapacity,
            },
            (17, _) => failed(LegError::Node {
                fault: NodeFault::Transfer,
                reason: "reset".to_owned(),
                detail: "a test".to_owned(),
            }),
            (18, _) => failed(LegError::Unreachable { detail: "x".to_owned() }),
            _ => failed(LegError::ConnectionLost { detail: "x".to_owned() }),
        }
    }

    fn join(&mut self, node: usize) {
        self.next_stream += 1;
        let stream = StreamId(self.next_stream);
        let is_new_life = self.nodes[node].epoch == 0 || self.rng.random_bool(0.5);
        let state = &mut self.nodes[node];
        state.epoch += u64::from(is_new_life);
        (state.stream, state.granted, state.used) = (Some(stream), 0, 0);
        let record = node_record(node, state.epoch);
        self.apply(ClusterEvent::NodeJoined { record, stream });
        self.report(node);
    }

    fn report(&mut self, node: usize) {
        let Some(stream) = self.nodes[node].stream else {
            return;
        };
        let is_draining = self.rng.random_bool(0.02);
        let room = self.rng.random_range(0..400);
        let state = &mut self.nodes[node];
        state.granted = state.granted.max(state.used + room);
        let mut status = status(state.granted, self.nodes[0].epoch);
        status.permits_received_total = self.nodes[node].used;
        status.computed_tokens_total = self.events;
        if is_draining {
            status.state = NodeState::Draining;
        }
        let read_at = self.now;
        self.apply(ClusterEvent::NodeReported {
            stream,
            read_at,
            status,
        });
    }

    fn prefixes(&mut self) {
        let node = self.any_node();
        let prompt = self.prompt();
        let keys: Vec<_> = prefix_keys(ChainLink::ROOT, &prompt, BLOCK_TOKENS).collect();
        if let Some(stream) = self.nodes[node].stream {
            let report = match self.rng.random_bool(0.2) {
                true => PrefixReport::Whole(keys.into_iter().collect()),
                false => PrefixReport::Changes {
                    listed: keys,
                    gone: Vec::new(),
                },
            };
            self.apply(ClusterEvent::PrefixesReported { stream, report });
        }
    }

    fn break_node(&mut self) {
        let node = self.any_node();
        if let Some(stream) = self.nodes[node].stream.take() {
            let event = match self.rng.random_bool(0.7) {
                true => ClusterEvent::NodeDisconnected { stream },
                false => ClusterEvent::NodeLeft { stream },
            };
            self.apply(event);
        }
    }

    fn client(&mut self) {
        if self.alive.is_empty() {
            return;
        }
        let request = self.alive[self.rng.random_range(0..self.alive.len())];
        let event = match self.rng.random_range(0..3) {
            0 => ClusterEvent::ClientGone { request },
            1 => ClusterEvent::StreamBroken {
                request,
                error: RequestError::SlowReader {
                    behind_tokens: 9,
                    waited_ms: 8,
                },
            },
            _ => ClusterEvent::ChoiceFinished {
                request,
                choice: ChoiceIndex(0),
                by: FinishedBy::Edge,
            },
        };
        self.apply(event);
    }

    fn order(&mut self) {
        let node = self.any_node();
        let event = match self.rng.random_bool(0.5) {
            true => ClusterEvent::DrainNode {
                name: NodeName::new(NODES[node].0),
                next_role: Some(AssignedRole::Decode),
            },
            false => ClusterEvent::StoodStill {
                stillness: Duration::from_millis(300),
            },
        };
        self.apply(event);
    }
}

fn node_record(node: usize, epoch: u64) -> NodeRecord {
    let (name, role) = NODES[node];
    NodeRecord {
        id: NodeId {
            name: NodeName::new(name),
            epoch: NodeEpoch(epoch),
        },
        role,
        is_co_located: false,
        address: format!("{name}:1"),
        kv_address: format!("{name}:2"),
        compatibility: CompatibilityHash([7; 32]).into(),
        transports: vec!["grpc".to_owned()],
        version: "0.0.0".to_owned(),
        capacity: NodeCapacity {
            kv_blocks: 300,
            block_tokens: BLOCK_TOKENS,
            max_sequences: 8,
            max_batch_tokens: 512,
            max_model_tokens: 4_096,
            block_bytes: 1_024,
        },
        model_name: "m".to_owned(),
        state: NodeState::Ready,
        roles: Vec::new(),
    }
}

fn ticket(transfer: u128) -> Ticket {
    Ticket {
        transfer: TransferId(transfer),
        decode_node: node_record(0, 1).id,
        decode_address: "d0:2".to_owned(),
        blocks: Vec::new(),
        prefix_blocks: 0,
        total_bytes: 0,
        expires_in: Duration::from_secs(1),
    }
}

pub(super) fn header() -> Header {
    Header {
        version: "0.0.0".to_owned(),
        coordinator: "test".to_owned(),
        started_unix_ms: 1,
        config: ClusterConfig {
            queue_requests_max: 40,
            queue_wait_max: Duration::from_secs(4),
            local_prefill_below_tokens: 40,
            ..ClusterConfig::default()
        },
    }
}

fn request(id: RequestId, prompt: Vec<TokenId>) -> Request {
    Request {
        id,
        client_prompt_tokens: u32::try_from(prompt.len()).expect("short"),
        constraint: Default::default(),
        prompt: prompt.into(),
        sampling: SamplingParams::greedy(),
        stop: StopConditions {
            max_tokens: 9,
            min_tokens: 0,
            end_tokens: vec![TokenId(TOKEN_BASE)],
            stop_token_ids: vec![TokenId(TOKEN_BASE + 1)],
        },
        choice_count: 1,
        seed: 3,
        logprobs: None,
        prompt_logprobs: None,
        prefix_salt: None,
        cache_tenant: None,
        report_kv_hashes: false,
        share: None,
        priority: 0,
        lane: Lane::Interactive,
        time_limit: Duration::from_secs(20),
    }
}

fn status(granted: u64, decode_epoch: u64) -> NodeStatus {
    NodeStatus {
        state: NodeState::Ready,
        permits_granted_total: granted,
        permits_received_total: 0,
        permits_recalled_total: 0,
        permits_received_by: Vec::new(),
        coordinators: 1,
        kv_blocks: KvBlockCounts {
            free: 200,
            ..KvBlockCounts::default()
        },
        running_sequences: 1,
        waiting_sequences: 0,
        waiting_tokens: 0,
        prefix_query_tokens_total: 0,
        prefix_hit_tokens_total: 0,
        preemptions_total: 0,
        computed_tokens_total: 5,
        pairs: vec![PairHealth {
            decode_node: node_record(0, decode_epoch).id,
            unusable_reason: None,
            transport: Some("grpc".to_owned()),
        }],
    }
}

const KEY: AttemptKey = AttemptKey {
    request: RequestId(1 << 77),
    attempt: Attempt(1),
};

pub(super) fn one_of_each_event() -> Vec<ClusterEvent> {
    let (stream, request) = (StreamId(5), KEY.request);
    let leg = |event| ClusterEvent::Leg { key: KEY, event };
    vec![
        ClusterEvent::RequestArrived {
            request: Arc::new(self::request(request, vec![TokenId(TOKEN_BASE); 40])),
        },
        ClusterEvent::ClientGone { request },
        ClusterEvent::ChoiceFinished {
            request,
            choice: ChoiceIndex(1),
            by: FinishedBy::Edge,
        },
        ClusterEvent::StreamBroken {
            request,
            error: RequestError::Internal("x".to_owned()),
        },
        ClusterEvent::AttemptEnded {
            key: KEY,
            delivered: Delivered {
                tokens: vec![TokenId(TOKEN_BASE); 3],
                token_count: 3,
                is_complete: true,
            },
        },
        leg(LegEvent::Opened {
            ticket: Some(ticket(9)),
        }),
        leg(LegEvent::PrefillAccepted),
        leg(LegEvent::FirstToken { leg: Leg::Decode }),
        leg(LegEvent::Committed),
        leg(LegEvent::TokensDelivered {
            leg: Leg::Decode,
            count: 7,
        }),
        leg(LegEvent::PrefillFinished {
            outcome: PrefillOutcome::EndedAtFirstToken,
        }),
        leg(LegEvent::DecodeFinished),
        leg(LegEvent::Refused {
            leg: Leg::Prefill,
            reason: RefuseReason::Incompatible,
        }),
        leg(LegEvent::Failed {
            leg: Leg::Prefill,
            error: LegError::Protocol { detail: "x".to_owned() },
        }),
        ClusterEvent::NodeJoined {
            record: node_record(3, 4),
            stream,
        },
        ClusterEvent::NodeReported {
            stream,
            read_at: Time::from_millis(3),
            status: status(6, 2),
        },
        ClusterEvent::PrefixesReported {
            stream,
            report: PrefixReport::Whole(prefix_keys(ChainLink::ROOT, &[TokenId(1); 16], 16).collect()),
        },
        ClusterEvent::NodeDisconnected { stream },
        ClusterEvent::NodeLeft { stream },
        ClusterEvent::DrainNode {
            name: NodeName::new("d0"),
            next_role: Some(AssignedRole::CoLocated),
        },
        ClusterEvent::DrainStarted,
        ClusterEvent::StoodStill {
            stillness: Duration::from_millis(70),
        },
        ClusterEvent::Tick,
    ]
}

pub(super) fn one_of_each_action() -> Vec<ClusterAction> {
    let (key, stream, request) = (KEY, StreamId(5), KEY.request);
    let whole = Arc::new(self::request(request, vec![TokenId(TOKEN_BASE); 40]));
    let node = node_record(1, 2).id;
    let target = Target {
        node: node.clone(),
        address: "h:1".to_owned(),
    };
    let time_left = Duration::from_millis(900);
    vec![
        ClusterAction::Place {
            key,
            placement: PlacementFacts {
                prefill: Some(node.clone()),
                decode: None,
                local: Some(LocalPrefillReason::CoLocated),
                route_reason: "x".to_owned(),
                queued_for: time_left,
            },
        },
        ClusterAction::StartOpen {
            key,
            request: whole.clone(),
            decode: target.clone(),
            prefill: Some(node.clone()),
            local: None,
            permit_blocks: 3,
            time_left,
        },
        ClusterAction::StartPrefill {
            key,
            request: whole,
            prefill: target,
            ticket: Some(ticket(8)),
            permit_tokens: 4,
            time_left,
        },
        ClusterAction::FailLeg {
            key,
            leg: Leg::Decode,
            error: LegError::NodeLost,
        },
        ClusterAction::CancelLeg { key, leg: Leg::Prefill },
        ClusterAction::EndAttempt { key },
        ClusterAction::Reject {
            request,
            reason: RejectReason::Draining,
            retry_after: Some(time_left),
        },
        ClusterAction::Fail {
            request,
            error: RequestError::Internal("x".to_owned()),
        },
        ClusterAction::Complete { request, attempts: 2 },
        ClusterAction::Forget { request },
        ClusterAction::WelcomeNode { stream },
        ClusterAction::RefuseNode {
            stream,
            reason: JoinRefusal::Invalid { field: "x".into() },
        },
        ClusterAction::RenewLease { stream },
        ClusterAction::SendPeers {
            stream,
            peers: vec![node_record(0, 1)],
        },
        ClusterAction::TellPermits {
            stream,
            note: PermitNote {
                wanted: 1,
                waited: time_left,
                returned_total: 2,
            },
        },
        ClusterAction::RequestDrain {
            stream,
            next_role: Some(AssignedRole::Prefill),
        },
        ClusterAction::DropNode {
            node,
            cause: DropCause::Restarted,
        },
    ]
}
