//! The decode role of a node: its configuration, its gRPC service, its program. What a node does is `crates/node`.
//! Reserves KV blocks, verifies and commits handoffs, computes prompts itself when told to, and generates tokens in one
//! continuously changing batch.
//! Read first: `config`, then `service`. Tests: `tests/` drives a node over real gRPC with the stand-in engine.

#![forbid(unsafe_code)]

pub mod config;
mod service;

use std::pin::Pin;

use node::Life;
use service_runtime::config::Program;
use service_runtime::joined::LifeEnd;
use service_runtime::serve::KeptPort;
use service_runtime::shutdown::Shutdown;

pub use config::Config;
pub use node::RunError;
pub use service::add_to_routes;

pub const PROGRAM: Program = Program {
    name: "baton-decode-node",
    about: "A decode node of a baton cluster: receives KV, generates tokens",
    version: env!("CARGO_PKG_VERSION"),
};

/// Runs a decode node until `shutdown`, then drains.
///
/// # Errors
/// [`RunError`].
pub async fn run(config: Config, shutdown: Shutdown) -> Result<(), RunError> {
    live(config, Default::default(), shutdown).await.map(drop)
}

/// One life of a process that may have another in another role (`config.node.roles`), with the same weights and port.
///
/// # Errors
/// [`RunError`].
pub fn live(config: Config, kept: (engine::KeptWeights, KeptPort), shutdown: Shutdown) -> Living {
    let life = Life {
        settings: config.settings(),
        open: move |weights| config.open_engine(weights),
        service: add_to_routes,
        kept,
    };
    Box::pin(node::live(life, shutdown))
}

/// A node that runs. It is boxed, so that it is compiled and optimised in this crate, not in a program's.
pub type Living = Pin<Box<dyn Future<Output = Result<LifeEnd, RunError>> + Send>>;
