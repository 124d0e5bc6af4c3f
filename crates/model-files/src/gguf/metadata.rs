//! Metadata values of a GGUF file and the typed getters on top of them.

use std::collections::BTreeMap;

use super::GgufFile;
use super::error::GgufError;
use super::reader::{Reader, What};

/// Fewest bytes of one key-value pair: key length, value type, one byte of value.
pub(super) const PAIR_BYTES_MIN: u64 = 8 + 4 + 1;
/// Longest key (gguf.md).
const KEY_BYTES_MAX: u64 = 65_535;
/// Longest string value: an embedded tokenizer.json is the largest known, about 20 MB.
const STRING_BYTES_MAX: u64 = 64 << 20;
/// Arrays within arrays: gguf.md allows them, no known model nests more than one level.
const ARRAY_DEPTH_MAX: u32 = 4;

/// One metadata value with its type in the file.
#[derive(Clone, Debug, PartialEq)]
pub enum MetadataValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Vec<MetadataValue>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl MetadataValue {
    /// Name of the value's type, as in error messages.
    pub fn type_name(&self) -> &'static str {
        match self {
            MetadataValue::U8(_) => "u8",
            MetadataValue::I8(_) => "i8",
            MetadataValue::U16(_) => "u16",
            MetadataValue::I16(_) => "i16",
            MetadataValue::U32(_) => "u32",
            MetadataValue::I32(_) => "i32",
            MetadataValue::F32(_) => "f32",
            MetadataValue::Bool(_) => "bool",
            MetadataValue::String(_) => "a string",
            MetadataValue::Array(_) => "an array",
            MetadataValue::U64(_) => "u64",
            MetadataValue::I64(_) => "i64",
            MetadataValue::F64(_) => "f64",
        }
    }

    /// Any integer type, as a non-negative number; `None` for other types and for negative numbers.
    pub fn as_u64(&self) -> Option<u64> {
        self.as_i128().and_then(|number| u64::try_from(number).ok())
    }

    fn as_i128(&self) -> Option<i128> {
        match *self {
            MetadataValue::U8(v) => Some(v.into()),
            MetadataValue::I8(v) => Some(v.into()),
            MetadataValue::U16(v) => Some(v.into()),
            MetadataValue::I16(v) => Some(v.into()),
            MetadataValue::U32(v) => Some(v.into()),
            MetadataValue::I32(v) => Some(v.into()),
            MetadataValue::U64(v) => Some(v.into()),
            MetadataValue::I64(v) => Some(v.into()),
            _ => None,
        }
    }

    fn as_f32(&self) -> Option<f32> {
        match *self {
            MetadataValue::F32(v) => Some(v),
            MetadataValue::F64(v) => Some(v as f32),
            _ => None,
        }
    }
}

/// Typed getters. A missing key is [`GgufError::MissingKey`], another type [`GgufError::WrongType`]; wrap the call in
/// [`optional`] where absence is fine.
impl GgufFile {
    pub fn u32(&self, key: &str) -> Result<u32, GgufError> {
        self.integer(key, "u32")
    }

    pub fn u64(&self, key: &str) -> Result<u64, GgufError> {
        self.integer(key, "u64")
    }

    fn integer<T: TryFrom<i128>>(&self, key: &str, expected: &'static str) -> Result<T, GgufError> {
        let number = self.typed(key, expected, MetadataValue::as_i128)?;
        T::try_from(number).map_err(|_| GgufError::OutOfRange {
            key: key.to_owned(),
            expected,
        })
    }

    pub fn f32(&self, key: &str) -> Result<f32, GgufError> {
        self.typed(key, "f32", MetadataValue::as_f32)
    }

    pub fn bool(&self, key: &str) -> Result<bool, GgufError> {
        self.typed(key, "bool", |value| match value {
            MetadataValue::Bool(v) => Some(*v),
            _ => None,
        })
    }

    pub fn str(&self, key: &str) -> Result<&str, GgufError> {
        self.typed(key, "a string", |value| match value {
            MetadataValue::String(v) => Some(v.as_str()),
            _ => None,
        })
    }

    pub fn str_array(&self, key: &str) -> Result<Vec<&str>, GgufError> {
        self.elements(key, "an array of strings", |value| match value {
            MetadataValue::String(v) => Some(v.as_str()),
            _ => None,
        })
    }

    pub fn i32_array(&self, key: &str) -> Result<Vec<i32>, GgufError> {
        self.elements(key, "an array of i32", |value| {
            value.as_i128().and_then(|v| i32::try_from(v).ok())
        })
    }

