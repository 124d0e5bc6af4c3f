//! Typed access to the metadata keys of a model's family, named here without the family in front.

use super::{ConfigError, in_range, real};
use crate::arch::Architecture;
use crate::gguf::{GgufFile, optional};

pub(super) struct Keys<'a> {
    pub file: &'a GgufFile,
    pub architecture: &'static Architecture,
}

impl Keys<'_> {
    pub(super) fn full(&self, key: &str) -> String {
        self.architecture.key(key)
    }

    pub(super) fn count(&self, key: &str, max: u32) -> Result<u32, ConfigError> {
        let key = self.full(key);
        in_range(&key, self.file.u64(&key)?, max)
    }

    /// `None` for an absent key.
    pub(super) fn optional_count(&self, key: &str, max: u32) -> Result<Option<u32>, ConfigError> {
        match optional(self.file.u64(&self.full(key)))? {
            Some(_) => self.count(key, max).map(Some),
            None => Ok(None),
        }
    }

    /// `None` for an absent key, and for zero, which writers use for "none".
    pub(super) fn optional_real(&self, key: &str, range: (f32, f32)) -> Result<Option<f32>, ConfigError> {
        let key = self.full(key);
        match optional(self.file.f32(&key))? {
            None | Some(0.0) => Ok(None),
            Some(value) => real(&key, value, range).map(Some),
        }
    }

    pub(super) fn unsupported<T>(
        &self,
        key: &str,
        value: impl ToString,
        feature: &'static str,
    ) -> Result<T, ConfigError> {
        Err(ConfigError::UnsupportedFeature {
            key: self.full(key),
            value: value.to_string(),
            feature,
        })
    }
}
