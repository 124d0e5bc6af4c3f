//! The rules of order: who used each pair of bytes last, and whether the next user is ordered after them.
//!
//! Two uses of the same byte conflict when at least one writes. They are ordered when they are of one thread, when a barrier of
//! their block lies between, when a barrier of their warp lies between, or when the host ordered their operations. A shuffle, a
//! vote and a matrix product order no memory. Of the readers since the last write the last two are kept, so a race with an
//! older reader may stay unseen in one order of threads; another seed shows it.

use std::num::NonZeroU32;
use std::ops::Range;

use crate::findings::{FindingKind, Findings};

const LINE_BITS: u32 = 19;
/// Later lines count as this one.
const LINE_MAX: u32 = (1 << LINE_BITS) - 1;
/// A block has at most 1,024 threads.
const THREAD_BITS: u32 = 10;
const ATOMIC_BIT: u32 = 1 << (LINE_BITS + THREAD_BITS);
const BYTES_SHIFT: u32 = LINE_BITS + THREAD_BITS + 1;

/// Who acts, and how many barriers it has passed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Actor {
    pub(crate) block: u32,
    pub(crate) thread: u32,
    pub(crate) block_epoch: u32,
    pub(crate) warp_epoch: u32,
}

/// One use of a pair of bytes. Packed, for a cell has to fit in a line of the CPU's cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stamp {
    operation: NonZeroU32,
    block: u32,
    block_epoch: u32,
    warp_epoch: u32,
    /// From the lowest bit: line, thread, whether it is atomic, which of the two bytes.
    packed: u32,
}

impl Stamp {
    pub(crate) fn new(operation: NonZeroU32, actor: Actor, line: u32) -> Self {
        let Actor {
            block,
            thread,
            block_epoch,
            warp_epoch,
        } = actor;
        let packed = line.min(LINE_MAX) | thread << LINE_BITS;
        Self {
            operation,
            block,
            block_epoch,
            warp_epoch,
            packed,
        }
    }

    pub(crate) fn line(&self) -> u32 {
        self.packed & LINE_MAX
    }

    fn thread(&self) -> u32 {
        (self.packed >> LINE_BITS) & ((1 << THREAD_BITS) - 1)
    }

    fn is_atomic(&self) -> bool {
        self.packed & ATOMIC_BIT != 0
    }

    fn bytes(&self) -> u32 {
        self.packed >> BYTES_SHIFT
    }

    fn is_same_thread(&self, other: &Stamp) -> bool {
        self.operation == other.operation && self.block == other.block && self.thread() == other.thread()
    }

    #[inline(always)]
    fn is_before(&self, later: &Stamp, ended_before: &[bool]) -> bool {
        if self.operation != later.operation {
            // An operation with a higher number has run early, and nothing orders it before this one.
            let index = self.operation.get() as usize - 1;
            return ended_before.get(index).copied().unwrap_or(false);
        }
        let is_same_warp = self.thread() / 32 == later.thread() / 32;
        self.block == later.block
            && (self.thread() == later.thread()
                || self.block_epoch < later.block_epoch
                || is_same_warp && self.warp_epoch < later.warp_epoch)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Usage {
    Read,
    /// By `ld.global.nc`: nothing that this launch wrote may be read so.
    ReadOnlyPath,
    Write,
    /// Reads and writes in one step.
    Atomic,
    /// `cp.async` was issued: its target is neither old nor new.
    CopyIssued,
    /// `cp.async` has been waited for.
    CopyLanded,
}

impl Usage {
    fn reads(self) -> bool {
        matches!(self, Usage::Read | Usage::ReadOnlyPath | Usage::Atomic)
    }

    pub(crate) fn writes(self) -> bool {
        !matches!(self, Usage::Read | Usage::ReadOnlyPath)
    }
}

/// What is known of two bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cell {
    writer: Option<Stamp>,
    /// Since the last write, the latest first.
    readers: [Option<Stamp>; 2],
    /// A bit for each byte.
    pub(crate) initialised: u8,
    is_pending: bool,
}

impl Cell {
    fn remember_reader(&mut self, me: Stamp) {
        match self.readers[0] {
            Some(first) if !first.is_same_thread(&me) => self.readers = [Some(me), Some(first)],
            _ => self.readers[0] = Some(me),
        }
    }
}

/// Which of the bytes of cell `index` are in a range of bytes: bit 0 for the first, bit 1 for the second.
pub(crate) fn bytes_of_cell(index: usize, range: &Range<usize>) -> u32 {
    let first = 2 * index;
    u32::from(range.contains(&first)) | u32::from(range.contains(&(first + 1))) << 1
}

/// Judges one use of memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Judge<'a> {
    pub(crate) me: Stamp,
    pub(crate) usage: Usage,
    pub(crate) is_shared: bool,
    /// By number of operation.
    pub(crate) ended_before: &'a [bool],
    /// Where the cells begin, for the words of a finding.
    pub(crate) base: u64,
}

