//! The numbers of a model out of a GGUF file's metadata.

use super::{
    CONTEXT_MAX, ConfigError, Contradiction, FFN_MAX, HEAD_DIM_MAX, HEADS_MAX, HIDDEN_MAX, LAYERS_MAX, ModelConfig,
    ROPE_BASE_DEFAULT, Rope, RopeScaling, VOCAB_MAX, in_range, real,
};
use crate::arch::Architecture;
use crate::gguf::{GgufFile, MetadataValue, optional};

pub(super) fn read(file: &GgufFile) -> Result<ModelConfig, ConfigError> {
    let name = file.str("general.architecture")?;
    let Some(architecture) = Architecture::named(name) else {
        let found = name.to_owned();
        return Err(ConfigError::UnsupportedArchitecture { found });
    };
    let config = read_numbers(file, architecture)?;
    refuse_unsupported(file, &config)?;
    check_tokenizer_fits(file, &config)?;
    Ok(config)
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
    let rope = Rope {
        pairs: architecture.rope,
        base: real(&base_key, rope_base, (1.0, 1e12))?,
        dims: head_dim,
        scaling: RopeScaling::None,
    };
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
        rope,
        window_rope: None,
        window: None,
        attention_scale: 1.0 / (head_dim as f32).sqrt(),
        attention_softcap: None,
        logit_softcap: None,
        rms_epsilon: real(&epsilon_key, rms_epsilon, (1e-12, 0.1))?,
        context_length: count("context_length", CONTEXT_MAX)? as usize,
        tied_embeddings: !file.tensor_names().any(|name| name == architecture.output),
    })
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
