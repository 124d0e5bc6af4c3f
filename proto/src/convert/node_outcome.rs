//! How a node's brain refuses or breaks off, in the labels of the wire. One table serves both kinds of node.

use serving_core::scheduler::{NodeFailure, Refusal};

use crate::messages::{Failed, Fault, Refused, RefusedReason};

impl From<&NodeFailure> for Failed {
    fn from(failure: &NodeFailure) -> Self {
        let fault = match failure {
            NodeFailure::Deadline { .. } => Fault::Deadline,
            NodeFailure::ReservationExpired { .. } => Fault::Peer,
            NodeFailure::HoldExpired { .. } | NodeFailure::Transfer { .. } => Fault::Transfer,
            NodeFailure::Engine { .. } | NodeFailure::Sampling => Fault::Engine,
            NodeFailure::SlowReader { .. } => Fault::Internal,
            NodeFailure::Draining => Fault::Draining,
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
                RefusedReason::NoCapacity
            }
            Refusal::Duplicate => RefusedReason::Duplicate,
            Refusal::NeverFits { .. } | Refusal::Invalid(_) => RefusedReason::Invalid,
        };
        Self {
            reason,
            detail: refusal.to_string(),
        }
    }
}
