//! The sender's ring: frames are packed into it, on a stream of their own, and leave from there. The pair's blocks are free as
//! soon as they are packed, whatever the communicator does.

use std::fmt::{self, Debug};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use serving_core::ids::BlockId;
use tokio::sync::watch;

use super::KIND;
use super::group::{RingShape, Run};
use super::rings::RingMemory;
use crate::choice::TransportKind;
use crate::device::{DeviceFault, Event, Lane};
use crate::link::{Carrier, Copied, NoPlace, NotCopied, Place};
use crate::span::{DeviceAddress, Lent};
use crate::transports::shm::credits::{Credit, Credits};

/// The sender's end of one communicator's memory.
pub(super) struct SendRing {
    memory: Arc<RingMemory>,
    shape: RingShape,
    /// Whether the decode node looks at checksums.
    has_checksums: bool,
    lane: Lane,
    /// By slot.
    events: Vec<Mutex<Event>>,
}

impl Debug for SendRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendRing").field("shape", &self.shape).finish()
    }
}

impl SendRing {
    /// For a blocking thread.
    ///
    /// # Errors
    /// The device gives no stream or event.
    pub fn new(memory: Arc<RingMemory>, (shape, has_checksums): (RingShape, bool)) -> Result<Arc<Self>, DeviceFault> {
        let kv = memory.kv().clone();
        let events: Result<Vec<Mutex<Event>>, DeviceFault> =
            (0..shape.slots).map(|_| kv.event().map(Mutex::new)).collect();
        Ok(Arc::new(Self {
            shape,
            has_checksums,
            lane: kv.lane()?,
            events: events?,
            memory,
        }))
    }

    fn slot(&self, slot: u32) -> DeviceAddress {
        self.memory.at().offset(slot as usize * self.shape.slot_bytes as usize)
    }

    /// Packs a frame into a slot.
    fn pack(&self, slot: u32, from: &Copied<'_>) -> Result<u64, NotCopied> {
        let slot_bytes = self.shape.slot_bytes as usize;
        if from.bytes > slot_bytes {
            return Err(NoPlace::LayerTooLarge {
                layer_bytes: from.bytes,
                slot_bytes,
            }
            .into());
        }
        // Each slot has an event, and one holder.
        let event = self.events.get(slot as usize).ok_or(NotCopied::BrokeOff)?;
        let (kv, to) = (self.memory.kv(), self.slot(slot));
        from.to_device(
            &mut |source| {
                let event = event.lock().unwrap_or_else(PoisonError::into_inner);
                let copied = kv.copy((&self.lane, &*event), (source, to), from.bytes);
                self.note_end(&copied);
                copied?;
                match self.has_checksums {
                    true => kv.checksum(source, from.bytes),
                    false => Ok(0),
                }
            },
            &mut |bytes| {
                let uploaded = kv.upload_now(to, bytes);
                self.note_end(&uploaded);
                uploaded
            },
        )
    }

    /// What becomes of the ring after a write that ended like this.
    fn note_end(&self, written: &Result<(), DeviceFault>) {
        if DeviceFault::lent(written) == Lent::Kept {
            self.memory.note_stuck();
        }
    }
}

/// The pair's way to a ring that comes with its first transfer.
#[derive(Debug)]
pub(super) struct ByNccl {
    pub ring: watch::Receiver<Option<Arc<SendRing>>>,
    pub credits: Arc<Credits>,
    pub shape: RingShape,
}

#[async_trait]
impl Carrier for ByNccl {
    fn kind(&self) -> TransportKind {
        KIND
    }

    fn data_bytes_max(&self) -> usize {
        self.shape.slot_bytes as usize
    }

    async fn room(&self, _: (BlockId, Range<u32>), bytes: usize) -> Box<dyn Place> {
        let mut ring = self.ring.clone();
        let there = ring.wait_for(Option::is_some).await.ok().and_then(|ring| ring.clone());
        let ring = match there {
            Some(ring) => ring,
            // The pair is ending, and the caller learns that otherwise.
            None => std::future::pending().await,
        };
        let credit = self.credits.next().await;
        Box::new(Packed { ring, credit, bytes })
    }
}

/// One frame in the ring.
#[derive(Debug)]
pub(super) struct Packed {
    ring: Arc<SendRing>,
    credit: Credit,
    bytes: usize,
}

impl Packed {
    pub fn run(&self) -> Run {
        Run {
            at: self.ring.slot(self.credit.index()),
            bytes: self.bytes,
        }
    }
}

impl Place for Packed {
    fn fill(&mut self, from: &Copied<'_>) -> Result<u64, NotCopied> {
        self.bytes = from.bytes;
        self.ring.pack(self.credit.index(), from)
    }

    fn index(&self) -> u32 {
        self.credit.index()
    }
}
