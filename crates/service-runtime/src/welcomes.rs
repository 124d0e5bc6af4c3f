//! What a node makes of its membership's events: ready while it is welcome at one coordinator at least, and when to leave.

use std::collections::BTreeSet;

use serving_core::ids::NodeEpoch;

use crate::announce::Announcement;
use crate::health::{Health, ReadyState};
use crate::membership::{LostReason, MembershipEvent};

/// Why a node is to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaving {
    /// A coordinator asks for it.
    Asked,
    /// A process that was started later has its name.
    Fenced { by_epoch: NodeEpoch },
}

/// The coordinators that have welcomed this node and have not been lost since.
#[derive(Debug)]
pub struct Welcomes {
    role: &'static str,
    name: String,
    health: Health,
    addresses: BTreeSet<String>,
    has_been_welcome: bool,
}

impl Welcomes {
    pub fn new((role, name): (&'static str, &str), health: Health) -> Self {
        Self {
            role,
            name: name.to_owned(),
            health,
            addresses: BTreeSet::new(),
            has_been_welcome: false,
        }
    }

    /// Keeps the health true and announces the node at its first welcome.
    pub fn take(&mut self, event: MembershipEvent) -> Option<Leaving> {
        match event {
            MembershipEvent::Welcomed { coordinator, address } => {
                tracing::info!(%coordinator, address, "welcomed");
                self.health.set(ReadyState::Ready);
                if self.welcomed(address) {
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
            MembershipEvent::DrainRequested { reason } => {
                tracing::info!(reason, "a coordinator asks this node to leave");
                Some(Leaving::Asked)
            }
            MembershipEvent::Fenced { by_epoch } => Some(Leaving::Fenced { by_epoch }),
        }
    }

    /// True for the first welcome of all: that is when a node announces itself.
    fn welcomed(&mut self, coordinator_address: String) -> bool {
        self.addresses.insert(coordinator_address);
        !std::mem::replace(&mut self.has_been_welcome, true)
    }

    /// What the node is after the loss of one coordinator, or a failed attempt to reach it.
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
    use super::*;

    fn welcomes() -> Welcomes {
        Welcomes::new(("decode", "decode-0"), Health::new("not yet"))
    }

    #[test]
    fn a_node_is_ready_while_any_coordinator_wants_it() {
        let mut welcomes = welcomes();
        assert!(welcomes.welcomed("a:1".to_owned()));
        assert!(!welcomes.welcomed("b:1".to_owned()));
        assert!(welcomes.lost("a:1", &LostReason::Ended).is_ready());
        let state = welcomes.lost("b:1", &LostReason::Ended);
        assert!(!state.is_ready() && state.words().contains("ended the stream"));
        assert!(!welcomes.welcomed("a:1".to_owned()), "announced once");
    }

    #[test]
    fn it_leaves_when_asked_or_fenced_and_for_nothing_else() {
        let mut welcomes = welcomes();
        let lost = MembershipEvent::ConnectionLost {
            address: "a:1".to_owned(),
            reason: LostReason::Ended,
        };
        assert_eq!(welcomes.take(lost), None);
        assert!(welcomes.health.get().words().contains("no coordinator"));
        let asked = MembershipEvent::DrainRequested { reason: "r".to_owned() };
        assert_eq!(welcomes.take(asked), Some(Leaving::Asked));
        let by_epoch = NodeEpoch(4);
        assert_eq!(
            welcomes.take(MembershipEvent::Fenced { by_epoch }),
            Some(Leaving::Fenced { by_epoch })
        );
    }
}
