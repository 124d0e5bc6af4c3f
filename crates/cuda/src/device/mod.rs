//! Owned types over the driver: a device, its memory, streams, events, modules and graphs. Each frees what it owns when it is
//! dropped, and no drop panics or waits for work of other streams longer than the driver itself does. After [`Device::give_up`]
//! nothing is freed.
//!
//! Every object holds the device's context, and every call makes it current for its thread, so objects may move between
//! threads. Addresses ([`DevicePtr`]) are plain numbers: the owner of a [`DeviceMemory`] keeps it until the work on it is over.

mod args;
mod capturing;
mod context;
mod event;
mod facts;
mod graph;
mod handle;
mod ipc;
mod memory;
mod module;
mod pinned;
mod stream;

use std::sync::Arc;

pub use self::args::{ARGS_MAX, Args, Geometry};
pub(crate) use self::context::Context;
pub use self::event::Event;
pub use self::facts::{ComputeCapability, DeviceFacts};
pub use self::graph::Graph;
pub use self::handle::EventUse;
pub use self::ipc::{ImportedMemory, IpcEventHandle, IpcHandle};
pub use self::memory::{DeviceMemory, DevicePtr, MemoryInfo};
pub use self::module::{Function, Image, Module};
pub use self::pinned::{PinnedBytes, PinnedMemory};
pub use self::stream::Stream;
use crate::error::CudaError;
use crate::loader::Libraries;

/// A GPU with its primary context, which all users of the device in this process share.
#[derive(Clone, Debug)]
pub struct Device {
    context: Arc<Context>,
}

impl Device {
    /// Opens the visible device of this number. The first opening in a process takes hundreds of milliseconds.
    ///
    /// # Errors
    /// There is no driver, or no such device, or the device cannot be used.
    pub fn open(libraries: &Libraries, ordinal: u32) -> Result<Self, CudaError> {
        let context = Arc::new(Context::open(libraries, ordinal)?);
        Ok(Self { context })
    }

    pub fn facts(&self) -> &DeviceFacts {
        self.context.facts()
    }

    /// # Errors
    /// The device has failed.
    pub fn memory(&self) -> Result<MemoryInfo, CudaError> {
        MemoryInfo::of(&self.context)
    }

    /// A stream that does not wait for the legacy default stream.
    ///
    /// # Errors
    /// The driver has no more resources, or the device has failed.
    pub fn stream(&self) -> Result<Stream, CudaError> {
        Stream::new(&self.context)
    }

    /// # Errors
    /// The driver has no more resources, or the device has failed.
    pub fn event(&self, event_use: EventUse) -> Result<Event, CudaError> {
        Event::new(&self.context, event_use)
    }

    /// Loads code. The driver may wait for all work of the device, so modules are loaded before anything is served.
    ///
    /// # Errors
    /// The image is for another device, or it is broken.
    pub fn load(&self, image: &Image) -> Result<Module, CudaError> {
        Module::load(&self.context, image)
    }

    /// Plain memory (`cuMemAlloc`), which other processes can open. Its bytes are not initialised.
    ///
    /// # Errors
    /// `is_out_of_memory`, or no bytes were asked for.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceMemory, CudaError> {
        DeviceMemory::new(&self.context, bytes)
    }

    /// Memory of the host that the device copies from and to while the host goes on. It is zeroed. The driver may wait for all
    /// work of the device.
    ///
    /// # Errors
    /// The host has no memory that can be pinned (`ulimit -l`), or no bytes were asked for.
    pub fn allocate_pinned(&self, bytes: usize) -> Result<PinnedMemory, CudaError> {
        PinnedMemory::new(&self.context, bytes)
    }

    /// For a device whose work may never end, and may go on at any time. Every later call on it is an error, whoever makes it, and
    /// what is dropped is not freed: the driver would wait for the device. Only a new process uses it again.
    pub fn give_up(&self) {
        self.context.give_up();
    }

    /// Opens memory of another process. The driver refuses a handle of this process, and a second opening of the same memory
    /// by one context.
    ///
    /// # Errors
    /// The other process is gone, or the two devices do not reach each other.
    pub fn open_ipc(&self, handle: &IpcHandle) -> Result<ImportedMemory, CudaError> {
        ImportedMemory::open(&self.context, handle)
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}
