//! What the tiles of a step share: its memory, the KV of its sequences, and the product of rows with matrices.
//!
//! The result of a tile depends on its own rows only, so neither the thread that takes it nor the rest of the batch
//! changes it. With few rows (decode) each thread prepares a matrix's inputs for itself, which costs less than one more
//! phase. With many rows this is a phase of its own.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use model_files::config::{HEAD_DIM_MAX, ModelConfig};

use super::buffers::{AttentionScratch, Inputs, Shared, SumSlots};
use super::kernels::{Kernels, LANES, MAX_ROWS, Outputs};
use super::plan::{AttentionItem, PartitionLimits, Row, StepLayout};
use super::pool::Pool;
use super::rope::LayerRopes;
use super::weights::{Matrix, Weights};
use crate::kv_geometry::TILE_TOKENS;
use crate::{EngineLimits, KvDtype, KvGeometry, Numerics};

/// Up to this many rows each thread prepares the inputs of a matrix for itself.
const FEW_ROWS: usize = MAX_ROWS;
/// Rows of one pass of the LM head. It limits the logits buffer (6 MB for a vocabulary of 49,152).
pub(crate) const LOGITS_ROWS: usize = 32;
/// Tiles for each thread and matrix: enough that a thread which falls behind does not delay the others.
const TILES_PER_THREAD: usize = 8;
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
    /// `[row][ffn]`.
    pub(super) ffn: Shared<f32>,
    inputs: Inputs,
    /// `[row][padded vocabulary]`.
    pub(super) logits: Shared<f32>,
    pub(super) threads: Vec<ThreadScratch>,
    pub(super) partitions: PartitionScratch,
    /// Counts matrix products, so that a thread knows whether its own inputs belong to the running product.
    product: AtomicU64,
}

/// The memory of items whose partitions are computed apart.
pub(crate) struct PartitionScratch {
    /// `[slot][KV head]`.
    pub(super) slots: SumSlots,
    /// `[first slot][KV head]`: how many partitions of an item are done in this phase.
    pub(super) done: Vec<AtomicU32>,
}

pub(crate) struct ThreadScratch {
    inputs: Inputs,
    /// The product for which `inputs` were prepared. Only its own thread uses it.
    prepared: AtomicU64,
    pub(super) attention: AttentionScratch,
    /// `[hidden]`: a normed row of `branch`.
    pub(super) normed: Shared<f32>,
}

impl Scratch {
    pub(crate) fn new(
        config: &ModelConfig,
        numerics: Numerics,
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
        let thread = || ThreadScratch {
            inputs: Inputs::new(FEW_ROWS, columns, numerics),
            prepared: AtomicU64::new(0),
            attention: AttentionScratch::new(config),
            normed: Shared::new(branch),
        };
        Self {
            hidden: Shared::new(rows * hidden),
            qkv: Shared::new(rows * (query + 2 * config.kv_size())),
            attention: Shared::new(rows * query),
            branch: Shared::new(rows * branch),
            ffn: Shared::new(rows * config.ffn_size),
            inputs: Inputs::new(rows, columns, numerics),
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

/// A product of input rows with one or more matrices of equal column count.
pub(super) struct Product<'a> {
    pub(super) rows: usize,
    pub(super) matrices: &'a [&'a Matrix],
    pub(super) input: Input<'a>,
    /// Panels that one call of `write` gets together.
    pub(super) group: usize,
    pub(super) write: &'a (dyn Fn(Place, &mut [Outputs]) + Sync),
}

/// Where the inputs of a product come from.
pub(super) enum Input<'a> {
    /// This writes those of a row.
    Made(&'a (dyn Fn(usize, &mut [f32]) + Sync)),
    /// An earlier phase wrote them, `[row][column]`. `write` must not touch this buffer: with few rows it is read in the phase in which `write`
    /// runs.
    Stored(&'a Shared<f32>),
}

impl Input<'_> {
    /// # Safety
    /// Nobody else uses this row of `inputs` meanwhile, and nobody writes what the input reads.
    unsafe fn prepare(&self, inputs: &Inputs, (row, columns): (usize, usize), kernels: &Kernels) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Input::Made(fill) => inputs.fill((row, columns), kernels, |out| fill(row, out)),
                Input::Stored(from) => inputs.take(row, from.read(row * columns..(row + 1) * columns), kernels),
            }
        }
    }
}

