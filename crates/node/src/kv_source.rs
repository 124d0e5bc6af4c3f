//! What a transfer reads: this node's KV memory, until the transfer is over.

use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock, TryLockError};

use engine::KvMemory;
use kv_transfer::span::SpanMut;
use kv_transfer::transport::{KvSource, SourceError};
use serving_core::ids::BlockId;
use thiserror::Error;

/// This node's KV memory as one transfer may read it, until the transfer is over.
#[derive(Debug)]
pub struct TransferSource {
    kv: Arc<KvMemory>,
    /// Held for reading during a copy: closing waits for the copies that run and stops those that come.
    is_open: RwLock<bool>,
}

#[derive(Debug, Error)]
#[error("the transfer is over")]
struct SourceClosed;

impl TransferSource {
    pub fn new(kv: Arc<KvMemory>) -> Self {
        let is_open = RwLock::new(true);
        Self { kv, is_open }
    }
    /// Waits for the copies that run: milliseconds, but not on an async thread.
    pub fn close(&self) {
        *self.is_open.write().unwrap_or_else(PoisonError::into_inner) = false;
    }
    /// Never waits. False while a copy runs: then nothing has changed.
    pub fn try_close(&self) -> bool {
        match self.is_open.try_write() {
            Ok(mut is_open) => *is_open = false,
            Err(TryLockError::Poisoned(is_open)) => *is_open.into_inner() = false,
            Err(TryLockError::WouldBlock) => return false,
        }
        true
    }
}

impl KvSource for TransferSource {
    fn layer_count(&self) -> u32 {
        self.kv.geometry().layer_count
    }
    fn layer_bytes(&self) -> usize {
        self.kv.geometry().layer_bytes()
    }
    fn export(&self, block: BlockId, layers: Range<u32>, out: SpanMut<'_>) -> Result<(), SourceError> {
        let is_open = self.is_open.read().unwrap_or_else(PoisonError::into_inner);
        let copy = || -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
            match *is_open {
                true => Ok(self.kv.export_layers(block, layers, out.host()?)?),
                false => Err(SourceClosed.into()),
            }
        };
        copy().map_err(|source| SourceError { block, source })
    }
}
