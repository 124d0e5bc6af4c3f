//! Versions of libraries and of the driver, as the libraries encode them.

use std::fmt;

use serde::{Serialize, Serializer};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    /// CUDA's own versions have none.
    pub patch: Option<u32>,
}

impl Version {
    pub const fn new(major: u32, minor: u32) -> Self {
        let patch = None;
        Self { major, minor, patch }
    }

    /// 13000 is 13.0, 12040 is 12.4 (cuDriverGetVersion). `None` for 0, which is a stub's answer, and below.
    pub(crate) fn of_cuda(encoded: i32) -> Option<Self> {
        let encoded = u32::try_from(encoded).ok().filter(|encoded| *encoded > 0)?;
        Some(Self::new(encoded / 1000, encoded % 1000 / 10))
    }

    /// 22809 is 2.28.9 (NCCL_VERSION in nccl.h since 2.9), 130100 is 13.1.0 (cublasLtGetVersion).
    pub(crate) fn of_library(encoded: u64) -> Self {
        // A number that is not of this form is shown as it was understood.
        let part = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        Self {
            major: part(encoded / 10_000),
            minor: part(encoded % 10_000 / 100),
            patch: Some(part(encoded % 100)),
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)?;
        match self.patch {
            Some(patch) => write!(f, ".{patch}"),
            None => Ok(()),
        }
    }
}

/// As text: a report is read by people, too.
impl Serialize for Version {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_decoded_as_the_libraries_encode_them() {
        assert_eq!(Version::of_cuda(13000), Some(Version::new(13, 0)));
        assert_eq!(Version::of_cuda(12040), Some(Version::new(12, 4)));
        assert_eq!(Version::of_cuda(0), None);
        assert_eq!(Version::of_cuda(-1), None);
        assert_eq!(Version::of_library(22809).to_string(), "2.28.9");
        assert_eq!(Version::of_library(130_100).to_string(), "13.1.0");
    }

    #[test]
    fn versions_have_an_order() {
        assert!(Version::new(12, 9) < Version::new(13, 0));
        assert!(Version::new(12, 4) < Version::new(12, 10));
    }
}
