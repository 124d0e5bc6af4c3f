//! A sequence's blocks in order, as holds for the accounting and as plain ids for the engine.

use crate::ids::BlockId;
use crate::kv::block_holds::{BlockHandle, BlockUse};
use crate::kv::block_pool::BlockPool;

/// Block i holds positions `i * block_tokens ..`.
#[derive(Debug, Default)]
pub struct BlockTable {
    handles: Vec<BlockHandle>,
    ids: Vec<BlockId>,
}

impl BlockTable {
    pub fn new(handles: Vec<BlockHandle>) -> Self {
        let ids = handles.iter().map(BlockHandle::block).collect();
        Self { handles, ids }
    }
    pub fn push(&mut self, handle: BlockHandle) {
        self.ids.push(handle.block());
        self.handles.push(handle);
    }
    pub fn extend(&mut self, handles: Vec<BlockHandle>) {
        for handle in handles {
            self.push(handle);
        }
    }
    /// Room for further blocks, so that growth does not allocate.
    pub fn reserve(&mut self, blocks: usize) {
        self.handles.reserve(blocks);
        self.ids.reserve(blocks);
    }
    pub fn ids(&self) -> &[BlockId] {
        &self.ids
    }
    pub(crate) fn handles(&self) -> &[BlockHandle] {
        &self.handles
    }
    pub fn len(&self) -> u32 {
        u32::try_from(self.handles.len()).unwrap_or(u32::MAX)
    }
    pub fn is_empty(&self) -> bool {
        self.handles.is_empty()
    }
    /// Changes the use of blocks `from..to`.
    pub fn change(&mut self, pool: &mut BlockPool, range: std::ops::Range<usize>, held_as: BlockUse) {
        for handle in &mut self.handles[range] {
            pool.change(handle, held_as);
        }
    }
    /// Takes the blocks from `at` on out of the table.
    pub fn split_off(&mut self, at: usize) -> Vec<BlockHandle> {
        self.ids.truncate(at);
        self.handles.split_off(at.min(self.handles.len()))
    }
    /// Gives every block back, the last first: then a chain's tail is evicted before its head.
    pub fn release(&mut self, pool: &mut BlockPool) {
        self.ids.clear();
        while let Some(handle) = self.handles.pop() {
            pool.release(handle);
        }
    }
}
