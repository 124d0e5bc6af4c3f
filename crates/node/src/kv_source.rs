//! What a transfer reads: this node's KV memory, until the transfer is over.

use std::ops::Range;
use std::sync::{PoisonError, RwLock, TryLockError};

use kv_transfer::span::{DeviceAddress, Lending, Lent, SpanMut};
use kv_transfer::transport::{KvSource, SourceError};
use serving_core::ids::BlockId;
use thiserror::Error;

use crate::kv_access::{AnyError, KvAccess};

/// This node's KV memory as one transfer may read it, until the transfer is over.
#[derive(Debug)]
pub struct TransferSource {
    kv: KvAccess,
    /// Held for reading during a copy: closing waits for the copies that run and stops those that come.
    is_open: RwLock<bool>,
}

#[derive(Debug, Error)]
#[error("the transfer is over")]
struct SourceClosed;

impl TransferSource {
    pub fn new(kv: KvAccess) -> Self {
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
    /// Copies unless the transfer is over. Closing waits for it.
    fn while_open<R>(&self, block: BlockId, copy: impl FnOnce() -> Result<R, AnyError>) -> Result<R, SourceError> {
        let is_open = self.is_open.read().unwrap_or_else(PoisonError::into_inner);
        let copied = match *is_open {
            true => copy(),
            false => Err(SourceClosed.into()),
        };
        copied.map_err(|source| SourceError { block, source })
    }
}

impl KvSource for TransferSource {
    fn layer_count(&self) -> u32 {
        self.kv.memory().geometry().layer_count
    }
    fn layer_bytes(&self) -> usize {
        self.kv.memory().geometry().layer_bytes()
    }
    fn export(&self, block: BlockId, layers: Range<u32>, out: SpanMut<'_>) -> Result<(), SourceError> {
        self.while_open(block, || self.kv.export(block, layers, out))
    }
    fn lend(
        &self,
        block: BlockId,
        layers: Range<u32>,
        copy: &mut dyn FnMut(DeviceAddress) -> Lent,
    ) -> Result<Lending, SourceError> {
        self.while_open(block, || Ok(self.kv.lend_to_reader((block, layers), copy)?))
    }
}
