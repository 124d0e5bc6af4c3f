//! Weights in the form that the kernels read: one allocation, matrices cut into panels of 16 output rows, packed once at
//! load.
//!
//! A panel block (32 columns of 16 rows) holds the file's own numbers in another order, in as many bytes:
//! - Q4_1: 4 vectors of 64 bytes; byte `4 * row + t` of vector i has column 4i + t in its low and 16 + 4i + t in its high
//!   nibble; then 16 scales, 16 minima (f16).
//! - Q8_0: 8 vectors of 64 bytes; byte `4 * row + t` of vector i is column 4i + t, plus 128; then 16 scales (f16).
//! - f32 (`Exact`): `[column][row]`.
//!
//! Rows that fill up the last panel are zero. Their outputs are never read.

use std::ops::Range;

use half::f16;
use model_files::arch::{GateUp, LayerTensors, Linear, Projections, in_layer};
use model_files::config::ModelConfig;
use model_files::gguf::{GgmlType, Tensor};
use model_files::model::Model;

use super::kernels::{BLOCK, DotKernel, Kernels, LANES, Lanes, Q4_1_PANEL_BLOCK, Q8_0_PANEL_BLOCK};
use super::packing::{Packing, PlannedMatrix};
use crate::memory::FixedMemory;
use crate::{EngineError, Numerics};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Q4_1,
    Q8_0,
    F32,
}

impl Format {
    /// Bytes of 32 columns of a panel.
    fn block_bytes(self) -> usize {
        match self {
            Format::Q4_1 => Q4_1_PANEL_BLOCK,
            Format::Q8_0 => Q8_0_PANEL_BLOCK,
            Format::F32 => BLOCK * LANES * 4,
        }
    }
}

/// One packed matrix: `rows` outputs of `columns` inputs.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    format: Format,
    pub rows: usize,
    pub columns: usize,
    /// The position within the weights' allocation.
    bytes: Range<usize>,
    /// Added to the outputs: one vector for each panel.
    bias: Option<Vec<Lanes>>,
}

impl Matrix {
    pub(crate) fn bias(&self, panel: usize) -> Option<&Lanes> {
        self.bias.as_ref().map(|bias| &bias[panel])
    }

    pub(crate) fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    fn panel_bytes(&self) -> usize {
        self.columns / BLOCK * self.format.block_bytes()
    }

