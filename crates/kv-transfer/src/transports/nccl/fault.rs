//! Why a pair does not go by NCCL, and how a communicator ends.

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use thiserror::Error;

use crate::choice::Fallback;
use crate::device::DeviceFault;

/// What the library says. Its type is the library's own.
pub(super) type LibraryError = Box<dyn Error + Send + Sync>;

/// Why a pair has no link by NCCL. It is tried again when the pair's stream is made again.
#[derive(Debug, Error)]
pub(super) enum NcclFault {
    #[error("the decode node does not offer it; its `transports` leave it out, or it has no NCCL")]
    Disabled,
    #[error("this node's KV is not in the memory of a CUDA device; leave `nccl` out of `transports`")]
    NoDevice,
    #[error("this node cannot use NCCL: {0}; `baton doctor --gpu` lists where it was looked for")]
    NoLibrary(String),
    #[error("this node has NCCL {ours}, the decode node {theirs}; all ranks of a communicator need one version")]
    Version { ours: String, theirs: String },
    #[error("the last communicator with this node ended before a byte had moved; the next one is tried in {} s", .left.as_secs())]
    Resting { left: Duration },
    #[error("the decode node announced {slots} slots of {slot_bytes} bytes for what it receives")]
    Geometry { slots: u32, slot_bytes: u32 },
    #[error("the control stream: {0}")]
    Control(String),
}

impl NcclFault {
    /// Every label.
    pub const NAMES: [&'static str; 7] = [
        "disabled",
        "no_device",
        "no_library",
        "version",
        "resting",
        "geometry",
        "io",
    ];

    /// Closed label for metrics.
    pub fn name(&self) -> &'static str {
        match self {
            NcclFault::Disabled => "disabled",
            NcclFault::NoDevice => "no_device",
            NcclFault::NoLibrary(_) => "no_library",
            NcclFault::Version { .. } => "version",
            NcclFault::Resting { .. } => "resting",
            NcclFault::Geometry { .. } => "geometry",
            NcclFault::Control(_) => "io",
        }
    }

    /// See [`Fallback::may_pass`].
    fn may_pass(&self) -> bool {
        matches!(self, NcclFault::Resting { .. } | NcclFault::Control(_))
    }
}

impl From<NcclFault> for Fallback {
    fn from(fault: NcclFault) -> Self {
        Fallback {
            wanted: super::KIND,
            reason: fault.name(),
            detail: fault.to_string(),
            may_pass: fault.may_pass(),
        }
    }
}

/// How a communicator ended. Its pair is lost with it.
#[derive(Debug, Error)]
pub(super) enum Ending {
    #[error("this node needs it no longer")]
    Closed,
    #[error(
        "the two nodes had no communicator after {} ms{}; {}",
        .waited.as_millis(), said(.error.as_ref()), unreachable(.listener.as_ref())
    )]
    NotMade {
        waited: Duration,
        /// What the library said. `None`: nothing, until the deadline.
        error: Option<LibraryError>,
        /// Where the decode node's library listens for the other rank.
        listener: Option<SocketAddr>,
    },
    #[error("the peer took no part in an exchange of {bytes} bytes for {} ms", .waited.as_millis())]
    Late { bytes: u64, waited: Duration },
    #[error("NCCL failed: {0}")]
    Library(LibraryError),
    #[error("this node's device: {0}")]
    Device(#[from] DeviceFault),
    #[error("the system started no thread for it: {0}")]
    Thread(std::io::Error),
    #[error("the peer ended it: {0}")]
    ByPeer(String),
    #[error("the peer breaks the contract: {0}")]
    Contract(&'static str),
}

fn said(error: Option<&LibraryError>) -> String {
    error.map(|error| format!(", NCCL failed: {error}")).unwrap_or_default()
}

fn unreachable(listener: Option<&SocketAddr>) -> String {
    match listener {
        Some(listener) => format!(
            "the prefill node must reach {listener}, where the decode node's NCCL listens, and the decode node the same ports of \
             the prefill node: check NCCL_SOCKET_IFNAME and what is between the nodes"
        ),
        None => "check NCCL_SOCKET_IFNAME and what is between the nodes".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_has_its_label() {
        let faults = [
            NcclFault::Disabled,
            NcclFault::NoDevice,
            NcclFault::NoLibrary("x".to_owned()),
            NcclFault::Version {
                ours: "2.28".to_owned(),
                theirs: "2.30".to_owned(),
            },
            NcclFault::Resting { left: Duration::ZERO },
            NcclFault::Geometry {
                slots: 0,
                slot_bytes: 0,
            },
            NcclFault::Control("x".to_owned()),
        ];
        let passing = faults.iter().filter(|fault| fault.may_pass()).map(NcclFault::name);
        assert_eq!(passing.collect::<Vec<_>>(), ["resting", "io"]);
        assert_eq!(faults.map(|fault| fault.name()), NcclFault::NAMES);
    }

    #[test]
    fn a_communicator_that_is_not_made_names_the_port_that_must_be_reached() {
        let ending = Ending::NotMade {
            waited: Duration::from_secs(15),
            error: None,
            listener: Some("192.0.2.7:60187".parse().unwrap()),
        };
        assert!(ending.to_string().contains("192.0.2.7:60187"), "{ending}");
    }
}
