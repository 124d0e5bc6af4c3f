//! The nodes this coordinator knows: leases, lives, permits, suspicion.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use crate::ids::{NodeId, NodeName, RequestId};
use crate::node::{AssignedRole, NodeRecord, NodeRole, NodeState, NodeStatus, PermitNote};
use crate::scheduler::permit_shares::StreamPermits;
use crate::time::Time;

use super::action::JoinRefusal;
use super::breaker::Breaker;
use super::event::StreamId;
use super::permits::Permits;
use super::prefix_directory::CachedPrefixes;
use super::suspicion::Suspicion;

/// A node that is lost or has left is remembered this long, so that dashboards can show it.
const OVER_KEPT: Duration = Duration::from_secs(600);
/// Names remembered at most, live ones included: a bound against nodes that join under ever new names.
const NODES_MAX: usize = 1024;
/// Until a new life of a node gets as much work as the others: long enough to see its first answers, short against the
/// minutes that a scale-up takes.
const SLOW_START: Duration = Duration::from_secs(10);

/// Whether a node's membership stream is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    Connected {
        stream: StreamId,
    },
    /// The stream broke, the lease still runs: no new work, running work goes on.
    Disconnected,
    /// The lease ended.
    Lost {
        since: Time,
    },
    /// The node said goodbye.
    Left {
        since: Time,
    },
}

impl Life {
    /// Since when there is nobody behind the name any more.
    pub fn over_since(self) -> Option<Time> {
        match self {
            Life::Lost { since } | Life::Left { since } => Some(since),
            Life::Connected { .. } | Life::Disconnected => None,
        }
    }
    pub fn is_over(self) -> bool {
        self.over_since().is_some()
    }
}

/// What the outside may see of a node's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NodeHealth {
    Joining,
    Ready,
    Draining,
    Lost,
    Left,
}

impl NodeHealth {
    pub const ALL: [NodeHealth; 5] = [
        NodeHealth::Joining,
        NodeHealth::Ready,
        NodeHealth::Draining,
        NodeHealth::Lost,
        NodeHealth::Left,
    ];
    pub fn name(self) -> &'static str {
        match self {
            NodeHealth::Joining => "joining",
            NodeHealth::Ready => "ready",
            NodeHealth::Draining => "draining",
            NodeHealth::Lost => "lost",
            NodeHealth::Left => "left",
        }
    }
    /// There is nobody behind the name any more.
    pub fn is_over(self) -> bool {
        matches!(self, NodeHealth::Lost | NodeHealth::Left)
    }
}

/// The last note to a node, as far as a change of it is worth another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LastNote {
    waiting: Option<RequestId>,
    wanted: u64,
    returned_total: u64,
}

/// A node is to leave: for good, or to join again as something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainOrder {
    pub next_role: Option<AssignedRole>,
}

/// One name and the last life seen under it.
#[derive(Clone, Debug)]
pub struct Node {
    pub record: NodeRecord,
    pub life: Life,
    pub lease_until: Time,
    /// When this life was first seen.
    pub joined_at: Time,
    pub status: Option<NodeStatus>,
    pub status_at: Time,
    /// When a report last said that the model ran: a node at work is not a dead one, however quiet its streams are.
    pub progress_at: Time,
    pub permits: Permits,
    pub prefixes: CachedPrefixes,
    /// What this coordinator last told the node of the permits they share, and for which request.
    told: LastNote,
    /// Choices given to this node and not ended (decode).
    pub sequences: u32,
    /// Prompt tokens sent since the last status (prefill).
    pub sent_tokens: u64,
    /// What somebody asked of this life; its own reports may still say ready for a moment.
    pub drain: Option<DrainOrder>,
    pub(super) suspicion: Suspicion,
    /// Of its engine's failures.
    pub(super) breaker: Breaker,
}

impl Node {
    fn new(record: NodeRecord, stream: StreamId, now: Time, lease: Duration) -> Self {
        Self {
            record,
            life: Life::Connected { stream },
            lease_until: now + lease,
            joined_at: now,
            status: None,
            status_at: now,
            progress_at: now,
            permits: Permits::of_stream(stream),
            prefixes: CachedPrefixes::default(),
            told: LastNote::default(),
            sequences: 0,
            sent_tokens: 0,
            drain: None,
            suspicion: Suspicion::default(),
            breaker: Breaker::default(),
        }
    }

    pub fn id(&self) -> &NodeId {
        &self.record.id
    }

    /// Prompt tokens that wait here, as far as this coordinator knows (prefill).
    pub fn waiting_tokens(&self) -> u64 {
        let reported = self.status.as_ref().map_or(0, |status| status.waiting_tokens);
        u64::from(reported) + self.sent_tokens
    }

