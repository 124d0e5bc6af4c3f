//! RoPE out of a GGUF file: metadata, and tensors that hold a factor for each pair.

use super::gguf_keys::Keys;
use super::{CONTEXT_MAX, ConfigError, HEAD_DIM_MAX, ROPE_BASE_DEFAULT, Rope, RopeScaling, real};
use crate::gguf::{GgmlType, optional};

/// Factors of the pairs, for models of Llama 3.1 and later.
pub(super) const FACTORS: &str = "rope_freqs.weight";
/// Factors for contexts up to the original one, and for longer ones: Phi-3's "longrope".
pub(super) const SHORT_FACTORS: &str = "rope_factors_short.weight";
pub(super) const LONG_FACTORS: &str = "rope_factors_long.weight";

/// Limits of every factor. Llama 3 has 1 to 32, Phi-3 up to 70.
const FACTORS_RANGE: (f32, f32) = (0.01, 1e6);
const BASE_RANGE: (f32, f32) = (1.0, 1e12);

/// The RoPE of a model, and the other one of its layers with a window, where there is one.
pub(super) fn read(keys: &Keys<'_>, head_dim: usize, context_length: u32) -> Result<(Rope, Option<Rope>), ConfigError> {
    let dims = dims(keys, head_dim)?;
    let base_key = keys.full("rope.freq_base");
    let base = optional(keys.file.f32(&base_key))?.unwrap_or(ROPE_BASE_DEFAULT);
    let rope = Rope {
        pairs: keys.architecture.rope,
        base: real(&base_key, base, BASE_RANGE)?,
        dims,
        scaling: scaling(keys, dims, context_length)?,
    };
    let written = keys.optional_real("rope.freq_base_swa", BASE_RANGE)?;
    let window_rope = match (written, keys.architecture.unwritten.window_rope_base) {
        (None, None) => None,
        (written, Some(usual)) => Some(Rope {
            base: written.unwrap_or(usual),
            scaling: RopeScaling::None,
            ..rope.clone()
        }),
        (Some(base), None) => Some(Rope { base, ..rope.clone() }),
    };
    Ok((rope, window_rope))
}

fn dims(keys: &Keys<'_>, head_dim: usize) -> Result<usize, ConfigError> {
    for key in [
        "rope.dimension_count_swa",
        "attention.key_length_swa",
        "attention.value_length_swa",
    ] {
        if let Some(size) = optional(keys.file.u64(&keys.full(key)))?
            && size != head_dim as u64
        {
            return keys.unsupported(key, size, "other sizes in layers with a window");
        }
    }
    const KEY: &str = "rope.dimension_count";
    match keys.optional_count(KEY, HEAD_DIM_MAX as u32)? {
        None => Ok(head_dim),
        Some(dims) if dims as usize <= head_dim && dims.is_multiple_of(2) => Ok(dims as usize),
        Some(dims) => keys.unsupported(KEY, dims, "an odd part of a head, or more than all of it"),
    }
}

fn scaling(keys: &Keys<'_>, dims: usize, context_length: u32) -> Result<RopeScaling, ConfigError> {
    const TYPE: &str = "rope.scaling.type";
    let kind = optional(keys.file.str(&keys.full(TYPE)))?;
    let mut factor = keys.optional_real("rope.scaling.factor", FACTORS_RANGE)?;
    if factor.is_none() {
        factor = keys.optional_real("rope.scale_linear", FACTORS_RANGE)?;
    }
    let factor = factor.unwrap_or(1.0);
    let has = |tensor| keys.file.tensor_names().any(|name| name == tensor);
    let magnitude = keys.optional_real("rope.scaling.attn_factor", FACTORS_RANGE)?;
    if has(FACTORS) || has(SHORT_FACTORS) || has(LONG_FACTORS) {
        if has(FACTORS) && (has(SHORT_FACTORS) || has(LONG_FACTORS)) {
            return keys.unsupported(TYPE, FACTORS, "two kinds of factors together");
        }
        if factor != 1.0 {
            return keys.unsupported(
                "rope.scaling.factor",
                factor,
                "linear RoPE scaling together with factors",
            );
        }
        let original = keys.optional_count("rope.scaling.original_context_length", CONTEXT_MAX)?;
        // One set serves every request, as in llama.cpp: tokens must not change when a sequence grows.
        let tensor = match original {
            _ if has(FACTORS) => FACTORS,
            Some(original) if context_length > original => LONG_FACTORS,
            _ => SHORT_FACTORS,
        };
        return Ok(RopeScaling::Factors {
            factors: factors(keys, tensor, dims)?,
            magnitude: magnitude.unwrap_or(1.0),
        });
    }
    if let Some(magnitude) = magnitude
        && magnitude != 1.0
    {
        return keys.unsupported(
            "rope.scaling.attn_factor",
            magnitude,
            "a magnitude of RoPE without factors",
        );
    }
    match kind {
        None | Some("linear") if factor == 1.0 => Ok(RopeScaling::None),
        None | Some("linear") => Ok(RopeScaling::Linear { factor }),
        Some("none") => Ok(RopeScaling::None),
        Some("longrope") => keys.unsupported(TYPE, "longrope", "RoPE factors that the file lacks"),
        Some(other) => keys.unsupported(TYPE, other, "RoPE scaling of this kind"),
    }
}

/// One number for each pair. `super::tensors` has this shape and type, too, but is asked later.
fn factors(keys: &Keys<'_>, name: &str, dims: usize) -> Result<Vec<f32>, ConfigError> {
    let tensor = keys.file.tensor(name)?;
    if tensor.kind != GgmlType::F32 {
        return Err(ConfigError::WrongType {
            tensor: name.to_owned(),
            found: tensor.kind,
            expected: GgmlType::F32,
        });
    }
    let expected = vec![dims as u64 / 2];
    if tensor.dims != expected {
        let found = tensor.dims.to_vec();
        return Err(ConfigError::WrongShape {
            tensor: name.to_owned(),
            found,
            expected,
        });
    }
    let numbers = tensor.bytes.as_chunks::<4>().0.iter();
    numbers
        .map(|bytes| real(name, f32::from_le_bytes(*bytes), FACTORS_RANGE))
        .collect()
}
