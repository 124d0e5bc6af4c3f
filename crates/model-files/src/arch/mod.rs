//! Model architectures as facts: each family is one file of this folder and one line of [`SUPPORTED`].
//!
//! A family is RMS norms before attention and before the feed-forward part, causal attention, a gated unit, and the choices
//! that the types below offer. Numbers of one model are in [`crate::config::ModelConfig`]. A model that asks for anything
//! else is refused there. A family that needs more adds a choice here and the code that reads it.

mod gemma2;
mod gemma3;
mod llama;
mod phi3;
mod qwen2;
mod qwen3;
mod refused;

pub(crate) use refused::what_it_is;

/// Every architecture that this build runs.
pub const SUPPORTED: &[&Architecture] = &[
    &llama::FACTS,
    &qwen2::FACTS,
    &qwen3::FACTS,
    &gemma2::FACTS,
    &gemma3::FACTS,
    &phi3::FACTS,
];

/// What the loader and the forward pass must know about a family of models. Tensors have their names in GGUF files
/// everywhere; `folder_names` translates them for Hugging Face folders.
#[derive(Debug, PartialEq)]
pub struct Architecture {
    /// `general.architecture` of a GGUF file, which also stands in front of the family's metadata keys.
    pub name: &'static str,
    /// `model_type` in the config.json of Hugging Face folders.
    pub folder_types: &'static [&'static str],
    /// `model_type` of folders that read images, too, and have a model of the family as their `text_config`.
    pub folder_parts_of: &'static [&'static str],
    /// Keys that a config.json of the family may leave out, and the numbers that they have then, as in transformers. Keys with
    /// the same default in all families are not here.
    pub folder_defaults: &'static [(&'static str, u64)],
    /// The metadata key of the epsilon of RMS norms, without the name in front.
    pub epsilon_key: &'static str,
    /// The pairs in a GGUF file. In a folder they are halves.
    pub rope: RopePairs,
    pub activation: Activation,
    pub embedding_scale: EmbeddingScale,
    pub folder_norms: FolderNorms,
    /// The layers that a sliding window holds for, in models that have one.
    pub window_layers: WindowLayers,
    pub unwritten: Unwritten,
    pub token_embedding: &'static str,
    pub output_norm: &'static str,
    /// A file without this tensor has a tied head: the embedding is the output matrix, too.
    pub output: &'static str,
    pub layer: LayerTensors,
    /// Pairs of a tensor's name here and in a folder. Names in a layer are without `blk.N.` and `model.layers.N.` in front.
    pub folder_names: &'static [(&'static str, &'static str)],
}

/// Names of a layer's tensors, without `blk.N.` in front.
#[derive(Debug, PartialEq, Eq)]
pub struct LayerTensors {
    pub attention_norm: &'static str,
    pub projections: Projections,
    /// A norm over each head of the queries, before RoPE; and the same for the keys.
    pub query_norm: Option<&'static str>,
    pub key_norm: Option<&'static str>,
    pub attention_output: Linear,
    /// A norm of what attention adds to the residual stream.
    pub post_attention_norm: Option<&'static str>,
    pub ffn_norm: &'static str,
    pub gate_up: GateUp,
    pub ffn_down: &'static str,
    /// A norm of what the feed-forward part adds to the residual stream.
    pub post_ffn_norm: Option<&'static str>,
}

/// The matrices that make queries, keys and values.
#[derive(Debug, PartialEq, Eq)]
pub enum Projections {
    Separate {
        query: Linear,
        key: Linear,
        value: Linear,
    },
    /// One matrix: the rows of the queries, then those of the keys, then those of the values.
    Fused(&'static str),
}

/// The matrices of the gated unit's two halves.
#[derive(Debug, PartialEq, Eq)]
pub enum GateUp {
    Separate {
        gate: &'static str,
        up: &'static str,
    },
    /// One matrix: the rows of the gate, then those of the other half.
    Fused(&'static str),
}

/// A matrix, and the bias that is added to its outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Linear {
    pub weight: &'static str,
    pub bias: Option<&'static str>,
}

/// Which two numbers of a head RoPE turns together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RopePairs {
    /// `(2i, 2i + 1)`: llama.cpp's "norm".
    Neighbours,
    /// `(i, i + head size / 2)`: llama.cpp's "neox", and every Hugging Face folder.
    Halves,
}

/// The function of the gated unit's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Silu,
    /// GELU in its tanh form.
    GeluTanh,
}

/// What embeddings are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmbeddingScale {
    One,
    /// The square root of the hidden size.
    SqrtHidden,
}

/// What a folder stores of a norm's weights. GGUF files have the whole weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FolderNorms {
    Whole,
    /// The weight less one.
    LessOne,
}

/// The layers whose attention sees only the last tokens, the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum WindowLayers {
    All,
    /// Each `every`-th layer, counted from one, sees all tokens.
    AllBut {
        every: usize,
    },
}

/// Numbers of a family's models that GGUF files may leave out. Folders have all of them. The sources are llama.cpp's loader
/// and the configurations that the models were published with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Unwritten {
    /// Tokens of the window.
    pub window: Option<u32>,
    /// The base of RoPE in layers with a window. `None`: that of the other layers.
    pub window_rope_base: Option<f32>,
    pub attention_softcap: Option<f32>,
    pub logit_softcap: Option<f32>,
    /// The family's model with this many layers multiplies scores by `1 / sqrt(hidden size / heads)`. All others multiply them
    /// by `1 / sqrt(head size)`.
    pub layers_scaled_by_hidden: Option<usize>,
}

impl Unwritten {
    pub(super) const NOTHING: Unwritten = Unwritten {
        window: None,
        window_rope_base: None,
        attention_softcap: None,
        logit_softcap: None,
        layers_scaled_by_hidden: None,
    };
}

impl Architecture {
    /// The architecture of a GGUF file by its name there.
    pub fn named(name: &str) -> Option<&'static Architecture> {
        SUPPORTED.iter().copied().find(|known| known.name == name)
    }

    /// The architecture of a folder by its `model_type`. `is_nested`: the model for text is a part of what the folder has.
    pub(crate) fn of_folder(model_type: &str, is_nested: bool) -> Option<&'static Architecture> {
        SUPPORTED.iter().copied().find(|known| {
            let types = if is_nested {
                known.folder_parts_of
            } else {
                known.folder_types
            };
            types.contains(&model_type)
        })
    }

    /// The names of all architectures, for people.
    pub fn names() -> String {
        let names: Vec<&str> = SUPPORTED.iter().map(|known| known.name).collect();
        names.join(", ")
    }

    /// The full name of a metadata key.
    pub fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.name)
    }
}

/// The full name of a layer's tensor.
pub fn in_layer(layer: usize, tensor: &str) -> String {
    format!("blk.{layer}.{tensor}")
}
