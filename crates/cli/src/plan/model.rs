//! The numbers of a model's files that plans need. The files are read; nothing is computed with the weights.

use anyhow::Context;
use model_files::info::ModelInfo;
use model_files::model::Model;
use workload::plan::PlanError;
use workload::plan::kv::KvShape;

use super::sheet::Sheet;
use crate::model::{resolve, with_exit};

#[derive(Clone, Debug)]
pub(super) struct ModelNumbers {
    pub name: String,
    pub parameters: f64,
    pub layers: f64,
    pub kv_heads: f64,
    pub head_size: f64,
    /// Query heads times head size.
    pub attention_width: f64,
}

/// `model` is what `baton up --model` takes. A model with a name is fetched when it is not on this machine.
pub(super) fn numbers(model: &str) -> anyhow::Result<ModelNumbers> {
    let resolved = resolve(model).map_err(with_exit)?;
    let files = Model::open(&resolved.path)?;
    let info = ModelInfo::of(&files).with_context(|| format!("the files of {model} cannot be described"))?;
    let config = &info.config;
    Ok(ModelNumbers {
        name: resolved.name.unwrap_or_else(|| files.name()),
        parameters: info.parameter_count as f64,
        layers: config.layer_count as f64,
        kv_heads: config.kv_head_count as f64,
        head_size: config.head_dim as f64,
        attention_width: config.query_size() as f64,
    })
}

/// Says which model the numbers come from.
pub(super) fn named(sheet: Sheet, model: Option<&ModelNumbers>) -> Sheet {
    match model {
        Some(model) => sheet.input_words(("model", "model"), model.name.clone()),
        None => sheet,
    }
}

/// What the engine keeps a key or a value in.
const KV_VALUE_BYTES: f64 = 2.0;

impl ModelNumbers {
    pub fn kv_shape(&self) -> KvShape {
        KvShape {
            layers: self.layers,
            kv_heads: self.kv_heads,
            head_size: self.head_size,
            bytes_per_value: KV_VALUE_BYTES,
        }
    }

    /// With 16-bit values.
    pub fn kv_bytes_per_token(&self) -> Result<f64, PlanError> {
        self.kv_shape().bytes_per_token()
    }
}
