//! Gives every matrix and vector its place. Nothing is read but vectors, which are small.

use engine::EngineError;
use model_files::arch::{GateUp, LayerTensors, Linear, Projections, in_layer};
use model_files::config::ModelConfig;
use model_files::gguf::Tensor;
use model_files::model::Model;

use super::stage::STAGE_BYTES;
use super::{Layer, Matrix, Table};
use crate::arena::{Arena, Place};
use crate::error::CudaEngineError;
use crate::model::ModelPlan;

/// bf16.
pub(super) const WEIGHT_BYTES: usize = 2;

/// A tensor's rows, and their place as bf16.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part<'a> {
    pub tensor: Tensor<'a>,
    pub to: Place,
}

/// The weights before they are on the device.
#[derive(Debug)]
pub(crate) struct WeightsPlan<'a> {
    pub(super) table: Table,
    pub(super) parts: Vec<Part<'a>>,
    /// Vectors as their bytes.
    pub(super) vectors: Vec<(Place, Vec<u8>)>,
    bytes: usize,
}

impl<'a> WeightsPlan<'a> {
    /// # Errors
    /// A tensor is missing, or has rows that cannot be loaded.
    pub(crate) fn new(file: &'a Model, model: &ModelPlan) -> Result<Self, CudaEngineError> {
        let mut planner = Planner {
            file,
            arena: Arena::default(),
            parts: Vec::new(),
            vectors: Vec::new(),
        };
        let table = planner.table(file.config(), model)?;
        Ok(Self {
            table,
            parts: planner.parts,
            vectors: planner.vectors,
            bytes: planner.arena.bytes(),
        })
    }

    /// Of the one allocation.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

struct Planner<'a> {
    file: &'a Model,
    arena: Arena,
    parts: Vec<Part<'a>>,
    vectors: Vec<(Place, Vec<u8>)>,
}

