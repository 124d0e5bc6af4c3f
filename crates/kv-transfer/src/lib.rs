//! Moves KV blocks from a prefill node to a decode node: the data plane of a handoff, nothing else.
//! Never decides what is pushed, who may write where (that is the ticket, checked by serving-core's ledger) or when to retry.
//! Sender: `transports::pairs` (one call per transfer: `begin`, then `push` .. `last`, `acked`); the node gives its memory as
//! `KvSource`. Receiver: implement `receiver::HandoffSink`, make a `receiver::Receiver`, give it to `grpc::add_to_routes` and
//! `transports::serve`. KV memory is read and written as `span`s, or, on a CUDA device (`device`), lent to copies of its own.
//! A transport implements `link` whole, in a folder of `transports/` where a line registers it. A pair says hello over `grpc`
//! and takes the best transport that both nodes have; what these say to each other is opaque to everything else here.
//! Read first: `transport`, `pairs`, `receiver`, `link`, then `grpc` or `shm`. Tests: beside the code; `conformance` is the suite
//! every transport passes.

pub mod choice;
mod device;
mod frame;
mod link;
pub mod pairs;
pub mod receiver;
pub mod span;
#[cfg(feature = "testing")]
pub mod testing;
pub mod transport;
pub mod transports;
mod trust;

pub use device::{DeviceFault, DeviceKv, DeviceLimits, DeviceParts};
pub use link::{ReceivingEnd, Serving};
pub use transports::{grpc, shm};
pub use trust::{DeviceEnd, DevicePlace, DirectOffer, DirectSecret, DirectWish};

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod test_process;
