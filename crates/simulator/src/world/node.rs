//! One simulated node: the real scheduler, and what its process would hold besides.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use serving_core::cluster::{Leg, StreamId};
use serving_core::compatibility::CompatibilityHash;
use serving_core::ids::{NodeEpoch, NodeId, NodeName, TransferId};
use serving_core::kv::prefix_log::{LogPosition, PrefixLog};
use serving_core::node::{AssignedRole, NodeCapacity, NodeRecord, NodeRole, NodeState, NodeStatus, Ticket};
use serving_core::request::{AttemptKey, TokenEvent};
use serving_core::scheduler::permit_shares::PermitShares;
use serving_core::scheduler::{SampledToken, Scheduler, SchedulerConfig};
use serving_core::time::Time;

use super::agenda::{Place, ToNode};
use crate::arithmetic::keyed;
use crate::costs::{ColdCosts, StepKind, StepShape};
use crate::scenario::Scenario;

/// The node's end of one leg.
#[derive(Debug)]
pub(super) struct Stream {
    pub leg: Leg,
    pub ticket: Option<Ticket>,
    /// Set while its transfer is awaited.
    pub receives: Option<TransferId>,
    /// First tokens of a prefill leg, until it is known whether they are all.
    pub tokens: Vec<TokenEvent>,
    /// When the coordinator's brain was last told that tokens come; `None` before the first.
    pub told_at: Option<Time>,
    /// Tokens that the brain was not told of.
    pub untold: u32,
}

/// The step that the engine runs.
#[derive(Debug)]
pub(super) struct Running {
    /// Of its end in the agenda: a step that is timed anew has another.
    pub serial: u64,
    pub kind: StepKind,
    /// What is left of it, in seconds at full speed.
    pub left: f64,
    /// Share of the full speed; 0 while the process stands still.
    pub speed: f64,
    pub since: Time,
    /// How long it computed until `since`, at whatever speed.
    pub computed: Duration,
}

