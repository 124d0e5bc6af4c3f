//! KV over gRPC: one long-lived `Push` stream per pair with many transfers at once. It works everywhere. The two nodes of a
//! pair also meet here before they share memory.

mod connect;
mod receiver;

pub(crate) use connect::connect;
pub use receiver::{add_to_routes, routes};

#[cfg(test)]
mod conformance_tests;
