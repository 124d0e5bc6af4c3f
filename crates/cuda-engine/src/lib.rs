//! Owns the engine on a CUDA device: its kernels, weights, KV memory, forward pass and draws. Not run on hardware yet.
//! Never does: scheduling, transfers between nodes, the search for libraries (`cuda` does), arithmetic of its own beside the kernels.
//! Promise: a row's bits depend on its own sequence only when [`Mode::Invariant`] is chosen. In [`Mode::Fast`] they depend on the
//! sizes of a step, too. The first opening on a GPU checks every kernel against the host and refuses to serve if one is wrong.
//! An error of the device in a step ends the engine, and so does a device that hangs: nobody knows then what was written.
//! Read first: `device_engine.rs` (submit and complete), `step/rows.rs`, `forward.rs`, then `kernels/mod.rs`.
//! Tests: beside the code without a device; `tests/` on the false driver.

#![forbid(unsafe_code)]

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
mod wait;
mod weights;

use engine::{Engine, LoadProgress, OpenError, OpenOptions};
use model_files::model::Model;

pub use self::device_engine::CudaEngine;
pub use self::error::{CudaEngineError, WorkError};
pub use self::gate::{GateError, GateVerdict};
pub use self::libraries::libraries;
pub use self::memory::{DeviceNeed, DeviceRoom, DoesNotFit};
pub use self::model::UnsupportedModel;
pub use self::open::open_cuda_engine;
pub use self::options::{CudaOptions, DeviceChoice, KvRoom, Mode, ProductChoice};
pub use self::times::StepTimes;

/// Opens the engine for a node's settings on a visible device, as [`engine::open_engine_by`] wants it.
///
/// # Errors
/// [`OpenError`]: there is no model, or [`CudaEngineError`] within it.
pub fn open(
    (ordinal, mode): (u32, Mode),
    file: Option<&Model>,
    (options, fits): (OpenOptions<'_>, &mut dyn FnMut()),
) -> Result<Box<dyn Engine>, OpenError> {
    let file = file.ok_or(OpenError::NoModel)?;
    let mut report = |progress| options.kept_weights.report(progress);
    let progress: &mut dyn FnMut(LoadProgress) = match options.progress {
        Some(progress) => progress,
        None => &mut report,
    };
    let engine = open_cuda_engine(
        file,
        CudaOptions {
            ordinal,
            mode,
            products: ProductChoice::Measured,
            limits: options.limits,
            block_tokens: options.block_tokens,
            kv: KvRoom::Bytes(options.kv_bytes),
            step_limit: None,
            fits: Some(fits),
            progress: Some(progress),
        },
    );
    Ok(Box::new(engine.map_err(|error| OpenError::Device(Box::new(error)))?))
}
