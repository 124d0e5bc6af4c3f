//! Bytes from the host to the device: through a ring of pinned buffers. A call returns when its last copy is launched. Copies
//! complete in the order of the calls, so whoever needs the bytes waits for a number.

use std::collections::VecDeque;
use std::sync::Mutex;
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
    ring: Mutex<Ring>,
}

struct Ring {
    /// The one that was used first is first.
    slots: VecDeque<Slot>,
    launched: u64,
    completed: u64,
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
            ring: Mutex::new(Ring {
                slots: buffers.map(|buffer| Slot { buffer, copy: None }).collect(),
                launched: 0,
                completed: 0,
            }),
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
            let ring = &mut *lock(&self.ring);
            let Some(mut slot) = ring.slots.pop_front() else {
                return Err(DeviceFault::NoBuffer { waited: Duration::ZERO });
            };
            let launched = self.launch_part((to.offset(start), part), (completed, limit), (&mut slot, &mut *ring));
            match &launched {
                // The copy before this one has not completed. The next caller waits for it, too.
                Err(_) if slot.copy.is_some() => ring.slots.push_front(slot),
                // The device may still read the buffer.
                Err(DeviceFault::Failed(_)) => std::mem::forget(slot),
                _ => ring.slots.push_back(slot),
            }
            launched?;
        }
        Ok(())
    }

    fn launch_part(
        &self,
        (to, part): (DeviceAddress, &[u8]),
        (completed, limit): (&Mutex<Option<Event>>, Duration),
        (slot, ring): (&mut Slot, &mut Ring),
    ) -> Result<(), DeviceFault> {
        if let Some(copy) = slot.copy {
            wait_for(&slot.buffer.done, limit)?;
            slot.copy = None;
            ring.completed = ring.completed.max(copy);
        }
        let Buffer { pinned, done } = &mut slot.buffer;
        pinned.fill(part).map_err(DeviceFault::Refused)?;
        let pinned = &*pinned;
        self.lane
            .launch((completed, &*done), |stream| pinned.send(stream, to, part.len()))?;
        ring.launched += 1;
        slot.copy = Some(ring.launched);
        Ok(())
    }

    /// The number of the last copy.
    pub fn launched(&self) -> u64 {
        lock(&self.ring).launched
    }

    /// Whether this copy and all before it have completed.
    pub fn have_completed(&self, copy: u64) -> Result<bool, DeviceFault> {
        let ring = &mut *lock(&self.ring);
        for slot in ring.slots.iter_mut() {
            let Some(number) = slot.copy else { continue };
            if !slot.buffer.done.is_done().map_err(DeviceFault::Failed)? {
                break;
            }
            slot.copy = None;
            ring.completed = ring.completed.max(number);
        }
        Ok(ring.completed >= copy)
    }
}
