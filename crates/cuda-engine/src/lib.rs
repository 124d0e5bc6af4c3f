//! Owns the engine on a CUDA device: its kernels, weights, KV memory, forward pass and draws. Not run on hardware yet.
//! Never does: scheduling, transfers between nodes, the search for libraries (`cuda` does), arithmetic of its own beside the kernels.
//! Promise: a row's bits depend on its own sequence only when [`Mode::Invariant`] is chosen. In [`Mode::Fast`] they depend on the
//! sizes of a step, too. The first opening on a GPU checks every kernel against the host and refuses to serve if one is wrong.
//! An error of the device in a step ends the engine: nobody knows then what was written.
//! Read first: `device_engine.rs` (submit and complete), `step/rows.rs`, `forward.rs`, then `kernels/mod.rs`.
//! Tests: beside the code without a device; `tests/` on the false driver.

mod arena;
mod buffers;
mod device_engine;
mod error;
mod finish;
mod forward;
mod gate;
mod graphs;
pub mod kernels;
mod kv;
mod libraries;
mod memory;
mod model;
mod open;
mod options;
mod products;
mod step;
mod times;
mod weights;

pub use self::device_engine::CudaEngine;
pub use self::error::{CudaEngineError, WorkError};
pub use self::gate::{GateError, GateVerdict};
pub use self::libraries::libraries;
pub use self::memory::{DeviceMemoryUse, DeviceNeed, DeviceRoom, DoesNotFit};
pub use self::model::UnsupportedModel;
pub use self::open::open_cuda_engine;
pub use self::options::{CudaOptions, KvRoom, Mode, ProductChoice};
pub use self::times::StepTimes;
