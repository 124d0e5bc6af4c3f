//! The transformer on the device: from the tables of a step to the residual stream, and from chosen rows of it to logits and
//! drawn tokens. Everything is given to one stream, and nothing is waited for. `engine::cpu` has the same steps on the host.
//!
//! Where a model norms what attention or the feed-forward part adds, the addition and both norms are one kernel.

use std::sync::Arc;

use cuda::{DevicePtr, Stream};

use crate::arena::Place;
use crate::buffers::{Buffers, LOGITS_ROWS};
use crate::error::WorkError;
use crate::kernels::Kernels;
use crate::kernels::calls::{
    AddRmsNorm, Call, CallError, CapLogits, DRAWN_BYTES, DecodeAttention, DrawTokens, Embed, Gate, GatherRows, Output,
    PagedKv, PrefillAttention, PrepareLogits, RmsNorm, RopeAngles, RopeWrite,
};
use crate::model::{Capacity, ModelPlan};
use crate::products::{Job, Products};
use crate::step::{Layout, Pass, StepShape};
use crate::weights::{Layer, Matrix, Weights};

/// The pool of KV blocks, as kernels address it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pool {
    pub start: DevicePtr,
    pub block_bytes: u64,
    pub layer_bytes: u64,
    pub block_tokens: u32,
}

/// Everything that a step computes with and does not change.
#[derive(Debug)]
pub(crate) struct Forward {
    pub model: ModelPlan,
    pub weights: Weights,
    pub buffers: Buffers,
    pub kernels: Arc<Kernels>,
    pub products: Products,
    pub pool: Pool,
    pub capacity: Capacity,
}

/// A step whose tables are on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tables<'a> {
    pub shape: &'a StepShape,
    pub layout: &'a Layout,
}

/// What attention or the feed-forward part adds to the stream, and the norms around it.
struct Branch<'a> {
    matrix: &'a Matrix,
    input: DevicePtr,
    post_norm: Option<Place>,
    /// Of what comes next. `None` behind the last layer.
    next_norm: Option<Place>,
}

impl Forward {
    fn launch(&self, stream: &Stream, call: Result<Call, CallError>) -> Result<(), WorkError> {
        Ok(self.kernels.launch(stream, &call?)?)
    }

    /// Writes keys and values of all rows, and leaves the residual stream in the buffers.
    pub(crate) fn run(&self, stream: &Stream, tables: Tables<'_>) -> Result<(), WorkError> {
        let (model, places) = (&self.model, &self.buffers.places);
        let Tables { shape, layout } = tables;
        let embed = Embed {
            tokens: layout.tokens(),
            table: self.weights.at(self.weights.table.embedding),
            out: places.hidden,
            rows: shape.rows,
            columns: model.hidden,
            scale: model.embedding_scale,
        };
        self.launch(stream, embed.call())?;
        for ((rope, angles), speeds) in model
            .ropes
            .iter()
            .zip(&places.angles)
            .zip(&self.weights.table.rope_speeds)
        {
            let turns = RopeAngles {
                row_position: layout.row_position(),
                speeds: self.weights.at(*speeds),
                angles: *angles,
                rows: shape.rows,
                pairs: rope.pairs(),
                magnitude: rope.magnitude,
            };
            self.launch(stream, turns.call())?;
        }
        let layers = &self.weights.table.layers;
        if let Some(first) = layers.first() {
            self.norm(stream, first.attention_norm, shape.rows)?;
        }
        for (index, layer) in layers.iter().enumerate() {
            self.attention_part(stream, (index, layer), tables)?;
            let next_norm = layers.get(index + 1).map(|next| next.attention_norm);
            self.feed_forward_part(stream, (layer, next_norm), shape.rows)?;
        }
        Ok(())
    }

    /// From the residual stream to the input of a matrix.
    fn norm(&self, stream: &Stream, weight: Place, rows: u32) -> Result<(), WorkError> {
        let norm = RmsNorm {
            x: self.buffers.places.hidden,
            weight: self.weights.at(weight),
            out: self.buffers.places.normed,
            rows,
            columns: self.model.hidden,
            epsilon: self.model.epsilon,
        };
        self.launch(stream, norm.call())
    }

    fn product(
        &self,
        stream: &Stream,
        matrix: &Matrix,
        (x, out): (DevicePtr, DevicePtr),
        (rows, output): (u32, Output),
    ) -> Result<(), WorkError> {
        let job = self.job(matrix, (x, out), (rows, output));
        self.products.enqueue(stream, &job)
    }

