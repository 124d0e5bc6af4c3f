//! Memory that the tiles of a phase share: they write disjoint pieces and read them in later phases.

use std::cell::UnsafeCell;
use std::ops::Range;

use model_files::config::ModelConfig;

use super::kernels::attend::{AttendScratch, PARTITION_TILES, PARTS, PartialSums};
use super::kernels::lanes::{QuantisedBlock, QuantisedRow};
use super::kernels::pairs::{PAIR_BLOCKS, UnpackedBlock};
use super::kernels::{BLOCK, BlockMarks, InputRows, Kernels, LANES, Lanes, MAX_ROWS};
use super::plan::ATTENTION_ROWS;
use crate::Numerics;

/// A fixed buffer. Its users keep their pieces apart themselves: ranges are checked, overlap is not.
pub(crate) struct Shared<T> {
    cells: Box<[UnsafeCell<T>]>,
}

// SAFETY: both accessors are unsafe and demand that no piece is written while another thread uses it.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}

impl<T: Copy + Default> Shared<T> {
    pub(crate) fn new(length: usize) -> Self {
        Self {
            cells: (0..length).map(|_| UnsafeCell::new(T::default())).collect(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.cells.len()
    }

    /// # Safety
    /// Nobody writes any of the range while the result lives.
    pub(crate) unsafe fn read(&self, range: Range<usize>) -> &[T] {
        let cells = &self.cells[range];
        // SAFETY: UnsafeCell<T> has the layout of T; the caller rules out writers.
        unsafe { std::slice::from_raw_parts(cells.as_ptr().cast::<T>(), cells.len()) }
    }

    /// # Safety
    /// Nobody else reads or writes any of the range while the result lives.
    #[expect(
        clippy::mut_from_ref,
        reason = "the caller keeps the pieces apart; that is what this type is for"
    )]
    pub(crate) unsafe fn write(&self, range: Range<usize>) -> &mut [T] {
        let cells = &self.cells[range];
        // SAFETY: UnsafeCell<T> has the layout of T and allows writing; the caller rules out other users.
        unsafe { std::slice::from_raw_parts_mut(UnsafeCell::raw_get(cells.as_ptr()), cells.len()) }
    }

    pub(crate) fn pointer(&self, at: usize) -> *mut T {
        self.cells[at..].as_ptr().cast_mut().cast()
    }
}

impl Shared<f32> {
    /// 16 values from `start`.
    ///
    /// # Safety
    /// As [`Shared::write`].
    #[expect(clippy::mut_from_ref, reason = "as above")]
    pub(crate) unsafe fn lanes(&self, start: usize) -> &mut Lanes {
        // SAFETY: the caller's promise; an array has the layout of a slice of its length.
        unsafe { &mut *self.write(start..start + LANES).as_mut_ptr().cast() }
    }
}

/// Inputs of a matrix: rows of f32, or of 8-bit numbers. Kernels get only what their numerics need.
pub(crate) struct Inputs {
    values: Shared<f32>,
    quants: Shared<i8>,
    marks: Shared<BlockMarks>,
    numerics: Numerics,
}

impl Inputs {
    /// Room for `rows` rows of up to `columns` columns.
    pub(crate) fn new(rows: usize, columns: usize, numerics: Numerics) -> Self {
        let (values, quants, blocks) = match numerics {
            Numerics::Int8Blocks => (0, rows * columns, rows * columns / BLOCK),
            Numerics::Exact => (rows * columns, 0, 0),
        };
        Self {
            values: Shared::new(values),
            quants: Shared::new(quants),
            marks: Shared::new(blocks),
            numerics,
        }
    }

    /// Lets `fill` write the f32 values of a row of `columns`. If they are to be quantised, it writes them to `buffer`.
    ///
    /// # Safety
    /// Nobody else uses this row meanwhile.
    pub(crate) unsafe fn fill(
        &self,
        (row, columns): (usize, usize),
        kernels: &Kernels,
        buffer: &mut [f32],
        fill: impl FnOnce(&mut [f32]),
    ) {
        // SAFETY: the caller has this row for itself.
        unsafe {
            match self.numerics {
                Numerics::Int8Blocks => {
                    let values = &mut buffer[..columns];
                    fill(values);
                    self.quantise(row, values, kernels);
                }
                Numerics::Exact => fill(self.values.write(row * columns..(row + 1) * columns)),
            }
        }
    }

    /// Takes a row whose f32 values are in another buffer: quantises them there, or copies them for `Exact`.
    ///
    /// # Safety
    /// As `fill`.
    pub(crate) unsafe fn take(&self, row: usize, values: &[f32], kernels: &Kernels) {
        // SAFETY: as in `fill`.
        unsafe {
            match self.numerics {
                Numerics::Int8Blocks => self.quantise(row, values, kernels),
                Numerics::Exact => {
                    let columns = values.len();
                    self.values
                        .write(row * columns..(row + 1) * columns)
                        .copy_from_slice(values);
                }
            }
        }
    }

    /// Takes a quantised block of a row of `columns`.
    ///
    /// # Safety
    /// Nobody else uses this block of this row meanwhile.
    pub(crate) unsafe fn put(&self, (row, columns): (usize, usize), block: usize, values: &QuantisedBlock) {
        let (cell, mark) = (row * columns + block * BLOCK, row * (columns / BLOCK) + block);
        // SAFETY: the caller's promise.
        unsafe {
            self.quants
                .write(cell..cell + BLOCK)
                .copy_from_slice(values.quants.as_flattened());
            self.marks.write(mark..mark + 1)[0] = values.marks;
        }
    }

