//! What a node does with its membership's events: it is ready while at least one coordinator has welcomed it, and leaves
//! when told.

use std::collections::BTreeSet;

use serving_core::ids::NodeEpoch;
use serving_core::node::{AssignedRole, NodeRecord};

use crate::announce::Announcement;
use crate::health::{Health, ReadyState};
use crate::membership::{LostReason, Membership, MembershipEvent};

/// Why a node must leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaving {
    /// A coordinator asks for it.
    Asked,
    /// It must join again in another role.
    ForRole(AssignedRole),
    /// A process that was started later has its name.
    Fenced { by_epoch: NodeEpoch },
}

impl Leaving {
    /// An order that comes while the node already leaves. A namesake is stronger than an order to leave for good, and that
    /// is stronger than a change of role. Of two equal orders the later one counts.
    fn then(self, heard: Leaving) -> Self {
        let strength = |leaving: Leaving| match leaving {
            Leaving::ForRole(_) => 0,
            Leaving::Asked => 1,
            Leaving::Fenced { .. } => 2,
        };
        if strength(heard) >= strength(self) { heard } else { self }
    }
}

/// How a node's process goes on when one of its lives has ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LifeEnd {
    /// It has left for good.
    Left,
    /// It must join again in another role.
    ForRole(AssignedRole),
}

impl From<Option<Leaving>> for LifeEnd {
    /// A fenced node's end is an error. The role words it.
    fn from(leaving: Option<Leaving>) -> Self {
        match leaving {
            Some(Leaving::ForRole(role)) => Self::ForRole(role),
            Some(Leaving::Asked | Leaving::Fenced { .. }) | None => Self::Left,
        }
    }
}

/// The coordinators that have welcomed this node and have not been lost since.
#[derive(Debug)]
pub struct JoinedCoordinators {
    role: &'static str,
    name: String,
    /// The roles that it may be asked to take.
    roles: Vec<AssignedRole>,
    health: Health,
    addresses: BTreeSet<String>,
    has_been_welcome: bool,
}

impl JoinedCoordinators {
    /// `role` is the role in its announcement.
    pub fn new(role: &'static str, record: &NodeRecord, health: Health) -> Self {
        Self {
            role,
            name: record.id.name.to_string(),
            roles: record.roles.clone(),
            health,
            addresses: BTreeSet::new(),
            has_been_welcome: false,
        }
    }

    /// Keeps the health up to date, and announces the node at its first welcome.
    pub fn take(&mut self, event: MembershipEvent) -> Option<Leaving> {
        match event {
            MembershipEvent::Welcomed { coordinator, address } => {
                tracing::info!(%coordinator, address, "welcomed");
                self.health.set(ReadyState::Ready);
                // A welcome that comes while the node leaves is too late.
                if self.welcomed(address) && self.health.get().is_ready() {
                    let (role, name) = (self.role.to_owned(), self.name.clone());
                    Announcement::Ready { role, name }.print();
                }
                None
            }
            MembershipEvent::ConnectionLost { address, reason } => {
                let state = self.lost(&address, &reason);
                self.health.set(state);
                None
            }
            MembershipEvent::DrainRequested { reason, next_role } => self.asked(&reason, next_role),
            MembershipEvent::Fenced { by_epoch } => Some(Leaving::Fenced { by_epoch }),
        }
    }

    /// Carries out the node's `goodbye` and listens to its coordinators meanwhile: an order may say that the node leaves
    /// for good instead of coming back, or another process may take its name. A node that leaves by itself (`None`) ignores
    /// such orders.
    pub async fn hear_during<T>(
        &mut self,
        membership: &mut Membership,
        (mut leaving, goodbye): (Option<Leaving>, impl Future<Output = T>),
    ) -> (Option<Leaving>, T) {
        tokio::pin!(goodbye);
        let mut hear = |event| {
            let heard = self.take(event);
            leaving = leaving.map(|leaving| heard.map_or(leaving, |heard| leaving.then(heard)));
        };
        let said = loop {
            tokio::select! {
                said = &mut goodbye => break said,
                Some(event) = membership.next_event() => hear(event),
            }
        };
        while let Some(event) = membership.queued_event() {
            hear(event);
        }
        (leaving, said)
    }