impl Running {
    /// How long it has computed by now. A node that stands still does not compute.
    pub fn computed_by(&self, now: Time) -> Duration {
        match self.speed > 0.0 {
            true => self.computed + now.since(self.since),
            false => self.computed,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Draining {
    pub until: Time,
    pub next_role: Option<AssignedRole>,
}

#[derive(Debug)]
pub(super) struct Node {
    pub name: NodeName,
    pub life: u32,
    pub role: AssignedRole,
    pub is_alive: bool,
    pub scheduler: Scheduler,
    pub streams: BTreeMap<AttemptKey, Stream>,
    /// Reservations that wait for a transfer.
    pub receiving: BTreeMap<TransferId, AttemptKey>,
    /// Pushes under way, also of requests that have left.
    pub pushes: BTreeMap<AttemptKey, TransferId>,
    /// Blocks that wait for the link.
    pub queued_blocks: u32,
    pub running: Option<Running>,
    pub sampled: Vec<SampledToken>,
    pub is_turn_due: bool,
    /// When the loop next looks at its timers. An entry of the agenda for a later time was put off.
    pub tick_at: Option<Time>,
    pub shares: PermitShares,
    pub stream: Option<StreamId>,
    pub prefixes: PrefixLog,
    pub prefixes_told: Option<LogPosition>,
    pub reported: Option<NodeStatus>,
    pub reported_at: Time,
    /// When the next status goes out, unless something changes.
    pub report_at: Option<Time>,
    pub draining: Option<Draining>,
    /// Set while the process stands still: what reaches it meanwhile.
    pub paused: Option<Vec<ToNode>>,
    pub steps: u64,
    /// Steps in a row that only decoded, with no long pause among them: the weights are in the caches.
    pub warm_steps: u32,
    pub computed_until: Time,
    pub busy: Duration,
    pub computed_before: u64,
    pub preemptions_before: u64,
    pub kv_bytes_sent: u64,
    pub kv_blocks_used_max: u32,
}

pub(super) fn scheduler_of(scenario: &Scenario, role: AssignedRole) -> Scheduler {
    let nodes = &scenario.nodes;
    let config = match role.node_role() {
        NodeRole::Prefill => {
            SchedulerConfig::prefill(nodes.limits, nodes.hold, NonZeroU32::new(nodes.last_chunk_tokens))
        }
        NodeRole::Decode => SchedulerConfig::decode(nodes.limits, nodes.reservation),
    };
    Scheduler::new(SchedulerConfig {
        step_target: nodes.step_target,
        mixed_step_tokens: nodes.mixed_step_tokens,
        ..config
    })
}

impl Node {
    pub fn new(scenario: &Scenario, (name, role): (&str, AssignedRole)) -> Self {
        Self {
            name: NodeName::new(name),
            life: 0,
            role,
            is_alive: true,
            scheduler: scheduler_of(scenario, role),
            streams: BTreeMap::new(),
            receiving: BTreeMap::new(),
            pushes: BTreeMap::new(),
            queued_blocks: 0,
            running: None,
            sampled: Vec::new(),
            is_turn_due: false,
            tick_at: None,
            shares: PermitShares::default(),
            stream: None,
            prefixes: PrefixLog::default(),
            prefixes_told: None,
            reported: None,
            reported_at: Time::ZERO,
            report_at: None,
            draining: None,
            paused: None,
            steps: 0,
            warm_steps: 0,
            computed_until: Time::ZERO,
            busy: Duration::ZERO,
            computed_before: 0,
            preemptions_before: 0,
            kv_bytes_sent: 0,
            kv_blocks_used_max: 0,
        }
    }

    /// Another process under the same name: nothing of the earlier one is left but what it did.
    pub fn start_anew(&mut self, scenario: &Scenario, role: AssignedRole) {
        let earlier = std::mem::replace(self, Self::new(scenario, (&self.name.0.clone(), role)));
        let status = earlier.scheduler.status(NodeState::Ready);
        self.life = earlier.life + 1;
        self.steps = earlier.steps;
        self.busy = earlier.busy;
        self.computed_before = earlier.computed_before + status.computed_tokens_total;
        self.preemptions_before = earlier.preemptions_before + status.preemptions_total;
        self.kv_bytes_sent = earlier.kv_bytes_sent;
        self.kv_blocks_used_max = earlier.kv_blocks_used_max;
    }

    pub fn id(&self, seed: u64) -> NodeId {
        self.id_of_life(seed, self.life)
    }

    pub fn id_of_life(&self, seed: u64, life: u32) -> NodeId {
        // A name's hash (FNV): two nodes in one life have different epochs.
        let named = self
            .name
            .as_str()
            .bytes()
            .fold(0_u64, |sum, byte| sum.wrapping_mul(0x100_0000_01b3) ^ u64::from(byte));
        NodeId {
            name: self.name.clone(),
            epoch: NodeEpoch(keyed(seed, named, u64::from(life))),
        }
    }

    pub fn running_kind(&self) -> Option<StepKind> {
        self.running.as_ref().map(|running| running.kind)
    }

    /// Begins a step: what it takes more than one for which the weights are in the caches.
    pub fn cold_seconds(&mut self, shape: &StepShape, now: Time, costs: &ColdCosts) -> f64 {
        if shape.prefill_tokens > 0 {
            self.warm_steps = 0;
            return 0.0;
        }
        if now.since(self.computed_until) > ColdCosts::PAUSE {
            self.warm_steps = 0;
        }
        let steps = self.warm_steps;
        self.warm_steps = steps.saturating_add(1);
        costs.seconds_after(steps, shape.decode_rows)
    }

    pub fn state(&self) -> NodeState {
        match self.draining {
            Some(_) => NodeState::Draining,
            None => NodeState::Ready,
        }
    }

    pub fn record(&self, scenario: &Scenario) -> NodeRecord {
        let limits = &scenario.nodes.limits;
        let block_bytes = block_bytes(scenario);
        NodeRecord {
            id: self.id(scenario.seed),
            role: self.role.node_role(),
            is_co_located: self.role == AssignedRole::CoLocated,
            address: self.name.to_string(),
            kv_address: self.name.to_string(),
            compatibility: CompatibilityHash([1; 32]).into(),
            transports: vec![scenario.costs.link.name.clone()],
            version: String::new(),
            capacity: NodeCapacity {
                kv_blocks: limits.kv_blocks,
                block_tokens: limits.block_tokens,
                max_sequences: limits.max_sequences,
                max_batch_tokens: limits.max_batch_tokens,
                max_model_tokens: limits.max_model_tokens,
                block_bytes,
            },
            model_name: "simulated".to_owned(),
            state: self.state(),
            roles: AssignedRole::ALL.to_vec(),
        }
    }

    /// Nobody is here, and nothing is being moved.
    pub fn is_empty(&self) -> bool {
        self.scheduler.keys().next().is_none()
            && self.running.is_none()
            && self.scheduler.pool().counts().quarantined == 0
    }

    pub fn is_at(&self, place: Place) -> bool {
        self.is_alive && self.life == place.life
    }
}

pub(super) fn block_bytes(scenario: &Scenario) -> u64 {
    let tokens = u64::from(scenario.nodes.limits.block_tokens);
    scenario.costs.kv_bytes_per_token.saturating_mul(tokens)
}
