//! The tensor table of a GGUF file: types, shapes and where the bytes are, all checked against the file's length.

use std::collections::HashSet;
use std::fmt;

use super::error::GgufError;
use super::reader::{Reader, What};

/// Fewest bytes of one table entry: name length, dimension count, one dimension, type, offset.
pub(super) const ENTRY_BYTES_MIN: u64 = 8 + 4 + 8 + 4 + 8;
/// Longest tensor name: gguf.md says 64, a few converters write more.
const NAME_BYTES_MAX: u64 = 256;
/// Most dimensions (gguf.md).
const DIMS_MAX: u32 = 4;

/// Number formats of weights that the engine can read. `dequantise.rs` describes the bytes of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(non_camel_case_types, reason = "the names that everybody knows the formats by")]
pub enum GgmlType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
}

impl GgmlType {
    pub const ALL: [GgmlType; 11] = [
        GgmlType::F32,
        GgmlType::F16,
        GgmlType::BF16,
        GgmlType::Q4_0,
        GgmlType::Q4_1,
        GgmlType::Q5_0,
        GgmlType::Q5_1,
        GgmlType::Q8_0,
        GgmlType::Q4_K,
        GgmlType::Q5_K,
        GgmlType::Q6_K,
    ];

    /// Number in GGUF files, name, elements of a block, bytes of a block.
    const fn facts(self) -> (u32, &'static str, usize, usize) {
        match self {
            GgmlType::F32 => (0, "F32", 1, 4),
            GgmlType::F16 => (1, "F16", 1, 2),
            GgmlType::BF16 => (30, "BF16", 1, 2),
            GgmlType::Q4_0 => (2, "Q4_0", 32, 2 + 16),
            GgmlType::Q4_1 => (3, "Q4_1", 32, 2 + 2 + 16),
            GgmlType::Q5_0 => (6, "Q5_0", 32, 2 + 4 + 16),
            GgmlType::Q5_1 => (7, "Q5_1", 32, 2 + 2 + 4 + 16),
            GgmlType::Q8_0 => (8, "Q8_0", 32, 2 + 32),
            GgmlType::Q4_K => (12, "Q4_K", 256, 2 + 2 + 12 + 128),
            GgmlType::Q5_K => (13, "Q5_K", 256, 2 + 2 + 12 + 32 + 128),
            GgmlType::Q6_K => (14, "Q6_K", 256, 128 + 64 + 16 + 2),
        }
    }

    /// The type's number in GGUF files.
    pub fn id(self) -> u32 {
        self.facts().0
    }

    pub fn name(self) -> &'static str {
        self.facts().1
    }

    /// Elements of one block: 1 for plain numbers.
    pub fn block_elements(self) -> usize {
        self.facts().2
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        self.facts().3
    }

    /// The names of all types, for people.
    pub(crate) fn names() -> String {
        GgmlType::ALL.map(GgmlType::name).join(", ")
    }

    pub(super) fn from_id(id: u32) -> Option<GgmlType> {
        GgmlType::ALL.into_iter().find(|kind| kind.id() == id)
    }
}

/// Names of the types we cannot run, so that the message says more than a number (ggml.h).
fn type_name(id: u32) -> &'static str {
    match id {
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => "unknown",
    }
}

/// One tensor of an open file. `dims` is in GGUF order: `dims[0]` is the length of a row, whose elements are
/// contiguous. `bytes` is aligned to at least 8 bytes.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    pub name: &'a str,
    pub kind: GgmlType,
    pub dims: &'a [u64],
    pub bytes: &'a [u8],
}

impl Tensor<'_> {
    /// Elements of one row.
    pub fn row_elements(&self) -> usize {
        self.dims.first().map_or(0, |&dim| dim as usize)
    }

    /// Number of rows: the product of all dimensions after the first.
    pub fn rows(&self) -> usize {
        self.dims.iter().skip(1).map(|&dim| dim as usize).product()
    }

    /// Number of elements. Checked at open: the bytes of all of them are in the file.
    pub fn element_count(&self) -> usize {
        self.dims.iter().map(|&dim| dim as usize).product()
    }
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Tensor({} {} {:?}, {} bytes)",
            self.name,
            self.kind.name(),
            self.dims,
            self.bytes.len()
        )
    }
}

/// A checked line of the tensor table; `start..end` are offsets in the file.
#[derive(Debug)]
pub(crate) struct TensorEntry {
    pub(crate) name: String,
    pub(crate) kind: GgmlType,
    pub(crate) dims: Vec<u64>,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// A line as the file has it: the offset is relative to a data section whose start is known only after the table.
struct RawEntry<'a> {
    name: &'a str,
    kind: GgmlType,
    dims: Vec<u64>,
    offset: u64,
    length: u64,
}