/// The target of a tile's outputs.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) matrix: usize,
    /// First column: 16 times the index of the panel group.
    pub(super) column: usize,
    pub(super) first_row: usize,
    pub(super) rows: usize,
}

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

    /// Multiplies: prepares the inputs once (or once for each thread), then runs one tile for a few panels and all rows.
    pub(super) fn multiply(&self, pool: &mut Pool, product: &Product<'_>) {
        let columns = product.matrices[0].columns;
        let rows = product.rows;
        let number = self.scratch.product.fetch_add(1, Ordering::Relaxed) + 1;
        if rows > FEW_ROWS {
            pool.parallel(rows.div_ceil(ROWS_PER_TILE), &|tile, _| {
                for row in tile_rows(tile, rows) {
                    // SAFETY: each row is prepared by one tile, and nothing is written in this phase but inputs.
                    unsafe {
                        product
                            .input
                            .prepare(&self.scratch.inputs, (row, columns), self.kernels)
                    };
                }
            });
        }
        let groups: usize = product
            .matrices
            .iter()
            .map(|matrix| matrix.panels() / product.group)
            .sum();
        let per_tile = (groups / (pool.threads() * TILES_PER_THREAD)).max(1);
        pool.parallel(groups.div_ceil(per_tile), &|tile, thread| {
            let inputs = if rows > FEW_ROWS {
                &self.scratch.inputs
            } else {
                let own = &self.scratch.threads[thread];
                if own.prepared.swap(number, Ordering::Relaxed) != number {
                    for row in 0..rows {
                        // SAFETY: these inputs belong to this thread alone, and a product writes another buffer than its input reads.
                        unsafe { product.input.prepare(&own.inputs, (row, columns), self.kernels) };
                    }
                }
                &own.inputs
            };
            for group in tile * per_tile..((tile + 1) * per_tile).min(groups) {
                self.multiply_group(product, inputs, group);
            }
        });
    }

    /// All rows with the panels of one group, counted over all matrices.
    fn multiply_group(&self, product: &Product<'_>, inputs: &Inputs, mut group: usize) {
        let mut matrix_index = 0;
        while group >= product.matrices[matrix_index].panels() / product.group {
            group -= product.matrices[matrix_index].panels() / product.group;
            matrix_index += 1;
        }
        let matrix = product.matrices[matrix_index];
        let kernel = matrix.kernel(self.kernels);
        let mut outputs = [[[0.0; LANES]; MAX_ROWS]; 2];
        for first_row in (0..product.rows).step_by(MAX_ROWS) {
            let rows = (product.rows - first_row).min(MAX_ROWS);
            // SAFETY: the rows were prepared before this phase, or by this thread for itself.
            let input = unsafe { inputs.rows(first_row, rows, matrix.columns) };
            for (part, outputs) in outputs.iter_mut().enumerate().take(product.group) {
                let panel = self.weights.panel(matrix, group * product.group + part);
                kernel(panel, &input, rows, outputs);
                if let Some(bias) = matrix.bias(group * product.group + part) {
                    for (output, bias) in outputs[..rows].iter_mut().flat_map(|row| row.iter_mut().zip(bias)) {
                        *output += bias;
                    }
                }
            }
            let place = Place {
                matrix: matrix_index,
                column: group * LANES,
                first_row,
                rows,
            };
            (product.write)(place, &mut outputs[..product.group]);
        }
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
