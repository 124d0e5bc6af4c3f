//! The KV pool in the device's memory, in the wire layout. Transports get the pool itself ([`DevicePool`]) and copy beside the
//! engine. Everything else, such as the fork of a block, goes by this file, one copy at a time.
//!
//! Every copy waits for the step that has completed last, on the device. No later step touches the bytes, because the caller
//! holds claims on their blocks.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuda::{CudaError, Device, DevicePtr, Event, EventUse, Libraries, PinnedMemory, Stream};
use engine::{DeviceError, DevicePool};

use crate::error::WorkError;
use crate::wait::Patience;

/// Of a copy by way of the host. A block of an 8B model has 2 MiB.
const STAGE_BYTES: usize = 4 << 20;
/// The driver lends memory to another process in whole pieces of this size, with whatever else is in them. So a pool that others
/// open has whole pieces of its own (CUDA programming guide, interprocess communication: "only share allocations with a 2MiB
/// aligned size").
const LENT_BYTES: usize = 2 << 20;

/// The event of the last step that has completed, `None` before the first. It is put here before `complete` returns, and recorded
/// again only after another event is in its place.
pub(crate) type Completed = Arc<Mutex<Option<Event>>>;

/// What copies are made with, by one thread at a time.
struct Copier {
    stream: Stream,
    pinned: PinnedMemory,
    done: Event,
    patience: Patience,
}

/// The pool. Clones share it.
#[derive(Clone)]
pub(crate) struct KvPool {
    libraries: Arc<Libraries>,
    device: Device,
    memory: Arc<cuda::DeviceMemory>,
    completed: Completed,
    copier: Arc<Mutex<Copier>>,
}

impl fmt::Debug for KvPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvPool")
            .field("memory", &self.memory)
            .finish_non_exhaustive()
    }
}

impl KvPool {
    /// Zeroed memory of at least so many bytes: what other processes had there is nobody's business, and a block is sent whole.
    pub(crate) fn new(
        (libraries, device): (&Arc<Libraries>, &Device),
        patience: Patience,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        let memory = device.allocate(bytes.next_multiple_of(LENT_BYTES))?;
        let copier = Copier {
            stream: device.stream()?,
            pinned: device.allocate_pinned(STAGE_BYTES)?,
            done: device.event(EventUse::Order)?,
            patience,
        };
        copier.stream.fill(memory.ptr(), 0, memory.bytes())?;
        copier.stream.synchronize()?;
        Ok(Self {
            libraries: libraries.clone(),
            device: device.clone(),
            memory: Arc::new(memory),
            completed: Completed::default(),
            copier: Arc::new(Mutex::new(copier)),
        })
    }

    pub(crate) fn start(&self) -> DevicePtr {
        self.memory.ptr()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Puts the event of a completed step in the place of the one before, which may be recorded again.
    pub(crate) fn set_completed(&self, event: Event) -> Option<Event> {
        lock(&self.completed).replace(event)
    }

    /// Orders the copier's next work behind the last step.
    fn begin(&self) -> Result<MutexGuard<'_, Copier>, CudaError> {
        let copier = lock(&self.copier);
        if let Some(step) = &*lock(&self.completed) {
            copier.stream.wait(step)?;
        }
        Ok(copier)
    }

    fn download(&self, from: usize, out: &mut [u8]) -> Result<(), WorkError> {
        let copier = self.begin()?;
        for (at, part) in (0_usize..).step_by(STAGE_BYTES).zip(out.chunks_mut(STAGE_BYTES)) {
            copier
                .stream
                .copy_to_host(&copier.pinned, 0, self.at(from + at), part.len())?;
            copier.wait()?;
            part.copy_from_slice(&copier.pinned.read()?[..part.len()]);
        }
        Ok(())
    }

    fn upload(&self, to: usize, bytes: &[u8]) -> Result<(), WorkError> {
        let mut copier = self.begin()?;
        for (at, part) in (0_usize..).step_by(STAGE_BYTES).zip(bytes.chunks(STAGE_BYTES)) {
            copier.pinned.write(0, part)?;
            copier
                .stream
                .copy_to_device(self.at(to + at), &copier.pinned, 0..part.len())?;
            copier.wait()?;
        }
        Ok(())
    }

    fn copy_within(&self, from: Range<usize>, to: usize) -> Result<(), WorkError> {
        let copier = self.begin()?;
        copier
            .stream
            .copy_on_device(self.at(to), self.at(from.start), from.len())?;
        copier.wait()
    }

    fn at(&self, offset: usize) -> DevicePtr {
        self.memory.ptr().offset(offset)
    }
}

impl Copier {
    /// Until everything that was given to the stream is over. After the time limit the device is given up: a copy may then still
    /// use the pinned memory and the blocks, and nobody else can use them any more.
    fn wait(&self) -> Result<(), WorkError> {
        self.stream.record(&self.done)?;
        self.patience.wait(&self.done)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn device_error(error: WorkError) -> DeviceError {
    DeviceError(error.to_string())
}

impl engine::DeviceMemory for KvPool {
    fn read(&self, from: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        self.download(from, out).map_err(device_error)
    }

    fn write(&self, to: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.upload(to, bytes).map_err(device_error)
    }

    fn copy(&self, from: Range<usize>, to: usize) -> Result<(), DeviceError> {
        self.copy_within(from, to).map_err(device_error)
    }

    fn pool(&self) -> Option<DevicePool> {
        Some(DevicePool {
            libraries: self.libraries.clone(),
            device: Arc::new(self.device.clone()),
            memory: self.memory.clone(),
            completed: self.completed.clone(),
            address: self.start().0,
        })
    }
}