    /// One product of each kind, with the most rows that it can have: those of a layer, and the head.
    pub(crate) fn kinds_of_products(&self) -> Vec<Job> {
        let (places, table) = (&self.buffers.places, &self.weights.table);
        let mut jobs = Vec::new();
        let mut add = |matrix, way, rows, output| jobs.push(self.job(matrix, way, (rows, output)));
        if let Some(layer) = table.layers.first() {
            let rows = self.capacity.rows;
            add(&layer.qkv, (places.normed, places.qkv), rows, Output::F32);
            add(&layer.gate_up, (places.normed, places.gate_up), rows, Output::Bf16);
            let branches = [
                (&layer.attention_output, places.attention, layer.post_attention_norm),
                (&layer.down, places.ffn, layer.post_ffn_norm),
            ];
            for (matrix, input, post_norm) in branches {
                match post_norm {
                    Some(_) => add(matrix, (input, places.branch), rows, Output::F32),
                    None => add(matrix, (input, places.hidden), rows, Output::AddF32),
                }
            }
        }
        add(
            &table.head,
            (places.head_input, places.logits),
            LOGITS_ROWS,
            Output::F32,
        );
        jobs
    }

    fn job(&self, matrix: &Matrix, (x, out): (DevicePtr, DevicePtr), (rows, output): (u32, Output)) -> Job {
        Job {
            weights: self.weights.at(matrix.weights),
            bias: matrix.bias.map(|bias| self.weights.at(bias)),
            x,
            out,
            rows,
            outputs: matrix.outputs,
            inputs: matrix.inputs,
            output,
        }
    }

    fn attention_part(
        &self,
        stream: &Stream,
        (index, layer): (usize, &Layer),
        tables: Tables<'_>,
    ) -> Result<(), WorkError> {
        let (model, places) = (&self.model, &self.buffers.places);
        let Tables { shape, layout } = tables;
        self.product(
            stream,
            &layer.qkv,
            (places.normed, places.qkv),
            (shape.rows, Output::F32),
        )?;
        let plan = model.layers[index];
        let rope = &model.ropes[plan.rope];
        let kv = PagedKv {
            pool: self.pool.start,
            block_bytes: self.pool.block_bytes,
            layer_offset: self.pool.layer_bytes * index as u64,
            tables: layout.blocks(),
            table_stride: shape.stride,
            block_tokens: self.pool.block_tokens,
            kv_heads: model.kv_heads,
            row_sequence: layout.row_sequence(),
            row_position: layout.row_position(),
        };
        let write = RopeWrite {
            shape: model.shape,
            qkv: places.qkv,
            query_norm: layer.query_norm.map(|norm| self.weights.at(norm)),
            key_norm: layer.key_norm.map(|norm| self.weights.at(norm)),
            angles: places.angles[plan.rope],
            queries: places.queries,
            kv,
            rows: shape.rows,
            rope_pairs: rope.pairs(),
            kind: rope.kind,
            epsilon: model.epsilon,
        };
        self.launch(stream, write.call())?;
        self.attend(stream, (kv, plan.window), tables)?;
        let branch = Branch {
            matrix: &layer.attention_output,
            input: places.attention,
            post_norm: layer.post_attention_norm,
            next_norm: Some(layer.ffn_norm),
        };
        self.add(stream, &branch, shape.rows)
    }

    /// Keys and values of all rows are in the pool.
    fn attend(
        &self,
        stream: &Stream,
        (kv, window): (PagedKv, Option<u32>),
        Tables { shape, layout }: Tables<'_>,
    ) -> Result<(), WorkError> {
        let (model, places) = (&self.model, &self.buffers.places);
        if shape.tiles > 0 {
            let prefill = PrefillAttention {
                shape: model.shape,
                queries: places.queries,
                out: places.attention,
                tiles: layout.tiles(),
                tile_count: shape.tiles,
                kv,
                window,
                scale: model.attention_scale,
                softcap: model.attention_softcap,
            };
            self.launch(stream, prefill.call())?;
        }
        // The scratch memory has room for so many rows of this length.
        let rows_at_once = (self.capacity.parts / shape.splits.max(1)).max(1);
        for first in (0..shape.decode_rows).step_by(rows_at_once as usize) {
            let decode = DecodeAttention {
                shape: model.shape,
                queries: places.queries,
                out: places.attention,
                rows: layout.decode_rows(first),
                row_count: rows_at_once.min(shape.decode_rows - first),
                splits: shape.splits,
                part_out: places.part_out,
                part_state: places.part_state,
                kv,
                window,
                scale: model.attention_scale,
                softcap: model.attention_softcap,
            };
            for call in decode.calls()? {
                self.launch(stream, Ok(call))?;
            }
        }
        Ok(())
    }

