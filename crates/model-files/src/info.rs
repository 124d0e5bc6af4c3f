//! The content of `baton model inspect`: identity, size, number formats, special tokens.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;
use serving_core::ids::TokenId;

use crate::config::ModelConfig;
use crate::files::Files;
use crate::folder::Folder;
use crate::gguf::{GgufError, GgufFile, optional};
use crate::model::Model;
use crate::tokenizer::{SpecialTokens, TokenizerError};

/// A summary of one model. Serialises to the JSON of `baton model inspect --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelInfo {
    pub path: PathBuf,
    /// The form of the files, such as `GGUF 3`, `GGUF 3 in 4 files` or `safetensors in 2 files`.
    pub form: String,
    /// Bytes of all files with weights.
    pub file_bytes: u64,
    /// `general.name`, where the file has one.
    pub name: Option<String>,
    pub architecture: String,
    pub license: Option<String>,
    /// Elements of all tensors; tied embeddings count once.
    pub parameter_count: u64,
    /// By type name: how many tensors, elements and bytes are in it.
    pub quantization: BTreeMap<&'static str, TypeShare>,
    pub config: ModelConfig,
    /// Numbers that the KV cache keeps for each token of a sequence. The engine's numerics decide how long each is.
    pub kv_values_per_token: u64,
    pub tokenizer: Option<String>,
    pub begin_token: Option<TokenId>,
    /// Whether plain prompts get the begin token in front.
    pub add_begin_token: bool,
    pub end_tokens: Vec<TokenId>,
    pub has_chat_template: bool,
}

/// The part of a model that is stored in one number format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TypeShare {
    pub tensors: u64,
    pub elements: u64,
    pub bytes: u64,
}

/// Why a model file cannot be described.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelInfoError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

impl ModelInfo {
    /// Reads metadata and the tensor table, no weights.
    ///
    /// # Errors
    /// [`ModelInfoError`]: the file is not a model that this build can run.
    pub fn of(model: &Model) -> Result<ModelInfo, ModelInfoError> {
        let config = model.config().clone();
        let mut quantization: BTreeMap<&'static str, TypeShare> = BTreeMap::new();
        for name in model.files().tensor_names() {
            let tensor = model.tensor(name)?;
            let share = quantization.entry(tensor.kind.name()).or_default();
            share.tensors += 1;
            share.elements += tensor.element_count() as u64;
            share.bytes += tensor.bytes.len() as u64;
        }
        let info = ModelInfo {
            path: model.path().to_path_buf(),
            form: String::new(),
            file_bytes: 0,
            name: None,
            architecture: config.architecture.name.to_owned(),
            license: None,
            parameter_count: model.parameter_count()?,
            quantization,
            kv_values_per_token: 2 * (config.layer_count * config.kv_size()) as u64,
            config,
            tokenizer: None,
            begin_token: None,
            add_begin_token: false,
            end_tokens: Vec::new(),
            has_chat_template: false,
        };
        match model.files() {
            Files::Gguf(file) => info.of_gguf(file),
            Files::Folder(folder, _) => info.of_folder(folder, model),
        }
    }

    fn of_gguf(self, file: &GgufFile) -> Result<ModelInfo, ModelInfoError> {
        let special = SpecialTokens::from_gguf(file)?;
        let text = |key| -> Result<Option<String>, GgufError> { Ok(optional(file.str(key))?.map(str::to_owned)) };
        Ok(ModelInfo {
            form: in_files(format!("GGUF {}", file.version()), file.part_count()),
            file_bytes: file.file_bytes(),
            name: text("general.name")?,
            license: text("general.license")?,
            tokenizer: text("tokenizer.ggml.pre")?,
            begin_token: special.begin,
            add_begin_token: special.add_begin,
            end_tokens: special.end,
            has_chat_template: optional(file.str("tokenizer.chat_template"))?.is_some(),
            ..self
        })
    }

    fn of_folder(self, folder: &Folder, model: &Model) -> Result<ModelInfo, ModelInfoError> {
        let tokenizer = model.tokenizer()?;
        let special = tokenizer.special().clone();
        Ok(ModelInfo {
            form: in_files("safetensors".to_owned(), folder.weight_files()),
            file_bytes: folder.weight_bytes(),
            tokenizer: Some("tokenizer.json".to_owned()),
            begin_token: special.begin,
            add_begin_token: special.add_begin,
            end_tokens: special.end,
            has_chat_template: model.chat_template().is_ok(),
            ..self
        })
    }

    /// One line such as `Q4_1 78%, Q8_0 22%, F32 0%`: shares of the elements, largest first.
    pub fn quantization_summary(&self) -> String {
        let mut shares: Vec<_> = self.quantization.iter().collect();
        shares.sort_by_key(|(name, share)| (std::cmp::Reverse(share.elements), **name));
        let percent = |share: &TypeShare| (share.elements as f64 / self.parameter_count.max(1) as f64 * 100.0).round();
        shares
            .iter()
            .map(|(name, share)| format!("{name} {}%", percent(share)))
            .collect::<Vec<_>>()
            .join(", ")
    }
}

fn in_files(form: String, count: usize) -> String {
    match count {
        1 => form,
        count => format!("{form} in {count} files"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::GgmlType;
    use crate::test_kit::{TinyFolder, TinyModel, model_path};

    #[test]
    fn the_real_model() {
        let info = ModelInfo::of(&Model::open(&model_path()).unwrap()).unwrap();
        // 28,311,552 embedding + 30 layers of 3,539,520 weights in norms and matrices + the output norm.
        assert_eq!(info.parameter_count, 134_515_008);
        assert_eq!(
            info.quantization.keys().copied().collect::<Vec<_>>(),
            ["F32", "Q4_1", "Q8_0"]
        );
        assert_eq!(info.quantization["Q4_1"].tensors, 210);
        assert_eq!(info.quantization_summary(), "Q4_1 79%, Q8_0 21%, F32 0%");
        assert_eq!((info.begin_token, info.add_begin_token), (Some(TokenId(1)), false));
        assert_eq!(info.end_tokens, [TokenId(0), TokenId(2)]);
        assert!(info.has_chat_template);
        let json = serde_json::to_value(&info).unwrap();
        assert_eq!(json["config"]["layer_count"], 30);
    }

    #[test]
    fn a_folder() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("tiny.gguf");
        let tiny = TinyModel {
            matrix_kind: GgmlType::BF16,
            ..TinyModel::default()
        };
        tiny.build().write(&path).unwrap();
        let model = Model::open(&path).unwrap();
        TinyFolder {
            model: &model,
            shards: 2,
        }
        .write(root.path());
        let (file, folder) = (
            ModelInfo::of(&model).unwrap(),
            ModelInfo::of(&Model::open(root.path()).unwrap()).unwrap(),
        );
        assert_eq!(
            (file.form.as_str(), folder.form.as_str()),
            ("GGUF 3", "safetensors in 2 files")
        );
        assert_eq!(folder.quantization, file.quantization);
        assert_eq!(
            (folder.begin_token, folder.end_tokens),
            (file.begin_token, file.end_tokens)
        );
        // 2 layers with 2 KV heads of 16, keys and values.
        assert_eq!(folder.kv_values_per_token, 128);
        assert!(folder.file_bytes > folder.quantization["BF16"].bytes);
    }
}
