//! One step of the transformer, phase by phase; each phase is a set of tiles.
//!
//! Phases of a layer: q, k, v; store keys and values; attention; output; gate and up; down. Where a model norms what attention
//! or the feed-forward part adds to the residual stream, that is one more phase after output, or after down.

use model_files::arch::{Activation, EmbeddingScale};

use super::attention;
use super::forward::{LOGITS_ROWS, ROWS_PER_TILE, Step, tile_rows};
use super::kernels::lanes::QuantisedBlock;
use super::kernels::{BLOCK, LANES, Lanes};
use super::multiply::{Input, Place, Product, Write};
use super::pool::Pool;
use super::weights::{Layer, Matrix};
use crate::LogitsSink;

impl Step<'_> {
    pub(crate) fn run(&self, pool: &mut Pool, sink: &mut dyn LogitsSink) {
        let (rows, hidden) = (self.plan.rows.len(), self.config.hidden_size);
        let scale = match self.config.architecture.embedding_scale {
            EmbeddingScale::One => None,
            EmbeddingScale::SqrtHidden => Some((hidden as f32).sqrt()),
        };
        pool.parallel(rows.div_ceil(ROWS_PER_TILE), &|tile, _| {
            for row in tile_rows(tile, rows) {
                // SAFETY: each row is written by one tile.
                let out = unsafe { self.scratch.hidden.write(row * hidden..(row + 1) * hidden) };
                self.weights.embed(self.plan.rows[row].token as usize, out);
                if let Some(scale) = scale {
                    out.iter_mut().for_each(|value| *value *= scale);
                }
            }
        });
        for (index, layer) in self.weights.layers.iter().enumerate() {
            self.project(pool, layer);
            self.store_apart(pool, index);
            attention::run(self, pool, index);
            let post_norm = layer.post_attention_norm.as_deref();
            let attended = Input::Stored(&self.scratch.attention);
            self.add_product(pool, (attended, &layer.attention_output), post_norm);
            self.feed_forward(pool, layer);
        }
        self.logits(pool, sink);
    }

    fn normed(&self, row: usize, weight: &[f32], out: &mut [f32]) {
        let hidden = self.config.hidden_size;
        // SAFETY: the residual stream is written in other phases than those that read it.
        let x = unsafe { self.scratch.hidden.read(row * hidden..(row + 1) * hidden) };
        (self.kernels.rms_norm)(x, weight, self.config.rms_epsilon, out);
    }

    fn project(&self, pool: &mut Pool, layer: &Layer) {
        let (query, kv, stride) = (self.config.query_size(), self.config.kv_size(), self.qkv_columns());
        self.multiply(
            pool,
            &Product {
                rows: self.plan.rows.len(),
                matrices: &[&layer.query, &layer.key, &layer.value],
                input: Input::Made(&|row, out| self.normed(row, &layer.attention_norm, out)),
                write: Write::Panel(&|place, outputs| {
                    let column = [0, query, query + kv][place.matrix] + place.column;
                    for (row, lanes) in (place.first_row..).zip(outputs) {
                        // SAFETY: each (row, panel) is written by one tile.
                        unsafe { *self.scratch.qkv.lanes(row * stride + column) = *lanes };
                    }
                }),
            },
        );
    }

    /// Multiplies what an earlier phase wrote, and adds the results to the residual stream, normed if the
    /// model norms them.
    fn add_product(&self, pool: &mut Pool, (input, matrix): (Input<'_>, &Matrix), post_norm: Option<&[f32]>) {
        self.multiply(
            pool,
            &Product {
                rows: self.plan.rows.len(),
                matrices: &[matrix],
                input,
                write: Write::Panel(&|place, outputs| match post_norm {
                    None => self.add_to_hidden(place, outputs),
                    Some(_) => self.copy_to_branch(place, outputs),
                }),
            },
        );
        if let Some(weight) = post_norm {
            self.add_normed_branch(pool, weight);
        }
    }

    fn copy_to_branch(&self, place: Place, outputs: &[Lanes]) {
        for (row, lanes) in (place.first_row..).zip(outputs) {
            let start = row * self.config.hidden_size + place.column;
            // SAFETY: each (row, panel) is written by one tile, and nothing reads the branch in this phase.
            unsafe { *self.scratch.branch.lanes(start) = *lanes };
        }
    }

    fn add_normed_branch(&self, pool: &mut Pool, weight: &[f32]) {
        let (rows, length) = (self.plan.rows.len(), self.config.hidden_size);
        pool.parallel(rows.div_ceil(ROWS_PER_TILE), &|tile, thread| {
            // SAFETY: this memory belongs to this thread alone.
            let normed = unsafe { self.scratch.threads[thread].row.write(0..length) };
            for row in tile_rows(tile, rows) {
                let cells = row * length..(row + 1) * length;
                // SAFETY: the phase that wrote the branch is over, and each row of the stream is written by one tile.
                let (branch, hidden) = unsafe {
                    (
                        self.scratch.branch.read(cells.clone()),
                        self.scratch.hidden.write(cells),
                    )
                };
                (self.kernels.rms_norm)(branch, weight, self.config.rms_epsilon, normed);
                for (hidden, normed) in hidden.iter_mut().zip(normed.iter()) {
                    *hidden += normed;
                }
            }
        });
    }

    fn add_to_hidden(&self, place: Place, outputs: &[Lanes]) {
        for (row, lanes) in (place.first_row..).zip(outputs) {
            let start = row * self.config.hidden_size + place.column;
            // SAFETY: each (row, panel) is written by one tile, and nothing reads the stream in this phase.
            let hidden = unsafe { self.scratch.hidden.lanes(start) };
            for (hidden, lane) in hidden.iter_mut().zip(lanes) {
                *hidden += lane;
            }
        }
    }

    fn feed_forward(&self, pool: &mut Pool, layer: &Layer) {
        let ffn = self.config.ffn_size;
        let gate_kernel = match self.config.architecture.activation {
            Activation::Silu => self.kernels.gate_silu,
            Activation::GeluTanh => self.kernels.gate_gelu,
        };
        let rows = self.plan.rows.len();
        // The gated values of many rows would leave the cache before they are quantised. So each tile makes whole blocks of 32 of them, and quantises these.
        let quantises = self.takes_pairs(rows, &layer.gate_up);
        let gate = |place: Place, [gates, ups]: [&mut [Lanes]; 2]| {
            gate_kernel(gates, ups);
            for (row, gate) in (place.first_row..).zip(gates) {
                // SAFETY: each (row, panel) is written by one tile.
                unsafe { *self.scratch.ffn.lanes(row * ffn + place.column) = *gate };
            }
        };
        let gate_and_quantise = |place: Place, outputs: [[&mut [Lanes]; 2]; 2], blocks: &mut [QuantisedBlock]| {
            let halves = outputs.map(|[gates, ups]| {
                gate_kernel(gates, ups);
                &*gates
            });
            (self.kernels.quantise_blocks)(halves, blocks);
            for (row, block) in (place.first_row..).zip(blocks) {
                // SAFETY: each block of a row is written by one tile.
                unsafe { self.scratch.next_inputs.put((row, ffn), place.column / BLOCK, block) };
            }
        };
        self.multiply(
            pool,
            &Product {
                rows,
                matrices: &[&layer.gate_up],
                input: Input::Made(&|row, out| self.normed(row, &layer.ffn_norm, out)),
                write: match quantises {
                    true => Write::FourPanels(&gate_and_quantise),
                    false => Write::TwoPanels(&gate),
                },
            },
        );
        let gated = match quantises {
            true => Input::Ready(&self.scratch.next_inputs),
            false => Input::Stored(&self.scratch.ffn),
        };
        self.add_product(pool, (gated, &layer.down), layer.post_ffn_norm.as_deref());
    }

    fn logits(&self, pool: &mut Pool, sink: &mut dyn LogitsSink) {
        let vocab = self.config.vocab_size;
        let stride = vocab.next_multiple_of(LANES);
        for wanted in self.plan.logits.chunks(LOGITS_ROWS) {
            self.multiply(
                pool,
                &Product {
                    rows: wanted.len(),
                    matrices: &[&self.weights.head],
                    input: Input::Made(&|row, out| {
                        self.normed(wanted[row].row as usize, &self.weights.output_norm, out)
                    }),
                    write: Write::Panel(&|place, outputs| {
                        for (row, lanes) in (place.first_row..).zip(outputs) {
                            if let Some(cap) = self.config.logit_softcap {
                                (self.kernels.softcap)(lanes, cap);
                            }
                            // SAFETY: each (row, panel) is written by one tile.
                            unsafe { *self.scratch.logits.lanes(row * stride + place.column) = *lanes };
                        }
                    }),
                },
            );
            for (index, wanted) in wanted.iter().enumerate() {
                // SAFETY: no phase is running.
                let row = unsafe { self.scratch.logits.write(index * stride..index * stride + vocab) };
                sink.row(wanted.sequence as usize, wanted.position, row);
            }
        }
    }
}
