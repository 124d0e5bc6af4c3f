//! Owns every decision of baton: ids, time, KV accounting, scheduling, the cluster state machine, routing.
//! Never does IO, never awaits, never reads a clock, never draws randomness, never logs: time and seeds are arguments.
//! Read first: `cluster::Cluster::apply` (the coordinator's brain), then `scheduler` (the nodes' brains).
//! Modules stand in reading order. Tests: beside the code, and scenario scripts under `tests/scenarios/`.

#![forbid(unsafe_code)]

pub mod cluster;
pub mod compatibility;
pub mod ids;
pub mod kv;
pub mod node;
pub mod request;
pub mod routing;
pub mod scheduler;
pub mod stage;
pub mod time;
