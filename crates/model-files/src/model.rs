//! A model to run, whatever form its files have. Tensors have their names in GGUF files here, whatever the form.

use std::path::Path;

use crate::arch::{Architecture, FolderNorms};
use crate::chat_template::{ChatTemplate, ChatTemplateError};
use crate::config::{ConfigError, ModelConfig, folder};
use crate::folder::{ConfigFile, Folder, FolderError};
use crate::gguf::{GgufError, GgufFile, Tensor, dequantise_row};
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
    /// One file, or the parts of a split one.
    Gguf(GgufFile),
    /// A Hugging Face folder, and the architecture that its config.json names.
    Folder(Folder, &'static Architecture),
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

    /// The name that people call the model by: that of its file without the ending, or of its folder.
    pub fn name(&self) -> String {
        let name = self.path().file_stem().unwrap_or_default();
        name.to_string_lossy().into_owned()
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

    pub(crate) fn files(&self) -> &Files {
        &self.files
    }
}

impl Files {
    pub(crate) fn tensor(&self, name: &str) -> Result<Tensor<'_>, GgufError> {
        match self {
            Files::Gguf(file) => file.tensor(name),
            Files::Folder(folder, _) => folder.tensor(name),
        }
    }

    pub(crate) fn tensor_names(&self) -> impl Iterator<Item = &str> {
        let (file, folder) = match self {
            Files::Gguf(file) => (Some(file), None),
            Files::Folder(folder, _) => (None, Some(folder)),
        };
        let of_file = file.into_iter().flat_map(GgufFile::tensor_names);
        of_file.chain(folder.into_iter().flat_map(Folder::tensor_names))
    }
}
