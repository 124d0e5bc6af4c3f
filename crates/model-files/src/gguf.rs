//! A GGUF file, memory-mapped and completely checked before any tensor can be read.
//!
//! Source of the layout: the page gguf.md of ggml's documentation, versions 2 and 3, little endian. The file is untrusted
//! input.

mod dequantise;
mod error;
mod metadata;
mod reader;
mod tensors;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use memmap2::Mmap;
use sha2::{Digest, Sha256};

pub use dequantise::{dequantise_row, k_scale};
pub use error::GgufError;
pub use metadata::MetadataValue;
pub(crate) use metadata::optional;
pub use tensors::{GgmlType, Tensor};

use reader::{Reader, What};
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

/// An open model file. Everything is checked at [`GgufFile::open`]; later calls only look things up.
///
/// The tensors' bytes stay in the file's mapping. Another process that shortens the file while it is mapped makes
/// the operating system kill this one (SIGBUS); `baton model pull` therefore only ever replaces files by rename.
pub struct GgufFile {
    path: PathBuf,
    map: Mmap,
    contents: Contents,
    sha256: OnceLock<[u8; 32]>,
}

/// The content of the header, apart from the bytes, so that tests can parse plain slices.
pub(crate) struct Contents {
    pub(crate) metadata: BTreeMap<String, MetadataValue>,
    pub(crate) tensors: Vec<TensorEntry>,
    by_name: HashMap<String, usize>,
    version: u32,
}

impl GgufFile {
    /// Maps `path`, parses the header, the metadata and the tensor table and checks all of it.
    ///
    /// # Errors
    /// [`GgufError`]: the file cannot be read, is no GGUF, is truncated, or names something this build cannot run.
    pub fn open(path: &Path) -> Result<GgufFile, GgufError> {
        let io = |cause| GgufError::Io {
            path: path.to_path_buf(),
            cause,
        };
        let file = File::open(path).map_err(io)?;
        if !file.metadata().map_err(io)?.is_file() {
            return Err(io(std::io::Error::other("not a regular file")));
        }
        // SAFETY: the mapping is read-only and private to this struct. The one way to invalidate it is another
        // process shortening the file, which ends this process with SIGBUS and cannot corrupt memory; a writer
        // changing bytes in place is outside the contract of model files (documented on the type).
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let contents = Contents::parse(&map)?;
        Ok(GgufFile {
            path: path.to_path_buf(),
            map,
            contents,
            sha256: OnceLock::new(),
        })
    }

    /// The tensor called `name`.
    ///
    /// # Errors
    /// [`GgufError::MissingTensor`].
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, GgufError> {
        let entry = self.contents.tensor(name).ok_or_else(|| GgufError::MissingTensor {
            tensor: name.to_owned(),
        })?;
        // The range was checked against the file's length at open, and a mapping does not change length.
        let bytes = &self.map[entry.start..entry.end];
        Ok(Tensor {
            name: &entry.name,
            kind: entry.kind,
            dims: &entry.dims,
            bytes,
        })
    }

    /// Names of all tensors, in the order of the file's table.
    pub(crate) fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.contents.tensors.iter().map(|entry| entry.name.as_str())
    }

    /// Value of a metadata key, whatever its type. The typed getters (`u32`, `str`, ...) name key and type on error.
    pub fn metadata(&self, key: &str) -> Option<&MetadataValue> {
        self.contents.metadata.get(key)
    }

    /// All metadata keys in alphabetical order.
    pub(crate) fn metadata_keys(&self) -> impl Iterator<Item = &str> {
        self.contents.metadata.keys().map(String::as_str)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// GGUF version of the file: 2 or 3.
    pub fn version(&self) -> u32 {
        self.contents.version
    }

    /// Length of the whole file in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// SHA-256 of the whole file. The first call reads every byte; later calls are free.
    pub fn content_sha256(&self) -> [u8; 32] {
        *self.sha256.get_or_init(|| Sha256::digest(&self.map[..]).into())
    }

    /// [`GgufFile::content_sha256`] as 64 hex digits.
    pub fn content_sha256_hex(&self) -> String {
        hex(&self.content_sha256())
    }
}

impl fmt::Debug for GgufFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GgufFile")
            .field("path", &self.path)
            .field("version", &self.version())
            .field("file_bytes", &self.file_bytes())
            .field("tensors", &self.contents.tensors.len())
            .finish_non_exhaustive()
    }
}

/// Lower-case hex digits of `bytes`.
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble & 15)]);
    bytes.iter().flat_map(|&byte| [digit(byte >> 4), digit(byte)]).collect()
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
        let by_name = tensors
            .iter()
            .enumerate()
            .map(|(index, entry)| (entry.name.clone(), index))
            .collect();
        Ok(Contents {
            metadata,
            tensors,
            by_name,
            version,
        })
    }

    fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.get(*self.by_name.get(name)?)
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
mod tests;
