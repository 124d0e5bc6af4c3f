//! Why a pair does not go by CUDA IPC.

use std::io;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::choice::Fallback;
use crate::device::DeviceFault;
use crate::transports::shm::ShmFault;

/// It is tried again as [`Fallback`] says.
#[derive(Debug, Error)]
pub(super) enum IpcFault {
    #[error(
        "the decode node does not offer it: its `transports` leave it out, its KV is on the host, or it holds no secret"
    )]
    Disabled,
    #[error("this node's KV is not in the memory of a CUDA device; leave `cuda-ipc` out of `transports`")]
    NoDevice,
    #[error("this node holds no `shm_direct_secret`, and only nodes that hold the same open each other's pool")]
    NoSecret,
    #[error("the decode node runs on another host")]
    NotSameHost,
    #[error(
        "the decode node runs in another namespace of process numbers, so its exit could not be watched; give both containers one"
    )]
    PidNamespace,
    #[error("{0}")]
    Socket(ShmFault),
    #[error("{0}")]
    Denied(IpcDenial),
    #[error(
        "the decode node's pool ({device}) could not be opened: {fault}; CUDA IPC needs devices that reach each other"
    )]
    Import { device: String, fault: DeviceFault },
    #[error("this node's device: {0}")]
    Device(DeviceFault),
}

/// Why the decode node does not give its pool to a process that came to its socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
pub(super) enum IpcDenial {
    #[error("the two nodes hold different secrets: they were not started by one `baton up`")]
    Secret,
    #[error("the two nodes' blocks differ in shape; their compatibility hashes should have")]
    Geometry,
    #[error("the decode node cannot watch this process: it would not know when a block can be written no more")]
    Unwatched,
}

impl IpcFault {
    /// Every label.
    pub const NAMES: [&'static str; 14] = [
        "disabled",
        "no_device",
        "no_secret",
        "not_same_host",
        "pid_namespace",
        "unreachable",
        "uid",
        "refused",
        "io",
        "time_out",
        "secret",
        "geometry",
        "unwatched",
        "device",
    ];

    /// Closed label for metrics.
    pub fn name(&self) -> &'static str {
        match self {
            IpcFault::Disabled => "disabled",
            IpcFault::NoDevice => "no_device",
            IpcFault::NoSecret => "no_secret",
            IpcFault::NotSameHost => "not_same_host",
            IpcFault::PidNamespace => "pid_namespace",
            IpcFault::Socket(fault) => fault.name(),
            IpcFault::Denied(IpcDenial::Secret) => "secret",
            IpcFault::Denied(IpcDenial::Geometry) => "geometry",
            IpcFault::Denied(IpcDenial::Unwatched) => "unwatched",
            IpcFault::Import { .. } | IpcFault::Device(_) => "device",
        }
    }

    /// See [`Fallback::may_pass`].
    fn may_pass(&self) -> bool {
        matches!(self, IpcFault::Socket(fault) if fault.may_pass())
    }
}

impl From<IpcFault> for Fallback {
    fn from(fault: IpcFault) -> Self {
        Fallback {
            wanted: super::KIND,
            reason: fault.name(),
            detail: fault.to_string(),
            may_pass: fault.may_pass(),
        }
    }
}

impl From<ShmFault> for IpcFault {
    fn from(fault: ShmFault) -> Self {
        IpcFault::Socket(fault)
    }
}

impl From<io::Error> for IpcFault {
    fn from(error: io::Error) -> Self {
        IpcFault::Socket(error.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_has_a_label_of_the_list() {
        let faults = [
            IpcFault::Disabled,
            IpcFault::NoDevice,
            IpcFault::NoSecret,
            IpcFault::NotSameHost,
            IpcFault::PidNamespace,
            ShmFault::Uid { ours: 1, theirs: 2 }.into(),
            ShmFault::Unreachable(io::ErrorKind::NotFound.into()).into(),
            ShmFault::Refused("a test").into(),
            ShmFault::TimeOut.into(),
            io::Error::from(io::ErrorKind::InvalidData).into(),
            IpcFault::Denied(IpcDenial::Secret),
            IpcFault::Denied(IpcDenial::Geometry),
            IpcFault::Denied(IpcDenial::Unwatched),
            IpcFault::Device(DeviceFault::NotCuda),
        ];
        let passing = faults.iter().filter(|fault| fault.may_pass()).map(IpcFault::name);
        assert_eq!(passing.collect::<Vec<_>>(), ["refused", "time_out", "io"]);
        let mut names: Vec<&str> = faults.iter().map(IpcFault::name).collect();
        assert!(names.iter().all(|name| IpcFault::NAMES.contains(name)), "{names:?}");
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), IpcFault::NAMES.len());
    }
}