    fn asked(&self, reason: &str, next_role: Option<AssignedRole>) -> Option<Leaving> {
        match next_role {
            None => {
                tracing::info!(reason, "a coordinator asks this node to leave");
                Some(Leaving::Asked)
            }
            Some(role) if self.roles.contains(&role) => {
                tracing::info!(
                    reason,
                    role = role.name(),
                    "a coordinator asks this node to change its role"
                );
                Some(Leaving::ForRole(role))
            }
            // A coordinator that has read the registration does not ask for it.
            Some(role) => {
                tracing::warn!(
                    reason,
                    role = role.name(),
                    "a coordinator asks for a role that this process cannot have"
                );
                None
            }
        }
    }

    /// True for the first welcome of all. That is when a node announces itself.
    fn welcomed(&mut self, coordinator_address: String) -> bool {
        self.addresses.insert(coordinator_address);
        !std::mem::replace(&mut self.has_been_welcome, true)
    }

    /// The state of the node after it lost one coordinator, or could not reach it.
    fn lost(&mut self, coordinator_address: &str, reason: &LostReason) -> ReadyState {
        self.addresses.remove(coordinator_address);
        match self.addresses.is_empty() {
            true => ReadyState::NotReady(format!("no coordinator: {reason}")),
            false => ReadyState::Ready,
        }
    }
}

#[cfg(test)]
mod tests {
    use serving_core::compatibility::CompatibilityHash;
    use serving_core::ids::{NodeId, NodeName};
    use serving_core::node::{NodeCapacity, NodeRole, NodeState};

    use super::*;

    fn joined() -> JoinedCoordinators {
        let capacity = NodeCapacity {
            kv_blocks: 1,
            block_tokens: 16,
            max_sequences: 1,
            max_batch_tokens: 16,
            max_model_tokens: 16,
            block_bytes: 1,
        };
        let record = NodeRecord {
            id: NodeId {
                name: NodeName::new("decode-0"),
                epoch: NodeEpoch(1),
            },
            role: NodeRole::Decode,
            is_co_located: false,
            address: "a:1".to_owned(),
            kv_address: "a:1".to_owned(),
            compatibility: CompatibilityHash([0; 32]).into(),
            transports: Vec::new(),
            version: "test".to_owned(),
            capacity,
            model_name: "m".to_owned(),
            state: NodeState::Ready,
            roles: vec![AssignedRole::Prefill],
        };
        JoinedCoordinators::new("decode", &record, Health::new("not yet"))
    }

    #[test]
    fn a_node_is_ready_while_any_coordinator_wants_it() {
        let mut joined = joined();
        assert!(joined.welcomed("a:1".to_owned()));
        assert!(!joined.welcomed("b:1".to_owned()));
        assert!(joined.lost("a:1", &LostReason::Ended).is_ready());
        let state = joined.lost("b:1", &LostReason::Ended);
        assert!(!state.is_ready() && state.words().contains("ended the stream"));
        assert!(!joined.welcomed("a:1".to_owned()), "announced once");
    }

    #[test]
    fn it_leaves_when_asked_or_fenced_and_for_nothing_else() {
        let mut joined = joined();
        let lost = MembershipEvent::ConnectionLost {
            address: "a:1".to_owned(),
            reason: LostReason::Ended,
        };
        assert_eq!(joined.take(lost), None);
        assert!(joined.health.get().words().contains("no coordinator"));
        let asked = |next_role| MembershipEvent::DrainRequested {
            reason: "r".to_owned(),
            next_role,
        };
        assert_eq!(joined.take(asked(None)), Some(Leaving::Asked));
        let prefill = AssignedRole::Prefill;
        assert_eq!(joined.take(asked(Some(prefill))), Some(Leaving::ForRole(prefill)));
        assert_eq!(joined.take(asked(Some(AssignedRole::CoLocated))), None, "not offered");
        let by_epoch = NodeEpoch(4);
        let (role, other, fenced) = (
            Leaving::ForRole(prefill),
            Leaving::ForRole(AssignedRole::Decode),
            Leaving::Fenced { by_epoch },
        );
        assert_eq!((role.then(other), role.then(Leaving::Asked)), (other, Leaving::Asked));
        assert_eq!(
            (Leaving::Asked.then(role), fenced.then(Leaving::Asked)),
            (Leaving::Asked, fenced)
        );
        assert_eq!(
            joined.take(MembershipEvent::Fenced { by_epoch }),
            Some(Leaving::Fenced { by_epoch })
        );
    }
}
