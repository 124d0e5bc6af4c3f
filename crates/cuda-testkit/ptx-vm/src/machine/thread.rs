//! What one thread has: where it is, what it waits for, the copies that it has issued.

use std::collections::VecDeque;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Ready,
    AtBarrier,
    /// At a warp operation, with the lanes that it names.
    InWarp {
        mask: u32,
    },
    Ended,
}

/// A `cp.async` that has not landed.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingCopy {
    /// In shared memory.
    pub(super) to: usize,
    /// In global memory, checked when the copy was issued.
    pub(super) from: u64,
    pub(super) bytes: usize,
    /// The rest is filled with zeros.
    pub(super) real_bytes: usize,
    /// The number of its group, by thread.
    pub(super) group: u32,
    pub(super) line: u32,
}

#[derive(Debug)]
pub(super) struct Thread {
    pub(super) state: State,
    /// The next instruction, or the one that it waits at.
    pub(super) pc: usize,
    /// Its place in the block.
    pub(super) at: [u32; 3],
    /// Barriers of the block that it has passed.
    pub(super) block_epoch: u32,
    /// Barriers of the warp and of the block.
    pub(super) warp_epoch: u32,
    /// In the order of issue. A thread waits for all but a fixed number of groups, so it stays short.
    pub(super) copies: VecDeque<PendingCopy>,
    /// Groups that it has committed. The open group has this number.
    pub(super) groups: u32,
}

impl Thread {
    pub(super) fn new(number: u32, block: [u32; 3]) -> Self {
        let [x, y, _] = block;
        let at = [number % x, number / x % y, number / x / y];
        Self {
            state: State::Ready,
            pc: 0,
            at,
            block_epoch: 0,
            warp_epoch: 0,
            copies: VecDeque::new(),
            groups: 0,
        }
    }

    /// As at the begin of a block.
    pub(super) fn begin(&mut self) {
        self.state = State::Ready;
        self.pc = 0;
        self.block_epoch = 0;
        self.warp_epoch = 0;
        self.copies.clear();
        self.groups = 0;
    }
}
