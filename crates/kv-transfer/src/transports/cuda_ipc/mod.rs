//! KV by CUDA IPC, between two processes of one host: the decode node exports its pool, the prefill node opens it and copies each
//! block to its place, from device to device. It is the direct mode of shared memory with a device's memory: the two ends prove
//! one secret to each other, the messages are the same on a socket of its own, and PROTOCOL rule 11 decides when a block is free.
//!
//! What differs:
//! - A pool is known by the kernel's boot, the namespace of process numbers, the device's UUID and its node's own name: equal
//!   process numbers of two containers are two processes.
//! - A frame is told when its copy has completed on the sender's own stream, which the host has waited for. So the decode node
//!   waits for no event of another process, and its ack follows the bytes.
//! - A copy that does not complete in time may still write. Then the sender neither aborts nor says goodbye, and closes nothing:
//!   the decode node waits for the exit of the process, as for every writer that does not answer.
//! - A process cannot open its own handle (the driver refuses it), so two nodes of one process use the pool as it is.
//!
//! The two nodes may have one device or two. The driver decides whether two devices reach each other, when the pool is opened.

mod connect;
mod fault;
mod here;
#[cfg(feature = "testing")]
pub(crate) mod hostile;
mod opened;
mod pool;
mod serve;
mod socket;

use std::io;
use std::sync::Arc;

use async_trait::async_trait;

use self::fault::IpcFault;
use self::serve::{IpcConfig, serve};
use super::Means;
use crate::choice::TransportKind;
use crate::link::{Dial, KvTransport, Link, NoLink, ReceivingEnd, Serving};
use crate::receiver::Receiver;
use crate::trust::{DeviceEnd, DirectWish};

pub(crate) const KIND: TransportKind = TransportKind::new("cuda-ipc");

#[derive(Debug)]
pub(super) struct CudaIpc {
    /// This process, as its peers see it. A pool is opened by processes of the same user.
    pub uid: u32,
    pub direct: Option<DirectWish>,
    pub device: Option<DeviceEnd>,
}

pub(super) fn transport(means: &Means<'_>) -> Arc<dyn KvTransport> {
    Arc::new(CudaIpc {
        uid: rustix::process::geteuid().as_raw(),
        direct: means.direct.cloned(),
        device: means.device.cloned(),
    })
}

#[async_trait]
impl KvTransport for CudaIpc {
    fn kind(&self) -> TransportKind {
        KIND
    }

    fn fallbacks(&self) -> &'static [(TransportKind, &'static [&'static str])] {
        &[(KIND, &IpcFault::NAMES)]
    }

    fn serve(&self, receiver: &Arc<Receiver>, _: &ReceivingEnd) -> io::Result<Option<Serving>> {
        let device = self.device.as_ref().ok_or_else(|| {
            let why = "this node's KV is not in the memory of a CUDA device";
            io::Error::new(io::ErrorKind::Unsupported, why)
        })?;
        let config = IpcConfig::of(device, self.uid)?;
        Ok(Some(Serving(Box::new(serve(receiver, config)?))))
    }

    async fn connect(&self, dial: &Dial<'_>) -> Result<Link, NoLink> {
        let connected = connect::connect(dial, self).await;
        connected.map_err(|fault| NoLink::Way(fault.into()))
    }
}

#[cfg(test)]
mod conformance_tests;
#[cfg(test)]
mod tests;
