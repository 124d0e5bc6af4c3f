//! The numbers of a model. Each is range-checked, and every tensor's shape is checked against them.

pub(crate) mod folder;
mod folder_keys;
mod folder_rope;
mod gguf;
mod gguf_keys;
mod gguf_rope;
mod tensors;

use serde::Serialize;

use crate::arch::{Architecture, RopePairs, WindowLayers, what_it_is};
use crate::files::Files;
use crate::folder::FolderError;
use crate::gguf::{GgmlType, GgufError};

// Upper bounds: a few times the largest published llama-architecture model (Llama 3.1 405B: 126 layers, hidden 16,384, 128
// heads, FFN 53,248, vocabulary 128,256, context 131,072). They limit what is allocated for a file.
const LAYERS_MAX: u32 = 512;
const HIDDEN_MAX: u32 = 65_536;
const HEADS_MAX: u32 = 1_024;
/// The largest head size of any model that is opened.
pub const HEAD_DIM_MAX: usize = 512;
const FFN_MAX: u32 = 1 << 20;
pub(crate) const VOCAB_MAX: u32 = 1 << 20;
const CONTEXT_MAX: u32 = 1 << 24;
/// Gemma 2 has 30 and 50. Below 0.01 everything is one value.
const SOFTCAPS: (f32, f32) = (0.01, 1e6);
/// RoPE base of models without the key (the llama paper's value, and llama.cpp's default).
const ROPE_BASE_DEFAULT: f32 = 10_000.0;

/// Dimensions and constants of one model. Counts are in elements unless named otherwise.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelConfig {
    /// The facts of its family.
    #[serde(skip)]
    pub architecture: &'static Architecture,
    pub layer_count: usize,
    pub hidden_size: usize,
    /// Query heads.
    pub head_count: usize,
    /// Key/value heads; divides `head_count`.
    pub kv_head_count: usize,
    /// Even. `head_count * head_dim` need not be `hidden_size`.
    pub head_dim: usize,
    pub ffn_size: usize,
    pub vocab_size: usize,
    pub rope: Rope,
    /// RoPE of the layers with a window, where it is another one.
    pub window_rope: Option<Rope>,
    pub window: Option<Window>,
    /// What scores are multiplied by. Usually `1 / sqrt(head_dim)`.
    pub attention_scale: f32,
    /// Scores become `cap * tanh(score / cap)`.
    pub attention_softcap: Option<f32>,
    /// Logits become `cap * tanh(logit / cap)`.
    pub logit_softcap: Option<f32>,
    pub rms_epsilon: f32,
    /// Tokens the model was trained for.
    pub context_length: usize,
    /// The embedding is the output matrix, too.
    pub tied_embeddings: bool,
}

/// Rotary position embedding: pair i turns by `position * base^(-2i / dims)`, changed by `scaling`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rope {
    pub pairs: RopePairs,
    pub base: f32,
    /// The first `dims` values of a head turn. Even; at most the head size.
    pub dims: usize,
    pub scaling: RopeScaling,
}

/// How a model stretches RoPE to longer contexts.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RopeScaling {
    None,
    /// Every angle is divided by the factor.
    Linear {
        factor: f32,
    },
    /// Llama 3.1: slow pairs are divided by `factor`, fast ones stay, those between are mixed.
    Llama3 {
        factor: f32,
        low_freq_factor: f32,
        high_freq_factor: f32,
        original_context: u32,
    },
    /// Each pair's angle is divided by its own factor. `dims / 2` factors. Turned values are multiplied by `magnitude`.
    Factors {
        factors: Vec<f32>,
        magnitude: f32,
    },
}

/// A sliding window: attention of its layers sees the last `tokens` tokens, the token itself included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Window {
    pub tokens: usize,
    pub layers: WindowLayers,
}

impl Window {
    /// Whether the layer, counted from 0, has the window.
    pub(crate) fn holds_for(&self, layer: usize) -> bool {
        match self.layers {
            WindowLayers::All => true,
            WindowLayers::AllBut { every } => !(layer + 1).is_multiple_of(every),
        }
    }
}

