//! KV over gRPC: one long-lived `Push` stream per pair, many transfers interleaved. Works everywhere.

mod pair;
mod queue;
mod receiver;
mod sender;
mod transfer;

pub use receiver::add_to_routes;
pub use sender::{GrpcConfig, GrpcTransport};

#[cfg(test)]
pub(crate) use queue::FrameTap;

#[cfg(test)]
mod conformance_tests;