impl Planner<'_> {
    fn table(&mut self, config: &ModelConfig, model: &ModelPlan) -> Result<Table, CudaEngineError> {
        let facts = config.architecture;
        let embedding = self.matrix(&[facts.token_embedding.to_owned()])?;
        let layers = (0..config.layer_count).map(|layer| self.layer(layer, &facts.layer));
        let layers = layers.collect::<Result<Vec<Layer>, CudaEngineError>>()?;
        let output_norm = self.named_vector(facts.output_norm)?;
        let head = match config.tied_embeddings {
            true => embedding,
            false => self.matrix(&[facts.output.to_owned()])?,
        };
        let speeds = model.ropes.iter().map(|rope| {
            let bytes = rope.speeds.iter().flat_map(|speed| speed.to_le_bytes());
            self.vector(bytes.collect())
        });
        Ok(Table {
            embedding: embedding.weights,
            layers,
            output_norm,
            head,
            rope_speeds: speeds.collect(),
        })
    }

    fn layer(&mut self, index: usize, tensors: &LayerTensors) -> Result<Layer, CudaEngineError> {
        let qkv = match &tensors.projections {
            Projections::Separate { query, key, value } => self.linear(index, &[*query, *key, *value])?,
            Projections::Fused(all) => self.matrix(&[in_layer(index, all)])?,
        };
        let gate_up = match tensors.gate_up {
            GateUp::Separate { gate, up } => self.matrix(&[in_layer(index, gate), in_layer(index, up)])?,
            GateUp::Fused(both) => self.matrix(&[in_layer(index, both)])?,
        };
        Ok(Layer {
            attention_norm: self.named_vector(&in_layer(index, tensors.attention_norm))?,
            query_norm: self.optional_vector(index, tensors.query_norm)?,
            key_norm: self.optional_vector(index, tensors.key_norm)?,
            qkv,
            attention_output: self.linear(index, &[tensors.attention_output])?,
            post_attention_norm: self.optional_vector(index, tensors.post_attention_norm)?,
            ffn_norm: self.named_vector(&in_layer(index, tensors.ffn_norm))?,
            gate_up,
            down: self.matrix(&[in_layer(index, tensors.ffn_down)])?,
            post_ffn_norm: self.optional_vector(index, tensors.post_ffn_norm)?,
        })
    }

    /// Matrices whose outputs lie side by side, with their biases. A missing bias beside others is zero.
    fn linear(&mut self, layer: usize, parts: &[Linear]) -> Result<Matrix, CudaEngineError> {
        let names: Vec<String> = parts.iter().map(|part| in_layer(layer, part.weight)).collect();
        let mut matrix = self.matrix(&names)?;
        if parts.iter().any(|part| part.bias.is_some()) {
            let mut values: Vec<f32> = Vec::with_capacity(matrix.outputs as usize);
            for (part, name) in parts.iter().zip(&names) {
                match part.bias {
                    Some(bias) => values.extend(self.file.vector(&in_layer(layer, bias))?),
                    None => values.resize(values.len() + self.file.tensor(name)?.rows(), 0.0),
                }
            }
            matrix.bias = Some(self.vector(f32_bytes(&values)));
        }
        Ok(matrix)
    }

    /// One matrix of the rows of one or several tensors.
    fn matrix(&mut self, names: &[String]) -> Result<Matrix, CudaEngineError> {
        let mut tensors = Vec::with_capacity(names.len());
        for name in names {
            let tensor = self.file.tensor(name)?;
            check(&tensor)?;
            tensors.push(tensor);
        }
        let inputs = tensors.first().map_or(0, |tensor| tensor.row_elements());
        let outputs: usize = tensors.iter().map(|tensor| tensor.rows()).sum();
        let weights = self
            .arena
            .place(outputs.saturating_mul(inputs).saturating_mul(WEIGHT_BYTES));
        let mut to = weights;
        for tensor in tensors {
            self.parts.push(Part { tensor, to });
            to = to.behind(tensor.rows() * inputs * WEIGHT_BYTES);
        }
        Ok(Matrix {
            weights,
            bias: None,
            outputs: outputs as u32,
            inputs: inputs as u32,
        })
    }

    fn named_vector(&mut self, name: &str) -> Result<Place, CudaEngineError> {
        let values = self.file.vector(name)?;
        Ok(self.vector(f32_bytes(&values)))
    }

    fn optional_vector(&mut self, layer: usize, name: Option<&str>) -> Result<Option<Place>, CudaEngineError> {
        name.map(|name| self.named_vector(&in_layer(layer, name))).transpose()
    }

    fn vector(&mut self, bytes: Vec<u8>) -> Place {
        let place = self.arena.place(bytes.len());
        self.vectors.push((place, bytes));
        place
    }
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Rows are loaded whole, in the staging memory.
fn check(tensor: &Tensor<'_>) -> Result<(), EngineError> {
    let refused = |why| {
        Err(EngineError::UnsupportedTensor {
            tensor: tensor.name.to_owned(),
            kind: tensor.kind.name(),
            why,
        })
    };
    let elements = tensor.row_elements();
    if !elements.is_multiple_of(tensor.kind.block_elements()) {
        return refused("a row must have whole blocks of its type");
    }
    // A row of f32 is the longest form.
    match elements <= STAGE_BYTES / size_of::<f32>() {
        true => Ok(()),
        false => refused("a row must be at most 4,194,304 long"),
    }
}

#[cfg(test)]
mod tests {
    use model_files::gguf::GgmlType;

    use super::*;

    #[test]
    fn rows_that_do_not_fit_the_staging_memory_are_refused() {
        let tensor = |kind, dims| Tensor {
            name: "t",
            kind,
            dims,
            bytes: &[],
        };
        assert!(check(&tensor(GgmlType::Q8_0, &[64, 3])).is_ok());
        assert!(check(&tensor(GgmlType::Q8_0, &[33, 3])).is_err());
        assert!(check(&tensor(GgmlType::BF16, &[4_194_304, 1])).is_ok());
        assert!(check(&tensor(GgmlType::BF16, &[4_194_305, 1])).is_err());
    }
}
