//! Owns everything of CUDA that is not a kernel: the search for NVIDIA's libraries (`loader`), owned types over the driver
//! (`device`), the compiler (`nvrtc`), products (`cublaslt`), bytes between GPUs (`nccl`). Not run on hardware yet.
//! Never looks for a library before [`Libraries::find`] is called, and never panics because of what a machine lacks: a library
//! and each of its functions is proved to exist before it is used. Never decides which work runs where.
//! Read first: `loader/mod.rs`, then `device/stream.rs`.
//! Tests: beside the code, without a driver; `tests/` on the false driver. `scripts/cuda-abi-check` compares sizes and values with NVIDIA's headers.

mod calls;
pub mod cublaslt;
pub mod device;
mod error;
#[cfg(test)]
mod generated;
pub mod loader;
pub mod nccl;
pub mod nvrtc;
mod table;

pub use device::{
    Args, ComputeCapability, Device, DeviceFacts, DeviceMemory, DevicePtr, Event, EventUse, Function, Geometry, Graph,
    Image, ImportedMemory, IpcEventHandle, IpcHandle, MemoryInfo, Module, PinnedBytes, PinnedMemory, Stream,
};
pub use error::{Cause, CudaError, Fault};
pub use loader::{Libraries, LoaderReport, Search};