/// Why a readable GGUF is not a model that this build can run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error(
        "the model's architecture is \"{found}\"{}; this build runs these: {}. Choose such a model, for example smollm2-135m",
        what_it_is(found),
        Architecture::names()
    )]
    UnsupportedArchitecture { found: String },
    #[error("the metadata key \"{key}\" is {value}, outside {min}..={max}; the file is damaged or not a usable model")]
    OutOfRange {
        key: String,
        value: String,
        min: String,
        max: String,
    },
    #[error("the model's numbers contradict each other: {}; the file is damaged or not a plain model of its architecture", .0)]
    Inconsistent(Contradiction),
    #[error(
        "the metadata key \"{key}\" ({value}) asks for something this build does not compute: {feature}; it runs plain models of \
         these architectures: {}",
        Architecture::names()
    )]
    UnsupportedFeature {
        key: String,
        value: String,
        feature: &'static str,
    },
    #[error(
        "the folder's weights are quantised by {method}; this build reads folders with F32, F16 and BF16 weights, and GGUF files \
         with these types: {}",
        GgmlType::names()
    )]
    QuantisedFolder { method: String },
    #[error(
        "the tensor \"{tensor}\" asks for something this build does not compute; choose a plain model of its architecture"
    )]
    UnexpectedTensor { tensor: String },
    #[error(
        "the tensor \"{tensor}\" has shape {found:?}, expected {expected:?}; the file is damaged: download it again with `baton model pull --force`"
    )]
    WrongShape {
        tensor: String,
        found: Vec<u64>,
        expected: Vec<u64>,
    },
    #[error("the tensor \"{tensor}\" has type {}, expected {}; convert the model again", found.name(), expected.name())]
    WrongType {
        tensor: String,
        found: GgmlType,
        expected: GgmlType,
    },
}

/// Two numbers of one model that cannot both be right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Contradiction {
    #[error("{heads} query heads are not a multiple of {kv_heads} key/value heads")]
    HeadGroups { heads: u32, kv_heads: u32 },
    #[error("hidden size {hidden} is not a multiple of {heads} heads")]
    HiddenByHeads { hidden: u32, heads: u32 },
    #[error("head size {head_dim} is odd or above {HEAD_DIM_MAX}")]
    HeadDim { head_dim: usize },
    #[error("there are {types} layer_types for {layers} layers")]
    LayerTypes { types: usize, layers: usize },
    #[error("low_freq_factor is not below high_freq_factor")]
    RopeBands,
    #[error("there are {factors} RoPE factors for {pairs} pairs")]
    RopeFactors { factors: usize, pairs: usize },
    #[error("the tokenizer has {tokens} tokens for {rows} embedding rows")]
    TokensBeyondEmbedding { tokens: usize, rows: usize },
}

impl ModelConfig {
    /// Reads and checks the model's numbers, then checks that every tensor they imply is there with the right shape
    /// and that there is no tensor they do not explain.
    ///
    /// # Errors
    /// [`ConfigError`]; each names the key or tensor.
    pub(crate) fn read(files: &Files) -> Result<ModelConfig, ConfigError> {
        let config = match files {
            Files::Gguf(file) => gguf::read(file)?,
            Files::Folder(folder, architecture) => folder::read(folder, architecture)?,
        };
        tensors::check(files, &config)?;
        Ok(config)
    }

    /// Elements of one token's queries in one layer.
    pub fn query_size(&self) -> usize {
        self.head_count * self.head_dim
    }

    /// Elements of one token's keys (or values) in one layer.
    pub fn kv_size(&self) -> usize {
        self.kv_head_count * self.head_dim
    }

    /// The last tokens that the layer's attention sees, where there is a limit.
    pub fn window_of(&self, layer: usize) -> Option<usize> {
        self.window
            .filter(|window| window.holds_for(layer))
            .map(|window| window.tokens)
    }

    /// The layer's RoPE.
    #[cfg(test)]
    pub(crate) fn rope_of(&self, layer: usize) -> &Rope {
        match &self.window_rope {
            Some(rope) if self.window_of(layer).is_some() => rope,
            _ => &self.rope,
        }
    }
}

fn in_range(key: &str, value: u64, max: u32) -> Result<u32, ConfigError> {
    match u32::try_from(value) {
        Ok(number) if (1..=max).contains(&number) => Ok(number),
        _ => Err(out_of_range(key, value, 1, max)),
    }
}

fn real(key: &str, value: f32, (min, max): (f32, f32)) -> Result<f32, ConfigError> {
    // NaN is in no range.
    if (min..=max).contains(&value) {
        Ok(value)
    } else {
        Err(out_of_range(key, value, min, max))
    }
}

fn out_of_range(key: &str, value: impl ToString, min: impl ToString, max: impl ToString) -> ConfigError {
    ConfigError::OutOfRange {
        key: key.to_owned(),
        value: value.to_string(),
        min: min.to_string(),
        max: max.to_string(),
    }
}

#[cfg(test)]
mod tests;
