//! A stream with memory of the host beside it: fills memory of the device, and compares it. It never waits without a limit.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::bail;
use cuda::{CudaError, DevicePtr, Event, EventUse, PinnedMemory, Stream};

use super::here::Here;
use crate::doctor::pattern::Pattern;

const LOOK_EVERY: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(super) struct Lane {
    stream: Stream,
    done: Event,
    staged: PinnedMemory,
    within: Duration,
}

impl Lane {
    /// # Errors
    /// The device has failed, or the host has no memory that can be pinned.
    pub fn new(here: &Here) -> Result<Self, CudaError> {
        Ok(Self {
            stream: here.device.stream()?,
            done: here.device.event(EventUse::Order)?,
            staged: here.device.allocate_pinned(here.scale.bytes)?,
            within: here.scale.exchange,
        })
    }

    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// # Errors
    /// The device has failed.
    pub fn record(&self) -> Result<(), CudaError> {
        self.stream.record(&self.done)
    }

    /// Whether everything before the last record has ended.
    ///
    /// # Errors
    /// The device has failed.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.done.is_done()
    }

    /// # Errors
    /// The device has failed, or does not come to the end in time.
    pub fn fill(&mut self, to: DevicePtr, pattern: Pattern) -> anyhow::Result<()> {
        let bytes = self.staged.size_bytes();
        self.staged.write(0, &pattern.bytes(bytes))?;
        self.stream.copy_to_device(to, &self.staged, 0..bytes)?;
        self.wait()
    }

    /// As many bytes as the lane has.
    ///
    /// # Errors
    /// As of [`fill`](Self::fill).
    pub fn copy(&self, to: DevicePtr, from: DevicePtr) -> anyhow::Result<()> {
        self.stream.copy_on_device(to, from, self.staged.size_bytes())?;
        self.wait()
    }

    /// Compares every byte.
    ///
    /// # Errors
    /// A byte is another one, or as of [`fill`](Self::fill).
    pub fn expect(&self, at: DevicePtr, pattern: Pattern) -> anyhow::Result<()> {
        let bytes = self.staged.size_bytes();
        self.stream.copy_to_host(&self.staged, 0, at, bytes)?;
        self.wait()?;
        match pattern.difference(&self.staged.read()?) {
            None => Ok(()),
            Some(place) => bail!("byte {place} of {bytes} is another one than was sent"),
        }
    }

    fn wait(&self) -> anyhow::Result<()> {
        self.record()?;
        let deadline = Instant::now() + self.within;
        while !self.is_done()? {
            if Instant::now() >= deadline {
                bail!("a copy had not ended after {} s", self.within.as_secs());
            }
            thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }
}