    pub fn f32_array(&self, key: &str) -> Result<Vec<f32>, GgufError> {
        self.elements(key, "an array of f32", MetadataValue::as_f32)
    }

    fn elements<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl Fn(&'a MetadataValue) -> Option<T>,
    ) -> Result<Vec<T>, GgufError> {
        self.typed(key, expected, |value| match value {
            MetadataValue::Array(values) => values.iter().map(&convert).collect(),
            _ => None,
        })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a MetadataValue) -> Option<T>,
    ) -> Result<T, GgufError> {
        let value = self
            .metadata(key)
            .ok_or_else(|| GgufError::MissingKey { key: key.to_owned() })?;
        let found = value.type_name();
        convert(value).ok_or_else(|| GgufError::WrongType {
            key: key.to_owned(),
            expected,
            found,
        })
    }
}

/// Turns "the key is missing" into `None` and leaves every other error.
pub fn optional<T>(result: Result<T, GgufError>) -> Result<Option<T>, GgufError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(GgufError::MissingKey { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

pub(super) fn read_all(reader: &mut Reader<'_>, count: u64) -> Result<BTreeMap<String, MetadataValue>, GgufError> {
    let mut metadata = BTreeMap::new();
    for index in 0..count {
        let key = reader.string(What::Key(index), KEY_BYTES_MAX)?;
        let type_id = reader.u32(What::Value(key))?;
        let value = read_value(reader, What::Value(key), (type_id, 0))?;
        if metadata.insert(key.to_owned(), value).is_some() {
            return Err(GgufError::DuplicateKey { key: key.to_owned() });
        }
    }
    Ok(metadata)
}

fn read_value(
    reader: &mut Reader<'_>,
    what: What<'_>,
    (type_id, depth): (u32, u32),
) -> Result<MetadataValue, GgufError> {
    Ok(match type_id {
        0 => MetadataValue::U8(u8::from_le_bytes(reader.array(what)?)),
        1 => MetadataValue::I8(i8::from_le_bytes(reader.array(what)?)),
        2 => MetadataValue::U16(u16::from_le_bytes(reader.array(what)?)),
        3 => MetadataValue::I16(i16::from_le_bytes(reader.array(what)?)),
        4 => MetadataValue::U32(reader.u32(what)?),
        5 => MetadataValue::I32(i32::from_le_bytes(reader.array(what)?)),
        6 => MetadataValue::F32(f32::from_le_bytes(reader.array(what)?)),
        7 => match reader.array(what)? {
            [0] => MetadataValue::Bool(false),
            [1] => MetadataValue::Bool(true),
            [byte] => {
                return Err(GgufError::InvalidBool {
                    reading: what.to_string(),
                    byte,
                });
            }
        },
        8 => MetadataValue::String(reader.string(what, STRING_BYTES_MAX)?.to_owned()),
        9 => read_array(reader, what, depth + 1)?,
        10 => MetadataValue::U64(reader.u64(what)?),
        11 => MetadataValue::I64(i64::from_le_bytes(reader.array(what)?)),
        12 => MetadataValue::F64(f64::from_le_bytes(reader.array(what)?)),
        type_id => {
            return Err(GgufError::UnknownValueType {
                reading: what.to_string(),
                type_id,
            });
        }
    })
}

fn read_array(reader: &mut Reader<'_>, what: What<'_>, depth: u32) -> Result<MetadataValue, GgufError> {
    if depth > ARRAY_DEPTH_MAX {
        return Err(GgufError::NestedTooDeep {
            reading: what.to_string(),
            limit: ARRAY_DEPTH_MAX,
        });
    }
    let type_id = reader.u32(what)?;
    let Some(bytes_each) = element_bytes_min(type_id) else {
        return Err(GgufError::UnknownValueType {
            reading: what.to_string(),
            type_id,
        });
    };
    let length = reader.array_length(what, bytes_each)?;
    // The length is within the element budget and the file is long enough for it.
    let mut values = Vec::with_capacity(length as usize);
    for _ in 0..length {
        values.push(read_value(reader, what, (type_id, depth))?);
    }
    Ok(MetadataValue::Array(values))
}

/// Fewest bytes of one value of the type: strings are at least their length, arrays their type and length.
fn element_bytes_min(type_id: u32) -> Option<u64> {
    match type_id {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        8 | 10..=12 => Some(8),
        9 => Some(12),
        _ => None,
    }
}
