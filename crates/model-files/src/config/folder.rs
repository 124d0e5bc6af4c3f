//! The numbers of a model out of a folder's config.json. Defaults of absent keys are those of transformers.

use serde_json::Value;

use super::folder_keys::{Keys, unsupported};
use super::{
    CONTEXT_MAX, ConfigError, Contradiction, FFN_MAX, HEAD_DIM_MAX, HEADS_MAX, HIDDEN_MAX, LAYERS_MAX, ModelConfig,
    SOFTCAPS, VOCAB_MAX, Window, folder_rope,
};
use crate::arch::{Activation, Architecture, WindowLayers};
use crate::folder::{ConfigFile, Folder, FolderError, Object};

/// transformers' default for every family.
const RMS_EPSILON_DEFAULT: f32 = 1e-6;

/// The architecture that config.json asks for. Refuses what this build cannot run, by name.
pub(crate) fn architecture(config: &ConfigFile) -> Result<&'static Architecture, ConfigError> {
    let (root, text) = (config.root(), config.text(&[]));
    for object in [&root, &text] {
        refuse_quantised(object)?;
        refuse_features(object)?;
    }
    let kind = root.str("model_type")?.ok_or_else(|| FolderError::MissingKey {
        key: root.full("model_type"),
    })?;
    match Architecture::of_folder(kind, config.is_nested()) {
        Some(architecture) => Ok(architecture),
        None => Err(ConfigError::UnsupportedArchitecture { found: kind.to_owned() }),
    }
}

pub(super) fn read(folder: &Folder, architecture: &'static Architecture) -> Result<ModelConfig, ConfigError> {
    let has_head = folder.tensor_names().any(|name| name == architecture.output);
    numbers(folder.config(), architecture, has_head)
}

/// `has_head`: a matrix for the head is among the weights.
pub(crate) fn numbers(
    config: &ConfigFile,
    architecture: &'static Architecture,
    has_head: bool,
) -> Result<ModelConfig, ConfigError> {
    let keys = Keys {
        text: config.text(architecture.folder_defaults),
        architecture,
    };
    keys.refuse_unsupported()?;
    keys.read(has_head)
}