    fn feed_forward_part(
        &self,
        stream: &Stream,
        (layer, next_norm): (&Layer, Option<Place>),
        rows: u32,
    ) -> Result<(), WorkError> {
        let (model, places) = (&self.model, &self.buffers.places);
        self.product(
            stream,
            &layer.gate_up,
            (places.normed, places.gate_up),
            (rows, Output::Bf16),
        )?;
        let gate = Gate {
            function: model.gate,
            gate_up: places.gate_up,
            out: places.ffn,
            rows,
            columns: model.ffn,
        };
        self.launch(stream, gate.call())?;
        let branch = Branch {
            matrix: &layer.down,
            input: places.ffn,
            post_norm: layer.post_ffn_norm,
            next_norm,
        };
        self.add(stream, &branch, rows)
    }

    /// Adds a branch to the stream, and norms the stream for what comes next.
    fn add(&self, stream: &Stream, branch: &Branch<'_>, rows: u32) -> Result<(), WorkError> {
        let places = &self.buffers.places;
        let Some(post_norm) = branch.post_norm else {
            let added = (branch.input, places.hidden);
            self.product(stream, branch.matrix, added, (rows, Output::AddF32))?;
            return match branch.next_norm {
                Some(weight) => self.norm(stream, weight, rows),
                None => Ok(()),
            };
        };
        self.product(
            stream,
            branch.matrix,
            (branch.input, places.branch),
            (rows, Output::F32),
        )?;
        // Behind the last layer nobody reads what is normed here.
        let next_norm = branch.next_norm.unwrap_or(self.weights.table.output_norm);
        let add = AddRmsNorm {
            stream: places.hidden,
            branch: places.branch,
            branch_weight: Some(self.weights.at(post_norm)),
            weight: self.weights.at(next_norm),
            out: places.normed,
            rows,
            columns: self.model.hidden,
            epsilon: self.model.epsilon,
        };
        self.launch(stream, add.call())
    }

    /// Logits of at most [`LOGITS_ROWS`] rows of the stream, whose numbers are at `rows`.
    pub(crate) fn logits(&self, stream: &Stream, rows: DevicePtr, count: u32) -> Result<(), WorkError> {
        let (model, places) = (&self.model, &self.buffers.places);
        let gather = GatherRows {
            x: places.hidden,
            rows,
            out: places.gathered,
            count,
            columns: model.hidden,
        };
        self.launch(stream, gather.call())?;
        let norm = RmsNorm {
            x: places.gathered,
            weight: self.weights.at(self.weights.table.output_norm),
            out: places.head_input,
            rows: count,
            columns: model.hidden,
            epsilon: model.epsilon,
        };
        self.launch(stream, norm.call())?;
        let head = &self.weights.table.head;
        self.product(stream, head, (places.head_input, places.logits), (count, Output::F32))?;
        match model.logit_softcap {
            Some(cap) => {
                let capped = CapLogits {
                    logits: places.logits,
                    count: u64::from(count) * u64::from(model.vocab),
                    cap,
                };
                self.launch(stream, capped.call())
            }
            None => Ok(()),
        }
    }

    /// Draws the tokens of a pass. The records are in the buffers afterwards.
    pub(crate) fn draw(&self, stream: &Stream, layout: &Layout, pass: &Pass) -> Result<(), WorkError> {
        let (places, vocab) = (&self.buffers.places, self.model.vocab);
        self.logits(stream, layout.logits_rows(pass.first_row), pass.rows)?;
        let prepare = PrepareLogits {
            logits: places.logits,
            adjustments: layout.adjustments(pass.first_row),
            edits: layout.edits(),
            status: places.status,
            rows: pass.rows,
            vocab,
        };
        self.launch(stream, prepare.call())?;
        let draw = DrawTokens {
            logits: places.logits,
            status: places.status,
            draws: layout.draws(pass.draws.start),
            drawn: places.drawn.offset(pass.draws.start * DRAWN_BYTES),
            count: pass.draws.len() as u32,
            vocab,
        };
        self.launch(stream, draw.call())
    }
}
