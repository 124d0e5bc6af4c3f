//! What nodes tell about themselves: role, state, capacity, load. Shared by the cluster's brain and the wire.

use serde::{Deserialize, Serialize};

use crate::compatibility::{Compatibility, Incompatibility};
use crate::ids::{BlockId, Generation, NodeEpoch, NodeId, TransferId};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum NodeRole {
    Prefill,
    Decode,
}

impl NodeRole {
    pub fn name(self) -> &'static str {
        match self {
            NodeRole::Prefill => "prefill",
            NodeRole::Decode => "decode",
        }
    }
}

/// What an operator can make of a node, if its process can be it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum AssignedRole {
    Prefill,
    Decode,
    /// A decode node that computes every prompt itself.
    CoLocated,
}

impl AssignedRole {
    pub const ALL: [AssignedRole; 3] = [AssignedRole::Prefill, AssignedRole::Decode, AssignedRole::CoLocated];

    pub fn name(self) -> &'static str {
        match self {
            AssignedRole::Prefill => "prefill",
            AssignedRole::Decode => "decode",
            AssignedRole::CoLocated => "co-located",
        }
    }
    /// The pool of a node that has this role.
    pub fn node_role(self) -> NodeRole {
        match self {
            AssignedRole::Prefill => NodeRole::Prefill,
            AssignedRole::Decode | AssignedRole::CoLocated => NodeRole::Decode,
        }
    }
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == name)
    }
}

/// What a node says of its own life; `lost` is the coordinator's verdict and never on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum NodeState {
    Joining,
    Ready,
    Draining,
}

impl NodeState {
    pub fn name(self) -> &'static str {
        match self {
            NodeState::Joining => "joining",
            NodeState::Ready => "ready",
            NodeState::Draining => "draining",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeCapacity {
    pub kv_blocks: u32,
    /// Tokens per KV block.
    pub block_tokens: u32,
    pub max_sequences: u32,
    pub max_batch_tokens: u32,
    pub max_model_tokens: u32,
    /// Bytes of one KV block over all layers.
    pub block_bytes: u64,
}

/// A node's registration record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeRecord {
    pub id: NodeId,
    pub role: NodeRole,
    /// A decode node that always computes prompts itself.
    pub is_co_located: bool,
    /// host:port of the node's services.
    pub address: String,
    /// host:port at which prefill nodes reach its handoff service: `address`, unless KV has a network of its own.
    pub kv_address: String,
    pub compatibility: Compatibility,
    /// KV transports the node has, best first.
    pub transports: Vec<String>,
    pub version: String,
    pub capacity: NodeCapacity,
    pub model_name: String,
    pub state: NodeState,
    /// What its process can become without a new start (`baton role`); empty where it is one thing only.
    pub roles: Vec<AssignedRole>,
}

impl NodeRecord {
    /// Why this node and the other one may not exchange KV. `None`: they may.
    pub fn incompatibility(&self, other: &NodeRecord) -> Option<Incompatibility> {
        let (ours, theirs) = (&self.compatibility, &other.compatibility);
        Incompatibility::between((&self.id.name, ours), (&other.id.name, theirs))
    }
    pub fn assigned_role(&self) -> AssignedRole {
        match self.role {
            NodeRole::Prefill => AssignedRole::Prefill,
            NodeRole::Decode if self.is_co_located => AssignedRole::CoLocated,
            NodeRole::Decode => AssignedRole::Decode,
        }
    }
}

/// Blocks by state; the sum is the pool's size after every step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KvBlockCounts {
    pub free: u32,
    pub active: u32,
    pub cached: u32,
    pub reserved: u32,
    pub in_transfer: u32,
    pub quarantined: u32,
}

impl KvBlockCounts {
    /// Name and count of each of the six states.
    pub fn by_state(&self) -> [(&'static str, u32); 6] {
        [
            ("free", self.free),
            ("active", self.active),
            ("cached", self.cached),
            ("reserved", self.reserved),
            ("in_transfer", self.in_transfer),
            ("quarantined", self.quarantined),
        ]
    }
    /// Share of the blocks that belong to a request or a transfer; cached ones can be had for the asking.
    pub fn held_share(&self) -> f64 {
        let held = self.active + self.reserved + self.in_transfer + self.quarantined;
        f64::from(held) / f64::from(self.total().max(1))
    }
    pub fn total(&self) -> u32 {
        self.free + self.active + self.cached + self.reserved + self.in_transfer + self.quarantined
    }
}

/// Load and permits of one node, as last reported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    pub state: NodeState,
    /// Cumulative since the status stream began: prompt tokens (prefill) or blocks (decode).
    pub permits_granted_total: u64,
    /// Permits of the work that has reached the node.
    pub permits_received_total: u64,
    /// Granted permits that the node would have back, for another coordinator.
    pub permits_recalled_total: u64,
    /// Not on the wire: received permits by the coordinator's epoch. A stream is told its own alone.
    pub permits_received_by: Vec<(NodeEpoch, u64)>,
    /// Connected to this node: with two or more, each says what it waits for and returns what is recalled.
    pub coordinators: u32,
    pub kv_blocks: KvBlockCounts,
    pub running_sequences: u32,
    pub waiting_sequences: u32,
    pub waiting_tokens: u32,
    pub prefix_query_tokens_total: u64,
    pub prefix_hit_tokens_total: u64,
    pub preemptions_total: u64,
    /// Rows run through the model since the node started, prompt and output alike: proof that it works.
    pub computed_tokens_total: u64,
    /// A prefill node's view of its links to decode nodes.
    pub pairs: Vec<PairHealth>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairHealth {
    pub decode_node: NodeId,
    /// `None` when usable, else a closed label.
    pub unusable_reason: Option<String>,
    /// What carries KV over it while it is usable: one of the prefill node's transports.
    pub transport: Option<String>,
}

/// What a coordinator tells a node that it shares with others. Totals are of the stream, as in [`NodeStatus`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PermitNote {
    /// Permits that the request next in turn takes of this node; 0 when none waits for permits.
    pub wanted: u64,
    /// For how long it has waited.
    pub waited: std::time::Duration,
    /// Permits given back after a recall.
    pub returned_total: u64,
}

/// Right to write one reservation (PROTOCOL, identities).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    pub transfer: TransferId,
    pub decode_node: NodeId,
    /// host:port of the decode node's handoff service.
    pub decode_address: String,
    /// Blocks past the prefix, in sequence order.
    pub blocks: Vec<(BlockId, Generation)>,
    pub prefix_blocks: u32,
    pub total_bytes: u64,
    pub expires_in: std::time::Duration,
}
