//! How the kernels of an instruction set go through the rows of a call: in groups, each with its own unrolled code, and block by block.

use super::{BLOCK, BlockMarks, InputRows};

/// The rows of a kernel call at one of their blocks. It goes along the blocks by pointers: with checked sums and products of indices
/// the inner loop had as many instructions for these as for its work.
#[derive(Clone, Copy)]
pub(super) struct RowsAtBlock {
    quants: *const i8,
    marks: *const BlockMarks,
    /// From row to row.
    columns: usize,
    blocks: usize,
}

impl RowsAtBlock {
    /// # Safety
    /// `first` is below the rows that `check_quantised` has found.
    #[inline(always)]
    pub(super) unsafe fn first(input: &InputRows<'_>, first: usize) -> Self {
        let (columns, blocks) = (input.columns, input.columns / BLOCK);
        let (cell, mark) = (first * columns, first * blocks);
        // SAFETY: both are inside what `check_quantised` has found.
        unsafe {
            Self {
                quants: input.quants.as_ptr().add(cell),
                marks: input.marks.as_ptr().add(mark),
                columns,
                blocks,
            }
        }
    }

    /// So many blocks further, where only what is there may be read.
    #[inline(always)]
    pub(super) fn after(self, blocks: usize) -> Self {
        Self {
            quants: self.quants.wrapping_add(blocks * BLOCK),
            marks: self.marks.wrapping_add(blocks),
            ..self
        }
    }

    /// # Safety
    /// The row is one of those that `first` was promised, and the block is there.
    #[inline(always)]
    pub(super) unsafe fn quants(self, row: usize) -> *const i8 {
        // SAFETY: the caller's promise.
        unsafe { self.quants.add(row.wrapping_mul(self.columns)) }
    }
    /// # Safety
    /// As `quants`.
    #[inline(always)]
    pub(super) unsafe fn scale(self, row: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { (*self.marks.add(row.wrapping_mul(self.blocks))).scale }
    }
    /// # Safety
    /// As `quants`.
    #[inline(always)]
    pub(super) unsafe fn middle(self, row: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { (*self.marks.add(row.wrapping_mul(self.blocks))).middle }
    }
    /// # Safety
    /// As `quants`.
    #[inline(always)]
    pub(super) unsafe fn total(self, row: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { (*self.marks.add(row.wrapping_mul(self.blocks))).total }
    }
    /// # Safety
    /// As `quants`.
    #[inline(always)]
    #[cfg_attr(target_arch = "aarch64", expect(dead_code, reason = "its 8-bit weights are signed"))]
    pub(super) unsafe fn sum(self, row: usize) -> i32 {
        // SAFETY: the caller's promise.
        unsafe { (*self.marks.add(row.wrapping_mul(self.blocks))).sum }
    }
}

/// One panel and a group of rows that begins at `first`. Panel and rows have `blocks` blocks.
pub(super) struct Call<'a> {
    pub panel: *const u8,
    pub input: &'a InputRows<'a>,
    pub first: usize,
    pub blocks: usize,
}

/// Makes `dot_q4_1` and `dot_q8_0` of the kernels `q4_1_rows` and `q8_0_rows`. `[4: 4, 2]` takes four rows at a time by `q4_1_rows::<4, 2>`. Large groups come first,
/// and the last has one row.
macro_rules! dot_by_rows {
    ($([$group:literal: $($constant:literal),+])+) => {
        pub(super) fn dot_q4_1(panel: &[u8], input: &InputRows<'_>, rows: usize, out: &mut Outputs) {
            assert!(panel.len() >= input.columns / BLOCK * Q4_1_PANEL_BLOCK);
            dot_by_rows!(q4_1_rows, (panel, input, rows, out) $([$group: $($constant),+])+);
        }

        pub(super) fn dot_q8_0(panel: &[u8], input: &InputRows<'_>, rows: usize, out: &mut Outputs) {
            assert!(panel.len() >= input.columns / BLOCK * Q8_0_PANEL_BLOCK);
            dot_by_rows!(q8_0_rows, (panel, input, rows, out) $([$group: $($constant),+])+);
        }
    };
    ($kernel:ident, ($panel:ident, $input:ident, $rows:ident, $out:ident) $([$group:literal: $($constant:literal),+])+) => {{
        assert!($rows <= MAX_ROWS);
        let blocks = $input.check_quantised($rows);
        let mut first = 0;
        while first < $rows {
            let call = Call {
                panel: $panel.as_ptr(),
                input: $input,
                first,
                blocks,
            };
            $(if $rows - first >= $group {
                // SAFETY: chosen only after `detect`; the lengths of panel and input were checked by the caller and above, and
                // `first + group <= rows <= MAX_ROWS`.
                unsafe { $kernel::<$($constant),+>(call, $out) };
                first += $group;
                continue;
            })+
        }
    }};
}
pub(super) use dot_by_rows;
