//! The numbers of a model. Each is range-checked, and every tensor's shape is checked against them.

use serde::Serialize;

use crate::arch::{Architecture, Linear, in_layer};
use crate::gguf::{GgmlType, GgufError, GgufFile, MetadataValue, optional};

// Upper bounds: a few times the largest published llama-architecture model (Llama 3.1 405B: 126 layers, hidden 16,384, 128
// heads, FFN 53,248, vocabulary 128,256, context 131,072). They limit what is allocated for a file.
const LAYERS_MAX: u32 = 512;
const HIDDEN_MAX: u32 = 65_536;
const HEADS_MAX: u32 = 1_024;
const HEAD_DIM_MAX: usize = 512;
const FFN_MAX: u32 = 1 << 20;
const VOCAB_MAX: u32 = 1 << 20;
const CONTEXT_MAX: u32 = 1 << 24;
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
    /// Even; `head_count * head_dim == hidden_size`.
    pub head_dim: usize,
    pub ffn_size: usize,
    pub vocab_size: usize,
    /// Base of the rotary angles.
    pub rope_base: f32,
    pub rms_epsilon: f32,
    /// Tokens the model was trained for.
    pub context_length: usize,
    /// The embedding is the output matrix, too.
    pub tied_embeddings: bool,
}

/// Why a readable GGUF is not a model that this build can run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(
        "the model's architecture is \"{found}\"; this build runs these: {}. Choose such a model, for example smollm2-135m",
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
        "the metadata key \"{key}\" ({value}) asks for something this build does not compute: {feature}; choose another model"
    )]
    UnsupportedFeature {
        key: String,
        value: String,
        feature: &'static str,
    },
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
    #[error("the tokenizer has {tokens} tokens for {rows} embedding rows")]
    TokensBeyondEmbedding { tokens: usize, rows: usize },
}

impl ModelConfig {
    /// Reads and checks the model's numbers, then checks that every tensor they imply is there with the right shape
    /// and that there is no tensor they do not explain.
    ///
    /// # Errors
    /// [`ConfigError`]; each names the key or tensor.
    pub fn from_gguf(file: &GgufFile) -> Result<ModelConfig, ConfigError> {
        let name = file.str("general.architecture")?;
        let Some(architecture) = Architecture::named(name) else {
            let found = name.to_owned();
            return Err(ConfigError::UnsupportedArchitecture { found });
        };
        let config = read_numbers(file, architecture)?;
        refuse_unsupported(file, &config)?;
        check_tensors(file, &config)?;
        check_tokenizer_fits(file, &config)?;
        Ok(config)
    }

    /// Elements of one token's keys (or values) in one layer.
    pub fn kv_size(&self) -> usize {
        self.kv_head_count * self.head_dim
    }
}

