//! The shadow of device memory: which bytes exist, which have a value, and who used them last.
//!
//! The bytes themselves lie at the addresses. A region's cells are kept in pages: a page that was only ever used as a whole has
//! one cell, so the weights of a model cost little until a kernel reads them.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::ops::Range;

use crate::findings::Findings;
use crate::shadow::{Actor, Cell, Judge, Stamp, Usage, bytes_of_cell};

/// Even. A page whose parts were used differently costs 32 times its bytes.
const PAGE_BYTES: usize = 4096;

/// How a copy or a fill uses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
}

/// An allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionInfo {
    pub start: u64,
    pub bytes: usize,
}

#[derive(Debug)]
enum Page {
    /// All cells are alike.
    Uniform(Cell),
    Split(Box<[Cell]>),
}

impl Page {
    fn split(&mut self, page_bytes: usize) -> &mut [Cell] {
        if let Page::Uniform(cell) = *self {
            *self = Page::Split(vec![cell; page_bytes.div_ceil(2)].into_boxed_slice());
        }
        match self {
            Page::Split(cells) => cells,
            Page::Uniform(_) => &mut [],
        }
    }
}

/// A range within one page.
struct PagePart {
    page: usize,
    /// In bytes, from the page's start.
    range: Range<usize>,
    page_bytes: usize,
}

impl PagePart {
    fn is_whole(&self) -> bool {
        self.range == (0..self.page_bytes)
    }
}

#[derive(Debug)]
struct Region {
    start: u64,
    bytes: usize,
    pages: Vec<Page>,
}

impl Region {
    fn new(start: u64, bytes: usize) -> Self {
        let new_page = |_| Page::Uniform(Cell::default());
        Self {
            start,
            bytes,
            pages: (0..bytes.div_ceil(PAGE_BYTES)).map(new_page).collect(),
        }
    }

    fn has(&self, at: u64, bytes: usize) -> bool {
        at.checked_sub(self.start)
            .and_then(|offset| offset.checked_add(bytes as u64))
            .is_some_and(|end| end <= self.bytes as u64)
    }

    /// The pages of a range that the region has.
    fn parts(&self, at: u64, bytes: usize) -> impl Iterator<Item = PagePart> + use<> {
        let first = (at - self.start) as usize;
        let (end, region_bytes) = (first + bytes, self.bytes);
        let pages = if bytes == 0 {
            0..0
        } else {
            first / PAGE_BYTES..end.div_ceil(PAGE_BYTES)
        };
        pages.map(move |page| {
            let page_start = page * PAGE_BYTES;
            let page_bytes = PAGE_BYTES.min(region_bytes - page_start);
            let from = first.saturating_sub(page_start);
            PagePart {
                page,
                range: from..page_bytes.min(end - page_start),
                page_bytes,
            }
        })
    }

    fn use_bytes(&mut self, span: (u64, usize), judge: &Judge<'_>, findings: &mut Findings) {
        let (at, bytes) = span;
        for part in self.parts(at, bytes) {
            let judge = Judge {
                base: (part.page * PAGE_BYTES) as u64,
                ..*judge
            };
            let page = &mut self.pages[part.page];
            if let (Page::Uniform(cell), true) = (&mut *page, part.is_whole()) {
                judge.use_cell(cell, (0, 0b11), findings);
                continue;
            }
            let is_whole = part.is_whole();
            let cells = page.split(part.page_bytes);
            judge.use_cells(cells, part.range, findings);
            // A write of the whole page has made its cells alike, but for a last cell of one byte.
            if is_whole && judge.usage.writes() && !cells.is_empty() {
                let cell = cells[0];
                *page = Page::Uniform(cell);
            }
        }
    }

    fn set_initialised(&mut self, at: u64, bytes: usize) {
        for part in self.parts(at, bytes) {
            let page = &mut self.pages[part.page];
            if let (Page::Uniform(cell), true) = (&mut *page, part.is_whole()) {
                cell.initialised = 0b11;
                continue;
            }
            let first = part.range.start / 2;
            let cells = &mut page.split(part.page_bytes)[first..part.range.end.div_ceil(2)];
            for (offset, cell) in cells.iter_mut().enumerate() {
                cell.initialised |= bytes_of_cell(first + offset, &part.range) as u8;
            }
        }
    }

