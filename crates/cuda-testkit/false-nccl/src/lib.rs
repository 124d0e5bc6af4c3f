//! Owns a `libnccl.so.2` for tests: communicators of two ranks whose sends and receives are work of the false driver's streams. As with
//! the real one a send or receive is a kernel that spins until the peer has done its part, for ever if need be.
//! It never says how fast NCCL is, nor what it does where its documents are silent. Collectives and more ranks are not there.
//! Variables: `FALSE_NCCL_PEER_DEATH` is `hang` (the default, as between GPUs of one host) or `error` (ncclRemoteError);
//! `FALSE_NCCL_HANG` is `init` or `abort`; `FALSE_NCCL_ADDRESS` (`address` or `address:port`) and `NCCL_SOCKET_IFNAME` (see
//! `rendezvous.rs`) let ranks meet over TCP, else they meet on an abstract Unix socket of the host.
//! Read first: `communicator.rs` (the states), `exchange.rs` (what a kernel does).

#![allow(non_snake_case, reason = "the functions have NVIDIA's names")]
#![allow(
    clippy::missing_safety_doc,
    reason = "each function has the contract of NVIDIA's function of its name"
)]

mod communicator;
mod exchange;
mod exported;
mod group;
mod operation;
mod rendezvous;
mod socket;
mod status;

#[allow(dead_code, reason = "each of the three libraries uses its own part")]
#[path = "../../false-cuda/src/outside_abi.rs"]
mod outside_abi;

pub use exported::*;
