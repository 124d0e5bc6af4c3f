//! Moves KV blocks from a prefill node to a decode node: the data plane of a handoff, nothing else.
//! Never decides what is pushed, who may write where (that is the ticket, checked by serving-core's ledger) or when to retry.
//! Sender: `transport::Transport` (one call per transfer: `begin`, then `push` .. `last`, `acked`); the node gives its memory as `KvSource`.
//! Receiver: implement `receiver::HandoffSink`, make a `receiver::Receiver`, give it to `grpc::add_to_routes`.
//! One transport now: `grpc`, works everywhere. Next to it come `shm` (same host: direct or staged ring), `cuda_ipc` (same host,
//! GPU) and `nccl` (one communicator per pair): each implements `Transport` and feeds `receiver::IncomingPair`, so checks
//! and refusals are the same code for all. Mapped transports make `abort` wait until the peer's memory is no longer touched.
//! Read first: `transport`, `receiver`, then `grpc`. Tests: beside the code; `conformance` is the suite every transport passes.

mod frame;
pub mod grpc;
pub mod receiver;
pub mod transport;

#[cfg(test)]
mod conformance;
