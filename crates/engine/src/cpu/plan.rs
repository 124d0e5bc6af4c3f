//! What a step computes, listed before its first phase: one entry per row, per attention item, and per logits row.

use crate::{KvGeometry, LogitsWanted, SequenceRows};

/// Rows of one sequence that one attention tile takes: enough to share the unpacked KV, few enough to balance threads.
pub(crate) const ATTENTION_ROWS: usize = 16;

/// One row of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub token: u32,
    pub position: u32,
    pub sequence: u32,
}

/// Up to [`ATTENTION_ROWS`] neighbouring rows of one sequence. Every KV head makes one tile of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionItem {
    pub first_row: u32,
    pub rows: u32,
    /// The sequence has one row in this step. Its tile may store its own KV, which no other tile reads.
    pub alone: bool,
}

/// A row whose logits are wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogitsRow {
    pub row: u32,
    pub sequence: u32,
    pub position: u32,
}

/// Reused from step to step. The capacities come from the limits, so filling it allocates nothing.
#[derive(Debug, Default)]
pub(crate) struct StepLayout {
    pub rows: Vec<Row>,
    pub items: Vec<AttentionItem>,
    pub logits: Vec<LogitsRow>,
    /// Block ids of all sequences, one after the other.
    pub blocks: Vec<u32>,
    /// Where each sequence's blocks start in `blocks`.
    pub tables: Vec<usize>,
    /// Some sequence has more than one row, so keys and values are stored in a phase of their own.
    pub has_chunks: bool,
}

impl StepLayout {
    pub(crate) fn with_capacity(limits: crate::EngineLimits, context_blocks: usize) -> Self {
        let (rows, sequences) = (limits.max_batch_tokens as usize, limits.max_sequences as usize);
        Self {
            rows: Vec::with_capacity(rows),
            items: Vec::with_capacity(rows / ATTENTION_ROWS + sequences + 1),
            logits: Vec::with_capacity(rows),
            blocks: Vec::with_capacity(sequences.saturating_mul(context_blocks)),
            tables: Vec::with_capacity(sequences),
            has_chunks: false,
        }
    }

    /// The batch has been checked.
    pub(crate) fn fill(&mut self, batch: &[SequenceRows<'_>], geometry: &KvGeometry) {
        self.rows.clear();
        self.items.clear();
        self.logits.clear();
        self.blocks.clear();
        self.tables.clear();
        self.has_chunks = batch.iter().any(|rows| rows.tokens.len() > 1);
        for (sequence, rows) in (0u32..).zip(batch) {
            let first_row = self.rows.len() as u32;
            let count = rows.tokens.len() as u32;
            let positions = rows.first_position..rows.end_position();
            for (token, position) in rows.tokens.iter().zip(positions.clone()) {
                self.rows.push(Row {
                    token: token.0,
                    position,
                    sequence,
                });
            }
            for start in (0..count).step_by(ATTENTION_ROWS) {
                let rows = (count - start).min(ATTENTION_ROWS as u32);
                self.items.push(AttentionItem {
                    first_row: first_row + start,
                    rows,
                    alone: count == 1,
                });
            }
            let skipped = match rows.logits {
                LogitsWanted::None => count,
                LogitsWanted::Last => count - 1,
                LogitsWanted::All => 0,
            };
            for (index, position) in (0..count).zip(positions).skip(skipped as usize) {
                self.logits.push(LogitsRow {
                    row: first_row + index,
                    sequence,
                    position,
                });
            }
            self.tables.push(self.blocks.len());
            let used = geometry.blocks_for(rows.end_position()) as usize;
            self.blocks.extend(rows.block_table[..used].iter().map(|block| block.0));
        }
    }
}
