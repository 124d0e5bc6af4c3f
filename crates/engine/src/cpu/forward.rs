//! What the tiles of a step share: its memory, and the KV of its sequences.
//!
//! The result of a tile depends on its own rows only, so neither the thread that takes it nor the rest of the batch changes it.

use std::sync::atomic::{AtomicU32, AtomicU64};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use model_files::config::{HEAD_DIM_MAX, ModelConfig};

use super::buffers::{AttentionScratch, Inputs, ProductScratch, Shared, SumSlots};
use super::kernels::{Kernels, LANES, MAX_ROWS};
use super::plan::{AttentionItem, PartitionLimits, Row, StepLayout};
use super::pool::Pool;
use super::rope::LayerRopes;
use super::weights::Weights;
use crate::kv_geometry::TILE_TOKENS;
use crate::{EngineLimits, KvDtype, KvGeometry, Numerics};

/// Up to this many rows each thread prepares the inputs of a matrix for itself.
pub(super) const FEW_ROWS: usize = MAX_ROWS;
/// From so many rows on, pairs of panels pay for their unpacking: on an Intel Xeon, steps of 16, 24 and 32 rows took 1.15, 1.05 and 0.96 times as long with them.
pub(super) const MANY_ROWS: usize = 32;
/// Rows of one pass of the LM head. It limits the logits buffer (6 MB for a vocabulary of 49,152).
pub(crate) const LOGITS_ROWS: usize = 32;
/// Rows of a tile in phases that work row by row.
pub(super) const ROWS_PER_TILE: usize = 8;

/// All memory of a step.
pub(crate) struct Scratch {
    /// `[row][hidden]`: the residual stream.
    pub(super) hidden: Shared<f32>,
    /// `[row][queries, keys, values]`.
    pub(super) qkv: Shared<f32>,
    /// `[row][queries]`: the result of attention.
    pub(super) attention: Shared<f32>,
    /// `[row][hidden]`: what is normed before it is added to the residual stream, in models that have such norms.
    pub(super) branch: Shared<f32>,
    /// `[row][ffn]`. Where tiles quantise what they gate, it has only the rows of steps that are too small for this.
    pub(super) ffn: Shared<f32>,
    pub(super) inputs: Inputs,
    /// Inputs of the next product, quantised by the tiles of this one.
    pub(super) next_inputs: Inputs,
    /// `[row][padded vocabulary]`.
    pub(super) logits: Shared<f32>,
    pub(super) threads: Vec<ThreadScratch>,
    pub(super) partitions: PartitionScratch,
    /// Counts matrix products, so that a thread knows whether its own inputs belong to the running product.
    pub(super) product: AtomicU64,
}

/// The memory of items whose partitions are computed apart.
pub(crate) struct PartitionScratch {
    /// `[slot][KV head]`.
    pub(super) slots: SumSlots,
    /// `[first slot][KV head]`: how many partitions of an item are done in this phase.
    pub(super) done: Vec<AtomicU32>,
}

pub(crate) struct ThreadScratch {
    pub(super) inputs: Inputs,
    /// The product for which `inputs` were prepared. Only its own thread uses it.
    pub(super) prepared: AtomicU64,
    pub(super) products: ProductScratch,
    pub(super) attention: AttentionScratch,
    /// A row before it is quantised, or a normed row of `branch`.
    pub(super) row: Shared<f32>,
}

impl Scratch {
    pub(crate) fn new(
        config: &ModelConfig,
        (numerics, kernels): (Numerics, &Kernels),
        limits: EngineLimits,
        (threads, partitions): (usize, PartitionLimits),
    ) -> Self {
        let rows = limits.max_batch_tokens as usize;
        let (query, hidden) = (config.query_size(), config.hidden_size);
        let columns = hidden.max(config.ffn_size).max(query);
        let layer = &config.architecture.layer;
        let has_branch = layer.post_attention_norm.is_some() || layer.post_ffn_norm.is_some();
        let branch = if has_branch { hidden } else { 0 };
        let slots = partitions.slots * partitions.kv_heads;
        let quantises_units = numerics == Numerics::Int8Blocks && kernels.pair_q4_1.is_some();
        let (ffn_rows, next_rows) = match quantises_units {
            true => (rows.min(MANY_ROWS), rows),
            false => (rows, 0),
        };
        let thread = || ThreadScratch {
            inputs: Inputs::new(FEW_ROWS, columns, numerics),
            prepared: AtomicU64::new(0),
            products: ProductScratch::new(rows),
            attention: AttentionScratch::new(config),
            row: Shared::new(columns),
        };
        Self {
            hidden: Shared::new(rows * hidden),
            qkv: Shared::new(rows * (query + 2 * config.kv_size())),
            attention: Shared::new(rows * query),
            branch: Shared::new(rows * branch),
            ffn: Shared::new(ffn_rows * config.ffn_size),
            inputs: Inputs::new(rows, columns, numerics),
            next_inputs: Inputs::new(next_rows, config.ffn_size, numerics),
            logits: Shared::new(LOGITS_ROWS.min(rows) * config.vocab_size.next_multiple_of(LANES)),
            threads: (0..threads).map(|_| thread()).collect(),
            partitions: PartitionScratch {
                slots: SumSlots::new(slots, config.head_count / config.kv_head_count, config.head_dim),
                done: (0..slots).map(|_| AtomicU32::new(0)).collect(),
            },
            product: AtomicU64::new(0),
        }
    }
}

