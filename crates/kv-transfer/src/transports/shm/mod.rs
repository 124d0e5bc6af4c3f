//! KV through memory shared by two processes of one host and one user: both modes of PROTOCOL rule 11.
//!
//! *Staged*, the default. A pair has one Unix socket and one ring of equal slots in a memfd. The sender copies a block's
//! layers into a free slot and sends a small message. The receiver copies the slot into memory of its own; it sums, checks
//! and imports that copy, and gives the slot back. So a sender that changes a slot late, or breaks off in the middle, harms
//! only its own transfer. The *receiver* makes the ring, as a gRPC receiver grants its windows: the side that takes
//! untrusted input decides how much of a pair may be in flight, and owns the memory.
//!
//! *Direct*, between nodes that hold one secret because one `baton up` started them. The receiver passes its whole pool.
//! The sender writes each block where its ticket says and then sends the frame. The receiver checks the frame with the same
//! ledger, sums the bytes in place, and gives the credit back. This is one copy instead of three. The sender is *trusted*:
//! it could write any block. Its timing need not be trusted. A sender that was paused in the middle of a store finishes the
//! store when it wakes, whatever was decided meanwhile. Therefore:
//! - It writes no block before the receiver has said that the reservation is claimed (`Begun`): the blocks of an expired
//!   ticket may belong to another request by then.
//! - A claimed transfer that does not commit ends (`HandoffSink::ended`, the end of its quarantine) only when the sender
//!   has said that it stores no more (its `Abort`, sent when its running copy is over, also as the answer to a refusal or to
//!   the receiver's abort), when it has unmapped the pool (`Goodbye`), or when its process has exited (pidfd). A closed
//!   socket proves nothing.
//!
//! The memory cannot be resized once passed (the sender verifies the seals), so no access can fault. The socket's name is
//! abstract, and memfds have no name in the file system: whatever process dies, the kernel leaves nothing behind.
//!
//! The nodes learn in their first hello whether a pair may share memory: the offer is boot id and socket. Both ends compare the
//! user behind the socket (SO_PEERCRED) with their own before they say anything else. Then each proves that it holds the
//! secret.

mod config;
pub(super) mod connect;
pub(super) mod credits;
mod fault;
#[cfg(feature = "testing")]
pub(crate) mod hostile;
pub(super) mod in_place;
mod lent;
mod part;
pub(super) mod peer_process;
pub(super) mod pool;
pub(super) mod receiver;
mod ring;
pub(super) mod socket;
pub(super) mod welcome;
mod yardstick;

use std::io;
use std::sync::Arc;

use async_trait::async_trait;
pub use fault::ShmFault;
pub use yardstick::Yardstick;

use self::config::ShmConfig;
use self::fault::DirectFault;
use self::receiver::serve;
use super::Means;
use crate::choice::TransportKind;
use crate::link::{Dial, KvTransport, Link, NoLink, ReceivingEnd, Serving};
use crate::receiver::Receiver;
use crate::trust::DirectWish;

/// Memory shared by two processes of one host.
pub const KIND: TransportKind = TransportKind::new("shm");
/// The mode between peers that trust each other: the prefill node writes the decode node's pool in place. A pair that takes
/// shared memory may get this mode; it is never in a list of transports.
pub const DIRECT: TransportKind = TransportKind::new("shm-direct");

#[derive(Debug)]
pub(crate) struct Shm {
    /// This process, as its peers see it. Shared memory is for peers of the same user.
    pub uid: u32,
    pub direct: Option<DirectWish>,
}

pub(super) fn transport(means: &Means<'_>) -> Arc<dyn KvTransport> {
    Arc::new(Shm {
        uid: rustix::process::geteuid().as_raw(),
        direct: means.direct.cloned(),
    })
}

#[async_trait]
impl KvTransport for Shm {
    fn kind(&self) -> TransportKind {
        KIND
    }

    fn fallbacks(&self) -> &'static [(TransportKind, &'static [&'static str])] {
        &[(KIND, &ShmFault::NAMES), (DIRECT, &DirectFault::NAMES)]
    }

    fn serve(&self, receiver: &Arc<Receiver>, end: &ReceivingEnd) -> io::Result<Option<Serving>> {
        let config = ShmConfig {
            direct: end.direct.clone(),
            ..ShmConfig::new(end.layer_bytes)
        };
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
mod direct_tests;
#[cfg(test)]
mod tests;
