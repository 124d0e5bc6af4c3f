//! What a step computes, listed before its first phase: one entry per row, per attention item, and per logits row.

use model_files::config::ModelConfig;

use super::kernels::attend::PARTITION;
use crate::{EngineLimits, KvGeometry, LogitsWanted, SequenceRows};

/// Rows of one sequence that one attention tile takes: enough to share the unpacked KV, few enough to balance threads.
pub(crate) const ATTENTION_ROWS: usize = 16;

/// One row of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub token: u32,
    pub position: u32,
    pub sequence: u32,
}

/// Fewer tiles of attention than this for each thread, and the contexts of lone rows are split: so that threads which are ready find work.
const TILES_PER_THREAD: usize = 4;

/// Up to [`ATTENTION_ROWS`] neighbouring rows of one sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionItem {
    pub first_row: u32,
    pub rows: u32,
    /// The sequence has one row in this step, and each KV head has one tile for it. That tile may store the row's own KV, which no other tile reads.
    pub stores: bool,
}

/// What a tile of attention computes. Every KV head makes one tile of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttentionTask {
    /// All partitions of an item, in order.
    Item { item: u32 },
    /// One partition of an item. Its sums have a place of their own (`first_place + partition`, for each KV head), where the last tile of the item adds them up.
    Partition {
        item: u32,
        partition: u32,
        partitions: u32,
        first_place: u32,
    },
}

/// How contexts may be split.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SplitLimits {
    /// With so many tiles no context is split.
    pub tiles: usize,
    pub kv_heads: usize,
    /// Places for sums of partitions, for each KV head: as many as two of the longest contexts have.
    pub places: usize,
}

impl SplitLimits {
    pub(crate) fn new(config: &ModelConfig, threads: usize) -> Self {
        Self {
            tiles: if threads > 1 { threads * TILES_PER_THREAD } else { 0 },
            kv_heads: config.kv_head_count,
            places: 2 * config.context_length.div_ceil(PARTITION),
        }
    }
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
    pub tasks: Vec<AttentionTask>,
    split: SplitLimits,
    pub logits: Vec<LogitsRow>,
    /// Block ids of all sequences, one after the other.
    pub blocks: Vec<u32>,
    /// Where each sequence's blocks start in `blocks`.
    pub tables: Vec<usize>,
    /// Some item is not one tile for each KV head, so its keys and values are stored in a phase of their own.
    pub stores_apart: bool,
}

impl StepLayout {
    pub(crate) fn with_capacity(limits: EngineLimits, context_blocks: usize, split: SplitLimits) -> Self {
        let (rows, sequences) = (limits.max_batch_tokens as usize, limits.max_sequences as usize);
        Self {
            rows: Vec::with_capacity(rows),
            items: Vec::with_capacity(rows / ATTENTION_ROWS + sequences + 1),
            tasks: Vec::with_capacity(rows / ATTENTION_ROWS + sequences + 1 + split.places),
            split,
            logits: Vec::with_capacity(rows),
            blocks: Vec::with_capacity(sequences.saturating_mul(context_blocks)),
            tables: Vec::with_capacity(sequences),
            stores_apart: false,
        }
    }

    /// The batch has been checked.
    pub(crate) fn fill(&mut self, batch: &[SequenceRows<'_>], geometry: &KvGeometry) {
        self.rows.clear();
        self.items.clear();
        self.logits.clear();
        self.blocks.clear();
        self.tables.clear();
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
                    stores: count == 1,
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
        self.make_tasks();
        self.stores_apart = self.items.iter().any(|item| !item.stores);
    }

    /// The tasks of the items: one of each, or one of each partition where else threads would have nothing to do.
    fn make_tasks(&mut self) {
        self.tasks.clear();
        let is_split = self.items.len() * self.split.kv_heads < self.split.tiles;
        let mut places = 0;
        for (index, item) in (0u32..).zip(&mut self.items) {
            let partitions = self.rows[item.first_row as usize].position / PARTITION as u32 + 1;
            let is_split =
                is_split && item.stores && partitions > 1 && places + partitions as usize <= self.split.places;
            if !is_split {
                self.tasks.push(AttentionTask::Item { item: index });
                continue;
            }
            item.stores = false;
            self.tasks
                .extend((0..partitions).map(|partition| AttentionTask::Partition {
                    item: index,
                    partition,
                    partitions,
                    first_place: places as u32,
                }));
            places += partitions as usize;
        }
    }
}