pub(super) fn read_table(reader: &mut Reader<'_>, count: u64, alignment: u64) -> Result<Vec<TensorEntry>, GgufError> {
    // `count` is limited and the file is long enough for it.
    let mut raw = Vec::with_capacity(count as usize);
    let mut names = HashSet::new();
    for index in 0..count {
        let entry = read_entry(reader, index)?;
        if !names.insert(entry.name) {
            return Err(GgufError::DuplicateTensor {
                tensor: entry.name.to_owned(),
            });
        }
        if !entry.offset.is_multiple_of(alignment) {
            return Err(GgufError::MisalignedTensor {
                tensor: entry.name.to_owned(),
                offset: entry.offset,
                alignment,
            });
        }
        raw.push(entry);
    }
    let data_start = reader.position().next_multiple_of(alignment);
    let file_bytes = reader.file_bytes();
    let entries = raw
        .into_iter()
        .map(|entry| place(entry, data_start, file_bytes))
        .collect::<Result<Vec<_>, _>>()?;
    check_overlaps(&entries)?;
    Ok(entries)
}

fn read_entry<'a>(reader: &mut Reader<'a>, index: u64) -> Result<RawEntry<'a>, GgufError> {
    let name = reader.string(What::TensorName(index), NAME_BYTES_MAX)?;
    let what = What::TensorEntry(name);
    let dim_count = reader.u32(what)?;
    if dim_count > DIMS_MAX {
        let reading = format!("the dimension count of tensor \"{name}\"");
        return Err(GgufError::AboveLimit {
            reading,
            value: dim_count.into(),
            limit: DIMS_MAX.into(),
        });
    }
    let mut dims = Vec::with_capacity(dim_count as usize);
    for _ in 0..dim_count {
        dims.push(reader.u64(what)?);
    }
    let type_id = reader.u32(what)?;
    let offset = reader.u64(what)?;
    let Some(kind) = GgmlType::from_id(type_id) else {
        return Err(GgufError::UnsupportedType {
            tensor: name.to_owned(),
            type_id,
            type_name: type_name(type_id),
            supported: GgmlType::names(),
        });
    };
    let length = byte_length(name, kind, &dims)?;
    Ok(RawEntry {
        name,
        kind,
        dims,
        offset,
        length,
    })
}

fn byte_length(name: &str, kind: GgmlType, dims: &[u64]) -> Result<u64, GgufError> {
    let bad = || GgufError::BadDimensions {
        tensor: name.to_owned(),
        dims: dims.to_vec(),
    };
    let elements = dims
        .iter()
        .try_fold(1u64, |product, &dim| product.checked_mul(dim))
        .ok_or_else(bad)?;
    if elements == 0 || dims.is_empty() {
        return Err(bad());
    }
    let block_elements = kind.block_elements() as u64;
    let row_elements = dims.first().copied().unwrap_or(0);
    if !row_elements.is_multiple_of(block_elements) {
        return Err(GgufError::RowNotBlocks {
            tensor: name.to_owned(),
            row_elements,
            block_elements: kind.block_elements(),
            type_name: kind.name(),
        });
    }
    (elements / block_elements)
        .checked_mul(kind.block_bytes() as u64)
        .ok_or_else(bad)
}

fn place(entry: RawEntry<'_>, data_start: u64, file_bytes: u64) -> Result<TensorEntry, GgufError> {
    let start = u128::from(data_start) + u128::from(entry.offset);
    let end = start + u128::from(entry.length);
    if end > u128::from(file_bytes) {
        return Err(GgufError::TensorOutsideFile {
            tensor: entry.name.to_owned(),
            end,
            file_bytes,
        });
    }
    // Both are at most the length of a mapped file, so they fit.
    let (start, end) = (start as usize, end as usize);
    Ok(TensorEntry {
        name: entry.name.to_owned(),
        kind: entry.kind,
        dims: entry.dims,
        start,
        end,
    })
}

fn check_overlaps(entries: &[TensorEntry]) -> Result<(), GgufError> {
    let mut order: Vec<&TensorEntry> = entries.iter().collect();
    order.sort_by_key(|entry| entry.start);
    for pair in order.windows(2) {
        if let [first, second] = pair
            && second.start < first.end
        {
            return Err(GgufError::OverlappingTensors {
                first: first.name.clone(),
                second: second.name.clone(),
            });
        }
    }
    Ok(())
}
