//! How a registration stands.

use std::time::Instant;

use serving_core::ids::NodeEpoch;

use crate::trouble::EtcdTrouble;

/// The state of the registration. Only the process can end it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegistrationHealth {
    Registered {
        since: Instant,
    },
    /// Not known to be registered. It is tried again for ever, at least every 2 s.
    Retrying {
        why: EtcdTrouble,
        since: Instant,
    },
    /// A process that was started later has the name. Nothing is written any more. The process decides what to do.
    Fenced {
        by_epoch: NodeEpoch,
    },
}
