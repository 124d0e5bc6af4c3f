//! The decode node's pool as a prefill node maps it. Blocks are written where they belong; one thread copies and sums.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use async_trait::async_trait;
use memmap2::{MmapOptions, MmapRaw};
use serde::{Deserialize, Serialize};
use serving_core::ids::BlockId;

use super::DIRECT;
use super::credits::{Credit, Credits};
use super::fault::ShmFault;
use super::in_place::{self, WrittenInPlace};
use super::ring::{SLOTS_MAX, sealed_bytes};
use crate::choice::TransportKind;
use crate::link::{Carrier, Copied, NoPlace, NotCopied, Place};
use crate::receiver::PoolShape;
use crate::span::SpanMut;

/// The time for which `unmap` may have to wait: 3 ms where a page takes 10 us.
const WARMED_AT_ONCE_BYTES: usize = 1 << 20;

/// The sender's mapping of a pool.
pub(super) struct SendPool {
    shape: PoolShape,
    /// Removed as soon as the pair is over. Held for reading during a copy, so that removing it waits for running copies.
    map: RwLock<Option<MmapRaw>>,
    /// Blocks that a thread of this process is writing now.
    writing: Mutex<BTreeSet<BlockId>>,
    credits: Arc<Credits>,
    /// Largest run of bytes in one frame.
    frame_bytes_max: usize,
    /// Whether the decode node looks at checksums.
    has_checksums: bool,
}

impl Debug for SendPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SendPool").field("shape", &self.shape).finish()
    }
}

/// What a decode node grants with its pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::transports) struct PoolTerms {
    pub shape: PoolShape,
    pub frames_in_flight: u32,
    pub frame_bytes_max: u32,
    pub has_checksums: bool,
}

