//! The weights on the device: one allocation, in which every matrix and vector has its place. Matrices are bf16
//! `[outputs][inputs]`; queries, keys and values lie together, and so do both halves of the gated unit. Vectors are f32.
//!
//! `plan.rs` gives the places, `load.rs` fills them, by way of `stage.rs`; `host.rs` makes bf16 of types without a kernel.

mod host;
mod load;
mod plan;
mod stage;

use cuda::{DeviceMemory, DevicePtr};

pub(crate) use self::load::load;
pub(crate) use self::plan::WeightsPlan;
pub(crate) use self::stage::Loading;
use crate::arena::Place;

/// A matrix, and the bias that is added to its outputs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub weights: Place,
    pub bias: Option<Place>,
    pub outputs: u32,
    pub inputs: u32,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Layer {
    pub attention_norm: Place,
    pub query_norm: Option<Place>,
    pub key_norm: Option<Place>,
    pub qkv: Matrix,
    pub attention_output: Matrix,
    pub post_attention_norm: Option<Place>,
    pub ffn_norm: Place,
    pub gate_up: Matrix,
    pub down: Matrix,
    pub post_ffn_norm: Option<Place>,
}

/// Where everything is.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    pub embedding: Place,
    pub layers: Vec<Layer>,
    pub output_norm: Place,
    /// Of tied models the embedding.
    pub head: Matrix,
    /// f64 for each pair of each of the model's RoPEs.
    pub rope_speeds: Vec<Place>,
}

#[derive(Debug)]
pub(crate) struct Weights {
    memory: DeviceMemory,
    pub table: Table,
}

impl Weights {
    pub(crate) fn at(&self, place: Place) -> DevicePtr {
        place.of(self.memory.ptr())
    }

    pub(crate) fn bytes(&self) -> usize {
        self.memory.bytes()
    }
}
