//! Owns the front of baton: the HTTP API, admission, placement, the membership endpoint and every client stream.
//! Never touches KV bytes or model weights: it imports neither `engine` nor `kv-transfer`.
//! Read first: `request_handle` (what the API edge and the control loop say to each other), then `control_loop`.
//! Tests: beside the code, `tests/` (real gRPC against scripted nodes), and whole-cluster tests in `integration-tests`.

#![forbid(unsafe_code)]

pub mod api;
mod cache_reset;
mod cluster_metrics;
mod config;
pub mod control_handle;
mod control_loop;
mod coordinator;
mod dispatch;
mod flight_recorder;
mod insight;
pub mod keys;
mod membership;
mod metrics;
mod node_clocks;
mod node_notes;
mod node_page;
pub mod records;
pub mod registry;
pub mod request_handle;
mod running_leg;
mod serve;
mod slo;
mod stage_clock;
mod standstill;
pub mod text;
mod token_stream;
mod trace_viewer;

pub use config::Config;
pub use coordinator::Coordinator;
pub use flight_recorder::FlightRecordTarget;
pub use serve::{PROGRAM, run};
pub use slo::{SloConfig, SloRules};
pub use trace_viewer::TraceViewerUrl;

/// The commit of the sources. A packager sets it when building; a build from a checkout has none.
pub const BUILD_COMMIT: Option<&str> = option_env!("BATON_BUILD_COMMIT");

/// How this program was compiled. `release` is the only build whose times are those of a user: most crates of `tests`
/// (scripts/rustc-for-tests sets its cfg) are not optimised.
pub const BUILD_PROFILE: &str = if cfg!(built_for_tests) {
    "tests"
} else if cfg!(debug_assertions) {
    "debug"
} else {
    "release"
};
