//! KV by NCCL, between nodes of any hosts. It is used only where `transports` names it.
//!
//! - **A pair** has a control stream, which is a method of the handoff service on the port that every node has, and one
//!   communicator of two ranks. The control stream comes with the pair. The communicator comes with the pair's first transfer,
//!   because its id opens a listener and its kernels take memory.
//! - **The decode node mints the id**, when the prefill node asks for it. It decides how many communicators it has, as it
//!   decides about rings of shared memory, and connections then go towards it, as those of the handoff do.
//! - **Both ends name an exchange alike**: its frames and sizes travel on the control stream, in order; the sender posts the
//!   exchange after that message, the decode node when it reads it. One exchange is under way (PROTOCOL rule 12).
//! - **Blocks are packed** into a ring of the device's memory, and unpacked from another one. NCCL touches no block. So a
//!   communicator that ends late writes into its own ring, blocks need no quarantine for it, and a frame lands only after the
//!   ledger and the checksum were asked.
//! - **A finished exchange is not an arrival.** The sender's slots come back when the decode node has taken the frames, and a
//!   transfer counts with its ack.
//! - **Deadlines**: the making, each exchange and the abort have one (`DeviceLimits`). A late one, an asynchronous error, or a
//!   control stream that ends, ends the communicator, and the pair with it. The pair's next life makes the next communicator in
//!   this process. When nothing had moved, the pair takes its next transport for a while (`rest.rs`).
//!
//! Nothing that a communicator may touch is freed before its abort has returned; memory of rings is used again, never freed
//! while any communicator of this process may run. Kernels and GEMMs must be loaded before the first communicator, because
//! loading can wait for the device: the engine does that when it opens.

mod carrier;
mod connect;
mod cuda_library;
mod fault;
mod group;
#[cfg(feature = "testing")]
pub(crate) mod hostile;
mod land;
mod library;
mod messages;
mod rest;
mod rings;
mod send;
mod serve;
mod worker;

use std::io;
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;

use self::fault::NcclFault;
use self::library::Library;
use self::rest::Rests;
use self::rings::Rings;
use self::serve::{NcclConfig, serve};
use super::Means;
use crate::choice::TransportKind;
use crate::device::DeviceKv;
use crate::link::{Dial, KvTransport, Link, NoLink, ReceivingEnd, Serving};
use crate::receiver::Receiver;
use crate::trust::DeviceEnd;

pub(crate) const KIND: TransportKind = TransportKind::new("nccl");

#[derive(Debug)]
struct Nccl {
    device: Option<DeviceEnd>,
    /// Taken when the first peer offers it.
    library: OnceLock<Result<Arc<dyn Library>, String>>,
    rings: OnceLock<Arc<Rings>>,
    rests: Arc<Rests>,
}

pub(super) fn transport(means: &Means<'_>) -> Arc<dyn KvTransport> {
    Arc::new(Nccl {
        device: means.device.cloned(),
        library: OnceLock::new(),
        rings: OnceLock::new(),
        rests: Arc::default(),
    })
}

impl Nccl {
    fn library(&self, kv: &Arc<DeviceKv>) -> Result<Arc<dyn Library>, NcclFault> {
        let open = || cuda_library::open(kv).map_err(|error| error.to_string());
        let opened = self.library.get_or_init(open);
        opened.clone().map_err(NcclFault::NoLibrary)
    }

    fn rings(&self, kv: &Arc<DeviceKv>) -> Arc<Rings> {
        self.rings.get_or_init(|| Rings::new(kv.clone())).clone()
    }
}

#[async_trait]
impl KvTransport for Nccl {
    fn kind(&self) -> TransportKind {
        KIND
    }

    fn fallbacks(&self) -> &'static [(TransportKind, &'static [&'static str])] {
        &[(KIND, &NcclFault::NAMES)]
    }

    /// The communicator comes with the first transfer.
    fn proves_its_links(&self) -> bool {
        false
    }

    fn serve(&self, receiver: &Arc<Receiver>, end: &ReceivingEnd) -> io::Result<Option<Serving>> {
        let device = self.device.as_ref().ok_or_else(|| {
            let why = "this node's KV is not in the memory of a CUDA device";
            io::Error::new(io::ErrorKind::Unsupported, why)
        })?;
        let library = self.library(&device.kv).map_err(io::Error::other)?;
        let config = NcclConfig::new(end.layer_bytes, device.has_checksums);
        let serving = serve(receiver, config, (library, self.rings(&device.kv)));
        Ok(Some(Serving(Box::new(serving))))
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
