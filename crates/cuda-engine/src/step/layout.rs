//! Places of a step's tables, one behind the other. Those of the rows come first, and depend on the step's shape alone: a graph
//! finds them where they were when it was captured.

use cuda::DevicePtr;

use super::logits::{EDITS_MAX, LogitsPlan};
use super::rows::{RowTables, StepShape};
use crate::buffers::DRAWS_MAX;
use crate::kernels::TILE_ROWS;
use crate::kernels::calls::{ADJUSTMENT_BYTES, DRAW_BYTES, EDIT_BYTES};
use crate::model::Capacity;

/// The widest load of a table is that of a tile.
const ALIGNMENT: usize = 16;
const WORD: usize = size_of::<u32>();
const TILE_BYTES: usize = 16;

/// Positions behind the start of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    start: DevicePtr,
    tokens: usize,
    row_sequence: usize,
    row_position: usize,
    decode_rows: usize,
    tiles: usize,
    blocks: usize,
    logits_rows: usize,
    adjustments: usize,
    edits: usize,
    draws: usize,
    pub bytes: usize,
}

impl Layout {
    pub(crate) fn new(start: DevicePtr, shape: &StepShape, logits: &LogitsPlan) -> Self {
        let logits = [
            logits.rows.len() * WORD,
            logits.adjustments.len(),
            logits.edits.len(),
            logits.draws.len(),
        ];
        Self::of(start, shape, logits)
    }

    fn of(start: DevicePtr, shape: &StepShape, [logits_rows, adjustments, edits, draws]: [usize; 4]) -> Self {
        let mut end = 0;
        let mut place = |bytes: usize| {
            let at = end;
            end = (at + bytes).next_multiple_of(ALIGNMENT);
            at
        };
        let rows = shape.rows as usize * WORD;
        let mut layout = Self {
            start,
            tokens: place(rows),
            row_sequence: place(rows),
            row_position: place(rows),
            decode_rows: place(shape.decode_rows as usize * WORD),
            tiles: place(shape.tiles as usize * TILE_BYTES),
            blocks: place(shape.sequences as usize * shape.stride as usize * WORD),
            logits_rows: place(logits_rows),
            adjustments: place(adjustments),
            edits: place(edits),
            draws: place(draws),
            bytes: 0,
        };
        layout.bytes = end;
        layout
    }

