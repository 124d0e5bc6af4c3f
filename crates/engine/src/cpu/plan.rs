//! What a step computes, listed before its first phase: one entry per row, per attention item, per task of attention, and per logits row.

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

/// With fewer tiles of attention than this for each thread, the contexts of lone rows are split, so that no thread is left without work.
const ENOUGH_TILES_PER_THREAD: usize = 4;

/// Up to [`ATTENTION_ROWS`] neighbouring rows of one sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionItem {
    pub first_row: u32,
    pub rows: u32,
    /// The sequence has one row in this step, and each KV head has one tile for it. That tile may store the row's own KV, which no other tile reads.
    /// A sequence with guesses has several rows, so it is never split.
    pub stores: bool,
}

/// What a tile of attention computes. Every KV head makes one tile of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttentionTask {
    /// All partitions of an item, by its index, in order.
    Item(u32),
    Partition(PartitionTask),
}

/// One partition of an item. Its sums have a slot of their own: `first_slot + partition`, for each KV head. The item's last tile adds them up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PartitionTask {
    pub item: u32,
    pub partition: u32,
    /// Partitions of the item.
    pub partitions: u32,
    pub first_slot: u32,
}

/// How contexts may be split over threads.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PartitionLimits {
    /// From this many tiles on, no context is split.
    pub tiles: usize,
    pub kv_heads: usize,
    /// Slots for sums of partitions, for each KV head. 0: no context is split.
    pub slots: usize,
}

impl PartitionLimits {
    /// Two contexts of `longest_blocks` have slots, if contexts are split at all.
    pub(crate) fn new(geometry: &KvGeometry, longest_blocks: usize, threads: usize) -> Self {
        let (tiles, kv_heads) = (threads * ENOUGH_TILES_PER_THREAD, geometry.kv_head_count as usize);
        let longest = (longest_blocks * geometry.block_tokens as usize).div_ceil(PARTITION);
        let can_split = threads > 1 && kv_heads < tiles;
        Self {
            tiles,
            kv_heads,
            slots: if can_split { 2 * longest } else { 0 },
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
    limits: PartitionLimits,
    pub logits: Vec<LogitsRow>,
    /// Block ids of all sequences, one after the other.
    pub blocks: Vec<u32>,
    /// Where each sequence's blocks start in `blocks`.
    pub tables: Vec<usize>,
    /// Some item is not one tile for each KV head, so its keys and values are stored in a phase of their own.
    pub stores_apart: bool,
}

impl StepLayout {
    pub(crate) fn with_capacity(limits: EngineLimits, context_blocks: usize, partitions: PartitionLimits) -> Self {
        let (rows, sequences) = (limits.max_batch_tokens as usize, limits.max_sequences as usize);
        Self {
            rows: Vec::with_capacity(rows),
            items: Vec::with_capacity(rows / ATTENTION_ROWS + sequences + 1),
            tasks: Vec::with_capacity(rows / ATTENTION_ROWS + sequences + 1 + partitions.slots),
            limits: partitions,
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
        let may_split = self.items.len() * self.limits.kv_heads < self.limits.tiles;
        let mut slots = 0;
        for (index, item) in (0u32..).zip(&mut self.items) {
            let partitions = self.rows[item.first_row as usize].position / PARTITION as u32 + 1;
            let has_slots = slots + partitions as usize <= self.limits.slots;
            if !(may_split && has_slots && item.stores && partitions > 1) {
                self.tasks.push(AttentionTask::Item(index));
                continue;
            }
            item.stores = false;
            self.tasks.extend((0..partitions).map(|partition| {
                AttentionTask::Partition(PartitionTask {
                    item: index,
                    partition,
                    partitions,
                    first_slot: slots as u32,
                })
            }));
            slots += partitions as usize;
        }
    }
}

#[cfg(test)]
mod tests {
    use serving_core::ids::{BlockId, TokenId};

    use super::*;
    use crate::KvDtype;

    fn geometry(kv_head_count: u32) -> KvGeometry {
        KvGeometry {
            layer_count: 1,
            kv_head_count,
            head_dim: 16,
            block_tokens: 16,
            dtype: KvDtype::F16,
        }
    }

    /// The tasks of rows at these positions, so many for each sequence, with eight tiles as enough and six slots.
    fn filled(sequences: &[(u32, usize)]) -> StepLayout {
        let limits = EngineLimits {
            max_batch_tokens: 64,
            max_sequences: 8,
        };
        let partitions = PartitionLimits {
            tiles: 8,
            kv_heads: 2,
            slots: 6,
        };
        let table: Vec<BlockId> = (0..100).map(BlockId).collect();
        let batch: Vec<_> = sequences
            .iter()
            .map(|(first_position, count)| SequenceRows {
                tokens: &[TokenId(1); 64][..*count],
                first_position: *first_position,
                block_table: &table,
                logits: LogitsWanted::Last,
            })
            .collect();
        let mut layout = StepLayout::with_capacity(limits, 100, partitions);
        let capacity = layout.tasks.capacity();
        layout.fill(&batch, &geometry(2));
        assert_eq!(layout.tasks.capacity(), capacity);
        layout
    }

    fn partitions_of(item: u32, partitions: u32, first_slot: u32) -> Vec<AttentionTask> {
        (0..partitions)
            .map(|partition| {
                AttentionTask::Partition(PartitionTask {
                    item,
                    partition,
                    partitions,
                    first_slot,
                })
            })
            .collect()
    }

    #[test]
    fn slots_are_there_only_where_contexts_can_be_split() {
        let slots = |threads, kv_heads, blocks| PartitionLimits::new(&geometry(kv_heads), blocks, threads).slots;
        // Of 256 tokens, and of one block more.
        assert_eq!(slots(2, 2, 16), 2);
        assert_eq!(slots(2, 2, 17), 4);
        // One thread shares nothing, and eight heads are enough tiles for two.
        assert_eq!(slots(1, 2, 17), 0);
        assert_eq!(slots(2, 8, 17), 0);
    }

    #[test]
    fn lone_rows_of_long_contexts_are_split_while_there_are_slots() {
        // Positions 255 and 256 are the last of the first partition and the first of the second.
        let layout = filled(&[(255, 1), (256, 1), (800, 1)]);
        let expected = [
            vec![AttentionTask::Item(0)],
            partitions_of(1, 2, 0),
            partitions_of(2, 4, 2),
        ];
        assert_eq!(layout.tasks, expected.concat());
        assert!(layout.stores_apart);
        assert_eq!(
            layout.items.iter().map(|item| item.stores).collect::<Vec<_>>(),
            [true, false, false]
        );

        let layout = filled(&[(800, 1), (800, 1)]);
        assert_eq!(
            layout.tasks,
            [partitions_of(0, 4, 0), vec![AttentionTask::Item(1)]].concat()
        );
    }

    #[test]
    fn chunks_short_contexts_and_full_steps_are_not_split() {
        let layout = filled(&[(3, 1), (100, 1)]);
        assert_eq!(layout.tasks, [AttentionTask::Item(0), AttentionTask::Item(1)]);
        assert!(!layout.stores_apart);

        let layout = filled(&[(600, 20)]);
        assert_eq!(layout.tasks, [AttentionTask::Item(0), AttentionTask::Item(1)]);
        assert!(layout.stores_apart);

        let layout = filled(&[(600, 1); 4]);
        assert_eq!(layout.tasks, [0, 1, 2, 3].map(AttentionTask::Item));
        assert!(!layout.stores_apart);
    }
}
