//! The files of a model, whatever their form. Tensors have their names in GGUF files here.

use crate::arch::Architecture;
use crate::folder::Folder;
use crate::gguf::{GgufError, GgufFile, Tensor};

/// The forms that a model's files may have.
#[derive(Debug)]
pub(crate) enum Files {
    /// One file, or the parts of a split one.
    Gguf(GgufFile),
    /// A Hugging Face folder, and the architecture that its config.json names.
    Folder(Folder, &'static Architecture),
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
