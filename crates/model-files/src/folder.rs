//! A Hugging Face folder: config.json and safetensors files, memory-mapped and completely checked before any tensor can be
//! read. The files are untrusted input.

mod error;
mod json;
mod names;
mod safetensors;
mod shards;

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use sha2::{Digest, Sha256};

use crate::arch::Architecture;
use crate::gguf::{GgufError, Tensor};

pub use error::FolderError;
pub(crate) use json::{ConfigFile, Object};

use names::Translator;
use shards::Shard;

/// An open folder. Its tensors have their names in GGUF files here.
pub struct Folder {
    path: PathBuf,
    config: ConfigFile,
    shards: Vec<Shard>,
    tensors: Vec<Place>,
    by_name: HashMap<String, usize>,
    translator: Translator,
    sha256: OnceLock<[u8; 32]>,
}

/// Where a tensor is: its name here, and its positions in the lists of files and of their entries.
struct Place {
    name: String,
    shard: usize,
    entry: usize,
}

impl Folder {
    /// Maps the weights of the folder, and checks their headers and that every tensor is one of the architecture's.
    ///
    /// # Errors
    /// [`FolderError`].
    pub(crate) fn open(
        path: &Path,
        config: ConfigFile,
        architecture: &'static Architecture,
    ) -> Result<Folder, FolderError> {
        let translator = Translator::new(architecture, config.is_nested());
        let shards = shards::open_all(path)?;
        let (mut tensors, mut by_name) = (Vec::new(), HashMap::new());
        for (shard, file) in shards.iter().enumerate() {
            for (entry, found) in file.entries.iter().enumerate() {
                if translator.ignores(&found.name) {
                    continue;
                }
                let Some(name) = translator.to_gguf(&found.name) else {
                    return Err(FolderError::UnexpectedTensor {
                        tensor: found.name.clone(),
                        architecture: architecture.name,
                    });
                };
                if found.kind().is_none() {
                    return Err(FolderError::UnsupportedDtype {
                        tensor: found.name.clone(),
                        dtype: found.dtype.clone(),
                    });
                }
                if by_name.insert(name.clone(), tensors.len()).is_some() {
                    return Err(FolderError::DuplicateTensor {
                        tensor: found.name.clone(),
                    });
                }
                tensors.push(Place { name, shard, entry });
            }
        }
        Ok(Folder {
            path: path.to_path_buf(),
            config,
            shards,
            tensors,
            by_name,
            translator,
            sha256: OnceLock::new(),
        })
    }

    /// # Errors
    /// [`GgufError::MissingTensor`] with the tensor's name in folders.
    pub(crate) fn tensor(&self, name: &str) -> Result<Tensor<'_>, GgufError> {
        let place = self.by_name.get(name).and_then(|&index| self.tensors.get(index));
        let found = place.and_then(|place| {
            let shard = &self.shards[place.shard];
            let entry = &shard.entries[place.entry];
            Some(Tensor {
                name: &place.name,
                kind: entry.kind()?,
                dims: &entry.dims,
                bytes: shard.bytes_of(entry),
            })
        });
        found.ok_or_else(|| GgufError::MissingTensor {
            tensor: self.translator.to_folder(name),
        })
    }

    /// Names in GGUF files of all tensors, in the order of the files.
    pub(crate) fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|place| place.name.as_str())
    }

    pub(crate) fn config(&self) -> &ConfigFile {
        &self.config
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of all files with weights.
    pub(crate) fn weight_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.file_bytes()).sum()
    }

    pub(crate) fn weight_files(&self) -> usize {
        self.shards.len()
    }

    /// SHA-256 over config.json and the files with weights, in the order of their names, each with its name and length.
    pub(crate) fn content_sha256(&self) -> [u8; 32] {
        *self.sha256.get_or_init(|| {
            let mut hasher = Sha256::new();
            hasher.update(b"baton folder 1\0");
            let mut add = |name: &str, bytes: &[u8]| {
                hasher.update((name.len() as u64).to_le_bytes());
                hasher.update(name);
                hasher.update((bytes.len() as u64).to_le_bytes());
                hasher.update(bytes);
            };
            add(json::CONFIG, self.config.bytes());
            // `shards` is sorted by name.
            self.shards.iter().for_each(|shard| add(&shard.name, shard.bytes()));
            hasher.finalize().into()
        })
    }
}

impl fmt::Debug for Folder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Folder")
            .field("path", &self.path)
            .field("files", &self.shards.len())
            .field("tensors", &self.tensors.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
