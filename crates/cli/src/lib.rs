//! Owns the verbs of the `baton` binary and the launcher of a cluster on one machine.
//! Never decides anything about serving: requests, routing and KV belong to the processes that it starts.
//! Read first: `args::Command` (one variant per verb), then `exit` (what the exit status means).
//! Tests: beside the code; whole-cluster tests in `integration-tests` start clusters through `local_cluster`.

#![forbid(unsafe_code)]

pub mod args;
pub mod bench;
pub mod certs;
pub mod chat;
pub mod compare;
pub mod completions;
pub(crate) mod date;
pub mod doctor;
pub mod exit;
pub mod http;
pub mod kernels;
pub mod keys;
pub mod local_cluster;
pub mod logs;
pub mod man;
pub mod model;
pub mod observe;
pub mod operate;
pub mod plan;
pub mod record;
pub mod replay;
pub mod report;
pub mod serve;
pub(crate) mod signals;
pub mod simulate;
pub mod sse;
pub(crate) mod stdout;
pub mod terminal;
pub mod topology;
pub mod up;
pub mod version;
