//! A model to run, whatever form its files have. Tensors have their names in GGUF files here, whatever the form.

use std::path::Path;

use crate::arch::FolderNorms;
use crate::chat_template::{ChatTemplate, ChatTemplateError};
use crate::config::{ConfigError, ModelConfig, folder};
use crate::files::Files;
use crate::folder::{ConfigFile, Folder, FolderError};
use crate::gguf::{GgufError, GgufFile, Tensor, dequantise_row};
use crate::name;
use crate::tokenizer::{Tokenizer, TokenizerError};

/// The files of one model, checked, and the model's numbers.
#[derive(Debug)]
pub struct Model {
    files: Files,
    config: ModelConfig,
}

/// Why files are not a model that this build can run. No retry with the same files helps.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error(transparent)]
    Config(#[from] ConfigError),
}

impl Model {
    /// Opens a GGUF file, the first part of a split one, or a Hugging Face folder. Reads metadata and tables of tensors and
    /// checks all of it; weights stay where they are.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn open(path: &Path) -> Result<Model, ModelError> {
        let files = if path.is_dir() {
            let config = ConfigFile::read(path)?;
            let architecture = folder::architecture(&config)?;
            Files::Folder(Folder::open(path, config, architecture)?, architecture)
        } else {
            Files::Gguf(GgufFile::open(path)?)
        };
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
            Files::Folder(folder, _) => folder.path(),
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

    /// The vector called `name` in GGUF files: a norm's whole weight, or a bias.
    ///
    /// # Errors
    /// [`GgufError::MissingTensor`].
    pub fn vector(&self, name: &str) -> Result<Vec<f32>, GgufError> {
        let tensor = self.tensor(name)?;
        let mut values = vec![0.0; tensor.row_elements()];
        dequantise_row(&tensor, 0, &mut values);
        if let Files::Folder(_, architecture) = &self.files
            && architecture.folder_norms == FolderNorms::LessOne
            && name.ends_with("norm.weight")
        {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        Ok(values)
    }

    /// The model's tokenizer.
    ///
    /// # Errors
    /// [`TokenizerError`]: there is none that this build knows, or it is damaged.
    pub fn tokenizer(&self) -> Result<Tokenizer, TokenizerError> {
        match &self.files {
            Files::Gguf(file) => Tokenizer::from_gguf(file),
            Files::Folder(folder, _) => {
                let max = self.config.vocab_size;
                let tokenizer = Tokenizer::for_rows(folder.path(), max)?;
                // A token without an embedding row would be an index outside the matrix.
                match tokenizer.vocab_size() {
                    found if found > max => Err(TokenizerError::VocabularySize { found, max }),
                    _ => Ok(tokenizer),
                }
            }
        }
    }

    /// The model's chat template.
    ///
    /// # Errors
    /// [`ChatTemplateError::Missing`] for a model without one; see [`ChatTemplateError`].
    pub fn chat_template(&self) -> Result<ChatTemplate, ChatTemplateError> {
        match &self.files {
            Files::Gguf(file) => ChatTemplate::from_gguf(file),
            Files::Folder(folder, _) => ChatTemplate::from_folder(folder.path()),
        }
    }

    /// SHA-256 over the content of the files that decide the model's numbers. The first call reads every byte; later calls
    /// are free.
    pub fn content_sha256(&self) -> [u8; 32] {
        match &self.files {
            Files::Gguf(file) => file.content_sha256(),
            Files::Folder(folder, _) => folder.content_sha256(),
        }
    }

    /// Elements of all tensors; tied embeddings count once.
    ///
    /// # Errors
    /// A tensor of the table is not in the files.
    pub fn parameter_count(&self) -> Result<u64, GgufError> {
        let count = |name: &str| -> Result<u64, GgufError> { Ok(self.tensor(name)?.element_count() as u64) };
        self.files.tensor_names().map(count).sum()
    }

    pub(crate) fn files(&self) -> &Files {
        &self.files
    }
}
