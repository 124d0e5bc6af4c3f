//! Value types of configuration keys that carry a unit.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A number of bytes, written `512MiB`. Accepts B, kB, MB, GB, KiB, MiB, GiB, TiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

const BYTE_UNITS: &[(&str, u64)] = &[
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("B", 1),
];

#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{text}` is not a size; write a whole number and a unit, for example 512MiB, 2GiB or 64KiB")]
pub struct ByteSizeError {
    text: String,
}

impl ByteSize {
    pub const fn mib(mib: u64) -> Self {
        Self(mib << 20)
    }
    pub fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for ByteSize {
    type Err = ByteSizeError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ByteSizeError { text: text.to_owned() };
        let trimmed = text.trim();
        let digits = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(digits);
        let number: u64 = number.parse().map_err(|_| error())?;
        let unit = unit.trim();
        // Without a unit `--kv-cache-memory 12` would make a pool of one block.
        let known = BYTE_UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit));
        let factor = known.ok_or_else(error)?.1;
        number.checked_mul(factor).map(ByteSize).ok_or_else(error)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let binary = BYTE_UNITS.iter().filter(|(name, _)| name.ends_with("iB"));
        for (name, factor) in binary {
            if self.0 != 0 && self.0.is_multiple_of(*factor) {
                return write!(f, "{}{name}", self.0 / factor);
            }
        }
        write!(f, "{}B", self.0)
    }
}

impl Serialize for ByteSize {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_back_as_they_print() {
        for text in ["512MiB", "2GiB", "1KiB", "1000B", "0B"] {
            assert_eq!(text.parse::<ByteSize>().unwrap().to_string(), text);
        }
        assert_eq!("2 GB".parse(), Ok(ByteSize(2_000_000_000)));
    }

    #[test]
    fn nonsense_and_overflow_are_refused_with_an_example() {
        for text in ["", "17", "MiB", "-1MiB", "1.5GiB", "99999999999TiB", "3 parsecs"] {
            let error = text.parse::<ByteSize>().unwrap_err();
            assert!(error.to_string().contains("512MiB"), "{error}");
        }
    }
}
