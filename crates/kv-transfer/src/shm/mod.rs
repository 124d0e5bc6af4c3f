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
//! The nodes learn over gRPC whether a pair may share memory: `HelloReply` has boot id and socket. Both ends compare the
//! user behind the socket (SO_PEERCRED) with their own before they say anything else. Then each proves that it holds the
//! secret.

mod connect;
mod credits;
mod lent;
mod part;
mod place;
mod pool;
mod receiver;
mod ring;
mod socket;
mod trust;
mod welcome;
mod yardstick;

pub(crate) use connect::connect;
pub(crate) use place::{NoPlace, Slot};
pub(crate) use pool::SendPool;
pub use receiver::{Serving, ShmConfig, serve};
pub(crate) use ring::SendRing;
pub use trust::{DirectSecret, NoSecret};
pub use welcome::DirectOffer;
pub use yardstick::Yardstick;

/// What a prefill node needs to write its peers' pools in place.
#[derive(Clone, Debug)]
pub struct DirectWish {
    pub secret: DirectSecret,
    /// The shape of this node's own blocks. Only pools of the same shape are written.
    pub layers: u32,
    pub layer_bytes: u32,
}

#[cfg(test)]
mod conformance_tests;
#[cfg(test)]
mod direct_tests;
#[cfg(test)]
mod tests;
