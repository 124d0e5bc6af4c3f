//! The memory of a pair: slots of equal size in a sealed memfd. The sender writes them, the receiver copies them out.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use memmap2::{MmapOptions, MmapRaw};
use proto::messages::KvBlockFrame;
use rustix::fs::{MemfdFlags, SealFlags};
use serde::{Deserialize, Serialize};
use serving_core::ids::BlockId;

use super::KIND;
use super::credits::{Credit, Credits};
use super::fault::ShmFault;
use crate::choice::TransportKind;
use crate::link::{Carrier, Copied, NoPlace, NotCopied, Place};
use crate::receiver::{FrameData, HandoffSink, TransferRefusal, copy_in};
use crate::span::Span;

/// Name of the memfd in `/proc/PID/maps`; no file has it.
pub(super) const MEMFD_NAME: &str = "baton-kv-ring";
/// Without these seals the other side could shrink the memory under a copy, which would kill the copying process.
pub(super) const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
/// No slot list grows beyond this, whatever a peer announces.
pub(in crate::transports) const SLOTS_MAX: u32 = 4096;
/// No mapping is larger than this, whatever a peer announces.
const RING_BYTES_MAX: u64 = 1 << 30;

/// The size of memory that a peer passed and that cannot shrink.
pub(super) fn sealed_bytes(memory: &OwnedFd) -> Result<u64, ShmFault> {
    let seals = rustix::fs::fcntl_get_seals(memory.as_fd()).map_err(|_| ShmFault::Seals)?;
    if !seals.contains(SEALS) {
        return Err(ShmFault::Seals);
    }
    let stat = rustix::fs::fstat(memory).map_err(io::Error::from)?;
    Ok(u64::try_from(stat.st_size).unwrap_or(0))
}

/// How a ring is divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::transports) struct RingShape {
    pub slots: u32,
    pub slot_bytes: u32,
}

impl RingShape {
    pub fn bytes(self) -> u64 {
        u64::from(self.slots) * u64::from(self.slot_bytes)
    }

    /// Checks an announced shape against the memory that the peer passed.
    fn check(self, bytes: u64) -> Result<Self, ShmFault> {
        let is_sound = (1..=SLOTS_MAX).contains(&self.slots)
            && self.slot_bytes > 0
            && self.bytes() <= RING_BYTES_MAX
            && self.bytes() == bytes;
        is_sound.then_some(self).ok_or(ShmFault::Geometry {
            slots: self.slots,
            slot_bytes: self.slot_bytes,
            bytes,
        })
    }

    /// The position of `bytes` from the start of `slot`, if they are inside the slot.
    fn span(self, slot: u32, bytes: u32) -> Option<(usize, usize)> {
        (slot < self.slots && bytes <= self.slot_bytes)
            .then(|| (slot as usize * self.slot_bytes as usize, bytes as usize))
    }
}

/// The receiver's end. It reads only.
pub(super) struct ReceiveRing {
    shape: RingShape,
    map: MmapRaw,
    /// The memory into which a slot's bytes are copied before anything looks at them. One frame of a pair lands at a time,
    /// so one copy is enough, and it stays in the processor's cache.
    copy: Mutex<Vec<u8>>,
}

impl Debug for ReceiveRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReceiveRing").field("shape", &self.shape).finish()
    }
}

