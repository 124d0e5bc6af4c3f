//! Membership events: joins, reports, goodbyes, and what they mean for the requests on those nodes.

use crate::ids::{NodeId, NodeName};
use crate::kv::prefix_log::PrefixReport;
use crate::node::{AssignedRole, NodeRecord, NodeStatus};
use crate::time::Time;

use super::Cluster;
use super::action::ClusterAction;
use super::action::DropCause;
use super::event::StreamId;
use super::member::{DrainOrder, Life};
use super::membership::Joined;

impl Cluster {
    pub(super) fn node_joined(&mut self, now: Time, record: NodeRecord, stream: StreamId) {
        // A lease that has run out does not hold its name, even if no tick came in between. It ends no other one here: the status that
        // renews that may be the next event (PROTOCOL rule 21).
        let late = self.members.expired(now);
        if let Some(id) = late.iter().find(|id| id.name == record.id.name) {
            self.node_lost(now, id, DropCause::LeaseExpired);
        }
        let id = record.id.clone();
        match self.members.join(now, record, stream) {
            Err(reason) => self.act(ClusterAction::RefuseNode { stream, reason }),
            Ok(joined) => {
                self.act(ClusterAction::WelcomeNode { stream });
                // It may have been asked on the stream that broke, or while there was none.
                self.tell_drain(&id);
                self.peers_changed = true;
                if let Joined::Replaced(old) = joined {
                    self.breaker.forget(&old);
                    self.act(ClusterAction::DropNode {
                        node: old.clone(),
                        cause: DropCause::Restarted,
                    });
                    self.fail_over(now, &old);
                }
            }
        }
    }

    pub(super) fn node_reported(&mut self, now: Time, (stream, read_at): (StreamId, Time), status: NodeStatus) {
        if self.members.report(now, (stream, read_at), status) {
            self.act(ClusterAction::RenewLease { stream });
        }
    }

    /// Void with the stream: a node's next one begins with everything.
    pub(super) fn prefixes_reported(&mut self, stream: StreamId, report: PrefixReport) {
        if let Some(node) = self.members.by_stream(stream) {
            let kv_blocks = node.record.capacity.kv_blocks;
            node.prefixes.take(report, kv_blocks);
        }
    }

    pub(super) fn node_disconnected(&mut self, stream: StreamId) {
        self.members.disconnect(stream);
    }

    pub(super) fn node_left(&mut self, now: Time, stream: StreamId) {
        let id = self.members.by_stream(stream).map(|n| n.id().clone());
        if let Some(id) = id {
            self.node_lost(now, &id, DropCause::Left);
        }
    }

    /// New work stops at once; the node finishes what it has and leaves by itself, for good or to join anew as `next_role`.
    /// A node that has not registered that role stays as it is. To leave for good overrides a change of role.
    pub(super) fn drain_node(&mut self, name: &NodeName, next_role: Option<AssignedRole>) {
        let Some(id) = self.members.by_name(name).map(|node| node.id().clone()) else {
            return;
        };
        let Some(node) = self.members.get_mut(&id) else {
            return;
        };
        if next_role.is_some_and(|role| !node.record.roles.contains(&role)) {
            return;
        }
        let is_leaving = node.drain.is_some_and(|order| order.next_role.is_none());
        if is_leaving && next_role.is_some() {
            return;
        }
        node.drain = Some(DrainOrder { next_role });
        self.tell_drain(&id);
    }

    /// On a stream that stands; on the node's next one otherwise.
    fn tell_drain(&mut self, id: &NodeId) {
        let node = self.members.get(id);
        if let Some((Life::Connected { stream }, Some(order))) = node.map(|node| (node.life, node.drain)) {
            self.act(ClusterAction::RequestDrain {
                stream,
                next_role: order.next_role,
            });
        }
    }

    /// Every prefill node learns of every decode node it may push to, whenever that set may have changed.
    pub(super) fn publish_peers(&mut self) {
        if !std::mem::take(&mut self.peers_changed) {
            return;
        }
        let lists: Vec<_> = self
            .members
            .prefill_streams()
            .map(|stream| (stream, self.members.peers()))
            .collect();
        for (stream, peers) in lists {
            self.act(ClusterAction::SendPeers { stream, peers });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ClusterConfig;
    use super::super::event::ClusterEvent;
    use super::super::fixtures::{node_record, ready_status};
    use super::*;
    use crate::node::NodeRole;

    #[test]
    fn a_join_ends_no_lease_whose_renewal_may_be_the_next_event() {
        let mut cluster = Cluster::new(ClusterConfig::default());
        let [first, second] = ["d0", "d1"].map(|name| node_record(name, 1, NodeRole::Decode));
        let joined = |record: &NodeRecord, stream| ClusterEvent::NodeJoined {
            record: record.clone(),
            stream: StreamId(stream),
        };
        cluster.apply(Time::ZERO, joined(&first, 1));
        let now = Time::from_millis(6_000);
        cluster.apply(now, joined(&second, 2));
        let report = ClusterEvent::NodeReported {
            stream: StreamId(1),
            read_at: Time::from_millis(4_000),
            status: ready_status(64),
        };
        cluster.apply(now, report);
        cluster.apply(now, ClusterEvent::Tick);
        assert!(cluster.members.get(&first.id).is_some_and(|node| node.is_live()));
    }

    #[test]
    fn a_life_that_is_replaced_leaves_no_pair_behind() {
        let mut cluster = Cluster::new(ClusterConfig::default());
        let decode = node_record("d0", 1, NodeRole::Decode);
        let lives = [1, 2].map(|epoch| node_record("p0", epoch, NodeRole::Prefill));
        let pair = (lives[0].id.clone(), decode.id.clone());
        let joined = |record: &NodeRecord, stream| ClusterEvent::NodeJoined {
            record: record.clone(),
            stream: StreamId(stream),
        };
        cluster.apply(Time::ZERO, joined(&decode, 1));
        cluster.apply(Time::ZERO, joined(&lives[0], 2));
        cluster.breaker.failed(Time::ZERO, pair);
        cluster.apply(Time::ZERO, ClusterEvent::NodeDisconnected { stream: StreamId(2) });
        assert!(!cluster.breaker.is_empty(), "it may come back");
        cluster.apply(Time::ZERO, joined(&lives[1], 3));
        assert!(cluster.breaker.is_empty());
    }
}
