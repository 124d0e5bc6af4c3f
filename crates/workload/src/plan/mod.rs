//! Formulas for planning a cluster, without IO: queues, instances, cost, arithmetic, KV bytes, the split of two pools.
//!
//! Each file names the source of its formulas. Every argument that comes from a person is checked by `check.rs`, so a zero, a
//! negative number or a NaN is an error and never a figure. `crates/cli/src/plan/` prints the results.

pub mod breakeven;
pub mod capacity;
mod check;
pub mod concurrency;
pub mod cost;
pub mod decode;
pub mod kv;
pub mod pools;
pub mod prefill;
pub mod queueing;

pub use check::PlanError;

#[cfg(test)]
mod figures_tests;