impl Keys<'_> {
    fn read(&self, has_head: bool) -> Result<ModelConfig, ConfigError> {
        let architecture = self.architecture;
        let layer_count = self.count("num_hidden_layers", LAYERS_MAX)? as usize;
        let hidden = self.count("hidden_size", HIDDEN_MAX)?;
        let heads = self.count("num_attention_heads", HEADS_MAX)?;
        let kv_heads = self.optional_count("num_key_value_heads", HEADS_MAX)?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(ConfigError::Inconsistent(Contradiction::HeadGroups { heads, kv_heads }));
        }
        let head_dim = self.head_dim(hidden, heads)?;
        let context_length = self.count("max_position_embeddings", CONTEXT_MAX)?;
        let window = self.window(layer_count)?;
        let (rope, window_rope) = folder_rope::read(self, head_dim, context_length)?;
        let scale_of = self
            .optional_real("query_pre_attn_scalar", (1.0, HIDDEN_MAX as f32))?
            .unwrap_or(head_dim as f32);
        let epsilon = self.optional_real("rms_norm_eps", (1e-12, 0.1))?;
        Ok(ModelConfig {
            architecture,
            layer_count,
            hidden_size: hidden as usize,
            head_count: heads as usize,
            kv_head_count: kv_heads as usize,
            head_dim,
            ffn_size: self.count("intermediate_size", FFN_MAX)? as usize,
            vocab_size: self.count("vocab_size", VOCAB_MAX)? as usize,
            rope,
            window_rope: window_rope.filter(|_| window.is_some()),
            window,
            attention_scale: 1.0 / scale_of.sqrt(),
            attention_softcap: self.optional_real("attn_logit_softcapping", SOFTCAPS)?,
            logit_softcap: self.optional_real("final_logit_softcapping", SOFTCAPS)?,
            rms_epsilon: epsilon.unwrap_or(RMS_EPSILON_DEFAULT),
            context_length: context_length as usize,
            // A head that is in the files is used, whatever the key says: it is either the embedding again, or what was meant.
            tied_embeddings: !has_head && self.text.bool("tie_word_embeddings")? != Some(false),
        })
    }

    fn head_dim(&self, hidden: u32, heads: u32) -> Result<usize, ConfigError> {
        let head_dim = match self.optional_count("head_dim", HIDDEN_MAX)? {
            Some(size) => size,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                return Err(ConfigError::Inconsistent(Contradiction::HiddenByHeads {
                    hidden,
                    heads,
                }));
            }
        } as usize;
        if !head_dim.is_multiple_of(2) || head_dim == 0 || head_dim > HEAD_DIM_MAX {
            return Err(ConfigError::Inconsistent(Contradiction::HeadDim { head_dim }));
        }
        Ok(head_dim)
    }

    fn window(&self, layer_count: usize) -> Result<Option<Window>, ConfigError> {
        const LAYER_TYPES: &str = "layer_types";
        let tokens = self.optional_count("sliding_window", CONTEXT_MAX)?;
        let types = self.text.strs(LAYER_TYPES)?;
        for kind in types.iter().flatten() {
            if !["sliding_attention", "full_attention"].contains(kind) {
                return self.unsupported(LAYER_TYPES, kind, "layers of this kind");
            }
        }
        let Some(tokens) = tokens.map(|tokens| tokens as usize) else {
            return Ok(None);
        };
        if self.text.bool("use_sliding_window")? == Some(false) {
            return Ok(None);
        }
        let mut has_window = Vec::with_capacity(layer_count);
        if let Some(types) = types {
            if types.len() != layer_count {
                return Err(ConfigError::Inconsistent(Contradiction::LayerTypes {
                    types: types.len(),
                    layers: layer_count,
                }));
            }
            has_window.extend(types.iter().map(|kind| *kind == "sliding_attention"));
        } else if let Some(every) = self.pattern()? {
            has_window.extend((1..=layer_count).map(|layer| !layer.is_multiple_of(every)));
        } else if let Some(first) = self.text.u64("max_window_layers")? {
            has_window.extend((0..layer_count as u64).map(|layer| layer >= first));
        } else {
            let layers = self.architecture.window_layers;
            return Ok(Some(Window { tokens, layers }));
        }
        if !has_window.contains(&true) {
            return Ok(None);
        }
        match self.layers_of(&has_window) {
            Some(layers) => Ok(Some(Window { tokens, layers })),
            None => self.unsupported(LAYER_TYPES, "irregular", "windows in layers without a pattern"),
        }
    }

    fn pattern(&self) -> Result<Option<usize>, ConfigError> {
        for key in ["sliding_window_pattern", "_sliding_window_pattern"] {
            if let Some(every) = self.optional_count(key, LAYERS_MAX)? {
                return Ok(Some(every as usize));
            }
        }
        Ok(None)
    }

    /// The pattern that the flags follow. The family's own goes first: a model with few layers follows several.
    fn layers_of(&self, has_window: &[bool]) -> Option<WindowLayers> {
        let every = has_window.iter().position(|has| !has).map(|layer| layer + 1);
        let alone = every.map_or(WindowLayers::All, |every| WindowLayers::AllBut { every });
        [self.architecture.window_layers, alone].into_iter().find(|layers| {
            let window = Window {
                tokens: 1,
                layers: *layers,
            };
            (0..)
                .zip(has_window)
                .all(|(layer, has)| window.holds_for(layer) == *has)
        })
    }

    /// Refuses what would silently change the arithmetic.
    fn refuse_unsupported(&self) -> Result<(), ConfigError> {
        for key in ["hidden_activation", "hidden_act"] {
            if let Some(name) = self.text.str(key)? {
                let found = match name {
                    "silu" | "swish" => Some(Activation::Silu),
                    "gelu_pytorch_tanh" => Some(Activation::GeluTanh),
                    _ => None,
                };
                if found != Some(self.architecture.activation) {
                    return self.unsupported(key, name, "an activation function other than the family's");
                }
                // transformers looks at the second key only where the first one is absent.
                break;
            }
        }
        for (key, feature) in [
            ("attention_bias", "biases that the family does not have"),
            ("mlp_bias", "biases that the family does not have"),
            ("use_bidirectional_attention", "attention to later tokens"),
        ] {
            if self.text.bool(key)? == Some(true) {
                return self.unsupported(key, true, feature);
            }
        }
        Ok(())
    }
}

fn refuse_quantised(object: &Object<'_>) -> Result<(), ConfigError> {
    for key in ["quantization_config", "compression_config"] {
        if let Some(quantised) = object.object(key)? {
            let method = quantised.str("quant_method")?.unwrap_or("an unnamed method");
            return Err(ConfigError::QuantisedFolder {
                method: method.to_owned(),
            });
        }
    }
    Ok(())
}

/// What makes a model one that no family of ours is, whatever its type is called.
fn refuse_features(object: &Object<'_>) -> Result<(), ConfigError> {
    const EXPERTS: &str = "a mixture of experts";
    const LATENT: &str = "multi-head latent attention";
    const STATE: &str = "layers with a recurrent state";
    for (key, feature) in [
        ("num_local_experts", EXPERTS),
        ("num_experts", EXPERTS),
        ("n_routed_experts", EXPERTS),
        ("moe_num_experts", EXPERTS),
        ("moe_intermediate_size", EXPERTS),
        ("kv_lora_rank", LATENT),
        ("q_lora_rank", LATENT),
        ("state_size", STATE),
        ("ssm_cfg", STATE),
        ("mamba_d_state", STATE),
        ("linear_num_value_heads", STATE),
    ] {
        let value = match object.value(key) {
            None => continue,
            Some(Value::Number(number)) if number.as_f64() == Some(0.0) => continue,
            Some(Value::Number(number)) => number.to_string(),
            Some(Value::Object(_) | Value::Array(_)) => "set".to_owned(),
            Some(other) => other.to_string(),
        };
        return unsupported(object, key, (value, feature));
    }
    Ok(())
}
