//! Owns the run of a kernel without a GPU: the PTX that NVRTC made is interpreted under CUDA's rules, and detectors name the
//! lines where the kernel breaks them (races, uninitialised reads, missing waits, divergence, deadlock).
//! It never guesses: an opcode, type or modifier that is not built is an error that names the line of the PTX.
//! It says nothing about speed, about `ptxas`, or about the rounding of approximations and tensor cores on hardware.
//! Read first: `instruction.rs` (what an instruction is), `machine/mod.rs` (how a launch runs), `shadow.rs` (the rules of order).
//! Only tests use it. Its own tests are in `tests/`.

mod fault;
mod findings;
mod instruction;
mod machine;
mod memory;
mod number;
mod ptx;
mod shadow;
mod types;
mod windows;

pub use fault::{AddressState, Fault, Place};
pub use findings::{Finding, FindingKind, Findings};
pub use machine::{Launch, run};
pub use memory::{Access, Memory, RegionInfo};
pub use ptx::{Kernel, Module, Param, ParseError, Refusal};
