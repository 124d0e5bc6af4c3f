//! Owns a `libcuda.so.1` for tests. It does queued work late, in a seeded order, on PTX that `ptx-vm` interprets, and says which of
//! CUDA's rules the host code or a kernel breaks. It never stands for hardware: it knows no speed, and where NVIDIA's documents are
//! silent its answer is a guess (each place says so).
//! Images are PTX. A cubin is answered with CUDA_ERROR_NO_BINARY_FOR_GPU, as a driver answers one for another chip, so an engine
//! loads PTX where `cuDeviceGetName` starts with "False" (or asks a variable of its own).
//! What is not exported is not modelled: pools, virtual memory, peers, graph updates, textures, the per-thread default stream.
//! Read first: `settings.rs` (the variables), `queue.rs` (when work runs), `execute.rs` (what it does), `capture.rs`, `report.rs`.

#![allow(non_snake_case, reason = "the exported functions have NVIDIA's names")]
#![allow(
    clippy::missing_safety_doc,
    reason = "`api/mod.rs` gives every exported function the same contract"
)]

mod address_space;
mod api;
mod capture;
mod codes;
mod context;
mod driver;
mod execute;
mod memory;
mod objects;
mod order;
#[allow(dead_code, reason = "each of the three libraries uses its own part")]
mod outside_abi;
mod queue;
mod report;
mod settings;
mod shared_page;
mod state;
mod work;

pub use api::control::*;
pub use api::copies::*;
pub use api::device::*;
pub use api::events::*;
pub use api::graphs::*;
pub use api::ipc::*;
pub use api::memory::*;
pub use api::modules::*;
pub use api::out::Out;
pub use api::procedures::*;
pub use api::streams::*;
pub use codes::Code;
pub use outside_abi::{OutsideAccess, OutsideWork};
pub use report::{Leaks, Report, ReportedFinding};
pub use settings::BadVariable;
pub use shared_page::IpcHandle;