fn read_numbers(file: &GgufFile, architecture: &'static Architecture) -> Result<ModelConfig, ConfigError> {
    let key = |name| architecture.key(name);
    let count = |name, max| {
        let key = key(name);
        in_range(&key, file.u64(&key)?, max)
    };
    let layer_count = count("block_count", LAYERS_MAX)?;
    let hidden = count("embedding_length", HIDDEN_MAX)?;
    let heads = count("attention.head_count", HEADS_MAX)?;
    let kv_heads = match optional(file.u32(&key("attention.head_count_kv")))? {
        Some(_) => count("attention.head_count_kv", HEADS_MAX)?,
        None => heads,
    };
    if !heads.is_multiple_of(kv_heads) {
        return Err(ConfigError::Inconsistent(Contradiction::HeadGroups { heads, kv_heads }));
    }
    if !hidden.is_multiple_of(heads) {
        return Err(ConfigError::Inconsistent(Contradiction::HiddenByHeads {
            hidden,
            heads,
        }));
    }
    let head_dim = (hidden / heads) as usize;
    if !head_dim.is_multiple_of(2) || head_dim > HEAD_DIM_MAX {
        return Err(ConfigError::Inconsistent(Contradiction::HeadDim { head_dim }));
    }
    let vocab_size = match optional(file.u32(&key("vocab_size")))? {
        Some(_) => count("vocab_size", VOCAB_MAX)? as usize,
        None => in_range(
            &format!("rows of {}", architecture.token_embedding),
            file.tensor(architecture.token_embedding)?.rows() as u64,
            VOCAB_MAX,
        )? as usize,
    };
    let (base_key, epsilon_key) = (key("rope.freq_base"), key(architecture.epsilon_key));
    let rope_base = optional(file.f32(&base_key))?.unwrap_or(ROPE_BASE_DEFAULT);
    let rms_epsilon = file.f32(&epsilon_key)?;
    Ok(ModelConfig {
        architecture,
        layer_count: layer_count as usize,
        hidden_size: hidden as usize,
        head_count: heads as usize,
        kv_head_count: kv_heads as usize,
        head_dim,
        ffn_size: count("feed_forward_length", FFN_MAX)? as usize,
        vocab_size,
        rope_base: real(&base_key, rope_base, (1.0, 1e12))?,
        rms_epsilon: real(&epsilon_key, rms_epsilon, (1e-12, 0.1))?,
        context_length: count("context_length", CONTEXT_MAX)? as usize,
        tied_embeddings: !file.tensor_names().any(|name| name == architecture.output),
    })
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

/// Refuses what would silently change the arithmetic.
fn refuse_unsupported(file: &GgufFile, config: &ModelConfig) -> Result<(), ConfigError> {
    let full = |name| config.architecture.key(name);
    let refuse = |key: &str, value: String, feature| {
        Err(ConfigError::UnsupportedFeature {
            key: key.to_owned(),
            value,
            feature,
        })
    };
    let key = full("rope.scaling.type");
    if let Some(kind) = optional(file.str(&key))?
        && kind != "none"
    {
        return refuse(&key, kind.to_owned(), "RoPE scaling");
    }
    for key in ["rope.scaling.factor", "rope.scale_linear"].map(full) {
        if let Some(factor) = optional(file.f32(&key))?
            && factor != 1.0
            && factor != 0.0
        {
            return refuse(&key, factor.to_string(), "RoPE scaling");
        }
    }
    let head_sized = ["rope.dimension_count", "attention.key_length", "attention.value_length"];
    for key in head_sized.map(full) {
        if let Some(size) = optional(file.u64(&key))?
            && size != config.head_dim as u64
        {
            return refuse(&key, size.to_string(), "a size other than hidden size / heads");
        }
    }
    let zero = [
        ("expert_count", "mixture of experts"),
        ("attention.sliding_window", "sliding-window attention"),
    ];
    for (key, feature) in zero {
        let key = full(key);
        if let Some(number) = optional(file.u64(&key))?
            && number != 0
        {
            return refuse(&key, number.to_string(), feature);
        }
    }
    Ok(())
}

/// A token without an embedding row would be an index outside the matrix. The reverse, padding rows, is common.
fn check_tokenizer_fits(file: &GgufFile, config: &ModelConfig) -> Result<(), ConfigError> {
    match file.metadata("tokenizer.ggml.tokens") {
        Some(MetadataValue::Array(tokens)) if tokens.len() > config.vocab_size => {
            let (tokens, rows) = (tokens.len(), config.vocab_size);
            Err(ConfigError::Inconsistent(Contradiction::TokensBeyondEmbedding {
                tokens,
                rows,
            }))
        }
        _ => Ok(()),
    }
}

/// Shape and type that one tensor must have; `kind` is given where only one type will do.
struct Expected {
    name: String,
    dims: Vec<usize>,
    kind: Option<GgmlType>,
}

fn check_tensors(file: &GgufFile, config: &ModelConfig) -> Result<(), ConfigError> {
    let expected = expected_tensors(config);
    for tensor in &expected {
        let found = file.tensor(&tensor.name)?;
        let dims: Vec<u64> = tensor.dims.iter().map(|&dim| dim as u64).collect();
        if found.dims != dims {
            let found = found.dims.to_vec();
            return Err(ConfigError::WrongShape {
                tensor: tensor.name.clone(),
                found,
                expected: dims,
            });
        }
        if let Some(kind) = tensor.kind
            && kind != found.kind
        {
            return Err(ConfigError::WrongType {
                tensor: tensor.name.clone(),
                found: found.kind,
                expected: kind,
            });
        }
    }
    let names: std::collections::HashSet<&str> = expected.iter().map(|tensor| tensor.name.as_str()).collect();
    match file.tensor_names().find(|name| !names.contains(name)) {
        Some(name) => Err(ConfigError::UnexpectedTensor {
            tensor: name.to_owned(),
        }),
        None => Ok(()),
    }
}

fn expected_tensors(config: &ModelConfig) -> Vec<Expected> {
    let (hidden, kv, ffn) = (config.hidden_size, config.kv_size(), config.ffn_size);
    let facts = config.architecture;
    let matrix = |name: &str, columns, rows| Expected {
        name: name.to_owned(),
        dims: vec![columns, rows],
        kind: None,
    };
    let vector = |name: &str, length| Expected {
        name: name.to_owned(),
        dims: vec![length],
        kind: Some(GgmlType::F32),
    };
    let mut expected = vec![
        matrix(facts.token_embedding, hidden, config.vocab_size),
        vector(facts.output_norm, hidden),
    ];
    if !config.tied_embeddings {
        expected.push(matrix(facts.output, hidden, config.vocab_size));
    }
    let linear = |linear: Linear, columns, rows| {
        let bias = linear.bias.map(|bias| vector(bias, rows));
        std::iter::once(matrix(linear.weight, columns, rows)).chain(bias)
    };
    let tensors = &facts.layer;
    for layer in 0..config.layer_count {
        let first = expected.len();
        expected.extend([
            vector(tensors.attention_norm, hidden),
            vector(tensors.ffn_norm, hidden),
            matrix(tensors.ffn_gate, hidden, ffn),
            matrix(tensors.ffn_up, hidden, ffn),
            matrix(tensors.ffn_down, ffn, hidden),
        ]);
        expected.extend(linear(tensors.query, hidden, hidden));
        expected.extend(linear(tensors.key, hidden, kv));
        expected.extend(linear(tensors.value, hidden, kv));
        expected.extend(linear(tensors.attention_output, hidden, hidden));
        for tensor in &mut expected[first..] {
            tensor.name = in_layer(layer, &tensor.name);
        }
    }
    expected
}

#[cfg(test)]
mod tests;
