//! Moves KV blocks from a prefill node to a decode node: the data plane of a handoff, nothing else.
//! Never decides what is pushed, who may write where (that is the ticket, checked by serving-core's ledger) or when to retry.
//! Sender: `pairs::PairTransport` (one call per transfer: `begin`, then `push` .. `last`, `acked`); the node gives its memory as `KvSource`.
//! Receiver: implement `receiver::HandoffSink`, make a `receiver::Receiver`, give it to `grpc::add_to_routes` and `shm::serve`.
//! Two transports: `grpc` works everywhere; `shm` (same host, same user) copies through a ring that both processes map. A pair
//! says hello over `grpc` and takes the best both know. Each transport brings a `Link` for the sender and feeds
//! `receiver::IncomingPair`, so checks and refusals are the same code for all.
//! Read first: `transport`, `pairs`, `receiver`, then `grpc` or `shm`. Tests: beside the code; `conformance` is the suite every transport passes.

pub mod choice;
mod frame;
pub mod grpc;
mod incoming;
pub mod pairs;
pub mod receiver;
pub mod shm;
mod sink;
pub mod transport;

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod test_process;
