//! Owns what every baton process does in the same way: configuration, start-up announcements, shutdown, time, telemetry,
//! serving a port, and a node's membership of its coordinators.
//! Never decides where a request goes, and never touches KV bytes or weights.
//! Read first: `process::main`, the life of a process; then `config`, `serve`, `membership`.
//! Tests: beside the code; `tests/` for what needs a process of its own.

pub mod admin;
pub mod announce;
pub mod certificates;
pub mod clock;
pub mod clock_offset;
pub mod config;
pub mod descriptors;
pub mod event_log;
pub mod failpoints;
pub mod freed_memory;
pub mod health;
pub mod http_guard;
pub mod joined;
pub mod membership;
pub mod metrics;
pub mod process;
pub mod runtime_tasks;
pub mod serve;
pub mod shutdown;
pub mod spans;
pub mod telemetry;
pub mod units;
mod wall_clocks;
pub mod watched_file;
