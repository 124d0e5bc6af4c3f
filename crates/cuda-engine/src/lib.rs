//! Owns the kernels of the GPU engine: their sources, compilation, calls, and the checks that compare each with the host.
//! Not run on hardware yet. The engine itself (weights, forward pass, draws) is not built yet.
//! Never does: scheduling, transfers between nodes, the search for libraries (`cuda` does).
//! Promise: a row's bits depend on its own inputs only.
//! Read first: `kernels/mod.rs`.
//! Tests: beside the code without a device; `tests/` on the false driver (`crates/cuda-testkit`).

pub mod kernels;
mod libraries;

pub use self::libraries::libraries;
