//! A bounds-checked little-endian cursor with a budget. Each length from the file is compared with the bytes that are left
//! before it is used.

use std::fmt;

use super::error::GgufError;

/// The most bytes that the whole header (metadata and tensor table) may take. A vocabulary of 262,144 tokens with merges
/// needs about 20 MB, and an embedded tokenizer.json as much again.
const HEADER_BYTES_MAX: u64 = 256 << 20;
/// Most array elements in all of the metadata: bounds the memory of arrays of small numbers (32 bytes each in
/// memory). Vocabulary 262,144 with merges, scores and types is 1.3 million.
const ARRAY_ELEMENTS_MAX: u64 = 4 << 20;

/// What is being read, for error messages. It costs nothing until an error is made.
#[derive(Clone, Copy, Debug)]
pub(super) enum What<'a> {
    Magic,
    Version,
    TensorCount,
    KeyCount,
    Key(u64),
    Value(&'a str),
    TensorName(u64),
    TensorEntry(&'a str),
}

impl fmt::Display for What<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            What::Magic => f.write_str("the magic"),
            What::Version => f.write_str("the version"),
            What::TensorCount => f.write_str("the tensor count"),
            What::KeyCount => f.write_str("the metadata key count"),
            What::Key(index) => write!(f, "the name of metadata key number {index}"),
            What::Value(key) => write!(f, "the value of metadata key \"{key}\""),
            What::TensorName(index) => write!(f, "the name of tensor number {index}"),
            What::TensorEntry(name) => write!(f, "the table entry of tensor \"{name}\""),
        }
    }
}

#[derive(Debug)]
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    position: usize,
    array_elements_left: u64,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Reader {
            bytes,
            position: 0,
            array_elements_left: ARRAY_ELEMENTS_MAX,
        }
    }

    pub(super) fn position(&self) -> u64 {
        self.position as u64
    }

    pub(super) fn file_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn left(&self) -> u64 {
        (self.bytes.len() - self.position) as u64
    }

    fn truncated(&self, what: What<'_>, needed: u64) -> GgufError {
        GgufError::Truncated {
            reading: what.to_string(),
            offset: self.position(),
            needed,
            left: self.left(),
        }
    }

    pub(super) fn take(&mut self, what: What<'_>, length: u64) -> Result<&'a [u8], GgufError> {
        if length > self.left() {
            return Err(self.truncated(what, length));
        }
        // `length` is at most the slice's length here, so it fits a usize and the sum does not overflow.
        let end = self.position + length as usize;
        if end as u64 > HEADER_BYTES_MAX {
            return Err(GgufError::AboveLimit {
                reading: format!("the header's size at {what}"),
                value: end as u64,
                limit: HEADER_BYTES_MAX,
            });
        }
        let taken = &self.bytes[self.position..end];
        self.position = end;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self, what: What<'_>) -> Result<[u8; N], GgufError> {
        let taken = self.take(what, N as u64)?;
        let mut array = [0; N];
        array.copy_from_slice(taken);
        Ok(array)
    }

    pub(super) fn u32(&mut self, what: What<'_>) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: What<'_>) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A count of things that take at least `bytes_each` bytes: refused when above `limit` or when the file cannot
    /// hold that many.
    pub(super) fn count(&mut self, what: What<'_>, limit: u64, bytes_each: u64) -> Result<u64, GgufError> {
        let count = self.u64(what)?;
        if count > limit {
            return Err(GgufError::AboveLimit {
                reading: what.to_string(),
                value: count,
                limit,
            });
        }
        // Both factors are far below 2^32 after the limit check.
        self.need(what, count.saturating_mul(bytes_each))?;
        Ok(count)
    }

    /// Length of an array whose elements take at least `bytes_each` bytes; counted against the element budget.
    pub(super) fn array_length(&mut self, what: What<'_>, bytes_each: u64) -> Result<u64, GgufError> {
        let length = self.count(what, self.array_elements_left, bytes_each)?;
        self.array_elements_left -= length;
        Ok(length)
    }

    fn need(&self, what: What<'_>, needed: u64) -> Result<(), GgufError> {
        if needed > self.left() {
            Err(self.truncated(what, needed))
        } else {
            Ok(())
        }
    }

    /// A length-prefixed UTF-8 string of at most `bytes_max` bytes.
    pub(super) fn string(&mut self, what: What<'_>, bytes_max: u64) -> Result<&'a str, GgufError> {
        let length = self.u64(what)?;
        if length > self.left() {
            return Err(self.truncated(what, length));
        }
        if length > bytes_max {
            return Err(GgufError::AboveLimit {
                reading: format!("the length of {what}"),
                value: length,
                limit: bytes_max,
            });
        }
        let bytes = self.take(what, length)?;
        std::str::from_utf8(bytes).map_err(|_| GgufError::InvalidUtf8 {
            reading: what.to_string(),
        })
    }
}
