//! The files that hold a folder's weights: one, or several with an index that says which tensor is in which.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

use memmap2::Mmap;
use serde::Deserialize;
use serde::de::{MapAccess, Visitor};

use super::error::FolderError;
use super::json::read_limited;
use super::safetensors::{self, Entry};
use crate::mapped_file;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// As for the header of one file.
const INDEX_BYTES_MAX: u64 = 16 << 20;
/// The largest models have about 200 files.
const SHARDS_MAX: usize = 1_024;

/// One mapped file.
pub(super) struct Shard {
    pub name: String,
    pub entries: Vec<Entry>,
    map: Mmap,
}

impl Shard {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.map
    }

    pub(super) fn bytes_of(&self, entry: &Entry) -> &[u8] {
        // The range was checked against the file's length at open, and a mapping does not change length.
        &self.map[entry.start..entry.end]
    }

    pub(super) fn file_bytes(&self) -> u64 {
        self.map.len() as u64
    }

    fn open(folder: &Path, name: &str) -> Result<Shard, FolderError> {
        let path = folder.join(name);
        let map = mapped_file::map(&path).map_err(|cause| FolderError::Io { path, cause })?;
        let entries = safetensors::parse(&map, name)?;
        let name = name.to_owned();
        Ok(Shard { name, entries, map })
    }
}

/// Opens all files with weights, sorted by name. A folder that has both forms is read as transformers reads it: the single
/// file counts.
pub(super) fn open_all(folder: &Path) -> Result<Vec<Shard>, FolderError> {
    if folder.join(SINGLE).exists() {
        return Ok(vec![Shard::open(folder, SINGLE)?]);
    }
    let path = folder.join(INDEX);
    if !path.exists() {
        let folder = folder.to_path_buf();
        return Err(FolderError::NoWeights { folder });
    }
    let bytes = read_limited(&path, INDEX_BYTES_MAX)?;
    let index: Index = serde_json::from_slice(&bytes).map_err(|cause| FolderError::Json { path, cause })?;
    let files = index.files()?;
    let shards = files
        .keys()
        .map(|name| {
            if folder.join(name).exists() {
                Shard::open(folder, name)
            } else {
                let file = (*name).to_owned();
                Err(FolderError::MissingShard { file })
            }
        })
        .collect::<Result<Vec<_>, _>>()?;
    for (shard, (_, tensors)) in shards.iter().zip(&files) {
        let found: BTreeSet<&str> = shard.entries.iter().map(|entry| entry.name.as_str()).collect();
        if let Some(tensor) = found.symmetric_difference(tensors).next() {
            return Err(FolderError::IndexDisagrees {
                file: shard.name.clone(),
                tensor: (*tensor).to_owned(),
            });
        }
    }
    Ok(shards)
}

/// The index. Its metadata, the sum of sizes, is not needed.
#[derive(Deserialize)]
struct Index {
    weight_map: WeightMap,
}

impl Index {
    /// The tensors of each file.
    fn files(&self) -> Result<BTreeMap<&str, BTreeSet<&str>>, FolderError> {
        let mut files: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        let mut seen = BTreeSet::new();
        for (tensor, file) in &self.weight_map.0 {
            if !is_shard_name(file) {
                return Err(FolderError::BadShardName { name: file.clone() });
            }
            if !seen.insert(tensor) {
                let tensor = tensor.clone();
                return Err(FolderError::DuplicateTensor { tensor });
            }
            files.entry(file).or_default().insert(tensor);
        }
        if files.len() > SHARDS_MAX {
            return Err(FolderError::AboveLimit {
                reading: format!("the number of files in {INDEX}"),
                value: files.len() as u64,
                limit: SHARDS_MAX as u64,
            });
        }
        Ok(files)
    }
}

/// A name that cannot lead out of the folder.
fn is_shard_name(name: &str) -> bool {
    name.ends_with(".safetensors")
        && !name.starts_with('.')
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

/// Pairs of a tensor and its file, with tensors that appear twice.
struct WeightMap(Vec<(String, String)>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors and the names of their files")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(WeightMap(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}
