//! Typed and checked access to the keys of a folder's config.json.

use super::{ConfigError, in_range, real};
use crate::arch::Architecture;
use crate::folder::{FolderError, Object};

/// The keys of the model for text.
pub(super) struct Keys<'a> {
    pub text: Object<'a>,
    pub architecture: &'static Architecture,
}

impl Keys<'_> {
    pub(super) fn count(&self, key: &str, max: u32) -> Result<u32, ConfigError> {
        let missing = || FolderError::MissingKey {
            key: self.text.full(key),
        };
        Ok(self.optional_count(key, max)?.ok_or_else(missing)?)
    }

    /// `None` for a key that is absent or null.
    pub(super) fn optional_count(&self, key: &str, max: u32) -> Result<Option<u32>, ConfigError> {
        let number = self.text.u64(key)?;
        number
            .map(|number| in_range(&self.text.full(key), number, max))
            .transpose()
    }

    /// `None` for a key that is absent or null.
    pub(super) fn optional_real(&self, key: &str, range: (f32, f32)) -> Result<Option<f32>, ConfigError> {
        real_of(&self.text, key, range)
    }

    pub(super) fn unsupported<T>(
        &self,
        key: &str,
        value: impl ToString,
        feature: &'static str,
    ) -> Result<T, ConfigError> {
        unsupported(&self.text, key, (value.to_string(), feature))
    }
}

pub(super) fn real_of(object: &Object<'_>, key: &str, range: (f32, f32)) -> Result<Option<f32>, ConfigError> {
    let number = object.f32(key)?;
    number.map(|number| real(&object.full(key), number, range)).transpose()
}

pub(super) fn unsupported<T>(
    object: &Object<'_>,
    key: &str,
    (value, feature): (String, &'static str),
) -> Result<T, ConfigError> {
    Err(ConfigError::UnsupportedFeature {
        key: object.full(key),
        value,
        feature,
    })
}
