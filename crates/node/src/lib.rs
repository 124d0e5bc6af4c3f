//! Owns a node whatever its role: the one loop, the streams of its requests, the handoffs in and out, status and metrics, and the
//! life of the process from its port to its goodbye. A role's package gives its settings and its gRPC service.
//! Never sees text, never decides where a request goes, never waits for a push, a peer or a client while it could compute.
//! Read first: `node_loop::NodeLoop::run`; then `streams` (what a request is told) and `handoff_out`, `handoff_in`.
//! A request passes `handle`, `admit`, `node_loop`, `deliver`. Tests: beside the code; `prefill-node/tests`, `decode-node/tests` over real gRPC.

#![forbid(unsafe_code)]

mod admit;
mod cache_service;
mod config;
mod constraints;
mod decode_leg;
mod deliver;
mod engine_thread;
mod handle;
mod handoff_in;
mod handoff_out;
mod inbox;
mod kv_access;
mod kv_pool;
mod kv_source;
mod life;
mod metrics;
mod node;
mod node_loop;
mod prefill_leg;
mod request;
mod settings;
mod streams;

pub use config::NodeConfig;
pub use handle::{Asked, EVENTS_QUEUED_MAX, EventStream, Handle};
pub use kv_pool::KvPool;
pub use life::{Life, RunError, live};
pub use node::{Drained, Node, NodeError};
pub use request::{LegRequest, NodeEvent};
pub use settings::{DecodeSettings, NodeSettings, PrefillSettings, RoleSettings};
