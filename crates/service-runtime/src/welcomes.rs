//! Whether a node may call itself ready: while it is welcome at one coordinator at least.

use std::collections::BTreeSet;

use crate::health::ReadyState;
use crate::membership::LostReason;

/// The coordinators that have welcomed this node and have not been lost since.
#[derive(Debug, Default)]
pub struct Welcomes {
    addresses: BTreeSet<String>,
    has_been_welcome: bool,
}

impl Welcomes {
    /// True for the first welcome of all: that is when a node announces itself.
    pub fn welcomed(&mut self, coordinator_address: String) -> bool {
        self.addresses.insert(coordinator_address);
        !std::mem::replace(&mut self.has_been_welcome, true)
    }

    /// What the node is after the loss of one coordinator, or a failed attempt to reach it.
    pub fn lost(&mut self, coordinator_address: &str, reason: &LostReason) -> ReadyState {
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

    #[test]
    fn a_node_is_ready_while_any_coordinator_wants_it() {
        let mut welcomes = Welcomes::default();
        assert!(welcomes.welcomed("a:1".to_owned()));
        assert!(!welcomes.welcomed("b:1".to_owned()));
        assert!(welcomes.lost("a:1", &LostReason::Ended).is_ready());
        let state = welcomes.lost("b:1", &LostReason::Ended);
        assert!(!state.is_ready() && state.words().contains("ended the stream"));
        assert!(!welcomes.welcomed("a:1".to_owned()), "announced once");
    }
}
