//! A double of a device: memory that only its own thread can address, and one stream of work in the order it was given.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use crate::{DeviceError, DeviceMemory};

/// Work that may wait for the device. Whoever gives more waits until there is room, as a driver lets its caller wait.
const WORK_QUEUED_MAX: usize = 64;

type Work = Box<dyn FnOnce(&mut [u8]) + Send>;

/// The device ends when the last handle is dropped.
#[derive(Clone)]
pub(super) struct Device(Arc<SyncSender<Work>>);

/// Work that was given to the device and may not be done yet.
#[derive(Debug)]
pub(super) struct Pending<R>(Receiver<R>);

impl Device {
    /// # Errors
    /// The system starts no thread.
    pub(super) fn new(bytes: usize) -> Result<Self, DeviceError> {
        let (queue, queued) = sync_channel::<Work>(WORK_QUEUED_MAX);
        let stream = std::thread::Builder::new().name("device".to_owned());
        let started = stream.spawn(move || {
            let mut memory = vec![0; bytes];
            for work in queued {
                work(&mut memory);
            }
        });
        started.map_err(|error| DeviceError(error.to_string()))?;
        Ok(Self(Arc::new(queue)))
    }

    /// Returns before the work is done.
    pub(super) fn launch<R: Send + 'static>(&self, work: impl FnOnce(&mut [u8]) -> R + Send + 'static) -> Pending<R> {
        let (result, pending) = sync_channel(1);
        let work: Work = Box::new(move |memory| {
            // Whoever launched it may have gone.
            let _ = result.send(work(memory));
        });
        // A device that is lost drops the work, and `wait` says so.
        let _ = self.0.send(work);
        Pending(pending)
    }
}

impl<R> Pending<R> {
    /// # Errors
    /// The device is lost.
    pub(super) fn wait(self) -> Result<R, DeviceError> {
        self.0
            .recv()
            .map_err(|_| DeviceError("its thread has ended".to_owned()))
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").finish_non_exhaustive()
    }
}

impl DeviceMemory for Device {
    fn read(&self, from: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        let range = from..from + out.len();
        let bytes = self.launch(move |memory| memory[range].to_vec()).wait()?;
        out.copy_from_slice(&bytes);
        Ok(())
    }

    fn write(&self, to: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let bytes = bytes.to_vec();
        let copy = move |memory: &mut [u8]| memory[to..to + bytes.len()].copy_from_slice(&bytes);
        self.launch(copy).wait()
    }

    fn copy(&self, from: Range<usize>, to: usize) -> Result<(), DeviceError> {
        self.launch(move |memory| memory.copy_within(from, to)).wait()
    }
}