    pub(crate) fn kernel(&self, kernels: &Kernels) -> DotKernel {
        match self.format {
            Format::Q4_1 => kernels.dot_q4_1,
            Format::Q8_0 => kernels.dot_q8_0,
            Format::F32 => kernels.dot_f32,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Layer {
    pub attention_norm: Vec<f32>,
    pub query: Matrix,
    pub key: Matrix,
    pub value: Matrix,
    pub attention_output: Matrix,
    pub ffn_norm: Vec<f32>,
    /// Panels of gate and up in turn, so that one tile has both halves of its outputs.
    pub gate_up: Matrix,
    pub down: Matrix,
}

pub(crate) struct Weights {
    memory: FixedMemory,
    pub embedding: Matrix,
    pub layers: Vec<Layer>,
    pub output_norm: Vec<f32>,
    pub head: Matrix,
}

impl Weights {
    pub(crate) fn panel(&self, matrix: &Matrix, panel: usize) -> &[u8] {
        let length = matrix.panel_bytes();
        let all = &self.memory[matrix.bytes.clone()];
        &all[panel * length..][..length]
    }

    /// The embedding of a token, dequantised.
    pub(crate) fn embed(&self, token: usize, out: &mut [f32]) {
        let panel = self.panel(&self.embedding, token / LANES);
        let lane = token % LANES;
        let half_at = |at: usize| f16::from_le_bytes([panel[at], panel[at + 1]]).to_f32();
        for (column, out) in out.iter_mut().enumerate() {
            let (block, i) = (column / BLOCK * self.embedding.format.block_bytes(), column % BLOCK);
            *out = match self.embedding.format {
                Format::Q8_0 => {
                    let quant = i32::from(panel[block + i / 4 * 64 + lane * 4 + i % 4]) - 128;
                    half_at(block + 512 + 2 * lane) * quant as f32
                }
                Format::Q4_1 => {
                    let byte = panel[block + i % 16 / 4 * 64 + lane * 4 + i % 4];
                    let quant = if i < 16 { byte & 15 } else { byte >> 4 };
                    half_at(block + 256 + 2 * lane) * f32::from(quant) + half_at(block + 288 + 2 * lane)
                }
                Format::F32 => {
                    let at = (column * LANES + lane) * 4;
                    f32::from_le_bytes([panel[at], panel[at + 1], panel[at + 2], panel[at + 3]])
                }
            };
        }
    }

    /// Packs every tensor of the model.
    pub(super) fn load(
        file: &Model,
        config: &ModelConfig,
        numerics: Numerics,
        packing: &mut Packing<'_>,
    ) -> Result<Self, EngineError> {
        let mut loader = Loader::new(file, numerics);
        let mut weights = Self::plan(&mut loader, config)?;
        weights.memory = loader.fill(packing)?;
        Ok(weights)
    }

    /// The memory that [`Weights::load`] fills.
    pub(super) fn packed_bytes(file: &Model, config: &ModelConfig, numerics: Numerics) -> Result<usize, EngineError> {
        let mut loader = Loader::new(file, numerics);
        Self::plan(&mut loader, config)?;
        Ok(loader.end)
    }

    /// Gives every matrix its place.
    fn plan(loader: &mut Loader<'_>, config: &ModelConfig) -> Result<Self, EngineError> {
        let facts = config.architecture;
        let embedding = loader.plan(&[facts.token_embedding])?;
        let layers = (0..config.layer_count)
            .map(|layer| loader.plan_layer(layer, &facts.layer))
            .collect::<Result<Vec<_>, _>>()?;
        let output_norm = loader.vector(facts.output_norm)?;
        let head = if config.tied_embeddings {
            embedding.clone()
        } else {
            loader.plan(&[facts.output])?
        };
        Ok(Self {
            memory: FixedMemory::default(),
            embedding,
            layers,
            output_norm,
            head,
        })
    }
}

/// Matrices get their places first. Then the one allocation is made and filled.
struct Loader<'a> {
    file: &'a Model,
    numerics: Numerics,
    planned: Vec<(Matrix, Vec<Tensor<'a>>)>,
    end: usize,
}

impl<'a> Loader<'a> {
    fn new(file: &'a Model, numerics: Numerics) -> Self {
        Self {
            file,
            numerics,
            planned: Vec::new(),
            end: 0,
        }
    }

    fn plan_layer(&mut self, layer: usize, tensors: &LayerTensors) -> Result<Layer, EngineError> {
        let name = |tensor| in_layer(layer, tensor);
        let (Projections::Separate { query, key, value }, GateUp::Separate { gate, up }) =
            (&tensors.projections, &tensors.gate_up)
        else {
            return Err(EngineError::FusedMatrices);
        };
        Ok(Layer {
            attention_norm: self.vector(&name(tensors.attention_norm))?,
            query: self.linear(layer, *query)?,
            key: self.linear(layer, *key)?,
            value: self.linear(layer, *value)?,
            attention_output: self.linear(layer, tensors.attention_output)?,
            ffn_norm: self.vector(&name(tensors.ffn_norm))?,
            gate_up: self.plan(&[&name(gate), &name(up)])?,
            down: self.plan(&[&name(tensors.ffn_down)])?,
        })
    }

    fn linear(&mut self, layer: usize, linear: Linear) -> Result<Matrix, EngineError> {
        let mut matrix = self.plan(&[&in_layer(layer, linear.weight)])?;
        if let Some(bias) = linear.bias {
            let mut values = self.vector(&in_layer(layer, bias))?;
            values.resize(matrix.panels() * LANES, 0.0);
            matrix.bias = Some(values.as_chunks::<LANES>().0.to_vec());
        }
        Ok(matrix)
    }

    /// One matrix of one tensor, or of several tensors with their panels in turn.
    fn plan(&mut self, names: &[&str]) -> Result<Matrix, EngineError> {
        let tensors = names
            .iter()
            .map(|name| self.file.tensor(name))
            .collect::<Result<Vec<_>, _>>()?;
        let first = &tensors[0];
        for tensor in &tensors {
            let format = format_of(tensor, self.numerics)?;
            if format != format_of(first, self.numerics)? {
                return Err(EngineError::UnsupportedTensor {
                    tensor: tensor.name.to_owned(),
                    kind: tensor.kind.name(),
                    why: "gate and up must have one type",
                });
            }
            if !tensor.row_elements().is_multiple_of(BLOCK) {
                return Err(EngineError::UnsupportedTensor {
                    tensor: tensor.name.to_owned(),
                    kind: tensor.kind.name(),
                    why: "rows must be a multiple of 32 long",
                });
            }
        }
        let panels: usize = tensors.iter().map(|tensor| tensor.rows().div_ceil(LANES)).sum();
        let rows = if tensors.len() == 1 {
            first.rows()
        } else {
            panels * LANES
        };
        let mut matrix = Matrix {
            format: format_of(first, self.numerics)?,
            rows,
            columns: first.row_elements(),
            bytes: 0..0,
            bias: None,
        };
        let length = panels.checked_mul(matrix.panel_bytes());
        let end = length.and_then(|length| self.end.checked_add(length));
        let end = end.ok_or(EngineError::OutOfMemory { bytes: usize::MAX })?;
        matrix.bytes = self.end..end;
        self.end = end;
        self.planned.push((matrix.clone(), tensors));
        Ok(matrix)
    }

    fn vector(&self, name: &str) -> Result<Vec<f32>, EngineError> {
        let tensor = self.file.tensor(name)?;
        let mut row = vec![0.0; tensor.row_elements()];
        dequantise_row(&tensor, 0, &mut row);
        Ok(row)
    }

    fn fill(self, packing: &mut Packing<'_>) -> Result<FixedMemory, EngineError> {
        let planned = self.planned.iter().map(|(matrix, tensors)| PlannedMatrix {
            bytes: matrix.bytes.clone(),
            panel_bytes: matrix.panel_bytes(),
            layout: format!("{:?} {} {}", matrix.format, matrix.rows, matrix.columns),
            pack: Box::new(move |index, panel| {
                let tensor = &tensors[index % tensors.len()];
                pack_panel(matrix.format, tensor, index / tensors.len() * LANES, panel);
            }),
        });
        packing.run(self.end, &planned.collect::<Vec<_>>())
    }
}

fn format_of(tensor: &Tensor<'_>, numerics: Numerics) -> Result<Format, EngineError> {
    match (numerics, tensor.kind) {
        (Numerics::Exact, _) => Ok(Format::F32),
        (Numerics::Int8Blocks, GgmlType::Q4_1) => Ok(Format::Q4_1),
        (Numerics::Int8Blocks, GgmlType::Q8_0) => Ok(Format::Q8_0),
        (Numerics::Int8Blocks, GgmlType::F16 | GgmlType::F32) => Err(EngineError::UnsupportedTensor {
            tensor: tensor.name.to_owned(),
            kind: tensor.kind.name(),
            why: "8-bit numerics run Q4_1 and Q8_0 weights: use such a file, or --numerics exact",
        }),
    }
}

fn pack_panel(format: Format, tensor: &Tensor<'_>, first_row: usize, panel: &mut [u8]) {
    let rows = tensor.rows().saturating_sub(first_row).min(LANES);
    match format {
        Format::F32 => {
            let mut values = vec![0.0; tensor.row_elements()];
            for lane in 0..rows {
                dequantise_row(tensor, first_row + lane, &mut values);
                for (column, value) in values.iter().enumerate() {
                    panel[(column * LANES + lane) * 4..][..4].copy_from_slice(&value.to_le_bytes());
                }
            }
        }
        Format::Q4_1 => {
            for lane in 0..rows {
                let blocks = row_bytes(tensor, first_row + lane).chunks_exact(20);
                for (from, to) in blocks.zip(panel.chunks_exact_mut(Q4_1_PANEL_BLOCK)) {
                    for (i, byte) in from[4..].iter().enumerate() {
                        to[i / 4 * 64 + lane * 4 + i % 4] = *byte;
                    }
                    to[256 + 2 * lane..][..2].copy_from_slice(&from[0..2]);
                    to[288 + 2 * lane..][..2].copy_from_slice(&from[2..4]);
                }
            }
        }
        Format::Q8_0 => {
            for lane in 0..rows {
                let blocks = row_bytes(tensor, first_row + lane).chunks_exact(34);
                for (from, to) in blocks.zip(panel.chunks_exact_mut(Q8_0_PANEL_BLOCK)) {
                    for (i, byte) in from[2..].iter().enumerate() {
                        to[i / 4 * 64 + lane * 4 + i % 4] = byte ^ 0x80;
                    }
                    to[512 + 2 * lane..][..2].copy_from_slice(&from[..2]);
                }
            }
        }
    }
}

fn row_bytes<'a>(tensor: &Tensor<'a>, row: usize) -> &'a [u8] {
    let length = tensor.row_elements() / tensor.kind.block_elements() * tensor.kind.block_bytes();
    &tensor.bytes[row * length..][..length]
}

/// One row of any type as f32: `q * d + m` for the block formats.
fn dequantise_row(tensor: &Tensor<'_>, row: usize, out: &mut [f32]) {
    let bytes = row_bytes(tensor, row);
    let half_at = |block: &[u8], at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
    match tensor.kind {
        GgmlType::F32 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *out = f32::from_le_bytes(*bytes);
            }
        }
        GgmlType::F16 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *out = f16::from_le_bytes(*bytes).to_f32();
            }
        }
        GgmlType::Q4_1 => {
            for (out, block) in out.chunks_exact_mut(BLOCK).zip(bytes.chunks_exact(20)) {
                let (d, m) = (half_at(block, 0), half_at(block, 2));
                for (i, byte) in block[4..].iter().enumerate() {
                    out[i] = f32::from(byte & 15) * d + m;
                    out[i + BLOCK / 2] = f32::from(byte >> 4) * d + m;
                }
            }
        }
        GgmlType::Q8_0 => {
            for (out, block) in out.chunks_exact_mut(BLOCK).zip(bytes.chunks_exact(34)) {
                let d = half_at(block, 0);
                for (out, quant) in out.iter_mut().zip(&block[2..]) {
                    *out = f32::from(quant.cast_signed()) * d;
                }
            }
        }
    }
}
