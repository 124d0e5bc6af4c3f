//! Kernels written by hand as PTX: each family of opcodes with its values, each detector with a bug and its mended twin.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]

mod arithmetic;
mod between_operations;
mod conversions;
mod copies;
mod detectors;
mod faults;
mod fixture;
mod floats;
mod matrices;
mod memory;
mod refusals;
mod warps;