impl SendPool {
    /// Maps the memory that a decode node passed, if it is what the node says and cannot shrink.
    pub(super) fn map(memory: &OwnedFd, terms: PoolTerms) -> Result<Arc<Self>, ShmFault> {
        let bytes = sealed_bytes(memory)?;
        let expected = terms.shape.bytes();
        let len =
            expected.filter(|expected| *expected as u64 == bytes && (1..=SLOTS_MAX).contains(&terms.frames_in_flight));
        let len = len.ok_or(ShmFault::Geometry {
            slots: terms.shape.blocks,
            slot_bytes: u32::try_from(terms.shape.block_bytes()).unwrap_or(u32::MAX),
            bytes,
        })?;
        let map = MmapOptions::new().len(len).map_raw(memory)?;
        // Best effort: fewer faults when the blocks are touched for the first time.
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Arc::new(Self {
            shape: terms.shape,
            map: RwLock::new(Some(map)),
            writing: Mutex::default(),
            credits: Credits::new(terms.frames_in_flight),
            frame_bytes_max: terms.frame_bytes_max as usize,
            has_checksums: terms.has_checksums,
        }))
    }

    pub fn layers(&self) -> u32 {
        self.shape.layers
    }

    /// Whether blocks of this shape are blocks of the pool.
    pub fn fits(&self, layers: u32, layer_bytes: usize) -> bool {
        self.shape.layers == layers && self.shape.layer_bytes as usize == layer_bytes
    }

    /// Gives `write` some layers of a block. The caller's transfer is claimed at the decode node and has not ended.
    pub fn write<R>(
        &self,
        (block, layers): (BlockId, &Range<u32>),
        write: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, NoPlace> {
        let span = self.shape.span(block, layers).ok_or(NoPlace::Outside)?;
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        let map = map.as_ref().ok_or(NoPlace::Unmapped)?;
        let _writing = Writing::claim(self, block)?;
        // SAFETY: the span is inside the mapping (`PoolShape::span`, whose whole is the mapping's length), which the
        // lock keeps mapped meanwhile and whose memory cannot shrink (seals). `_writing` makes this the only reference
        // to the block in this process. In the decode node nobody reads or writes it: the ledger there gave the block to
        // this transfer alone, from its claim until it is committed or has ended, and looks at a frame's bytes only
        // after its header, which is sent after this returns.
        let place = unsafe { std::slice::from_raw_parts_mut(map.as_mut_ptr().add(span.start), span.len()) };
        Ok(write(place))
    }

    /// Unmaps, after the running copies. From here on this process can write no block. Waits for milliseconds at most; not
    /// for an async thread.
    pub fn unmap(&self) {
        *self.map.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Makes the kernel give and map every page now, on a thread of its own. At a block's first transfer this would take
    /// many times as long as its bytes (90 page faults; 10 us each where the host of a virtual machine takes idle memory
    /// back). Ends early when the pool is unmapped. Without it everything works, but slower.
    pub(super) fn warm(self: &Arc<Self>) {
        let pool = self.clone();
        let started = std::thread::Builder::new().name("shm-warm".to_owned()).spawn(move || {
            let mut start = 0;
            while pool.warm_part(start) {
                start += WARMED_AT_ONCE_BYTES;
            }
        });
        if let Err(error) = started {
            tracing::debug!(%error, "no thread to warm a pool");
        }
    }

    /// True while there is more.
    fn warm_part(&self, start: usize) -> bool {
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        let Some(map) = map.as_ref() else { return false };
        let bytes = map.len().saturating_sub(start).min(WARMED_AT_ONCE_BYTES);
        // Writes nothing: the pages keep their content. A kernel before 5.14 does not know the call.
        bytes > 0 && map.advise_range(memmap2::Advice::PopulateWrite, start, bytes).is_ok()
    }

    fn writing(&self) -> MutexGuard<'_, BTreeSet<BlockId>> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One block that only this thread may write.
struct Writing<'a>(&'a SendPool, BlockId);

impl<'a> Writing<'a> {
    fn claim(pool: &'a SendPool, block: BlockId) -> Result<Self, NoPlace> {
        match pool.writing().insert(block) {
            true => Ok(Self(pool, block)),
            false => Err(NoPlace::Taken),
        }
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.writing().remove(&self.1);
    }
}

impl WrittenInPlace for SendPool {
    fn end(&self) -> in_place::Writing {
        self.unmap();
        in_place::Writing::Over
    }
}

#[async_trait]
impl Carrier for Arc<SendPool> {
    fn kind(&self) -> TransportKind {
        DIRECT
    }

    fn writes_in_place(&self) -> bool {
        true
    }

    fn data_bytes_max(&self) -> usize {
        self.frame_bytes_max
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
    pool: Arc<SendPool>,
    block: BlockId,
    layers: Range<u32>,
}

impl Place for InPlace {
    fn fill(&mut self, from: &Copied<'_>) -> Result<u64, NotCopied> {
        let written = self.pool.write((self.block, &self.layers), |place| {
            // Blocks of another shape.
            let place = place.get_mut(..from.bytes).ok_or(NoPlace::Outside)?;
            Ok(match self.pool.has_checksums {
                true => from.summed(place)?,
                false => from.to(SpanMut::Host(place)).map(|()| 0)?,
            })
        });
        written?
    }

    fn index(&self) -> u32 {
        self.credit.index()
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::MemfdFlags;

    use super::super::ring::SEALS;
    use super::*;

    const SHAPE: PoolShape = PoolShape {
        blocks: 4,
        layers: 2,
        layer_bytes: 4096,
    };
    const TERMS: PoolTerms = PoolTerms {
        shape: SHAPE,
        frames_in_flight: 2,
        frame_bytes_max: 8192,
        has_checksums: true,
    };

    fn memory(bytes: usize, is_sealed: bool) -> OwnedFd {
        let memory = rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&memory, bytes as u64).unwrap();
        if is_sealed {
            rustix::fs::fcntl_add_seals(&memory, SEALS).unwrap();
        }
        memory
    }

    #[test]
    fn only_sealed_memory_of_the_announced_size_is_mapped() {
        let bytes = SHAPE.bytes().unwrap();
        assert!(SendPool::map(&memory(bytes, true), TERMS).is_ok());
        let fault = |memory: OwnedFd, terms| SendPool::map(&memory, terms).unwrap_err().name();
        assert_eq!(fault(memory(bytes, false), TERMS), "seals");
        assert_eq!(fault(memory(bytes - 1, true), TERMS), "geometry");
        assert_eq!(fault(memory(bytes + 1, true), TERMS), "geometry");
        let none = PoolTerms {
            frames_in_flight: 0,
            ..TERMS
        };
        assert_eq!(fault(memory(bytes, true), none), "geometry");
        let shape = PoolShape {
            blocks: u32::MAX,
            layers: u32::MAX,
            layer_bytes: u32::MAX,
        };
        assert_eq!(fault(memory(bytes, true), PoolTerms { shape, ..TERMS }), "geometry");
    }

    #[test]
    fn a_block_is_written_in_its_place_by_one_thread_until_the_pool_is_unmapped() {
        let memory = memory(SHAPE.bytes().unwrap(), true);
        let pool = SendPool::map(&memory, TERMS).unwrap();
        let written = pool.write((BlockId(2), &(1..2)), |place| {
            place.fill(7);
            let again = pool.write((BlockId(2), &(0..1)), |_| ()).unwrap_err();
            (place.len(), again)
        });
        assert_eq!(written.unwrap(), (4096, NoPlace::Taken));
        let mut bytes = vec![0; SHAPE.bytes().unwrap()];
        rustix::io::pread(&memory, &mut bytes, 0).unwrap();
        let start = 2 * 8192 + 4096;
        assert!(
            bytes
                .iter()
                .enumerate()
                .all(|(at, byte)| (*byte == 7) == (start..start + 4096).contains(&at))
        );
        assert!(
            pool.warm_part(0) && !pool.warm_part(WARMED_AT_ONCE_BYTES),
            "it is smaller than a part"
        );
        assert_eq!(
            pool.write((BlockId(2), &(1..2)), |place| place[0]),
            Ok(7),
            "what lies there stays"
        );
        assert_eq!(pool.write((BlockId(4), &(0..1)), |_| ()), Err(NoPlace::Outside));
        assert_eq!(pool.write((BlockId(0), &(1..3)), |_| ()), Err(NoPlace::Outside));
        pool.unmap();
        assert_eq!(pool.write((BlockId(0), &(0..1)), |_| ()), Err(NoPlace::Unmapped));
        assert!(!pool.warm_part(0));
    }
}
