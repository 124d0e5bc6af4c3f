//! Membership events: joins, reports, goodbyes, and what they mean for the requests on those nodes.

use crate::ids::NodeName;
use crate::node::{AssignedRole, NodeRecord, NodeStatus};
use crate::time::Time;

use super::Cluster;
use super::action::ClusterAction;
use super::action::DropCause;
use super::event::StreamId;
use super::membership::{Joined, Life};

impl Cluster {
    pub(super) fn node_joined(&mut self, now: Time, record: NodeRecord, stream: StreamId) {
        // A lease that has run out does not hold its name, even if no tick came in between.
        for id in self.members.expired(now) {
            self.node_lost(now, &id, DropCause::LeaseExpired);
        }
        match self.members.join(now, record, stream) {
            Err(reason) => self.act(ClusterAction::RefuseNode { stream, reason }),
            Ok(joined) => {
                self.act(ClusterAction::WelcomeNode { stream });
                self.peers_changed = true;
                if let Joined::Replaced(old) = joined {
                    self.act(ClusterAction::DropNode {
                        node: old.clone(),
                        cause: DropCause::Restarted,
                    });
                    self.fail_over(now, &old);
                }
            }
        }
    }

    pub(super) fn node_reported(&mut self, now: Time, stream: StreamId, status: NodeStatus) {
        if self.members.report(now, stream, status) {
            self.act(ClusterAction::RenewLease { stream });
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
    pub(super) fn drain_node(&mut self, name: &NodeName, next_role: Option<AssignedRole>) {
        let Some(node) = self.members.by_name(name) else {
            return;
        };
        let (id, life) = (node.id().clone(), node.life);
        if let Some(node) = self.members.get_mut(&id) {
            node.is_drain_requested = true;
        }
        if let Life::Connected { stream } = life {
            self.act(ClusterAction::RequestDrain { stream, next_role });
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
