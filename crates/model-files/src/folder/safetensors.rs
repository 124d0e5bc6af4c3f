//! The header of a safetensors file. Source of the layout: the format's description in the README of the safetensors
//! project.
//!
//! We read it ourselves: it is a length and a JSON object, and so each refusal names the tensor and what to do, a name that
//! appears twice is seen, and the memory that a header may take has a limit of ours.

use std::fmt;

use serde::Deserialize;
use serde::de::{IgnoredAny, MapAccess, Visitor};

use super::error::FolderError;
use crate::gguf::GgmlType;

/// Bytes of the header's length.
const LENGTH_BYTES: usize = 8;
/// The largest real headers have a few hundred kilobytes. The format's own limit is 100 MB.
const HEADER_BYTES_MAX: u64 = 16 << 20;
/// As for GGUF files.
const TENSOR_COUNT_MAX: usize = 65_536;
const DIMS_MAX: usize = 4;
/// Free text of the writer.
const METADATA: &str = "__metadata__";

/// A checked entry; `start..end` are offsets in the file.
#[derive(Debug)]
pub(super) struct Entry {
    pub name: String,
    pub dtype: String,
    /// In GGUF order: the length of a row first.
    pub dims: Vec<u64>,
    pub start: usize,
    pub end: usize,
}

impl Entry {
    /// `None`: a type that we cannot read.
    pub(super) fn kind(&self) -> Option<GgmlType> {
        match self.dtype.as_str() {
            "F32" => Some(GgmlType::F32),
            "F16" => Some(GgmlType::F16),
            "BF16" => Some(GgmlType::BF16),
            _ => None,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The entries in the file's order, with names that appear twice.
struct Header(Vec<(String, RawEntry)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Parses and checks the header of a whole file. `file` is its name.
pub(super) fn parse(bytes: &[u8], file: &str) -> Result<Vec<Entry>, FolderError> {
    let truncated = |needed, left: usize| FolderError::Truncated {
        file: file.to_owned(),
        needed,
        left: left as u64,
    };
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(truncated(LENGTH_BYTES as u64, bytes.len()));
    };
    let length = u64::from_le_bytes(*length);
    if length > HEADER_BYTES_MAX {
        return Err(FolderError::AboveLimit {
            reading: format!("the header's size in {file}"),
            value: length,
            limit: HEADER_BYTES_MAX,
        });
    }
    let Some((header, data)) = rest.split_at_checked(length as usize) else {
        return Err(truncated(length, rest.len()));
    };
    let Header(raw) = serde_json::from_slice(header).map_err(|cause| FolderError::Json {
        path: format!("the header of {file}").into(),
        cause,
    })?;
    if raw.len() > TENSOR_COUNT_MAX {
        return Err(FolderError::AboveLimit {
            reading: format!("the tensor count of {file}"),
            value: raw.len() as u64,
            limit: TENSOR_COUNT_MAX as u64,
        });
    }
    let entries = raw
        .into_iter()
        .map(|(name, entry)| place(name, entry, (bytes.len(), data.len())))
        .collect::<Result<Vec<_>, _>>()?;
    check_against_each_other(&entries)?;
    Ok(entries)
}

fn place(name: String, raw: RawEntry, (file_bytes, data_bytes): (usize, usize)) -> Result<Entry, FolderError> {
    let (start, end) = raw.data_offsets;
    if start > end || end > data_bytes as u64 {
        return Err(FolderError::TensorOutsideFile {
            tensor: name,
            start,
            end,
            data_bytes: data_bytes as u64,
        });
    }
    let data_start = file_bytes - data_bytes;
    // Both are at most the length of a mapped file, so they fit.
    let (start, end) = (data_start + start as usize, data_start + end as usize);
    let entry = Entry {
        name,
        dtype: raw.dtype,
        dims: raw.shape.into_iter().rev().collect(),
        start,
        end,
    };
    check_shape(&entry)?;
    Ok(entry)
}

fn check_shape(entry: &Entry) -> Result<(), FolderError> {
    // The length of other types is not known. Nothing reads them.
    let Some(kind) = entry.kind() else { return Ok(()) };
    let elements = entry
        .dims
        .iter()
        .try_fold(1u64, |product, &dim| product.checked_mul(dim));
    let expected = elements.and_then(|elements| elements.checked_mul(kind.block_bytes() as u64));
    match expected {
        Some(expected) if expected > 0 && (1..=DIMS_MAX).contains(&entry.dims.len()) => {
            let found = (entry.end - entry.start) as u64;
            if found == expected {
                return Ok(());
            }
            Err(FolderError::WrongLength {
                tensor: entry.name.clone(),
                found,
                expected,
            })
        }
        _ => Err(FolderError::BadShape {
            tensor: entry.name.clone(),
            shape: entry.dims.iter().copied().rev().take(2 * DIMS_MAX).collect(),
        }),
    }
}

fn check_against_each_other(entries: &[Entry]) -> Result<(), FolderError> {
    let mut order: Vec<&Entry> = entries.iter().collect();
    order.sort_by_key(|entry| (entry.start, entry.end));
    for pair in order.windows(2) {
        if let [first, second] = pair
            && second.start < first.end
        {
            return Err(FolderError::OverlappingTensors {
                first: first.name.clone(),
                second: second.name.clone(),
            });
        }
    }
    order.sort_by_key(|entry| &entry.name);
    match order.windows(2).find(|pair| pair[0].name == pair[1].name) {
        Some(pair) => Err(FolderError::DuplicateTensor {
            tensor: pair[0].name.clone(),
        }),
        None => Ok(()),
    }
}
