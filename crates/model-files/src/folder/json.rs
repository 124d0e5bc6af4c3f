//! JSON files of a folder, read with a limit, and typed access to the keys of config.json.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value};

use super::error::FolderError;

pub(super) const CONFIG: &str = "config.json";
/// Real ones have a few kilobytes.
const CONFIG_BYTES_MAX: u64 = 1 << 20;
/// The object of a model for text within the config.json of one that also reads images.
const TEXT_CONFIG: &str = "text_config";

/// The content of config.json.
pub(crate) struct ConfigFile {
    bytes: Vec<u8>,
    root: Map<String, Value>,
}

impl ConfigFile {
    /// # Errors
    /// [`FolderError`]: there is none, or it is no JSON object.
    pub(crate) fn read(folder: &Path) -> Result<ConfigFile, FolderError> {
        let path = folder.join(CONFIG);
        if !path.exists() {
            let folder = folder.to_path_buf();
            return Err(FolderError::NoConfig { folder });
        }
        let bytes = read_limited(&path, CONFIG_BYTES_MAX)?;
        ConfigFile::parse(bytes).map_err(|cause| FolderError::Json { path, cause })
    }

    pub(super) fn parse(bytes: Vec<u8>) -> Result<ConfigFile, serde_json::Error> {
        let root = serde_json::from_slice(&bytes)?;
        Ok(ConfigFile { bytes, root })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn root(&self) -> Object<'_> {
        Object {
            map: &self.root,
            place: String::new(),
            defaults: &[],
        }
    }

    /// Whether the model for text is a part of another one.
    pub(crate) fn is_nested(&self) -> bool {
        self.root.get(TEXT_CONFIG).is_some_and(Value::is_object)
    }

    /// The keys of the model for text. `defaults` stand for absent keys.
    pub(crate) fn text(&self, defaults: &'static [(&'static str, u64)]) -> Object<'_> {
        let root = self.root();
        let nested = root.object(TEXT_CONFIG).ok().flatten();
        Object {
            defaults,
            ..nested.unwrap_or(root)
        }
    }
}

/// A JSON object, with its place in the file for error messages.
#[derive(Clone)]
pub(crate) struct Object<'a> {
    map: &'a Map<String, Value>,
    place: String,
    defaults: &'static [(&'static str, u64)],
}

/// Typed getters. They give `None` for a key that is absent or null.
impl<'a> Object<'a> {
    /// The key with its place.
    pub(crate) fn full(&self, key: &str) -> String {
        format!("{}{key}", self.place)
    }

    pub(crate) fn value(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub(crate) fn is_absent(&self, key: &str) -> bool {
        !self.map.contains_key(key)
    }

    /// A null is not replaced by the default.
    fn default(&self, key: &str) -> Option<u64> {
        let known = self.defaults.iter().find(|(name, _)| *name == key);
        known.filter(|_| self.is_absent(key)).map(|(_, number)| *number)
    }

    pub(crate) fn u64(&self, key: &str) -> Result<Option<u64>, FolderError> {
        let found = self.typed(key, "a whole number", Value::as_u64)?;
        Ok(found.or_else(|| self.default(key)))
    }

    pub(crate) fn f32(&self, key: &str) -> Result<Option<f32>, FolderError> {
        let found = self.typed(key, "a number", Value::as_f64)?;
        Ok(found
            .map(|number| number as f32)
            .or_else(|| self.default(key).map(|number| number as f32)))
    }

    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, FolderError> {
        let found = self.typed(key, "true or false", Value::as_bool)?;
        Ok(found.or_else(|| self.default(key).map(|number| number != 0)))
    }

    pub(crate) fn str(&self, key: &str) -> Result<Option<&'a str>, FolderError> {
        self.typed(key, "a string", Value::as_str)
    }

    pub(crate) fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>, FolderError> {
        let number = |value: &Value| value.as_f64().map(|number| number as f32);
        self.typed(key, "a list of numbers", |value| {
            value.as_array()?.iter().map(number).collect()
        })
    }

    pub(crate) fn strs(&self, key: &str) -> Result<Option<Vec<&'a str>>, FolderError> {
        self.typed(key, "a list of strings", |value| {
            value.as_array()?.iter().map(Value::as_str).collect()
        })
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Object<'a>>, FolderError> {
        let map = self.typed(key, "an object", Value::as_object)?;
        Ok(map.map(|map| Object {
            map,
            place: format!("{}{key}.", self.place),
            defaults: &[],
        }))
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, FolderError> {
        let wrong = || FolderError::WrongType {
            key: self.full(key),
            expected,
        };
        self.value(key)
            .map(|value| convert(value).ok_or_else(wrong))
            .transpose()
    }
}

/// The file's bytes, unless there are more than `limit`.
pub(super) fn read_limited(path: &Path, limit: u64) -> Result<Vec<u8>, FolderError> {
    let io = |cause| FolderError::Io {
        path: path.to_path_buf(),
        cause,
    };
    let file = File::open(path).map_err(io)?;
    let metadata = file.metadata().map_err(io)?;
    if !metadata.is_file() {
        return Err(io(std::io::Error::other("not a regular file")));
    }
    let mut bytes = Vec::new();
    // One byte more than the limit tells that the file is too long, even while somebody appends to it.
    file.take(limit + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > limit {
        return Err(FolderError::AboveLimit {
            reading: format!("the size of {}", path.display()),
            value: metadata.len(),
            limit,
        });
    }
    Ok(bytes)
}
