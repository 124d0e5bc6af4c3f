//! A model to run, whatever form its files have. Tensors have their names in GGUF files here, whatever the form.

use std::path::Path;

use crate::chat_template::{ChatTemplate, ChatTemplateError};
use crate::config::{ConfigError, ModelConfig};
use crate::gguf::{GgufError, GgufFile, Tensor};
use crate::name;
use crate::tokenizer::{Tokenizer, TokenizerError};

/// The files of one model, checked, and the model's numbers.
#[derive(Debug)]
pub struct Model {
    files: Files,
    config: ModelConfig,
}

/// The forms that a model's files may have.
#[derive(Debug)]
pub(crate) enum Files {
    Gguf(GgufFile),
}

/// Why files are not a model that this build can run. No retry with the same files helps.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(transparent)]
    Config(#[from] ConfigError),
}

impl Model {
    /// Opens a GGUF file. Reads metadata and the tensor table and checks all of it; weights stay where they are.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn open(path: &Path) -> Result<Model, ModelError> {
        let files = Files::Gguf(GgufFile::open(path)?);
        let config = ModelConfig::read(&files)?;
        Ok(Model { files, config })
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The path that the model was opened with.
    pub fn path(&self) -> &Path {
        match &self.files {
            Files::Gguf(file) => file.path(),
        }
    }

    /// The name that people call the model by: that of its file without the ending and the number of its part, or of its
    /// folder. A snapshot in the cache of the Hugging Face hub has the name of its repository, `org/name`.
    pub fn name(&self) -> String {
        name::of(self.path())
    }

    /// The tensor called `name` in GGUF files.
    ///
    /// # Errors
    /// [`GgufError::MissingTensor`].
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, GgufError> {
        self.files.tensor(name)
    }

    /// The model's tokenizer.
    ///
    /// # Errors
    /// [`TokenizerError`]: there is none that this build knows, or it is damaged.
    pub fn tokenizer(&self) -> Result<Tokenizer, TokenizerError> {
        match &self.files {
            Files::Gguf(file) => Tokenizer::from_gguf(file),
        }
    }

    /// The model's chat template.
    ///
    /// # Errors
    /// [`ChatTemplateError::Missing`] for a model without one; see [`ChatTemplateError`].
    pub fn chat_template(&self) -> Result<ChatTemplate, ChatTemplateError> {
        match &self.files {
            Files::Gguf(file) => ChatTemplate::from_gguf(file),
        }
    }

    /// SHA-256 over the content of the files that decide the model's numbers. The first call reads every byte; later calls
    /// are free.
    pub fn content_sha256(&self) -> [u8; 32] {
        match &self.files {
            Files::Gguf(file) => file.content_sha256(),
        }
    }

    pub(crate) fn files(&self) -> &Files {
        &self.files
    }
}

impl Files {
    pub(crate) fn tensor(&self, name: &str) -> Result<Tensor<'_>, GgufError> {
        match self {
            Files::Gguf(file) => file.tensor(name),
        }
    }

    pub(crate) fn tensor_names(&self) -> impl Iterator<Item = &str> {
        match self {
            Files::Gguf(file) => file.tensor_names(),
        }
    }
}
