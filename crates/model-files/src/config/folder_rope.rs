//! RoPE out of a folder's config.json, in the forms of all generations of transformers.

use super::folder_keys::{Keys, real_of, unsupported};
use super::{CONTEXT_MAX, ConfigError, Contradiction, ROPE_BASE_DEFAULT, Rope, RopeScaling, real};
use crate::arch::RopePairs;
use crate::folder::{FolderError, Object};

/// Limits of every factor. Llama 3 has up to 32, Phi-3 up to 70.
const FACTORS_RANGE: (f32, f32) = (0.01, 1e6);
const BASE_RANGE: (f32, f32) = (1.0, 1e12);

/// The RoPE of a model, and the other one of its layers with a window, where there is one.
pub(super) fn read(keys: &Keys<'_>, head_dim: usize, context_length: u32) -> Result<(Rope, Option<Rope>), ConfigError> {
    let text = &keys.text;
    // Newer files have one object with everything in it, or one for each kind of layer. Older ones have the scaling alone.
    let parameters = match text.object("rope_parameters")? {
        Some(parameters) => Some(parameters),
        None => text.object("rope_scaling")?,
    };
    let of_layers = |kind| match &parameters {
        Some(parameters) => parameters.object(kind),
        None => Ok(None),
    };
    let (full, sliding) = (of_layers("full_attention")?, of_layers("sliding_attention")?);
    let is_nested = full.is_some() || sliding.is_some();
    let whole = if is_nested { full } else { parameters };
    let base = keys
        .optional_real("rope_theta", BASE_RANGE)?
        .unwrap_or(ROPE_BASE_DEFAULT);
    let rope = one(keys, whole.as_ref(), (base, head_dim, context_length))?;
    let window_base = keys.optional_real("rope_local_base_freq", BASE_RANGE)?;
    let window_rope = match (sliding, window_base) {
        (Some(sliding), base_of_family) => {
            let base = base_of_family.unwrap_or(base);
            Some(one(keys, Some(&sliding), (base, head_dim, context_length))?)
        }
        (None, Some(base)) => Some(Rope {
            base,
            scaling: RopeScaling::None,
            ..rope.clone()
        }),
        (None, None) => None,
    };
    Ok((rope, window_rope))
}

fn one(
    keys: &Keys<'_>,
    parameters: Option<&Object<'_>>,
    (base, head_dim, context_length): (f32, usize, u32),
) -> Result<Rope, ConfigError> {
    const PART: &str = "partial_rotary_factor";
    const PART_RANGE: (f32, f32) = (0.0, 1.0);
    let own = |key, range| match parameters {
        Some(parameters) => real_of(parameters, key, range),
        None => Ok(None),
    };
    let part = match own(PART, PART_RANGE)? {
        Some(part) => Some(part),
        None => keys.optional_real(PART, PART_RANGE)?,
    };
    // transformers cuts the fraction off. The product is rounded to f32, as the factor was.
    let dims = (head_dim as f32 * part.unwrap_or(1.0)) as usize;
    if dims == 0 || !dims.is_multiple_of(2) {
        return keys.unsupported(PART, part.unwrap_or(1.0), "an odd part of a head");
    }
    Ok(Rope {
        pairs: RopePairs::Halves,
        base: own("rope_theta", BASE_RANGE)?.unwrap_or(base),
        dims,
        scaling: match parameters {
            Some(parameters) => scaling(keys, parameters, (dims, context_length))?,
            None => RopeScaling::None,
        },
    })
}

fn scaling(
    keys: &Keys<'_>,
    parameters: &Object<'_>,
    (dims, context_length): (usize, u32),
) -> Result<RopeScaling, ConfigError> {
    const ORIGINAL: &str = "original_max_position_embeddings";
    let required = |key| -> Result<f32, ConfigError> {
        let missing = || FolderError::MissingKey {
            key: parameters.full(key),
        };
        Ok(real_of(parameters, key, FACTORS_RANGE)?.ok_or_else(missing)?)
    };
    let original = || -> Result<u32, ConfigError> {
        if let Some(original) = keys.optional_count(ORIGINAL, CONTEXT_MAX)? {
            return Ok(original);
        }
        let inner = parameters.u64(ORIGINAL)?;
        let inner = inner.map(|number| super::in_range(&parameters.full(ORIGINAL), number, CONTEXT_MAX));
        Ok(inner.transpose()?.unwrap_or(context_length))
    };
    let kind = match parameters.str("rope_type")? {
        Some(kind) => Some(kind),
        None => parameters.str("type")?,
    };
    match kind {
        None | Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear {
            factor: required("factor")?,
        }),
        Some("llama3") => {
            let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
            if low >= high {
                return Err(ConfigError::Inconsistent(Contradiction::RopeBands));
            }
            Ok(RopeScaling::Llama3 {
                factor: required("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context: original()?,
            })
        }
        // "su" is an older name.
        Some("longrope" | "su") => long_rope(parameters, original()?, (dims, context_length)),
        Some(other) => unsupported(parameters, "rope_type", (other.to_owned(), "RoPE scaling of this kind")),
    }
}

/// transformers takes the short factors until a sequence is longer than the original context. Then it takes the long ones, and
/// what it has cached no longer fits. Here one set serves every request, as for GGUF files: tokens must not change when a
/// sequence grows.
fn long_rope(
    parameters: &Object<'_>,
    original: u32,
    (dims, context_length): (usize, u32),
) -> Result<RopeScaling, ConfigError> {
    for key in ["short_mscale", "long_mscale"] {
        if parameters.f32(key)?.is_some() {
            let feature = "a magnitude of RoPE for each set of factors";
            return unsupported(parameters, key, ("set".to_owned(), feature));
        }
    }
    let key = if context_length > original {
        "long_factor"
    } else {
        "short_factor"
    };
    let missing = || FolderError::MissingKey {
        key: parameters.full(key),
    };
    let factors = parameters.f32s(key)?.ok_or_else(missing)?;
    if factors.len() != dims / 2 {
        return Err(ConfigError::Inconsistent(Contradiction::RopeFactors {
            factors: factors.len(),
            pairs: dims / 2,
        }));
    }
    for factor in &factors {
        real(&parameters.full(key), *factor, FACTORS_RANGE)?;
    }
    let stretch = real_of(parameters, "factor", FACTORS_RANGE)?.map(f64::from);
    let stretch = stretch.unwrap_or(f64::from(context_length) / f64::from(original));
    let magnitude = match real_of(parameters, "attention_factor", FACTORS_RANGE)? {
        Some(magnitude) => magnitude,
        None if stretch <= 1.0 || original <= 1 => 1.0,
        // Machines differ in the last bit of a logarithm in f64 at most. Rounding to f32 takes that away.
        None => (1.0 + stretch.ln() / f64::from(original).ln()).sqrt() as f32,
    };
    Ok(RopeScaling::Factors { factors, magnitude })
}