    pub fn health(&self) -> NodeHealth {
        match self.life {
            Life::Lost { .. } => return NodeHealth::Lost,
            Life::Left { .. } => return NodeHealth::Left,
            Life::Connected { .. } | Life::Disconnected => {}
        }
        match self.record.state {
            NodeState::Ready if self.drain.is_some() => NodeHealth::Draining,
            NodeState::Joining => NodeHealth::Joining,
            NodeState::Ready => NodeHealth::Ready,
            NodeState::Draining => NodeHealth::Draining,
        }
    }

    /// No new work now: a connection to it broke, or the one request that tries it again has no answer yet.
    pub fn is_suspected(&self, now: Time) -> bool {
        !self.suspicion.trust.admits(now)
    }

    /// Its engine failed requests, one after the other: it gets no new work while another node can take it.
    pub fn is_resting(&self, now: Time) -> bool {
        self.breaker.is_resting(now)
    }

    /// Ready, connected: may be counted on. Suspicion is not considered.
    pub fn is_live(&self) -> bool {
        self.health() == NodeHealth::Ready && matches!(self.life, Life::Connected { .. })
    }

    /// May be given new work now, permits apart.
    pub fn is_usable(&self, now: Time) -> bool {
        self.is_live() && !self.is_suspected(now)
    }

    /// The life of a decode node that has just begun is the emptiest of its pool, so every request would go there at once,
    /// to a node that has proved nothing yet. It gets its share over `SLOW_START`, while others can take the rest. A prefill
    /// node never has more than two steps of work.
    pub(super) fn has_its_share(&self, now: Time) -> bool {
        let age = now.since(self.joined_at);
        if age >= SLOW_START || self.record.role == NodeRole::Prefill {
            return false;
        }
        let share = age.as_secs_f64() / SLOW_START.as_secs_f64();
        f64::from(self.sequences) >= (f64::from(self.record.capacity.max_sequences) * share).max(1.0)
    }

    /// Whether this prefill node reports its link to `decode` as broken.
    pub fn pair_is_usable(&self, decode: &NodeId) -> bool {
        let pairs = self.status.iter().flat_map(|s| &s.pairs);
        !pairs
            .into_iter()
            .any(|p| p.decode_node == *decode && p.unusable_reason.is_some())
    }

    /// Whether this prefill node has said that its link to `decode` works.
    pub fn pair_is_reported_usable(&self, decode: &NodeId) -> bool {
        let mut pairs = self.status.iter().flat_map(|s| &s.pairs);
        pairs.any(|p| p.decode_node == *decode && p.unusable_reason.is_none())
    }

    /// Returns what is recalled and says what is waited for, if there is anything new to say and others to share with.
    pub(super) fn share_permits(&mut self, waiting: Option<(RequestId, u64)>) -> Option<PermitNote> {
        if self.status.as_ref().is_none_or(|status| status.coordinators < 2) {
            return None;
        }
        let told = LastNote {
            waiting: waiting.map(|(request, _)| request),
            wanted: waiting.map_or(0, |(_, wanted)| wanted),
            returned_total: self.permits.return_recalled(),
        };
        let is_news = std::mem::replace(&mut self.told, told) != told;
        is_news.then_some(PermitNote {
            wanted: told.wanted,
            waited: Duration::ZERO,
            returned_total: told.returned_total,
        })
    }
}

/// What a join did besides adding the node.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Joined {
    New,
    /// The same life is back on a new stream.
    Again,
    /// Another life had this name.
    Replaced(NodeId),
}

#[derive(Debug)]
pub struct Membership {
    nodes: BTreeMap<NodeName, Node>,
    streams: BTreeMap<StreamId, NodeName>,
    lease: Duration,
    model_name: Option<String>,
}