/// Everything that a tile may read.
pub(crate) struct Step<'a> {
    pub config: &'a ModelConfig,
    pub kernels: &'a Kernels,
    pub weights: &'a Weights,
    pub ropes: &'a LayerRopes,
    pub plan: &'a StepLayout,
    pub scratch: &'a Scratch,
    pub geometry: KvGeometry,
    /// Start of the KV memory, whose blocks of this batch are claimed.
    pub kv: KvBase,
}

/// A pointer that tiles on several threads use for disjoint writes.
#[derive(Clone, Copy)]
pub(crate) struct KvBase(pub *mut u8);
// SAFETY: the step holds claims on all blocks it touches, and its phases keep writers and readers apart.
unsafe impl Sync for KvBase {}
// SAFETY: as above.
unsafe impl Send for KvBase {}

impl Step<'_> {
    pub(super) fn qkv_columns(&self) -> usize {
        self.config.query_size() + 2 * self.config.kv_size()
    }

    /// Rows of a chunk attend to each other, and several tiles read the KV of a split context. So their keys and values are stored first.
    pub(super) fn store_apart(&self, pool: &mut Pool, layer: usize) {
        if !self.plan.stores_apart {
            return;
        }
        pool.parallel(self.plan.items.len(), &|tile, _| {
            let AttentionItem {
                first_row,
                rows,
                stores,
            } = self.plan.items[tile];
            if stores {
                return;
            }
            for row in first_row..first_row + rows {
                for kv_head in 0..self.config.kv_head_count {
                    // SAFETY: each (row, head) belongs to one tile.
                    unsafe { self.turn_and_store(row as usize, layer, kv_head) };
                }
            }
        });
    }

    /// Norms a KV head's key and its query heads, in models that have such norms, turns them by RoPE, and stores key and value.
    ///
    /// # Safety
    /// Nobody else uses these heads of this row, nor its place in the KV memory, meanwhile.
    pub(super) unsafe fn turn_and_store(&self, row: usize, layer: usize, kv_head: usize) {
        let Row { position, sequence, .. } = self.plan.rows[row];
        let (config, head_dim) = (self.config, self.config.head_dim);
        let group = config.head_count / config.kv_head_count;
        let start = row * self.qkv_columns();
        let queries = start + kv_head * group * head_dim;
        let key = start + config.query_size() + kv_head * head_dim;
        let value = key + config.kv_size();
        // SAFETY: the caller has these heads for itself.
        let (queries, key, value) = unsafe {
            let qkv = &self.scratch.qkv;
            (
                qkv.write(queries..queries + group * head_dim),
                qkv.write(key..key + head_dim),
                qkv.read(value..value + head_dim),
            )
        };
        let (weights, rope) = (&self.weights.layers[layer], self.ropes.of(layer));
        for head in queries.chunks_exact_mut(head_dim) {
            self.norm_head(head, weights.query_norm.as_deref());
            rope.turn(position as usize, head);
        }
        self.norm_head(key, weights.key_norm.as_deref());
        rope.turn(position as usize, key);
        let tile = (position / TILE_TOKENS) as usize;
        let slot = (position % TILE_TOKENS) as usize * self.geometry.row_bytes();
        let keys = self.keys_of(sequence as usize, tile, (layer, kv_head)) as *mut u8;
        // SAFETY: the position is within the claimed block; the caller rules out other users of this row.
        unsafe {
            store_row(keys.add(slot), self.geometry.dtype, key);
            store_row(keys.add(self.values_offset() + slot), self.geometry.dtype, value);
        }
    }

    fn norm_head(&self, head: &mut [f32], weight: Option<&[f32]>) {
        if let Some(weight) = weight {
            let mut copy = [0.0; HEAD_DIM_MAX];
            let copy = &mut copy[..head.len()];
            copy.copy_from_slice(head);
            (self.kernels.rms_norm)(copy, weight, self.config.rms_epsilon, head);
        }
    }

    /// Start of a head's keys in an attention tile of a sequence. The tiles of a block follow each other, keys and values
    /// apart.
    pub(super) fn keys_of(&self, sequence: usize, tile: usize, (layer, kv_head): (usize, usize)) -> *const u8 {
        let geometry = &self.geometry;
        let tiles = (geometry.block_tokens / TILE_TOKENS) as usize;
        let block = self.plan.blocks[self.plan.tables[sequence] + tile / tiles] as usize;
        let offset = block * geometry.block_bytes()
            + layer * geometry.layer_bytes()
            + kv_head * geometry.head_bytes()
            + tile % tiles * TILE_TOKENS as usize * geometry.row_bytes();
        // SAFETY: the claim checked the block id; layer, head and tile are within the geometry.
        unsafe { self.kv.0.add(offset) }
    }

    /// The distance from a head's keys to its values.
    pub(super) fn values_offset(&self) -> usize {
        self.geometry.kv_head_count as usize * self.geometry.head_bytes()
    }
}

pub(super) fn tile_rows(tile: usize, rows: usize) -> std::ops::Range<usize> {
    tile * ROWS_PER_TILE..((tile + 1) * ROWS_PER_TILE).min(rows)
}

/// # Safety
/// `to` has room for `row` in `dtype`, is aligned to it, and nobody else uses it meanwhile.
unsafe fn store_row(to: *mut u8, dtype: KvDtype, row: &[f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            KvDtype::F16 => {
                std::slice::from_raw_parts_mut(to.cast::<f16>(), row.len()).convert_from_f32_slice(row);
            }
            KvDtype::F32 => std::slice::from_raw_parts_mut(to.cast::<f32>(), row.len()).copy_from_slice(row),
            // No numerics of this engine store it.
            KvDtype::Bf16 => {
                std::slice::from_raw_parts_mut(to.cast::<bf16>(), row.len()).convert_from_f32_slice(row);
            }
        }
    }
}
