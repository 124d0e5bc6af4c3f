//! The decode node's pool as a prefill node has it: opened or, in one process, known by its address. Blocks are copied to where
//! they belong, on a stream of this pair.

use std::collections::BTreeSet;
use std::fmt::{self, Debug};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use async_trait::async_trait;
use serving_core::ids::BlockId;

use super::KIND;
use super::fault::IpcFault;
use super::opened::Opened;
use crate::choice::TransportKind;
use crate::device::{DeviceFault, DeviceKv, Event, Lane};
use crate::link::{Carrier, Copied, NoPlace, NotCopied, Place};
use crate::receiver::PoolShape;
use crate::span::{DeviceAddress, Lent};
use crate::transports::shm::credits::{Credit, Credits};
use crate::transports::shm::in_place::{Writing, WrittenInPlace};
use crate::transports::shm::pool::PoolTerms;

/// Copies that one pair has under way, whatever its peer allows: each has an event.
pub(super) const COPIES_MAX: u32 = 256;

/// Where the peer's pool is, as long as this value lives.
pub(super) struct Mapping {
    address: DeviceAddress,
    _held: Held,
}

#[allow(dead_code, reason = "they are held for their drop")]
enum Held {
    Opened(Arc<Opened>),
    Here(Arc<DeviceKv>),
}

impl Mapping {
    /// Another process's.
    pub fn opened(opened: Arc<Opened>) -> Self {
        Self {
            address: opened.address(),
            _held: Held::Opened(opened),
        }
    }

    /// Of a node of this process.
    pub fn here(kv: Arc<DeviceKv>) -> Self {
        Self {
            address: kv.pool(),
            _held: Held::Here(kv),
        }
    }
}

/// The state of the way to the peer's pool.
enum Access {
    Mapped(Mapping),
    /// Closed: this process can write no block.
    Closed,
    /// A copy did not end in time and may still write. The mapping stays for the rest of the process, and is not used.
    Kept,
}

/// The sender's end of a pool.
pub(super) struct PeerPool {
    terms: PoolTerms,
    device: Arc<DeviceKv>,
    /// Held for reading during a copy, so that closing waits for the copies that run. Each of them has a deadline.
    access: RwLock<Access>,
    /// A copy has not ended in time.
    is_stuck: AtomicBool,
    /// Blocks that a thread of this process is writing now.
    writing: Mutex<BTreeSet<BlockId>>,
    lane: Lane,
    credits: Arc<Credits>,
    /// By the number of the credit.
    events: Vec<Mutex<Event>>,
}

