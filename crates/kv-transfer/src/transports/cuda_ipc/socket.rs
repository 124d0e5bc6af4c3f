//! The offer of a decode node, and the messages on its socket that shared memory does not have.

use std::io;
use std::os::unix::fs::MetadataExt as _;

use serde::{Deserialize, Serialize};

use super::fault::{IpcDenial, IpcFault};
use super::opened::PoolKey;
use crate::transports::shm::pool::PoolTerms;
use crate::transports::shm::socket::boot_id;
use crate::trust::Word32;

/// What a decode node says about its pool in the answer to a hello.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct IpcOffer {
    /// The kernel's boot id. It is equal on the same host only.
    #[prost(string, tag = "1")]
    pub boot_id: String,
    /// Inode of the namespace in which its process has its number.
    #[prost(uint64, tag = "2")]
    pub pid_namespace: u64,
    /// UUID of its device.
    #[prost(string, tag = "3")]
    pub device: String,
    /// Name of an abstract Unix socket of the same network namespace, drawn at random at every start.
    #[prost(string, tag = "4")]
    pub socket: String,
}

impl IpcOffer {
    /// Of this process.
    pub fn of(device: &str) -> io::Result<Self> {
        Ok(Self {
            boot_id: boot_id()?,
            pid_namespace: pid_namespace()?,
            device: device.to_owned(),
            socket: format!("baton-kv-cuda-{:032x}", rand::random::<u128>()),
        })
    }

    /// Of an offer of this host.
    pub fn key(&self) -> PoolKey {
        PoolKey {
            pid_namespace: self.pid_namespace,
            device: self.device.clone(),
            socket: self.socket.clone(),
        }
    }

    /// Whether a process of this host's kernel, and of this namespace, made it.
    pub fn check(&self) -> Result<(), IpcFault> {
        if self.boot_id != boot_id()? {
            return Err(IpcFault::NotSameHost);
        }
        if self.pid_namespace != pid_namespace()? {
            return Err(IpcFault::PidNamespace);
        }
        Ok(())
    }
}

fn pid_namespace() -> io::Result<u64> {
    Ok(std::fs::metadata("/proc/self/ns/pid")?.ino())
}

/// The decode node's answer to an ask, which is that of shared memory's direct mode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum IpcGrant {
    Pool {
        terms: PoolTerms,
        /// The driver's handle of the pool.
        handle: Vec<u8>,
        /// The receiver's own proof.
        proof: Word32,
    },
    Denied(IpcDenial),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_of_another_host_or_namespace_is_not_taken() {
        let here = IpcOffer::of("GPU-1").unwrap();
        assert!(here.check().is_ok());
        let elsewhere = IpcOffer {
            boot_id: "another".to_owned(),
            ..here.clone()
        };
        assert!(matches!(elsewhere.check(), Err(IpcFault::NotSameHost)));
        let container = IpcOffer {
            pid_namespace: here.pid_namespace + 1,
            ..here
        };
        assert!(matches!(container.check(), Err(IpcFault::PidNamespace)));
    }
}