impl Membership {
    pub(super) fn new(lease: Duration, model_name: Option<String>) -> Self {
        Self {
            nodes: BTreeMap::new(),
            streams: BTreeMap::new(),
            lease,
            model_name,
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values()
    }

    /// The node in exactly this life; `None` when the name lives on under another epoch.
    pub fn get(&self, id: &NodeId) -> Option<&Node> {
        self.nodes.get(&id.name).filter(|n| n.record.id == *id)
    }

    pub(super) fn get_mut(&mut self, id: &NodeId) -> Option<&mut Node> {
        self.nodes.get_mut(&id.name).filter(|n| n.record.id == *id)
    }

    pub(super) fn by_name(&self, name: &NodeName) -> Option<&Node> {
        self.nodes.get(name)
    }

    pub(super) fn by_stream(&mut self, stream: StreamId) -> Option<&mut Node> {
        let name = self.streams.get(&stream)?;
        self.nodes.get_mut(name)
    }

    /// Checks a registration and adds it. A name belongs to its life while that is connected and its lease runs.
    pub(super) fn join(&mut self, now: Time, record: NodeRecord, stream: StreamId) -> Result<Joined, JoinRefusal> {
        self.check(&record)?;
        let mut outcome = Joined::New;
        if let Some(old) = self.nodes.get(&record.id.name) {
            let is_same_life = old.record.id == record.id;
            let is_held = matches!(old.life, Life::Connected { .. }) && now < old.lease_until;
            if !is_same_life && is_held {
                return Err(JoinRefusal::NameTaken);
            }
            if let Life::Connected { stream: old_stream } = old.life {
                self.streams.remove(&old_stream);
            }
            outcome = match (old.life.is_over(), is_same_life) {
                (true, _) => Joined::New,
                (false, true) => Joined::Again,
                (false, false) => Joined::Replaced(old.record.id.clone()),
            };
        } else if self.nodes.len() >= NODES_MAX {
            return Err(JoinRefusal::Invalid {
                field: Cow::Borrowed("name: too many nodes"),
            });
        }
        let name = record.id.name.clone();
        let mut node = Node::new(record, stream, now, self.lease);
        if let Some(old) = self.nodes.get_mut(&name).filter(|old| old.record.id == node.record.id) {
            // Also when its lease has run out meanwhile: it may not have heard of it yet.
            node.drain = old.drain;
            if outcome == Joined::Again {
                node.sequences = old.sequences;
                node.joined_at = old.joined_at;
                node.suspicion = old.suspicion;
                node.suspicion.seen_alive(now);
                node.breaker = std::mem::take(&mut old.breaker);
            }
        }
        self.nodes.insert(name.clone(), node);
        self.streams.insert(stream, name);
        Ok(outcome)
    }

    fn check(&self, record: &NodeRecord) -> Result<(), JoinRefusal> {
        let capacity = &record.capacity;
        let invalid = [
            (
                record.id.name.as_str().is_empty() || record.id.name.as_str().len() > 128,
                "name",
            ),
            (record.address.is_empty() || record.address.len() > 256, "address"),
            (
                record.kv_address.is_empty() || record.kv_address.len() > 256,
                "kv_address",
            ),
            (capacity.kv_blocks == 0, "capacity.kv_blocks"),
            (capacity.block_tokens == 0, "capacity.block_tokens"),
            (capacity.max_sequences == 0, "capacity.max_num_seqs"),
            (capacity.max_model_tokens == 0, "capacity.max_model_len"),
            (capacity.max_batch_tokens == 0, "capacity.max_num_batched_tokens"),
            (record.role == NodeRole::Prefill && record.is_co_located, "co_located"),
        ];
        if let Some((_, field)) = invalid.iter().find(|(is_wrong, _)| *is_wrong) {
            return Err(JoinRefusal::Invalid {
                field: Cow::Borrowed(*field),
            });
        }
        match &self.model_name {
            Some(expected) if *expected != record.model_name => Err(JoinRefusal::IncompatibleModel {
                expected: expected.clone(),
                got: record.model_name.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// A status renews the lease from the moment at which it was read from its connection: however late it is looked at, it
    /// proves no more than that. False when the stream is not (or no longer) a node's.
    pub(super) fn report(&mut self, now: Time, (stream, read_at): (StreamId, Time), status: NodeStatus) -> bool {
        let lease = self.lease;
        let Some(node) = self.by_stream(stream) else {
            return false;
        };
        node.lease_until = node.lease_until.max(read_at + lease);
        node.suspicion.seen_alive(read_at);
        let said = StreamPermits {
            granted_total: status.permits_granted_total,
            received_total: status.permits_received_total,
            recalled_total: status.permits_recalled_total,
        };
        node.permits.reported(now, said);
        if status.coordinators > 1 {
            // Before anything is placed: whoever waits for them waits longer.
            node.permits.return_recalled();
        }
        let computed_before = node.status.as_ref().map_or(0, |s| s.computed_tokens_total);
        if status.computed_tokens_total != computed_before {
            node.progress_at = read_at;
        }
        node.record.state = status.state;
        node.status = Some(status);
        node.status_at = read_at;
        node.sent_tokens = 0;
        true
    }

    /// This coordinator stood still, and could have heard nobody: no lease runs meanwhile.
    pub(super) fn stood_still(&mut self, stillness: Duration) {
        for node in self.nodes.values_mut().filter(|node| !node.life.is_over()) {
            node.lease_until = node.lease_until + stillness;
        }
    }

    /// The stream ended: its permits are void.
    pub(super) fn disconnect(&mut self, stream: StreamId) -> Option<NodeId> {
        let name = self.streams.remove(&stream)?;
        let node = self.nodes.get_mut(&name)?;
        node.life = Life::Disconnected;
        node.permits = Permits::default();
        node.prefixes = CachedPrefixes::default();
        Some(node.record.id.clone())
    }

    pub(super) fn lose(&mut self, id: &NodeId, over: Life) {
        if let Some(node) = self.get_mut(id) {
            let life = node.life;
            node.life = over;
            node.permits = Permits::default();
            node.prefixes = CachedPrefixes::default();
            node.sequences = 0;
            if let Life::Connected { stream } = life {
                self.streams.remove(&stream);
            }
        }
    }

    /// Lives whose lease has run out, in order of name; forgets those that were over long ago.
    pub(super) fn expired(&mut self, now: Time) -> Vec<NodeId> {
        self.nodes
            .retain(|_, n| n.life.over_since().is_none_or(|since| now.since(since) < OVER_KEPT));
        let late = self
            .nodes
            .values()
            .filter(|n| !n.life.is_over() && n.lease_until <= now);
        late.map(|n| n.record.id.clone()).collect()
    }

    pub(super) fn next_wake(&self) -> Option<Time> {
        let of = |n: &Node| match n.life.over_since() {
            Some(since) => since + OVER_KEPT,
            None => n.lease_until.min(n.suspicion.trust.wake().unwrap_or(n.lease_until)),
        };
        self.nodes.values().map(of).min()
    }

    /// Nodes whose suspicion has run out may be tried again.
    pub(super) fn end_suspicions(&mut self, now: Time) {
        self.nodes.values_mut().for_each(|node| node.suspicion.trust.due(now));
    }

    /// Decode nodes that prefill nodes should keep links to. Also those of another compatibility: a prefill node never dials
    /// them, and says so in its log and in `baton_pair_up`.
    pub(super) fn peers(&self) -> Vec<NodeRecord> {
        let fits = |n: &&Node| n.record.role == NodeRole::Decode && !n.record.is_co_located && !n.life.is_over();
        self.nodes.values().filter(fits).map(|n| n.record.clone()).collect()
    }

    /// What the prefill node says carries its pair's KV. Before it has said so: its first transport that the decode node
    /// has too; `none` when a node is gone.
    pub(super) fn transport_of(&self, prefill: &NodeId, decode: &NodeId) -> String {
        let of = |id| self.get(id).map(|n| n.record.transports.as_slice()).unwrap_or_default();
        let pairs = self
            .get(prefill)
            .and_then(|n| n.status.as_ref())
            .map(|s| s.pairs.as_slice());
        let pair = pairs.unwrap_or_default().iter().find(|p| p.decode_node == *decode);
        let reported = pair.and_then(|pair| pair.transport.as_ref());
        // A label: one of the node's own transports, or the direct mode of one.
        let is_known = |t: &&String| {
            of(prefill)
                .iter()
                .any(|own| *t == own || t.strip_prefix(own.as_str()) == Some("-direct"))
        };
        let reported = reported.filter(is_known);
        let shared = reported.or_else(|| of(prefill).iter().find(|t| of(decode).contains(t)));
        shared.cloned().unwrap_or_else(|| "none".into())
    }

    /// Connected nodes with their streams, in order of name.
    pub(super) fn connected_mut(&mut self) -> impl Iterator<Item = (StreamId, &mut Node)> {
        self.nodes.values_mut().filter_map(|node| match node.life {
            Life::Connected { stream } => Some((stream, node)),
            _ => None,
        })
    }

    /// Every connected prefill node with its stream, in order of name.
    pub(super) fn prefill_streams(&self) -> impl Iterator<Item = StreamId> {
        self.nodes.values().filter_map(|n| match n.life {
            Life::Connected { stream } if n.record.role == NodeRole::Prefill => Some(stream),
            _ => None,
        })
    }

    #[cfg(test)]
    pub(super) fn check_invariants(&self) {
        for (stream, name) in &self.streams {
            let node = self.nodes.get(name).map(|n| n.life);
            assert_eq!(
                node,
                Some(Life::Connected { stream: *stream }),
                "stream {stream:?} of {name}"
            );
        }
        for node in self.nodes.values() {
            node.permits.check_invariants();
        }
    }
}

#[cfg(test)]
#[path = "membership_tests.rs"]
mod tests;