impl ReceiveRing {
    /// With the descriptor to pass. Nothing else keeps the descriptor.
    pub fn create(shape: RingShape) -> Result<(Arc<Self>, OwnedFd), ShmFault> {
        shape.check(shape.bytes())?;
        let memory = rustix::fs::memfd_create(MEMFD_NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(io::Error::from)?;
        rustix::fs::ftruncate(&memory, shape.bytes()).map_err(io::Error::from)?;
        rustix::fs::fcntl_add_seals(&memory, SEALS).map_err(io::Error::from)?;
        let file = File::from(memory);
        let map = MmapOptions::new()
            .len(shape.bytes() as usize)
            .map_raw_read_only(&file)?;
        let ring = Self {
            shape,
            map,
            copy: Mutex::default(),
        };
        Ok((Arc::new(ring), file.into()))
    }

    pub fn shape(&self) -> RingShape {
        self.shape
    }

    /// The bytes that a header names; `None` when they are not inside a slot.
    pub fn data(self: &Arc<Self>, slot: u32, bytes: u32) -> Option<RingData> {
        let (offset, len) = self.shape.span(slot, bytes)?;
        let ring = self.clone();
        Some(RingData { ring, offset, len })
    }
}

/// A frame's bytes, still in the ring.
#[derive(Debug)]
pub(super) struct RingData {
    ring: Arc<ReceiveRing>,
    offset: usize,
    len: usize,
}

impl RingData {
    /// Lets `take` see a copy, which the sender cannot change.
    fn copied<R>(&self, take: impl FnOnce(&[u8]) -> R) -> R {
        let mut copy = lock(&self.ring.copy);
        copy.resize(self.len, 0);
        // SAFETY: offset + len is inside the mapping (`RingShape::span`), which lives as long as `ring`, and whose memory
        // cannot shrink (seals). The sender may write at the same time: no reference is made to the shared bytes, any
        // value is a valid byte, and nothing is concluded from them but from the copy.
        unsafe {
            let from = self.ring.map.as_ptr().add(self.offset);
            std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), self.len);
        }
        // The copy is what is summed and imported: the compiler must not read the shared bytes a second time instead.
        take(std::hint::black_box(&copy))
    }
}

impl FrameData for RingData {
    fn len(&self) -> usize {
        self.len
    }

    fn land(self, frame: &KvBlockFrame, sink: &dyn HandoffSink) -> Result<(), TransferRefusal> {
        self.copied(|bytes| copy_in(Span::Host(bytes), frame, sink))
    }
}

/// The sender's end. It hands out free slots.
pub(super) struct SendRing {
    shape: RingShape,
    map: MmapRaw,
    credits: Arc<Credits>,
}

impl Debug for SendRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SendRing").field("shape", &self.shape).finish()
    }
}

impl SendRing {
    /// Maps the memory that a decode node passed, if it is what the node says and cannot shrink.
    pub(super) fn map(memory: &OwnedFd, shape: RingShape) -> Result<Arc<Self>, ShmFault> {
        shape.check(sealed_bytes(memory)?)?;
        Ok(Arc::new(Self {
            shape,
            map: MmapOptions::new().len(shape.bytes() as usize).map_raw(memory)?,
            credits: Credits::new(shape.slots),
        }))
    }

    fn slot_bytes(&self) -> usize {
        self.shape.slot_bytes as usize
    }

    /// Waits while every slot is in use. Cancel-safe.
    pub async fn slot(self: &Arc<Self>) -> Slot {
        let (credit, ring) = (self.credits.next().await, self.clone());
        Slot { credit, ring }
    }
}

#[async_trait]
impl Carrier for Arc<SendRing> {
    fn kind(&self) -> TransportKind {
        KIND
    }

    fn data_bytes_max(&self) -> usize {
        self.slot_bytes()
    }

    async fn room(&self, _: (BlockId, Range<u32>), _: usize) -> Box<dyn Place> {
        Box::new(self.slot().await)
    }
}

/// One slot of a ring, which nothing else in this process uses.
#[derive(Debug)]
pub(super) struct Slot {
    credit: Credit,
    ring: Arc<SendRing>,
}

impl Slot {
    /// The slot's first `bytes`, at most the whole slot.
    pub fn bytes(&mut self, bytes: usize) -> &mut [u8] {
        let slot_bytes = self.ring.slot_bytes();
        let index = self.credit.index().min(self.ring.shape.slots - 1) as usize;
        // SAFETY: the range is inside the mapping, which lives as long as the ring and cannot shrink (seals). A credit
        // is the only one of its index, and its slot is borrowed: nothing else in this process refers to the range. The
        // decode node has no business writing it; if it did, bytes are valid whatever they are, and it would spoil only
        // what it receives.
        unsafe {
            let start = self.ring.map.as_mut_ptr().add(index * slot_bytes);
            std::slice::from_raw_parts_mut(start, bytes.min(slot_bytes))
        }
    }
}

