//! The nodes this coordinator knows, by name: who joins, whose lease runs out, whose stream it is.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use crate::ids::{NodeId, NodeName};
use crate::node::{NodeRecord, NodeRole, NodeStatus};
use crate::scheduler::permit_shares::StreamPermits;
use crate::time::Time;

use super::action::JoinRefusal;
use super::event::StreamId;
use super::member::{Life, Node};
use super::permits::Permits;
use super::prefix_directory::CachedPrefixes;

/// A node that is lost or has left is remembered this long, so that dashboards can show it.
const OVER_KEPT: Duration = Duration::from_secs(600);
/// Names remembered at most, live ones included: a bound against nodes that join under ever new names. The name that has been over for
/// longest makes room for a new one.
const NODES_MAX: usize = 1024;

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
        } else if self.nodes.len() >= NODES_MAX && !self.forget_longest_over() {
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

    /// False when no node is over. One that is over is shown to people and decides nothing, so it must not keep a living one out.
    fn forget_longest_over(&mut self) -> bool {
        let over = self.nodes.iter();
        let over = over.filter_map(|(name, node)| Some((node.life.over_since()?, name)));
        let Some(name) = over.min().map(|(_, name)| name.clone()) else {
            return false;
        };
        self.nodes.remove(&name).is_some()
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
        node.take_status(status);
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
