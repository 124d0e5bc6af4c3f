//! KV over gRPC: one long-lived `Push` stream per pair, many transfers interleaved. Works everywhere, and is where the
//! two nodes of a pair meet before they share memory.

mod connect;
mod receiver;

pub(crate) use connect::connect;
pub use receiver::{add_to_routes, routes};

#[cfg(test)]
mod conformance_tests;
