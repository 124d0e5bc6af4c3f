//! The rows of a step: tokens, positions, tables of blocks, and which kernel of attention takes them.
//!
//! A step of single rows (decode) is padded to the next power of two of rows and of splits, so that few graphs serve all such
//! steps. Rows of padding belong to nobody: kernels store nothing for them.

use engine::SequenceRows;

use crate::kernels::calls::{DecodeAttention, RowTile};
use crate::kernels::{PADDING_ROW, TILE_ROWS};
use crate::model::{GRAPH_ROWS_MAX, stride_of};
use crate::options::Mode;

/// What decides how rows are computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowRules {
    pub mode: Mode,
    pub block_tokens: u32,
}

/// Everything that a graph is captured for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GraphKey {
    /// Rows with padding.
    pub rows: u32,
    /// Of the longest sequence: a power of two.
    pub splits: u32,
}

/// How many of each thing a step has, those of padding included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepShape {
    pub rows: u32,
    pub sequences: u32,
    /// Entries of a sequence's table of blocks.
    pub stride: u32,
    /// Entries of the table of tiles, for prefill attention.
    pub tiles: u32,
    /// Rows of decode attention.
    pub decode_rows: u32,
    /// Of the longest row of decode attention, at least one.
    pub splits: u32,
}

/// Filled anew for each step; the memory is used again.
#[derive(Debug, Default)]
pub(crate) struct RowTables {
    pub shape: StepShape,
    /// A step of single rows.
    pub graph: Option<GraphKey>,
    /// The first row of each sequence.
    pub first_rows: Vec<u32>,
    pub tokens: Vec<u32>,
    pub row_sequence: Vec<u32>,
    pub row_position: Vec<u32>,
    pub decode_rows: Vec<u32>,
    pub tiles: Vec<RowTile>,
    /// `[sequence][stride]`. Entries behind a sequence's blocks are zero, and no kernel reads them.
    pub blocks: Vec<u32>,
}

