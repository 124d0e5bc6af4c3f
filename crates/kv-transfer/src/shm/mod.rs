//! KV through memory shared by two processes of one host and one user: the staged mode of PROTOCOL rule 11.
//!
//! Per pair: one Unix socket, one ring of equal slots in a memfd. The sender copies a block's layers into a free slot and
//! says so in a small message; the receiver copies the slot into memory of its own, then sums, checks and imports that
//! copy, and gives the slot back. So a sender that changes a slot late, or breaks off in the middle, harms only its own
//! transfer: it never holds the receiver's blocks, and a retry needs no quarantine beyond gRPC's (rule 10 is about the
//! direct mode, which this version does not have). Blocks travel in the wire layout (rule 14), under the same ledger.
//!
//! The *receiver* makes the ring, as a gRPC receiver grants its windows: how much of a pair may be in flight, and whose
//! memory it is, is then decided by the side that takes untrusted input. The memfd cannot be resized once passed (seals,
//! which the sender verifies), so no access can fault. The socket's name is abstract and the memfd has none: whatever dies
//! how, the kernel leaves nothing behind. The end of either process closes the socket, which is how the other one knows.
//!
//! Where a pair may share memory is found out over gRPC: `HelloReply` says boot id and socket. Both ends then compare the
//! user behind the socket (SO_PEERCRED) with their own.

mod connect;
mod receiver;
mod ring;
mod socket;

pub(crate) use connect::connect;
pub use receiver::{Serving, ShmConfig, serve};
pub(crate) use ring::{SendRing, Slot};

#[cfg(test)]
mod conformance_tests;
#[cfg(test)]
mod tests;