    /// Writes all tables to the memory that is copied. It has room for the largest step.
    pub(crate) fn write(&self, rows: &RowTables, logits: &LogitsPlan, to: &mut [u8]) {
        let mut write_words = |at: usize, words: &[u32]| {
            let bytes = words.iter().map(|word| word.to_le_bytes());
            to[at..]
                .chunks_exact_mut(WORD)
                .zip(bytes)
                .for_each(|(to, word)| to.copy_from_slice(&word));
        };
        write_words(self.tokens, &rows.tokens);
        write_words(self.row_sequence, &rows.row_sequence);
        write_words(self.row_position, &rows.row_position);
        write_words(self.decode_rows, &rows.decode_rows);
        write_words(self.blocks, &rows.blocks);
        write_words(self.logits_rows, &logits.rows);
        let tiles = rows.tiles.iter().map(|tile| tile.to_bytes());
        to[self.tiles..]
            .chunks_exact_mut(TILE_BYTES)
            .zip(tiles)
            .for_each(|(to, tile)| to.copy_from_slice(&tile));
        for (at, bytes) in [
            (self.adjustments, &logits.adjustments),
            (self.edits, &logits.edits),
            (self.draws, &logits.draws),
        ] {
            to[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    pub(crate) fn start(&self) -> DevicePtr {
        self.start
    }

    pub(crate) fn tokens(&self) -> DevicePtr {
        self.start.offset(self.tokens)
    }

    pub(crate) fn row_sequence(&self) -> DevicePtr {
        self.start.offset(self.row_sequence)
    }

    pub(crate) fn row_position(&self) -> DevicePtr {
        self.start.offset(self.row_position)
    }

    /// From a decode row on.
    pub(crate) fn decode_rows(&self, first: u32) -> DevicePtr {
        self.start.offset(self.decode_rows + first as usize * WORD)
    }

    pub(crate) fn tiles(&self) -> DevicePtr {
        self.start.offset(self.tiles)
    }

    pub(crate) fn blocks(&self) -> DevicePtr {
        self.start.offset(self.blocks)
    }

    /// From a row of the plan of logits on.
    pub(crate) fn logits_rows(&self, first: usize) -> DevicePtr {
        self.start.offset(self.logits_rows + first * WORD)
    }

    pub(crate) fn adjustments(&self, first: usize) -> DevicePtr {
        self.start.offset(self.adjustments + first * ADJUSTMENT_BYTES)
    }

    pub(crate) fn edits(&self) -> DevicePtr {
        self.start.offset(self.edits)
    }

    pub(crate) fn draws(&self, first: usize) -> DevicePtr {
        self.start.offset(self.draws + first * DRAW_BYTES)
    }
}

/// Of the largest step: every table at its limit.
pub(crate) fn table_bytes_max(capacity: &Capacity) -> usize {
    let shape = StepShape {
        rows: capacity.rows,
        sequences: capacity.sequences,
        stride: capacity.stride,
        // Each sequence has at most one tile that is not full.
        tiles: capacity.sequences + capacity.rows / TILE_ROWS,
        decode_rows: capacity.sequences,
        splits: 1,
    };
    let rows = capacity.rows as usize;
    let logits = [
        rows * WORD,
        rows * ADJUSTMENT_BYTES,
        EDITS_MAX * EDIT_BYTES,
        DRAWS_MAX * DRAW_BYTES,
    ];
    Layout::of(DevicePtr(0), &shape, logits).bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::calls::RowTile;

    #[test]
    fn every_table_is_where_the_layout_says() {
        let rows = RowTables {
            shape: StepShape {
                rows: 3,
                sequences: 1,
                stride: 2,
                tiles: 1,
                decode_rows: 1,
                splits: 1,
            },
            tokens: vec![10, 11, 12],
            row_sequence: vec![0, 0, 0],
            row_position: vec![5, 6, 7],
            decode_rows: vec![2],
            tiles: vec![RowTile {
                first_row: 1,
                rows: 2,
                sequence: 0,
                first_position: 6,
            }],
            blocks: vec![40, 41],
            ..RowTables::default()
        };
        let logits = LogitsPlan {
            rows: vec![2],
            adjustments: vec![1; ADJUSTMENT_BYTES],
            edits: Vec::new(),
            draws: vec![9; DRAW_BYTES],
            ..LogitsPlan::default()
        };
        let start = DevicePtr(0x1000);
        let layout = Layout::new(start, &rows.shape, &logits);
        let mut bytes = vec![0xff; layout.bytes];
        layout.write(&rows, &logits, &mut bytes);
        let word = |at: DevicePtr| {
            let at = (at.0 - start.0) as usize;
            u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
        };
        assert_eq!((word(layout.tokens()), word(layout.row_position().offset(8))), (10, 7));
        assert_eq!((word(layout.decode_rows(0)), word(layout.blocks().offset(4))), (2, 41));
        assert_eq!((word(layout.tiles()), word(layout.tiles().offset(12))), (1, 6));
        assert_eq!((word(layout.logits_rows(0)), word(layout.draws(0))), (2, 0x0909_0909));
        assert_eq!(word(layout.row_sequence()), 0);
        assert!(layout.tiles().0.is_multiple_of(16) && layout.draws(0).0.is_multiple_of(8));
    }

    #[test]
    fn the_places_of_rows_do_not_depend_on_what_is_drawn() {
        let shape = StepShape {
            rows: 4,
            sequences: 4,
            stride: 16,
            tiles: 0,
            decode_rows: 4,
            splits: 1,
        };
        let start = DevicePtr(0);
        let (one, other) = (Layout::of(start, &shape, [4; 4]), Layout::of(start, &shape, [400; 4]));
        assert_eq!((one.tokens(), one.blocks()), (other.tokens(), other.blocks()));
        assert_eq!(one.logits_rows(0), other.logits_rows(0));
        assert!(one.bytes < other.bytes);
    }
}
