//! The weights of a model: one allocation, in which every matrix has its place, packed once at load by [`super::panels`].

use std::ops::Range;

use half::f16;
use model_files::arch::{GateUp, LayerTensors, Linear, Projections, in_layer};
use model_files::config::ModelConfig;
use model_files::model::Model;

use super::kernels::pairs::PairKernel;
use super::kernels::{BLOCK, DotKernel, Kernels, LANES, Lanes};
use super::packing::{Packing, PlannedMatrix};
use super::panels::{Format, Rows, pack_panel};
use crate::memory::FixedMemory;
use crate::{EngineError, Numerics};

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

    pub(crate) fn pair_kernel(&self, kernels: &Kernels) -> Option<PairKernel> {
        match self.format {
            Format::Q4_1 => kernels.pair_q4_1,
            Format::Q8_0 => kernels.pair_q8_0,
            Format::F32 => None,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Layer {
    pub attention_norm: Vec<f32>,
    pub query_norm: Option<Vec<f32>>,
    pub key_norm: Option<Vec<f32>>,
    pub query: Matrix,
    pub key: Matrix,
    pub value: Matrix,
    pub attention_output: Matrix,
    pub post_attention_norm: Option<Vec<f32>>,
    pub ffn_norm: Vec<f32>,
    /// Panels of gate and up in turn, so that one tile has both halves of its outputs.
    pub gate_up: Matrix,
    pub down: Matrix,
    pub post_ffn_norm: Option<Vec<f32>>,
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
        let mut loader = Loader::new(file, config, numerics);
        let mut weights = Self::plan(&mut loader, config)?;
        weights.memory = loader.fill(packing)?;
        Ok(weights)
    }

    /// The memory that [`Weights::load`] fills.
    pub(super) fn packed_bytes(file: &Model, config: &ModelConfig, numerics: Numerics) -> Result<usize, EngineError> {
        let mut loader = Loader::new(file, config, numerics);
        Self::plan(&mut loader, config)?;
        Ok(loader.end)
    }

    /// Gives every matrix its place.
    fn plan(loader: &mut Loader<'_>, config: &ModelConfig) -> Result<Self, EngineError> {
        let facts = config.architecture;
        let embedding = loader.whole(facts.token_embedding)?;
        let layers = (0..config.layer_count)
            .map(|layer| loader.plan_layer(layer, &facts.layer))
            .collect::<Result<Vec<_>, _>>()?;
        let output_norm = loader.vector(facts.output_norm)?;
        let head = if config.tied_embeddings {
            embedding.clone()
        } else {
            loader.whole(facts.output)?
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
    config: &'a ModelConfig,
    numerics: Numerics,
    planned: Vec<(Matrix, Vec<Rows<'a>>)>,
    end: usize,
}

impl<'a> Loader<'a> {
    fn new(file: &'a Model, config: &'a ModelConfig, numerics: Numerics) -> Self {
        Self {
            file,
            config,
            numerics,
            planned: Vec::new(),
            end: 0,
        }
    }

    fn plan_layer(&mut self, layer: usize, tensors: &LayerTensors) -> Result<Layer, EngineError> {
        let name = |tensor| in_layer(layer, tensor);
        let (query_rows, kv_rows, ffn) = (self.config.query_size(), self.config.kv_size(), self.config.ffn_size);
        let [query, key, value] = match &tensors.projections {
            Projections::Separate { query, key, value } => [
                self.linear(layer, *query)?,
                self.linear(layer, *key)?,
                self.linear(layer, *value)?,
            ],
            Projections::Fused(all) => {
                let tensor = self.file.tensor(&name(all))?;
                let mut part = |first, count| self.plan(vec![Rows { tensor, first, count }]);
                [
                    part(0, query_rows)?,
                    part(query_rows, kv_rows)?,
                    part(query_rows + kv_rows, kv_rows)?,
                ]
            }
        };
        let gate_up = match tensors.gate_up {
            GateUp::Separate { gate, up } => {
                let parts = [self.file.tensor(&name(gate))?, self.file.tensor(&name(up))?];
                self.plan(parts.map(Rows::all).to_vec())?
            }
            GateUp::Fused(both) => {
                let tensor = self.file.tensor(&name(both))?;
                let half = |first| Rows {
                    tensor,
                    first,
                    count: ffn,
                };
                self.plan(vec![half(0), half(ffn)])?
            }
        };
        Ok(Layer {
            attention_norm: self.vector(&name(tensors.attention_norm))?,
            query_norm: self.optional_vector(layer, tensors.query_norm)?,
            key_norm: self.optional_vector(layer, tensors.key_norm)?,
            query,
            key,
            value,
            attention_output: self.linear(layer, tensors.attention_output)?,
            post_attention_norm: self.optional_vector(layer, tensors.post_attention_norm)?,
            ffn_norm: self.vector(&name(tensors.ffn_norm))?,
            gate_up,
            down: self.whole(&name(tensors.ffn_down))?,
            post_ffn_norm: self.optional_vector(layer, tensors.post_ffn_norm)?,
        })
    }

    fn linear(&mut self, layer: usize, linear: Linear) -> Result<Matrix, EngineError> {
        let mut matrix = self.whole(&in_layer(layer, linear.weight))?;
        if let Some(bias) = linear.bias {
            let mut values = self.vector(&in_layer(layer, bias))?;
            values.resize(matrix.panels() * LANES, 0.0);
            matrix.bias = Some(values.as_chunks::<LANES>().0.to_vec());
        }
        Ok(matrix)
    }

    fn whole(&mut self, name: &str) -> Result<Matrix, EngineError> {
        let tensor = self.file.tensor(name)?;
        self.plan(vec![Rows::all(tensor)])
    }

    /// One matrix of some rows of a tensor, or of several such parts with their panels in turn.
    fn plan(&mut self, parts: Vec<Rows<'a>>) -> Result<Matrix, EngineError> {
        for Rows { tensor, .. } in &parts {
            if !tensor.row_elements().is_multiple_of(BLOCK) {
                return Err(EngineError::UnsupportedTensor {
                    tensor: tensor.name.to_owned(),
                    kind: tensor.kind.name(),
                    why: "rows must be a multiple of 32 long",
                });
            }
        }
        let panels: usize = parts.iter().map(|part| part.count.div_ceil(LANES)).sum();
        let rows = match parts.as_slice() {
            [one] => one.count,
            _ => panels * LANES,
        };
        let mut matrix = Matrix {
            format: Format::of(&parts, self.numerics),
            rows,
            columns: parts[0].tensor.row_elements(),
            bytes: 0..0,
            bias: None,
        };
        let length = panels.checked_mul(matrix.panel_bytes());
        let end = length.and_then(|length| self.end.checked_add(length));
        let end = end.ok_or(EngineError::OutOfMemory { bytes: usize::MAX })?;
        matrix.bytes = self.end..end;
        self.end = end;
        self.planned.push((matrix.clone(), parts));
        Ok(matrix)
    }

    fn vector(&self, name: &str) -> Result<Vec<f32>, EngineError> {
        Ok(self.file.vector(name)?)
    }

    fn optional_vector(&self, layer: usize, name: Option<&str>) -> Result<Option<Vec<f32>>, EngineError> {
        name.map(|name| self.vector(&in_layer(layer, name))).transpose()
    }

    fn fill(self, packing: &mut Packing<'_>) -> Result<FixedMemory, EngineError> {
        let planned = self.planned.iter().map(|(matrix, parts)| PlannedMatrix {
            bytes: matrix.bytes.clone(),
            panel_bytes: matrix.panel_bytes(),
            layout: format!("{:?} {} {}", matrix.format, matrix.rows, matrix.columns),
            pack: Box::new(move |index, panel| {
                let part = &parts[index % parts.len()];
                pack_panel(matrix.format, part, index / parts.len() * LANES, panel);
            }),
        });
        packing.run(self.end, &planned.collect::<Vec<_>>())
    }
}
