//! Bytes from the host to the device: through a ring of pinned buffers. A call returns when its last copy is launched. Copies
//! complete in the order of the calls, so whoever needs the bytes waits for a number.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, TryLockError};
use std::time::Duration;

use super::buffer::{BUFFER_BYTES, Buffer};
use super::driver::{Device, Event};
use super::fault::DeviceFault;
use super::lane::{Lane, wait_for};
use super::lock;
use crate::span::DeviceAddress;

/// Copies under way. A caller that finds them all in use waits for the oldest one: the network is slower than the link of the
/// device, so this is seldom.
const BUFFERS: usize = 8;

pub(super) struct Uploads {
    lane: Lane,
    /// The one that was used first is first. Whoever launches a copy holds them, also while it waits for the device.
    slots: Mutex<VecDeque<Slot>>,
    /// Numbers of copies, from 1: the last one that was launched, and the last one that is known to have completed.
    last_launched: AtomicU64,
    last_completed: AtomicU64,
}

struct Slot {
    buffer: Buffer,
    /// The number of the copy that uses it.
    copy: Option<u64>,
}

impl Uploads {
    pub fn new(device: &Device) -> Result<Self, DeviceFault> {
        let buffers = Buffer::several(device, BUFFERS)?.into_iter();
        Ok(Self {
            lane: Lane::new(device)?,
            slots: Mutex::new(buffers.map(|buffer| Slot { buffer, copy: None }).collect()),
            last_launched: AtomicU64::new(0),
            last_completed: AtomicU64::new(0),
        })
    }

    /// Takes the bytes and launches their copies.
    ///
    /// # Errors
    /// Some of the copies may have been launched.
    pub fn launch(
        &self,
        (to, bytes): (DeviceAddress, &[u8]),
        (completed, limit): (&Mutex<Option<Event>>, Duration),
    ) -> Result<(), DeviceFault> {
        for (part, start) in bytes.chunks(BUFFER_BYTES).zip((0..).step_by(BUFFER_BYTES)) {
            let mut slots = lock(&self.slots);
            let Some(mut slot) = slots.pop_front() else {
                return Err(DeviceFault::NoBuffer { waited: Duration::ZERO });
            };
            let launched = self.launch_part((to.offset(start), part), (completed, limit), &mut slot);
            match &launched {
                // The copy before this one has not completed. The next caller waits for it, too.
                Err(_) if slot.copy.is_some() => slots.push_front(slot),
                // The device may still read the buffer.
                Err(DeviceFault::Failed(_)) => std::mem::forget(slot),
                _ => slots.push_back(slot),
            }
            launched?;
        }
        Ok(())
    }

    fn launch_part(
        &self,
        (to, part): (DeviceAddress, &[u8]),
        (completed, limit): (&Mutex<Option<Event>>, Duration),
        slot: &mut Slot,
    ) -> Result<(), DeviceFault> {
        if let Some(copy) = slot.copy {
            wait_for(&slot.buffer.done, limit)?;
            slot.copy = None;
            self.last_completed.fetch_max(copy, Ordering::SeqCst);
        }
        let Buffer { pinned, done } = &mut slot.buffer;
        pinned.fill(part).map_err(DeviceFault::Refused)?;
        let pinned = &*pinned;
        self.lane
            .launch((completed, &*done), |stream| pinned.send(stream, to, part.len()))?;
        slot.copy = Some(self.last_launched.fetch_add(1, Ordering::SeqCst) + 1);
        Ok(())
    }

    /// The number of the last copy.
    pub fn launched(&self) -> u64 {
        self.last_launched.load(Ordering::SeqCst)
    }

    /// Whether this copy and all before it are known to have completed. It never waits: while somebody launches a copy, the answer
    /// is what was known before.
    pub fn have_completed(&self, copy: u64) -> Result<bool, DeviceFault> {
        if self.last_completed.load(Ordering::SeqCst) >= copy {
            return Ok(true);
        }
        let mut slots = match self.slots.try_lock() {
            Ok(slots) => slots,
            Err(TryLockError::Poisoned(slots)) => slots.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(false),
        };
        for slot in slots.iter_mut() {
            let Some(number) = slot.copy else { continue };
            if !slot.buffer.done.is_done().map_err(DeviceFault::Failed)? {
                break;
            }
            slot.copy = None;
            self.last_completed.fetch_max(number, Ordering::SeqCst);
        }
        Ok(self.last_completed.load(Ordering::SeqCst) >= copy)
    }
}
