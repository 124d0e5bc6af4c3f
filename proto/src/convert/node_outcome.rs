//! How a node's brain refuses or breaks off, in the labels of the wire. One table serves both kinds of node.

use serving_core::scheduler::{NodeFailure, Refusal};

use crate::messages::{Failed, NodeFault, RefuseReason, Refused};

impl From<&NodeFailure> for Failed {
    fn from(failure: &NodeFailure) -> Self {
        let fault = match failure {
            NodeFailure::Deadline { .. } => NodeFault::Deadline,
            NodeFailure::ReservationExpired { .. } => NodeFault::Peer,
            NodeFailure::HoldExpired { .. } | NodeFailure::Transfer { .. } => NodeFault::Transfer,
            NodeFailure::Engine { .. } | NodeFailure::NotFinite => NodeFault::Engine,
            NodeFailure::RuledOut => NodeFault::RuledOut,
            NodeFailure::SlowReader { .. } => NodeFault::Internal,
            NodeFailure::Draining => NodeFault::Draining,
        };
        let reason = match failure {
            // The transfer's own label says more than "transfer_failed", which the fault already says.
            NodeFailure::Transfer { reason, .. } => reason.clone(),
            _ => failure.name().to_owned(),
        };
        Self {
            fault,
            reason,
            detail: failure.to_string(),
        }
    }
}

impl From<&Refusal> for Refused {
    fn from(refusal: &Refusal) -> Self {
        let reason = match refusal {
            Refusal::NoBlocks { .. } | Refusal::TooManySequences { .. } | Refusal::Preempting => {
                RefuseReason::NoCapacity
            }
            Refusal::Duplicate => RefuseReason::Duplicate,
            Refusal::NeverFits { .. } | Refusal::Invalid(_) => RefuseReason::Invalid,
        };
        Self {
            reason,
            detail: refusal.to_string(),
        }
    }
}
