//! Bytes from the device to the host: through pinned buffers, of which every caller holds one at a time. Buffers are made once,
//! because making one can stop the whole device until all its streams are idle.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::buffer::{BUFFER_BYTES, Buffer};
use super::driver::{Device, Event};
use super::fault::DeviceFault;
use super::lane::{Lane, wait_for};
use super::lock;
use crate::span::{DeviceAddress, Lent};

/// Callers at the same time; further callers wait. A copy of a buffer takes 20 us of a PCIe 5 link, so eight keep it busy while
/// their bytes are taken out.
const BUFFERS: usize = 8;

pub(super) struct Downloads {
    lane: Lane,
    free: Mutex<Vec<Buffer>>,
    came_back: Condvar,
}

impl Downloads {
    pub fn new(device: &Device) -> Result<Self, DeviceFault> {
        Ok(Self {
            lane: Lane::new(device)?,
            free: Mutex::new(Buffer::several(device, BUFFERS)?),
            came_back: Condvar::new(),
        })
    }

    /// Shows `take` the bytes, a buffer at a time. For a blocking thread.
    pub fn each(
        &self,
        (from, bytes): (DeviceAddress, usize),
        (completed, limit): (&Mutex<Option<Event>>, Duration),
        take: &mut dyn FnMut(&[u8]),
    ) -> Result<(), DeviceFault> {
        for start in (0..bytes).step_by(BUFFER_BYTES) {
            let part = (bytes - start).min(BUFFER_BYTES);
            let buffer = self.next(limit)?;
            let copied = self
                .lane
                .launch((completed, &buffer.done), |stream| {
                    buffer.pinned.receive(stream, from.offset(start), part)
                })
                .and_then(|()| wait_for(&buffer.done, limit));
            let shown = match &copied {
                Ok(()) => buffer.pinned.show(part, &mut *take).map_err(DeviceFault::Refused),
                Err(_) => Ok(()),
            };
            match DeviceFault::lent(&copied) {
                Lent::Back => self.give_back(buffer),
                // The device may still write into it.
                Lent::Kept => std::mem::forget(buffer),
            }
            copied.and(shown)?;
        }
        Ok(())
    }

    fn next(&self, limit: Duration) -> Result<Buffer, DeviceFault> {
        let begun = Instant::now();
        let mut free = lock(&self.free);
        loop {
            if let Some(buffer) = free.pop() {
                return Ok(buffer);
            }
            let waited = begun.elapsed();
            if waited >= limit {
                return Err(DeviceFault::NoBuffer { waited });
            }
            let woken = self.came_back.wait_timeout(free, limit - waited);
            free = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn give_back(&self, buffer: Buffer) {
        lock(&self.free).push(buffer);
        self.came_back.notify_one();
    }
}
