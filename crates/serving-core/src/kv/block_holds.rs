//! One hold on a block, all holds on one block, and the state that follows from them. The pool (`block_pool.rs`) hands holds
//! out and takes them back.

use std::sync::mpsc;

use crate::ids::{BlockId, CacheTenant, Generation};

/// What a holder does with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockUse {
    /// A sequence reads or writes it.
    Active,
    /// Kept for bytes that have not begun to arrive, or for a sequence's next tokens.
    Reserved,
    /// Bytes are being written by a peer, or pushed to one.
    InTransfer,
    /// A transfer that was given up may still touch it.
    Quarantined,
}

/// One hold on one block. Neither `Clone` nor `Copy`: whoever has it owes one `release`.
#[derive(Debug)]
#[must_use = "give it back with BlockPool::release: dropping it works, and is counted as a bug"]
pub struct BlockHandle {
    pub(super) hold: Hold,
    pub(super) generation: Generation,
    /// `None` once released. At most one message for each handle: the channel needs no bound of its own.
    pub(super) if_dropped: Option<mpsc::Sender<Hold>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hold {
    pub block: BlockId,
    pub held_as: BlockUse,
}

impl Drop for BlockHandle {
    fn drop(&mut self) {
        if let Some(pool) = self.if_dropped.take() {
            // A pool that is gone has no blocks to lose.
            let _ = pool.send(self.hold);
        }
    }
}

impl BlockHandle {
    pub fn block(&self) -> BlockId {
        self.hold.block
    }
    pub fn generation(&self) -> Generation {
        self.generation
    }
    pub(crate) fn held_as(&self) -> BlockUse {
        self.hold.held_as
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    Free,
    Active,
    Cached,
    Reserved,
    InTransfer,
    Quarantined,
}

#[derive(Clone, Debug)]
pub(super) struct Block {
    pub generation: Generation,
    pub active: u32,
    pub reserved: u32,
    pub in_transfer: u32,
    pub quarantined: u32,
    /// Key in the prefix index, when it lists this block.
    pub published: Option<u64>,
    /// Whose it is while it is listed.
    pub tenant: Option<CacheTenant>,
    /// Orders cached blocks for eviction.
    pub cached_at: u64,
}

impl Block {
    pub fn state(&self) -> BlockState {
        if self.quarantined > 0 {
            BlockState::Quarantined
        } else if self.in_transfer > 0 {
            BlockState::InTransfer
        } else if self.reserved > 0 {
            BlockState::Reserved
        } else if self.active > 0 {
            BlockState::Active
        } else if self.published.is_some() {
            BlockState::Cached
        } else {
            BlockState::Free
        }
    }
    pub fn holds(&mut self, held_as: BlockUse) -> &mut u32 {
        match held_as {
            BlockUse::Active => &mut self.active,
            BlockUse::Reserved => &mut self.reserved,
            BlockUse::InTransfer => &mut self.in_transfer,
            BlockUse::Quarantined => &mut self.quarantined,
        }
    }
}

pub(super) fn take_hold(block: &mut Block, held_as: BlockUse) {
    let holds = block.holds(held_as);
    // A handle exists, so its hold is counted: anything else is a double release, and must stop the node.
    *holds = holds.checked_sub(1).expect("a block was released twice");
}