    /// # Safety
    /// As `fill`.
    unsafe fn quantise(&self, row: usize, values: &[f32], kernels: &Kernels) {
        let (columns, blocks) = (values.len(), values.len() / BLOCK);
        let marks = row * blocks..(row + 1) * blocks;
        // SAFETY: the ranges belong to this row alone, which the caller has for itself.
        let out = unsafe {
            QuantisedRow {
                quants: self.quants.write(row * columns..(row + 1) * columns),
                marks: self.marks.write(marks),
            }
        };
        (kernels.quantise)(values, out);
    }

    /// `count` rows from `first`, for a dot kernel.
    ///
    /// # Safety
    /// The rows were filled, taken or put with the same `columns`, and nobody writes them while the result lives.
    pub(crate) unsafe fn rows(&self, first: usize, count: usize, columns: usize) -> InputRows<'_> {
        let blocks = columns / BLOCK;
        let (cells, marks) = (
            first * columns..(first + count) * columns,
            first * blocks..(first + count) * blocks,
        );
        let (values, quants, marks) = match self.numerics {
            Numerics::Int8Blocks => (0..0, cells, marks),
            Numerics::Exact => (cells, 0..0, 0..0),
        };
        // SAFETY: the caller rules out writers.
        unsafe {
            InputRows {
                values: self.values.read(values),
                quants: self.quants.read(quants),
                marks: self.marks.read(marks),
                columns,
            }
        }
    }
}

/// Rows of a tile of pairs of panels. Unpacking a panel takes a few hundredths of the time of so many rows.
pub(super) const PAIR_ROWS: usize = 128;

/// The memory of one thread for a tile of a product: unpacked panels, and the sums of up to four panels.
pub(crate) struct ProductScratch {
    pub(super) blocks: Shared<UnpackedBlock>,
    pub(super) sums: [Shared<Lanes>; 4],
    pub(super) quantised: Shared<QuantisedBlock>,
}

impl ProductScratch {
    pub(crate) const MAX_BYTES: usize = 2 * PAIR_BLOCKS * size_of::<UnpackedBlock>()
        + PAIR_ROWS * (4 * size_of::<Lanes>() + size_of::<QuantisedBlock>());

    pub(crate) fn new(max_rows: usize) -> Self {
        // Kernels for few rows always have room for all of theirs.
        let rows = max_rows.clamp(MAX_ROWS, PAIR_ROWS);
        Self {
            blocks: Shared::new(2 * PAIR_BLOCKS),
            sums: std::array::from_fn(|_| Shared::new(rows)),
            quantised: Shared::new(rows),
        }
    }
}

/// The memory of one thread for a tile of attention.
pub(crate) struct AttentionScratch {
    keys: Shared<f32>,
    values: Shared<f32>,
    parts: Shared<Lanes>,
    scores: Shared<Lanes>,
    /// What an item's rows have of all partitions so far, and of one more.
    pub(super) sums: SumSlots,
    pub(super) partition: SumSlots,
}

impl AttentionScratch {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        let queries = ATTENTION_ROWS * config.head_count / config.kv_head_count;
        let tiles = 2 * config.head_dim * LANES;
        Self {
            keys: Shared::new(tiles),
            values: Shared::new(tiles),
            parts: Shared::new(PARTS),
            scores: Shared::new(queries * PARTITION_TILES),
            sums: SumSlots::new(1, queries, config.head_dim),
            partition: SumSlots::new(1, queries, config.head_dim),
        }
    }

    /// # Safety
    /// Nobody else uses this scratch while the result lives.
    pub(super) unsafe fn get(&self) -> AttendScratch<'_> {
        // SAFETY: the caller's promise.
        unsafe {
            AttendScratch {
                keys: self.keys.write(0..self.keys.len()),
                values: self.values.write(0..self.values.len()),
                parts: self.parts.write(0..self.parts.len()),
                scores: self.scores.write(0..self.scores.len()),
            }
        }
    }
}

/// Slots for the sums of partitions, each with room for up to `queries` queries.
pub(crate) struct SumSlots {
    largest: Shared<f32>,
    totals: Shared<f32>,
    sums: Shared<f32>,
    queries: usize,
    head_dim: usize,
}

impl SumSlots {
    pub(crate) fn new(slots: usize, queries: usize, head_dim: usize) -> Self {
        Self {
            largest: Shared::new(slots * queries),
            totals: Shared::new(slots * queries),
            sums: Shared::new(slots * queries * head_dim),
            queries,
            head_dim,
        }
    }

    /// The first `queries` of a slot.
    ///
    /// # Safety
    /// Nobody else uses this slot while the result lives.
    pub(super) unsafe fn get(&self, slot: usize, queries: usize) -> PartialSums<'_> {
        assert!(queries <= self.queries, "{queries} queries of {}", self.queries);
        let first = slot * self.queries;
        let range = first..first + queries;
        // SAFETY: the caller's promise.
        unsafe {
            PartialSums {
                largest: self.largest.write(range.clone()),
                totals: self.totals.write(range),
                sums: self
                    .sums
                    .write(first * self.head_dim..(first + queries) * self.head_dim),
            }
        }
    }
}
