//! Memory of the host that a device copies from and to by itself.
//!
//! Its bytes must not be touched while a copy is under way, and it must not be freed. Each copy records an event of this
//! memory on its stream. [`PinnedMemory::write`] and [`PinnedMemory::read`] refuse while such an event is not done, a copy to
//! the host is refused while somebody reads, and memory that is dropped during a copy is freed later.

use std::ffi::{c_uint, c_void};
use std::fmt;
use std::ops::{Deref, Range};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;

use super::context::{Context, Garbage};
use super::handle::{EventUse, Raw, RawEvent};
use super::memory::DevicePtr;
use super::stream::Stream;
use crate::calls;
use crate::error::{CudaError, check};

/// Streams that copied with one piece of memory and may have ended. With more of them, those that are done are forgotten.
const EVENTS_KEPT: usize = 8;

/// Which way a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    ToDevice,
    ToHost,
}

#[derive(Default)]
struct Uses {
    /// The last copy of each stream, by the stream's number.
    events: Vec<(u64, RawEvent)>,
    /// Values of [`PinnedBytes`].
    readers: usize,
    /// Copies whose end nobody will hear of, because their event could not be recorded.
    unknown: usize,
}

impl Uses {
    fn may_run(&self) -> bool {
        self.unknown > 0 || self.events.iter().any(|(_, event)| event.may_run())
    }

    /// The place of the event of a stream.
    fn event_of(&mut self, stream: &Stream) -> Result<usize, CudaError> {
        if let Some(at) = self.events.iter().position(|(number, _)| *number == stream.number()) {
            return Ok(at);
        }
        if self.events.len() >= EVENTS_KEPT {
            self.events.retain(|(_, event)| {
                let may_run = event.may_run();
                if !may_run {
                    event.destroy();
                }
                may_run
            });
        }
        self.events.push((stream.number(), RawEvent::new(EventUse::Order)?));
        Ok(self.events.len() - 1)
    }
}

pub struct PinnedMemory {
    context: Arc<Context>,
    at: Raw<c_void>,
    bytes: usize,
    uses: Mutex<Uses>,
}

impl fmt::Debug for PinnedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedMemory")
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl PinnedMemory {
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        /// `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context of the process.
        const FLAGS: c_uint = sys::CU_MEMHOSTALLOC_PORTABLE;
        if bytes == 0 {
            return Err(CudaError::misuse("cuMemHostAlloc", "no bytes were asked for", ""));
        }
        context.enter_outside_capture("cuMemHostAlloc")?;
        let mut at: *mut c_void = std::ptr::null_mut();
        // SAFETY: the driver writes one pointer.
        let allocated = unsafe { calls::cuMemHostAlloc(&raw mut at, bytes, FLAGS) };
        check("cuMemHostAlloc", allocated, || {
            format!("{bytes} bytes of pinned memory")
        })?;
        // SAFETY: the memory is new, and has as many bytes.
        unsafe { std::ptr::write_bytes(at.cast::<u8>(), 0, bytes) };
        Ok(Self {
            context: context.clone(),
            at: Raw(at),
            bytes,
            uses: Mutex::default(),
        })
    }

    pub fn size_bytes(&self) -> usize {
        self.bytes
    }

    fn uses(&self) -> MutexGuard<'_, Uses> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses while a copy is under way.
    fn idle(&self, call: &'static str) -> Result<MutexGuard<'_, Uses>, CudaError> {
        let uses = self.uses();
        if uses.events.is_empty() && uses.unknown == 0 {
            return Ok(uses);
        }
        self.context.enter_outside_capture(call)?;
        match uses.may_run() {
            false => Ok(uses),
            true => Err(CudaError::misuse(
                call,
                "a copy of this pinned memory is under way",
                format!("{} bytes", self.bytes),
            )),
        }
    }

    /// All bytes, to be filled in place.
    ///
    /// # Errors
    /// A copy is under way: wait for its event first.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8], CudaError> {
        drop(self.idle("PinnedMemory::bytes_mut")?);
        // SAFETY: the memory is initialised and owned. No copy runs, and none can begin while this borrow lives, because a
        // copy borrows this value. No reader lives, for the same reason.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.at.0.cast::<u8>(), self.bytes) })
    }

    /// # Errors
    /// A copy is under way, or the bytes do not fit.
    pub fn write(&mut self, at: usize, bytes: &[u8]) -> Result<(), CudaError> {
        let range = self.range("PinnedMemory::write", at, bytes.len())?;
        self.bytes_mut()?[range].copy_from_slice(bytes);
        Ok(())
    }

    /// All bytes. No copy to them can begin while the value lives.
    ///
    /// # Errors
    /// A copy is under way: wait for its event first.
    pub fn read(&self) -> Result<PinnedBytes<'_>, CudaError> {
        self.idle("PinnedMemory::read")?.readers += 1;
        Ok(PinnedBytes { memory: self })
    }

    fn range(&self, call: &'static str, at: usize, bytes: usize) -> Result<Range<usize>, CudaError> {
        match at.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(at..end),
            _ => {
                let context = format!("{bytes} bytes at {at} of {}", self.bytes);
                Err(CudaError::misuse(
                    call,
                    "the range is not in the pinned memory",
                    context,
                ))
            }
        }
    }

    /// Lets a stream copy a range. `copy` gets the address and puts the copy onto the stream.
    pub(super) fn lend(
        &self,
        (stream, direction): (&Stream, Direction),
        (at, bytes): (usize, usize),
        copy: impl FnOnce(*mut c_void) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        const CALL: &str = "cuMemcpyAsync";
        let range = self.range(CALL, at, bytes)?;
        self.context.enter_outside_capture(CALL)?;
        let mut uses = self.uses();
        if direction == Direction::ToHost && uses.readers > 0 {
            return Err(CudaError::misuse(CALL, "somebody reads this pinned memory", ""));
        }
        // Before the copy: without an event there is no copy.
        let event = uses.event_of(stream)?;
        // SAFETY: the range lies in the memory.
        copy(unsafe { self.at.0.byte_add(range.start) })?;
        let recorded = uses.events[event].1.record(stream.raw());
        if recorded.is_err() {
            uses.unknown += 1;
        }
        recorded
    }
}