impl Judge<'_> {
    /// Uses a range of bytes, counted from the first cell. The range lies in the cells.
    #[inline]
    pub(crate) fn use_cells(&self, cells: &mut [Cell], range: Range<usize>, findings: &mut Findings) {
        let first = range.start / 2;
        for (offset, cell) in cells[first..range.end.div_ceil(2)].iter_mut().enumerate() {
            let index = first + offset;
            self.use_cell(cell, (index, bytes_of_cell(index, &range)), findings);
        }
    }

    /// `place`: the number of the cell, and which of its bytes are used. Kernels spend a third of their time here. It
    /// is inlined and gives the stamp to others by value, so that the stamp stays in registers: to read it from memory just after it
    /// was written there in pieces took half of that third.
    #[inline(always)]
    pub(crate) fn use_cell(&self, cell: &mut Cell, place: (usize, u32), findings: &mut Findings) {
        let (index, bytes) = place;
        let atomic = if self.usage == Usage::Atomic { ATOMIC_BIT } else { 0 };
        let me = Stamp {
            packed: self.me.packed | atomic | bytes << BYTES_SHIFT,
            ..self.me
        };
        if let Some(writer) = &cell.writer {
            self.compare(writer, me, index, findings);
            if self.usage == Usage::ReadOnlyPath && writer.operation == me.operation {
                let first = || format!("byte {}: `ld.global.nc` of what this launch writes", self.byte(index));
                findings.add(FindingKind::RaceGlobal, me.line(), writer.line(), first);
            }
        }
        if self.usage.writes() {
            for reader in cell.readers.iter().flatten() {
                self.compare(reader, me, index, findings);
            }
        }
        let has_value = u32::from(cell.initialised) & bytes == bytes;
        if self.usage.reads() && (!has_value || cell.is_pending) {
            self.check_content(cell, me, index, findings);
        }
        if self.usage.writes() {
            let is_pending = self.usage == Usage::CopyIssued;
            let initialised = cell.initialised | bytes as u8;
            *cell = Cell {
                writer: Some(me),
                readers: [None; 2],
                initialised,
                is_pending,
            };
        } else {
            cell.remember_reader(me);
        }
    }

    fn byte(&self, cell: usize) -> u64 {
        self.base + 2 * cell as u64
    }

    #[inline(always)]
    fn compare(&self, earlier: &Stamp, me: Stamp, cell: usize, findings: &mut Findings) {
        if earlier.bytes() & me.bytes() != 0 && !earlier.is_before(&me, self.ended_before) {
            self.report(*earlier, me, cell, findings);
        }
    }

    #[cold]
    #[inline(never)]
    fn report(&self, earlier: Stamp, me: Stamp, cell: usize, findings: &mut Findings) {
        let is_one_operation = earlier.operation == me.operation;
        let are_atomic = earlier.is_atomic() && me.is_atomic() && is_one_operation;
        let kind = if are_atomic && earlier.block == me.block {
            return;
        } else if are_atomic {
            FindingKind::AtomicBetweenBlocks
        } else if self.is_shared {
            FindingKind::RaceShared
        } else if is_one_operation {
            FindingKind::RaceGlobal
        } else {
            FindingKind::RaceBetweenStreams
        };
        findings.add(kind, me.line(), earlier.line(), || {
            let (mine, other) = ((me.block, me.thread()), (earlier.block, earlier.thread()));
            let does = if self.usage.writes() { "writes" } else { "reads" };
            format!(
                "byte {}: block {} thread {} {does} what block {} thread {} of {} uses",
                self.byte(cell),
                mine.0,
                mine.1,
                other.0,
                other.1,
                if is_one_operation {
                    "the same operation"
                } else {
                    "another operation"
                },
            )
        });
    }

    #[cold]
    #[inline(never)]
    fn check_content(&self, cell: &Cell, me: Stamp, index: usize, findings: &mut Findings) {
        let who = || format!("byte {}: block {} thread {}", self.byte(index), me.block, me.thread());
        if u32::from(cell.initialised) & me.bytes() != me.bytes() {
            let kind = if self.is_shared {
                FindingKind::UninitialisedShared
            } else {
                FindingKind::UninitialisedGlobal
            };
            findings.add(kind, me.line(), 0, who);
        }
        if cell.is_pending {
            let copied_at = cell.writer.map_or(0, |writer| writer.line());
            findings.add(FindingKind::ReadBeforeAsyncWait, me.line(), copied_at, who);
        }
    }
}
