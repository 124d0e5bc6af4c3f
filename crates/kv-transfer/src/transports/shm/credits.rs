//! The right to have a frame's bytes in flight. The decode node decides how many there are; each has an index that comes
//! back.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

#[derive(Debug)]
pub(in crate::transports) struct Credits {
    /// Last in, first out, because the slot that was used last is still in the cache.
    free: Mutex<Vec<u32>>,
    /// One permit per free index.
    available: Arc<Semaphore>,
}

impl Credits {
    pub fn new(count: u32) -> Arc<Self> {
        Arc::new(Self {
            free: Mutex::new((0..count).rev().collect()),
            available: Arc::new(Semaphore::new(count as usize)),
        })
    }

    /// Waits while every index is in use. Cancel-safe.
    pub async fn next(self: &Arc<Self>) -> Credit {
        // The semaphore is never closed. Without a permit the only thing to do is to wait for the caller's end.
        match self.available.clone().acquire_owned().await {
            Ok(permit) => Credit {
                credits: self.clone(),
                index: self
                    .free()
                    .pop()
                    .expect("a permit stands for an index on the list: `Credit` gives both back, the index first"),
                _permit: permit,
            },
            Err(_) => std::future::pending().await,
        }
    }

    fn free(&self) -> MutexGuard<'_, Vec<u32>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One credit, owned by its holder alone. It is free again when it is dropped.
#[derive(Debug)]
pub(in crate::transports) struct Credit {
    credits: Arc<Credits>,
    index: u32,
    _permit: OwnedSemaphorePermit,
}

impl Credit {
    pub fn index(&self) -> u32 {
        self.index
    }
}

impl Drop for Credit {
    fn drop(&mut self) {
        self.credits.free().push(self.index);
    }
}