impl Debug for PeerPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerPool").field("terms", &self.terms).finish()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PeerPool {
    /// # Errors
    /// The device gives no stream or event.
    pub fn new(device: &Arc<DeviceKv>, terms: PoolTerms, mapping: Mapping) -> Result<Arc<Self>, IpcFault> {
        let copies = terms.frames_in_flight.clamp(1, COPIES_MAX);
        let events: Result<Vec<Mutex<Event>>, DeviceFault> =
            (0..copies).map(|_| device.event().map(Mutex::new)).collect();
        Ok(Arc::new(Self {
            terms,
            access: RwLock::new(Access::Mapped(mapping)),
            is_stuck: AtomicBool::new(false),
            writing: Mutex::default(),
            lane: device.lane().map_err(IpcFault::Device)?,
            credits: Credits::new(copies),
            events: events.map_err(IpcFault::Device)?,
            device: device.clone(),
        }))
    }

    fn shape(&self) -> PoolShape {
        self.terms.shape
    }

    /// Copies some layers of a block of this node to their place. The caller's transfer is claimed at the decode node and has
    /// not ended.
    fn copy(&self, (place, credit): ((BlockId, &Range<u32>), u32), from: &Copied<'_>) -> Result<u64, NotCopied> {
        let span = self.shape().span(place.0, place.1).ok_or(NoPlace::Outside)?;
        if from.bytes > span.len() {
            // Blocks of another shape.
            return Err(NoPlace::Outside.into());
        }
        let access = self.access.read().unwrap_or_else(PoisonError::into_inner);
        let Access::Mapped(mapping) = &*access else {
            return Err(NoPlace::Unmapped.into());
        };
        let _writing = WritingBlock::claim(self, place.0)?;
        let to = mapping.address.offset(span.start);
        // Each credit has an event, and one holder.
        let event = self.events.get(credit as usize).ok_or(NotCopied::BrokeOff)?;
        from.to_device(
            &mut |source| self.copy_and_sum((source, to), from.bytes, &lock(event)),
            &mut |bytes| {
                let uploaded = self.device.upload_now(to, bytes);
                self.note_end(&uploaded);
                uploaded
            },
        )
    }

    /// Sums only if the decode node looks at sums.
    fn copy_and_sum(
        &self,
        (from, to): (DeviceAddress, DeviceAddress),
        bytes: usize,
        event: &Event,
    ) -> Result<u64, DeviceFault> {
        let copied = self.device.copy((&self.lane, event), (from, to), bytes);
        self.note_end(&copied);
        copied?;
        match self.terms.has_checksums {
            true => self.device.checksum(from, bytes),
            false => Ok(0),
        }
    }

    /// What can still be told to the peer after a write that ended like this.
    pub(super) fn note_end(&self, written: &Result<(), DeviceFault>) {
        if DeviceFault::lent(written) == Lent::Kept {
            self.is_stuck.store(true, Ordering::SeqCst);
        }
    }
}

impl WrittenInPlace for PeerPool {
    fn writing(&self) -> Writing {
        match self.is_stuck.load(Ordering::SeqCst) {
            true => Writing::MayGoOn,
            false => Writing::Over,
        }
    }

    fn end(&self) -> Writing {
        let mut access = self.access.write().unwrap_or_else(PoisonError::into_inner);
        let writing = self.writing();
        let next = match writing {
            Writing::Over => Access::Closed,
            Writing::MayGoOn => Access::Kept,
        };
        let before = std::mem::replace(&mut *access, next);
        if let (Writing::MayGoOn, Access::Mapped(mapping)) = (writing, before) {
            std::mem::forget(mapping);
            self.device.keep("the pool of another process");
        }
        writing
    }
}

/// A pool that nobody ended: its link was never made, or the runtime is ending.
impl Drop for PeerPool {
    fn drop(&mut self) {
        self.end();
    }
}

/// One block that only this thread may write.
struct WritingBlock<'a>(&'a PeerPool, BlockId);

impl<'a> WritingBlock<'a> {
    fn claim(pool: &'a PeerPool, block: BlockId) -> Result<Self, NoPlace> {
        match lock(&pool.writing).insert(block) {
            true => Ok(Self(pool, block)),
            false => Err(NoPlace::Taken),
        }
    }
}

impl Drop for WritingBlock<'_> {
    fn drop(&mut self) {
        lock(&self.0.writing).remove(&self.1);
    }
}

#[async_trait]
impl Carrier for Arc<PeerPool> {
    fn kind(&self) -> TransportKind {
        KIND
    }

    fn writes_in_place(&self) -> bool {
        true
    }

    fn data_bytes_max(&self) -> usize {
        self.terms.frame_bytes_max as usize
    }

    async fn room(&self, (block, layers): (BlockId, Range<u32>), _: usize) -> Box<dyn Place> {
        Box::new(InPlace {
            credit: self.credits.next().await,
            pool: self.clone(),
            block,
            layers,
        })
    }
}

/// The place of some layers in the decode node's pool.
#[derive(Debug)]
struct InPlace {
    credit: Credit,
    pool: Arc<PeerPool>,
    block: BlockId,
    layers: Range<u32>,
}

impl Place for InPlace {
    fn fill(&mut self, from: &Copied<'_>) -> Result<u64, NotCopied> {
        self.pool.copy(((self.block, &self.layers), self.credit.index()), from)
    }

    fn index(&self) -> u32 {
        self.credit.index()
    }
}