impl Place for Slot {
    fn fill(&mut self, from: &Copied<'_>) -> Result<u64, NotCopied> {
        let slot_bytes = self.ring.slot_bytes();
        if from.bytes > slot_bytes {
            // Only a single layer is not cut.
            let layer_bytes = from.bytes;
            return Err(NoPlace::LayerTooLarge {
                layer_bytes,
                slot_bytes,
            }
            .into());
        }
        Ok(from.summed(self.bytes(from.bytes))?)
    }

    fn index(&self) -> u32 {
        self.credit.index()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const SHAPE: RingShape = RingShape {
        slots: 4,
        slot_bytes: 4096,
    };

    #[test]
    fn what_is_passed_is_sealed_and_other_memory_is_not_mapped() {
        let (_ring, memory) = ReceiveRing::create(SHAPE).unwrap();
        assert!(rustix::fs::fcntl_get_seals(&memory).unwrap().contains(SEALS));
        assert!(rustix::fs::ftruncate(&memory, 0).is_err(), "it can shrink");
        assert!(rustix::fs::ftruncate(&memory, 1 << 20).is_err(), "it can grow");
        assert!(SendRing::map(&memory, SHAPE).is_ok());

        let other = RingShape { slots: 5, ..SHAPE };
        let fault = SendRing::map(&memory, other).unwrap_err();
        assert!(matches!(fault, ShmFault::Geometry { .. }), "{fault}");
        let huge = RingShape {
            slots: u32::MAX,
            slot_bytes: u32::MAX,
        };
        assert!(matches!(SendRing::map(&memory, huge), Err(ShmFault::Geometry { .. })));

        let unsealed = rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&unsealed, SHAPE.bytes()).unwrap();
        assert!(matches!(SendRing::map(&unsealed, SHAPE), Err(ShmFault::Seals)));
        rustix::fs::fcntl_add_seals(&unsealed, SealFlags::SHRINK).unwrap();
        assert!(
            matches!(SendRing::map(&unsealed, SHAPE), Err(ShmFault::Seals)),
            "one seal is not all"
        );
        let (pipe, _) = rustix::pipe::pipe().unwrap();
        assert!(matches!(SendRing::map(&pipe, SHAPE), Err(ShmFault::Seals)));
    }

    #[test]
    fn nothing_outside_a_slot_can_be_named() {
        let (ring, _memory) = ReceiveRing::create(SHAPE).unwrap();
        assert!(ring.data(3, 4096).is_some());
        for (slot, bytes) in [
            (4, 0),
            (4, 1),
            (3, 4097),
            (u32::MAX, 1),
            (0, u32::MAX),
            (u32::MAX, u32::MAX),
        ] {
            assert!(ring.data(slot, bytes).is_none(), "slot {slot}, {bytes} bytes");
        }
    }

    #[test]
    fn a_slot_is_somebodys_alone_until_it_is_dropped() {
        let (receiving, memory) = ReceiveRing::create(SHAPE).unwrap();
        let ring = SendRing::map(&memory, SHAPE).unwrap();
        let mut slots: Vec<Slot> = std::iter::from_fn(|| ring.slot().now_or_never()).collect();
        let mut indices: Vec<u32> = slots.iter().map(Slot::index).collect();
        indices.sort_unstable();
        assert_eq!(indices, [0, 1, 2, 3]);
        for slot in &mut slots {
            let value = slot.index() as u8 + 1;
            slot.bytes(usize::MAX).fill(value);
        }
        for slot in 0..4 {
            let data = receiving.data(slot, 4096).unwrap();
            assert!(data.copied(|bytes| bytes == [slot as u8 + 1; 4096]));
        }
        let last = slots.pop().unwrap().index();
        assert_eq!(ring.slot().now_or_never().unwrap().index(), last);
    }
}