impl RowTables {
    /// The batch has been checked: it is within the limits, and its tables cover its positions.
    pub(crate) fn fill(&mut self, batch: &[SequenceRows<'_>], rules: RowRules) {
        self.clear();
        for (index, sequence) in (0..).zip(batch) {
            self.add(index, sequence, rules.mode);
        }
        let splits_of = |longest: Option<u32>| DecodeAttention::splits_for(longest.unwrap_or(1).max(1));
        let all_splits = splits_of(batch.iter().map(end).max());
        let singles = batch.iter().filter(|sequence| row_count(sequence) == 1);
        self.shape.splits = splits_of(singles.map(end).max());
        self.shape.sequences = batch.len() as u32;
        self.shape.stride = stride_of(all_splits, rules.block_tokens);
        let is_decode = batch.iter().all(|sequence| row_count(sequence) == 1);
        if is_decode && (1..=GRAPH_ROWS_MAX as usize).contains(&batch.len()) {
            self.pad(rules);
        }
        self.shape.rows = self.tokens.len() as u32;
        self.shape.tiles = self.tiles.len() as u32;
        self.shape.decode_rows = self.decode_rows.len() as u32;
        self.add_blocks(batch, rules.block_tokens);
    }

    /// Rows of nobody, for a first run of all kernels: so many or, as in each step of single rows, the next power of two.
    pub(crate) fn fill_with_padding(&mut self, rules: RowRules, rows: u32) {
        self.fill(&[], rules);
        self.tokens.resize(rows as usize, 0);
        self.pad(rules);
        self.shape.rows = self.tokens.len() as u32;
        self.tiles.resize(1, NO_TILE);
        self.shape.tiles = 1;
        self.shape.decode_rows = self.decode_rows.len() as u32;
        self.graph = None;
    }

    fn clear(&mut self) {
        self.shape = StepShape::default();
        self.graph = None;
        for table in [
            &mut self.first_rows,
            &mut self.tokens,
            &mut self.row_sequence,
            &mut self.row_position,
            &mut self.decode_rows,
            &mut self.blocks,
        ] {
            table.clear();
        }
        self.tiles.clear();
    }

    fn add(&mut self, sequence: u32, rows: &SequenceRows<'_>, mode: Mode) {
        let (first_row, count) = (self.tokens.len() as u32, row_count(rows));
        self.first_rows.push(first_row);
        self.tokens.extend(rows.tokens.iter().map(|token| token.0));
        self.row_sequence
            .extend(std::iter::repeat_n(sequence, rows.tokens.len()));
        self.row_position
            .extend(rows.first_position..rows.first_position + count);
        if count == 1 && mode == Mode::Fast {
            self.decode_rows.push(first_row);
            return;
        }
        self.tiles
            .extend((0..count).step_by(TILE_ROWS as usize).map(|from| RowTile {
                first_row: first_row + from,
                rows: (count - from).min(TILE_ROWS),
                sequence,
                first_position: rows.first_position + from,
            }));
    }

    fn pad(&mut self, rules: RowRules) {
        let rows = (self.tokens.len() as u32).next_power_of_two();
        let splits = self.shape.splits.next_power_of_two();
        let count = rows as usize;
        self.tokens.resize(count, 0);
        self.row_sequence.resize(count, PADDING_ROW);
        self.row_position.resize(count, 0);
        match rules.mode {
            Mode::Fast => self.decode_rows = (0..rows).collect(),
            Mode::Invariant => self.tiles.resize(count, NO_TILE),
        }
        self.shape.sequences = rows;
        self.shape.splits = splits;
        self.shape.stride = stride_of(splits, rules.block_tokens);
        self.graph = Some(GraphKey { rows, splits });
    }

    fn add_blocks(&mut self, batch: &[SequenceRows<'_>], block_tokens: u32) {
        let stride = self.shape.stride as usize;
        for sequence in batch {
            let start = self.blocks.len();
            let used = end(sequence).div_ceil(block_tokens) as usize;
            self.blocks
                .extend(sequence.block_table.iter().take(used).map(|block| block.0));
            self.blocks.resize(start + stride, 0);
        }
        self.blocks.resize(self.shape.sequences as usize * stride, 0);
    }
}

fn row_count(sequence: &SequenceRows<'_>) -> u32 {
    sequence.tokens.len() as u32
}

/// One past the last position.
fn end(sequence: &SequenceRows<'_>) -> u32 {
    sequence.first_position + row_count(sequence)
}

/// A tile of padding: without rows the kernel reads no key and writes nothing.
const NO_TILE: RowTile = RowTile {
    first_row: 0,
    rows: 0,
    sequence: 0,
    first_position: 0,
};

#[cfg(test)]
mod tests {
    use engine::LogitsWanted;
    use serving_core::ids::{BlockId, TokenId};

    use super::*;
    use crate::kernels::FEW_ROWS;

    const FAST: RowRules = RowRules {
        mode: Mode::Fast,
        block_tokens: 16,
    };
    const INVARIANT: RowRules = RowRules {
        mode: Mode::Invariant,
        ..FAST
    };

    fn rows<'a>(tokens: &'a [TokenId], first_position: u32, block_table: &'a [BlockId]) -> SequenceRows<'a> {
        SequenceRows {
            tokens,
            first_position,
            block_table,
            logits: LogitsWanted::Last,
        }
    }

    fn tokens(count: u32) -> Vec<TokenId> {
        (100..100 + count).map(TokenId).collect()
    }

    fn blocks(count: u32) -> Vec<BlockId> {
        (7..7 + count).map(BlockId).collect()
    }

    #[test]
    fn a_mixed_step_has_tiles_for_its_chunk_and_decode_rows_beside() {
        let (chunk, single, table) = (tokens(70), tokens(1), blocks(40));
        let batch = [rows(&chunk, 30, &table), rows(&single, 299, &table)];
        let mut tables = RowTables::default();
        tables.fill(&batch, FAST);
        assert_eq!(tables.graph, None);
        let shape = StepShape {
            rows: 71,
            sequences: 2,
            stride: 32,
            tiles: 2,
            decode_rows: 1,
            splits: 2,
        };
        assert_eq!(tables.shape, shape);
        assert_eq!(tables.first_rows, [0, 70]);
        assert_eq!((tables.tiles[1].first_row, tables.tiles[1].rows), (64, 6));
        assert_eq!(tables.tiles[1].first_position, 94);
        assert_eq!(tables.decode_rows, [70]);
        assert_eq!((tables.row_position[69], tables.row_position[70]), (99, 299));
        // 100 tokens have 7 blocks, 300 have 19.
        assert_eq!((tables.blocks[6], tables.blocks[7]), (13, 0));
        assert_eq!((tables.blocks[32 + 18], tables.blocks[32 + 19]), (25, 0));
        tables.fill(&batch, INVARIANT);
        assert_eq!((tables.shape.tiles, tables.shape.decode_rows), (3, 0));
    }

    #[test]
    fn a_decode_step_is_padded_to_a_graph_that_few_lengths_share() {
        let (single, table) = (tokens(1), blocks(60));
        let batch = [
            rows(&single, 0, &table),
            rows(&single, 600, &table),
            rows(&single, 15, &table),
        ];
        let mut tables = RowTables::default();
        for rules in [FAST, INVARIANT] {
            tables.fill(&batch, rules);
            assert_eq!(tables.graph, Some(GraphKey { rows: 4, splits: 4 }));
            assert_eq!(
                (tables.shape.rows, tables.shape.sequences, tables.shape.stride),
                (4, 4, 64)
            );
            assert_eq!(tables.row_sequence, [0, 1, 2, PADDING_ROW]);
            assert_eq!(tables.blocks.len(), 4 * 64);
        }
        assert_eq!(tables.tiles[3], NO_TILE);
        assert_eq!(tables.tiles[1].first_position, 600);
        tables.fill(&batch, FAST);
        assert_eq!(tables.decode_rows, [0, 1, 2, 3]);
        assert!(tables.tiles.is_empty());
    }

    #[test]
    fn too_many_single_rows_are_not_padded() {
        let (single, table) = (tokens(1), blocks(1));
        let batch = vec![rows(&single, 0, &table); 65];
        let mut tables = RowTables::default();
        tables.fill(&batch, FAST);
        assert_eq!((tables.graph, tables.shape.rows), (None, 65));
    }

    #[test]
    fn a_first_run_has_rows_of_nobody_for_both_kernels_of_attention_and_of_the_product() {
        let mut tables = RowTables::default();
        tables.fill_with_padding(FAST, 1);
        assert_eq!(
            (tables.shape.rows, tables.shape.tiles, tables.shape.decode_rows),
            (1, 1, 1)
        );
        assert_eq!((tables.row_sequence[0], tables.graph), (PADDING_ROW, None));
        assert_eq!(tables.shape.stride, 16);
        for rules in [FAST, INVARIANT] {
            tables.fill_with_padding(rules, FEW_ROWS + 1);
            let shape = tables.shape;
            assert!((FEW_ROWS + 1..=GRAPH_ROWS_MAX).contains(&shape.rows), "{shape:?}");
            assert_eq!((shape.sequences, shape.tiles), (shape.rows, 1));
            assert_eq!(tables.row_sequence, vec![PADDING_ROW; shape.rows as usize]);
        }
    }
}
