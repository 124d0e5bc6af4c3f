//! The memory for transfers: one budget for all pairs of a node, and buffers that are used again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{Copied, NotCopied, Place};

/// KV bytes that wait in this node's memory for the connections of all its pairs. When it is used up, a transfer waits for
/// room and its pair goes on with one frame at a time (see [`Share`]).
#[derive(Debug)]
pub(crate) struct Budget {
    /// In KiB.
    room: Arc<Semaphore>,
    kib: u32,
    /// Buffers of frames that were written, for the next frames of any pair: they are warm and were zeroed only once.
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    buffers: Vec<Vec<u8>>,
    bytes: usize,
}

impl Budget {
    /// At least one frame's worth, so that any frame fits.
    pub fn of(bytes: u64) -> Arc<Self> {
        let kib = u32::try_from(bytes / 1024).unwrap_or(u32::MAX).clamp(64, 1 << 28);
        Arc::new(Self {
            room: Arc::new(Semaphore::new(kib as usize)),
            kib,
            kept: Mutex::default(),
        })
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The content is what the last user left.
    fn buffer(self: &Arc<Self>, bytes: usize) -> Buffer {
        let mut buffer = {
            let mut kept = self.kept();
            let buffer = kept.buffers.pop().unwrap_or_default();
            kept.bytes -= buffer.len();
            buffer
        };
        buffer.resize(bytes, 0);
        let home = self.clone();
        Buffer { bytes: buffer, home }
    }
}

/// One pair's part of the budget: what all pairs share, and one frame of its own. So a pair whose peer stands still, and which
/// holds everything until its stall is noticed, makes the other pairs slow, but never stops them.
#[derive(Debug)]
pub(crate) struct Share {
    budget: Arc<Budget>,
    own: Arc<Semaphore>,
}

impl Share {
    pub fn of(budget: &Arc<Budget>) -> Self {
        let (budget, own) = (budget.clone(), Arc::new(Semaphore::new(1)));
        Self { budget, own }
    }

    /// Waits for room for one frame. Cancel-safe.
    pub async fn take(&self, bytes: usize) -> BufferPlace {
        let kib = u32::try_from(bytes.div_ceil(1024))
            .unwrap_or(u32::MAX)
            .min(self.budget.kib);
        let permit = tokio::select! {
            biased;
            permit = self.budget.room.clone().acquire_many_owned(kib) => permit,
            permit = self.own.clone().acquire_owned() => permit,
        };
        BufferPlace {
            budget: self.budget.clone(),
            buffer: None,
            // Neither semaphore is ever closed.
            _permit: permit.ok(),
        }
    }
}

/// Memory of its own for one frame whose bytes travel in it.
#[derive(Debug)]
pub(crate) struct BufferPlace {
    budget: Arc<Budget>,
    buffer: Option<Buffer>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Place for BufferPlace {
    fn fill(&mut self, from: &Copied<'_>) -> Result<u64, NotCopied> {
        let buffer = self.buffer.insert(self.budget.buffer(from.bytes));
        Ok(from.summed(&mut buffer.bytes)?)
    }

    fn inline(&mut self) -> Bytes {
        self.buffer.take().map_or_else(Bytes::new, Bytes::from_owner)
    }
}

/// Given back when it is dropped.
#[derive(Debug)]
struct Buffer {
    bytes: Vec<u8>,
    home: Arc<Budget>,
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut kept = self.home.kept();
        // With only 16 kept buffers, the rest of the 32 buffers of a 512-token prompt were zeroed again each time.
        if kept.bytes + self.bytes.len() <= self.home.kib as usize * 1024 {
            kept.bytes += self.bytes.len();
            kept.buffers.push(std::mem::take(&mut self.bytes));
        }
    }
}
