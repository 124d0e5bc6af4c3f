//! The numbers of a model out of a GGUF file's metadata. Defaults of absent keys are those of llama.cpp's loader.

use super::gguf_keys::Keys;
use super::{
    CONTEXT_MAX, ConfigError, Contradiction, FFN_MAX, HEAD_DIM_MAX, HEADS_MAX, HIDDEN_MAX, LAYERS_MAX, ModelConfig,
    SOFTCAPS, VOCAB_MAX, Window, gguf_rope, in_range, real,
};
use crate::arch::{Architecture, WindowLayers};
use crate::gguf::{GgufFile, MetadataValue, optional};

pub(super) fn read(file: &GgufFile) -> Result<ModelConfig, ConfigError> {
    let name = file.str("general.architecture")?;
    let Some(architecture) = Architecture::named(name) else {
        let found = name.to_owned();
        return Err(ConfigError::UnsupportedArchitecture { found });
    };
    let keys = Keys { file, architecture };
    keys.refuse_unsupported()?;
    let config = keys.read()?;
    check_tokenizer_fits(file, &config)?;
    Ok(config)
}

impl Keys<'_> {
    fn read(&self) -> Result<ModelConfig, ConfigError> {
        let (file, architecture) = (self.file, self.architecture);
        let layer_count = self.count("block_count", LAYERS_MAX)? as usize;
        let hidden = self.count("embedding_length", HIDDEN_MAX)?;
        let heads = self.count("attention.head_count", HEADS_MAX)?;
        let kv_heads = self
            .optional_count("attention.head_count_kv", HEADS_MAX)?
            .unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(ConfigError::Inconsistent(Contradiction::HeadGroups { heads, kv_heads }));
        }
        let head_dim = self.head_dim(hidden, heads)?;
        let vocab_size = match self.optional_count("vocab_size", VOCAB_MAX)? {
            Some(size) => size as usize,
            None => in_range(
                &format!("rows of {}", architecture.token_embedding),
                file.tensor(architecture.token_embedding)?.rows() as u64,
                VOCAB_MAX,
            )? as usize,
        };
        let context_length = self.count("context_length", CONTEXT_MAX)?;
        let (rope, window_rope) = gguf_rope::read(self, head_dim, context_length)?;
        let epsilon_key = self.full(architecture.epsilon_key);
        Ok(ModelConfig {
            architecture,
            layer_count,
            hidden_size: hidden as usize,
            head_count: heads as usize,
            kv_head_count: kv_heads as usize,
            head_dim,
            ffn_size: self.count("feed_forward_length", FFN_MAX)? as usize,
            vocab_size,
            rope,
            window_rope,
            window: self.window()?,
            attention_scale: self.attention_scale(layer_count, (hidden, heads, head_dim))?,
            attention_softcap: self.softcap("attn_logit_softcapping", architecture.unwritten.attention_softcap)?,
            logit_softcap: self.softcap("final_logit_softcapping", architecture.unwritten.logit_softcap)?,
            rms_epsilon: real(&epsilon_key, file.f32(&epsilon_key)?, (1e-12, 0.1))?,
            context_length: context_length as usize,
            tied_embeddings: !file.tensor_names().any(|name| name == architecture.output),
        })
    }

    fn head_dim(&self, hidden: u32, heads: u32) -> Result<usize, ConfigError> {
        let given = |key| self.optional_count(key, HIDDEN_MAX);
        let (key, value) = (given("attention.key_length")?, given("attention.value_length")?);
        let head_dim = match (key, value) {
            (Some(key), Some(value)) if key == value => key,
            (None, None) if hidden.is_multiple_of(heads) => hidden / heads,
            (None, None) => {
                return Err(ConfigError::Inconsistent(Contradiction::HiddenByHeads {
                    hidden,
                    heads,
                }));
            }
            (key, value) => {
                let (key, value) = (key.unwrap_or(hidden / heads), value.unwrap_or(hidden / heads));
                if key != value {
                    let feature = "keys and values of different sizes";
                    return self.unsupported("attention.key_length", format!("{key}, values {value}"), feature);
                }
                key
            }
        } as usize;
        if !head_dim.is_multiple_of(2) || head_dim == 0 || head_dim > HEAD_DIM_MAX {
            return Err(ConfigError::Inconsistent(Contradiction::HeadDim { head_dim }));
        }
        Ok(head_dim)
    }

    fn attention_scale(&self, layers: usize, (hidden, heads, head_dim): (u32, u32, usize)) -> Result<f32, ConfigError> {
        if let Some(scale) = self.optional_real("attention.scale", (1e-6, 1e3))? {
            return Ok(scale);
        }
        let by_hidden = self.architecture.unwritten.layers_scaled_by_hidden == Some(layers);
        let size = if by_hidden { (hidden / heads) as usize } else { head_dim };
        Ok(1.0 / (size as f32).sqrt())
    }

    /// Where the key is absent, the cap is the family's. Zero is no cap, as in the flash attention of llama.cpp.
    fn softcap(&self, key: &str, unwritten: Option<f32>) -> Result<Option<f32>, ConfigError> {
        match self.file.metadata(&self.full(key)) {
            None => Ok(unwritten),
            Some(_) => self.optional_real(key, SOFTCAPS),
        }
    }

    fn window(&self) -> Result<Option<Window>, ConfigError> {
        let key = self.full("attention.sliding_window");
        let tokens = match optional(self.file.u64(&key))? {
            // Writers use zero for "none".
            Some(0) => return Ok(None),
            Some(tokens) => Some(in_range(&key, tokens, CONTEXT_MAX)?),
            None => self.architecture.unwritten.window,
        };
        let layers = self.architecture.window_layers;
        let every = match layers {
            WindowLayers::All => 1,
            WindowLayers::AllBut { every } => every as u64,
        };
        const PATTERN: &str = "attention.sliding_window_pattern";
        match self.file.metadata(&self.full(PATTERN)) {
            None => {}
            Some(value) if value.as_u64() == Some(every) => {}
            Some(MetadataValue::Array(flags)) if follows(layers, flags) => {}
            Some(other) => {
                let value = match other.as_u64() {
                    Some(number) => number.to_string(),
                    None => other.type_name().to_owned(),
                };
                return self.unsupported(PATTERN, value, "windows in other layers than the family's");
            }
        }
        Ok(tokens.map(|tokens| Window {
            tokens: tokens as usize,
            layers,
        }))
    }

    /// Refuses what would silently change the arithmetic.
    fn refuse_unsupported(&self) -> Result<(), ConfigError> {
        for (key, feature) in [
            ("expert_count", "mixture of experts"),
            ("attention.kv_lora_rank", "multi-head latent attention"),
            ("attention.key_length_mla", "multi-head latent attention"),
            ("attention.value_length_mla", "multi-head latent attention"),
            ("nextn_predict_layers", "layers that predict several tokens"),
            ("ssm.state_size", "state-space layers"),
            ("leading_dense_block_count", "mixture of experts"),
        ] {
            if let Some(number) = optional(self.file.u64(&self.full(key)))?
                && number != 0
            {
                return self.unsupported(key, number, feature);
            }
        }
        for (key, feature) in [
            ("attention.clamp_kqv", "clamped queries, keys and values"),
            ("attention.max_alibi_bias", "ALiBi"),
            ("attention.temperature_scale", "scores scaled by position"),
            ("attention.output_scale", "a scale of the attention output"),
            ("logit_scale", "a scale of the logits"),
            ("residual_scale", "a scale of the residual stream"),
            ("embedding_scale", "a scale of the embeddings that the file chooses"),
            ("router_logit_softcapping", "mixture of experts"),
        ] {
            if let Some(number) = optional(self.file.f32(&self.full(key)))?
                && number != 0.0
            {
                return self.unsupported(key, number, feature);
            }
        }
        if optional(self.file.bool(&self.full("attention.causal")))? == Some(false) {
            return self.unsupported("attention.causal", false, "attention to later tokens");
        }
        Ok(())
    }
}

/// Whether a flag for each layer, true where it has the window, says what the family's pattern says.
fn follows(layers: WindowLayers, flags: &[MetadataValue]) -> bool {
    let window = Window { tokens: 1, layers };
    (0..)
        .zip(flags)
        .all(|(layer, flag)| *flag == MetadataValue::Bool(window.holds_for(layer)))
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
