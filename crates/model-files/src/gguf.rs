//! A GGUF file, memory-mapped and completely checked before any tensor can be read.
//!
//! Source of the layout: the page gguf.md of ggml's documentation, versions 2 and 3, little endian. The file is untrusted
//! input.

mod dequantise;
mod error;
mod metadata;
mod reader;
mod split;
mod tensors;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use memmap2::Mmap;
use sha2::{Digest, Sha256};

pub use dequantise::{dequantise_row, k_scale};
pub use error::GgufError;
pub use metadata::MetadataValue;
pub(crate) use metadata::optional;
pub use tensors::{GgmlType, Tensor};

use crate::mapped_file;
use reader::{Reader, What};
use split::Split;
use tensors::TensorEntry;

/// Bytes every GGUF file starts with.
pub(crate) const MAGIC: [u8; 4] = *b"GGUF";
/// Data alignment when `general.alignment` is absent (gguf.md).
pub(crate) const DEFAULT_ALIGNMENT: u64 = 32;
/// Metadata key of the data alignment.
const ALIGNMENT_KEY: &str = "general.alignment";
/// Largest believable number of metadata keys; real files have fewer than 100.
const KEY_COUNT_MAX: u64 = 65_536;
/// Largest believable number of tensors; the largest real models have a few thousand.
const TENSOR_COUNT_MAX: u64 = 65_536;

/// An open model: one file, or the parts of a split one. Everything is checked at [`GgufFile::open`]; later calls only look
/// things up.
pub struct GgufFile {
    path: PathBuf,
    /// The first one has the metadata.
    parts: Vec<Part>,
    /// The part and the position in its table of each tensor.
    by_name: HashMap<String, (usize, usize)>,
    sha256: OnceLock<[u8; 32]>,
}

/// One mapped file.
struct Part {
    map: Mmap,
    contents: Contents,
}

/// The content of the header, apart from the bytes, so that tests can parse plain slices.
pub(crate) struct Contents {
    pub(crate) metadata: BTreeMap<String, MetadataValue>,
    pub(crate) tensors: Vec<TensorEntry>,
    version: u32,
}

impl GgufFile {
    /// Maps `path`, parses the header, the metadata and the tensor table and checks all of it. Of a split model `path` is the
    /// first part; the others are opened, too.
    ///
    /// # Errors
    /// [`GgufError`]: a file cannot be read, is no GGUF, is truncated, or names something this build cannot run.
    pub fn open(path: &Path) -> Result<GgufFile, GgufError> {
        let first = Part::open(path)?;
        let mut parts = vec![first];
        if let Some(split) = Split::of(path, &parts[0].contents)? {
            for index in 1..split.count {
                parts.push(split.open_part(index)?);
            }
            split.check_tensor_count(parts.iter().map(|part| part.contents.tensors.len()).sum())?;
        }
        let mut by_name = HashMap::new();
        for (part, opened) in parts.iter().enumerate() {
            for (index, entry) in opened.contents.tensors.iter().enumerate() {
                if by_name.insert(entry.name.clone(), (part, index)).is_some() {
                    let tensor = entry.name.clone();
                    return Err(GgufError::DuplicateTensor { tensor });
                }
            }
        }
        Ok(GgufFile {
            path: path.to_path_buf(),
            parts,
            by_name,
            sha256: OnceLock::new(),
        })
    }

    /// The tensor called `name`.
    ///
    /// # Errors
    /// [`GgufError::MissingTensor`].
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, GgufError> {
        let &(part, index) = self.by_name.get(name).ok_or_else(|| GgufError::MissingTensor {
            tensor: name.to_owned(),
        })?;
        let part = &self.parts[part];
        let entry = &part.contents.tensors[index];
        // The range was checked against the file's length at open, and a mapping does not change length.
        let bytes = &part.map[entry.start..entry.end];
        Ok(Tensor {
            name: &entry.name,
            kind: entry.kind,
            dims: &entry.dims,
            bytes,
        })
    }

    /// Names of all tensors, in the order of the files' tables.
    pub(crate) fn tensor_names(&self) -> impl Iterator<Item = &str> {
        let tensors = self.parts.iter().flat_map(|part| &part.contents.tensors);
        tensors.map(|entry| entry.name.as_str())
    }

