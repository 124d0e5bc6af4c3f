//! This node's KV memory, as it is shown to trusted prefill nodes that write into it in place.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use engine::KvMemory;
use kv_transfer::receiver::{ImportError, MappedPool, PoolShape, WrittenPool};
use serving_core::ids::BlockId;

use crate::kv_access::KvAccess;

/// The blocks as they are: the memory's layout is the wire layout (PROTOCOL rule 14).
#[derive(Debug)]
pub struct KvPool {
    kv: KvAccess,
    shape: PoolShape,
}

impl KvPool {
    /// Memory that can be mapped. `None` when it is this process's alone.
    pub fn of(kv: &Arc<KvMemory>) -> Option<Self> {
        kv.descriptor()?;
        Self::written(&KvAccess::on_host(kv))
    }

    /// Memory that others can write, however they reach it. `None` when no message can say its shape.
    pub(crate) fn written(kv: &KvAccess) -> Option<Self> {
        let memory = kv.memory();
        let shape = PoolShape {
            blocks: memory.block_count(),
            layers: memory.geometry().layer_count,
            layer_bytes: u32::try_from(memory.geometry().layer_bytes()).ok()?,
        };
        Some(Self { kv: kv.clone(), shape })
    }
}

impl MappedPool for KvPool {
    fn memory(&self) -> BorrowedFd<'_> {
        self.kv
            .memory()
            .descriptor()
            .expect("`of` takes shareable memory only, and memory does not change its kind")
    }
}

impl WrittenPool for KvPool {
    fn shape(&self) -> PoolShape {
        self.shape
    }

    fn verify(
        &self,
        block: BlockId,
        layers: Range<u32>,
        is_good: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<bool, ImportError> {
        let shown = self.kv.show(block, layers, is_good);
        shown.map_err(|source| ImportError { block, source })
    }
}