impl Stream {
    /// Copies a range of pinned memory to the device. The memory is in use until the copy is over.
    ///
    /// # Errors
    /// The range is not in the memory, this thread captures a graph, or the device has failed.
    pub fn copy_to_device(&self, to: DevicePtr, from: &PinnedMemory, range: Range<usize>) -> Result<(), CudaError> {
        let bytes = range.end.saturating_sub(range.start);
        if bytes == 0 {
            return Ok(());
        }
        from.lend((self, Direction::ToDevice), (range.start, bytes), |source| {
            // SAFETY: the source has as many bytes and lives until its event is done.
            let copied = unsafe { calls::cuMemcpyHtoDAsync_v2(to.0, source, bytes, self.raw().0) };
            check("cuMemcpyHtoDAsync", copied, || format!("{bytes} bytes"))
        })
    }

    /// Copies from the device to pinned memory, `at` bytes behind its begin. The memory is in use until the copy is over.
    ///
    /// # Errors
    /// The range is not in the memory, somebody reads it, this thread captures a graph, or the device has failed.
    pub fn copy_to_host(&self, to: &PinnedMemory, at: usize, from: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        to.lend((self, Direction::ToHost), (at, bytes), |place| {
            // SAFETY: the place has as many bytes, lives until its event is done, and nobody reads it before.
            let copied = unsafe { calls::cuMemcpyDtoHAsync_v2(place, from.0, bytes, self.raw().0) };
            check("cuMemcpyDtoHAsync", copied, || format!("{bytes} bytes"))
        })
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let uses = std::mem::take(&mut *self.uses());
        if uses.unknown > 0 {
            tracing::warn!(bytes = self.bytes, "pinned memory is kept for ever: a copy may use it");
            return;
        }
        let uses = uses.events.into_iter().map(|(_, event)| event).collect();
        self.context.discard(Garbage::Pinned { at: self.at, uses });
    }
}

/// The bytes of pinned memory, while no copy changes them.
pub struct PinnedBytes<'a> {
    memory: &'a PinnedMemory,
}

impl fmt::Debug for PinnedBytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBytes")
            .field("bytes", &self.memory.bytes)
            .finish()
    }
}

impl Deref for PinnedBytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the memory is initialised, no copy was under way when this value was made, and none to the host can begin
        // before it is dropped. The host writes only by a mutable borrow.
        unsafe { std::slice::from_raw_parts(self.memory.at.0.cast::<u8>(), self.memory.bytes) }
    }
}

impl Drop for PinnedBytes<'_> {
    fn drop(&mut self) {
        self.memory.uses().readers -= 1;
    }
}