    /// Value of a metadata key, whatever its type. The typed getters (`u32`, `str`, ...) name key and type on error.
    pub fn metadata(&self, key: &str) -> Option<&MetadataValue> {
        self.first().metadata.get(key)
    }

    /// All metadata keys in alphabetical order.
    pub(crate) fn metadata_keys(&self) -> impl Iterator<Item = &str> {
        self.first().metadata.keys().map(String::as_str)
    }

    fn first(&self) -> &Contents {
        &self.parts[0].contents
    }

    /// The path of the file, or of the first part.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many files the model has.
    pub(crate) fn part_count(&self) -> usize {
        self.parts.len()
    }

    /// GGUF version of the file: 2 or 3.
    pub fn version(&self) -> u32 {
        self.first().version
    }

    /// Length of all files in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.map.len() as u64).sum()
    }

    /// SHA-256 of the whole file; of a split one that over the parts in order, each with its length. The first call reads every
    /// byte; later calls are free.
    pub fn content_sha256(&self) -> [u8; 32] {
        *self.sha256.get_or_init(|| match &self.parts[..] {
            [whole] => Sha256::digest(&whole.map[..]).into(),
            parts => {
                let mut hasher = Sha256::new();
                hasher.update(b"baton split gguf 1\0");
                for part in parts {
                    hasher.update((part.map.len() as u64).to_le_bytes());
                    hasher.update(&part.map[..]);
                }
                hasher.finalize().into()
            }
        })
    }
}

impl fmt::Debug for GgufFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GgufFile")
            .field("path", &self.path)
            .field("version", &self.version())
            .field("file_bytes", &self.file_bytes())
            .field("parts", &self.parts.len())
            .field("tensors", &self.by_name.len())
            .finish_non_exhaustive()
    }
}

/// Lower-case hex digits of `bytes`.
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble & 15)]);
    bytes.iter().flat_map(|&byte| [digit(byte >> 4), digit(byte)]).collect()
}

impl Part {
    fn open(path: &Path) -> Result<Part, GgufError> {
        let map = mapped_file::map(path).map_err(|cause| GgufError::Io {
            path: path.to_path_buf(),
            cause,
        })?;
        let contents = Contents::parse(&map)?;
        Ok(Part { map, contents })
    }
}

impl Contents {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Contents, GgufError> {
        let mut reader = Reader::new(bytes);
        let version = read_version(&mut reader)?;
        let tensor_count = reader.count(What::TensorCount, TENSOR_COUNT_MAX, tensors::ENTRY_BYTES_MIN)?;
        let key_count = reader.count(What::KeyCount, KEY_COUNT_MAX, metadata::PAIR_BYTES_MIN)?;
        let metadata = metadata::read_all(&mut reader, key_count)?;
        let alignment = alignment(&metadata)?;
        let tensors = tensors::read_table(&mut reader, tensor_count, alignment)?;
        Ok(Contents {
            metadata,
            tensors,
            version,
        })
    }

    fn number(&self, key: &str) -> Option<u64> {
        self.metadata.get(key).and_then(MetadataValue::as_u64)
    }
}

fn read_version(reader: &mut Reader<'_>) -> Result<u32, GgufError> {
    let magic = reader.array::<4>(What::Magic)?;
    if magic != MAGIC {
        return Err(GgufError::NotGguf { found: magic });
    }
    let version = reader.u32(What::Version)?;
    match version {
        2 | 3 => Ok(version),
        other if matches!(other.swap_bytes(), 1..=3) => Err(GgufError::BigEndian),
        other => Err(GgufError::UnsupportedVersion { version: other }),
    }
}

fn alignment(metadata: &BTreeMap<String, MetadataValue>) -> Result<u64, GgufError> {
    /// Tensors of f32 must be readable in place, and no writer aligns to more than a page or two.
    const RANGE: std::ops::RangeInclusive<u64> = 8..=65_536;
    let Some(value) = metadata.get(ALIGNMENT_KEY) else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    let found = value.as_u64().ok_or_else(|| GgufError::WrongType {
        key: ALIGNMENT_KEY.to_owned(),
        expected: "u32",
        found: value.type_name(),
    })?;
    if !found.is_power_of_two() || !RANGE.contains(&found) {
        return Err(GgufError::BadAlignment { alignment: found });
    }
    Ok(found)
}

#[cfg(test)]
mod split_tests;
#[cfg(test)]
mod tests;