    fn is_initialised(&self, at: u64, bytes: usize) -> bool {
        let has_value = |cell: &Cell, bytes: u32| u32::from(cell.initialised) & bytes == bytes;
        self.parts(at, bytes).all(|part| match &self.pages[part.page] {
            Page::Uniform(cell) => {
                let mut cells = part.range.start / 2..part.range.end.div_ceil(2);
                cell.initialised == 0b11 || cells.all(|index| has_value(cell, bytes_of_cell(index, &part.range)))
            }
            Page::Split(cells) => (part.range.start / 2..part.range.end.div_ceil(2))
                .all(|index| has_value(&cells[index], bytes_of_cell(index, &part.range))),
        })
    }
}

/// The shadow of device memory. The bytes themselves are at the addresses (host mappings that the driver has made readable).
#[derive(Debug)]
pub struct Memory {
    /// Sorted by start.
    regions: Vec<Region>,
    /// Start and end. New memory at the same place removes an entry.
    freed: BTreeMap<u64, u64>,
    /// The region that was used last is looked at first.
    last: usize,
    operation: NonZeroU32,
    ended_before: Vec<bool>,
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            regions: Vec::new(),
            freed: BTreeMap::new(),
            last: 0,
            operation: NonZeroU32::MIN,
            ended_before: Vec::new(),
        }
    }
}

impl Memory {
    /// The caller promises that these bytes can be read and written while kernels run, and that they overlap no other region.
    pub fn add(&mut self, at: u64, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let end = at.saturating_add(bytes as u64);
        self.freed.retain(|start, freed_end| *freed_end <= at || *start >= end);
        let index = self.regions.partition_point(|region| region.start < at);
        self.regions.insert(index, Region::new(at, bytes));
    }

    /// Does nothing if no region starts here.
    pub fn remove(&mut self, at: u64) {
        if let Ok(index) = self.regions.binary_search_by_key(&at, |region| region.start) {
            let region = self.regions.remove(index);
            self.freed.insert(at, at.saturating_add(region.bytes as u64));
        }
    }

    /// The region that has all these bytes.
    pub fn region(&self, at: u64, bytes: usize) -> Option<RegionInfo> {
        let region = &self.regions[self.position(at, bytes)?];
        Some(RegionInfo {
            start: region.start,
            bytes: region.bytes,
        })
    }

    pub fn was_freed(&self, at: u64) -> bool {
        self.freed.range(..=at).next_back().is_some_and(|(_, end)| at < *end)
    }

    /// Says that the bytes have a value. Bytes outside every region are left out.
    pub fn set_initialised(&mut self, at: u64, bytes: usize) {
        if let Some(index) = self.position(at, bytes) {
            self.regions[index].set_initialised(at, bytes);
        }
    }

    pub fn is_initialised(&self, at: u64, bytes: usize) -> bool {
        self.position(at, bytes)
            .is_some_and(|index| self.regions[index].is_initialised(at, bytes))
    }

    /// Before an operation: its number, and for each earlier operation whether it is known to have ended before this one
    /// (index = operation number). An operation without an entry is not ordered before this one.
    pub fn begin_operation(&mut self, operation: u32, ended_before: Vec<bool>) {
        self.operation = NonZeroU32::MIN.saturating_add(operation);
        self.ended_before = ended_before;
    }

    /// A copy or a fill by the operation that has begun: one access of the whole range, which one region has to have.
    pub fn touch(&mut self, at: u64, bytes: usize, access: Access, findings: &mut Findings) {
        let usage = match access {
            Access::Read => Usage::Read,
            Access::Write => Usage::Write,
        };
        let host = Actor {
            block: 0,
            thread: 0,
            block_epoch: 0,
            warp_epoch: 0,
        };
        self.use_bytes((at, bytes), self.stamp(host, 0), usage, findings);
    }

    pub(crate) fn stamp(&self, actor: Actor, line: u32) -> Stamp {
        Stamp::new(self.operation, actor, line)
    }

    /// `None`: no region has these bytes.
    pub(crate) fn use_bytes(
        &mut self,
        span: (u64, usize),
        me: Stamp,
        usage: Usage,
        findings: &mut Findings,
    ) -> Option<()> {
        let index = self.position(span.0, span.1)?;
        self.last = index;
        let judge = Judge {
            me,
            usage,
            is_shared: false,
            ended_before: &self.ended_before,
            base: 0,
        };
        self.regions[index].use_bytes(span, &judge, findings);
        Some(())
    }

    fn position(&self, at: u64, bytes: usize) -> Option<usize> {
        if self.regions.get(self.last).is_some_and(|region| region.has(at, bytes)) {
            return Some(self.last);
        }
        let index = self
            .regions
            .partition_point(|region| region.start <= at)
            .checked_sub(1)?;
        self.regions[index].has(at, bytes).then_some(index)
    }
}
