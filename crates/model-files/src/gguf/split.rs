//! Models that were split into several files, as llama.cpp's gguf-split names and marks them.

use std::path::{Path, PathBuf};

use super::error::GgufError;
use super::{Contents, Part};

/// The part's position, counted from zero.
const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
/// Tensors of all parts together.
const TENSORS: &str = "split.tensors.count";
/// Names have five digits, but the largest models have a few dozen parts.
const COUNT_MAX: u64 = 1_024;

/// A split model, as its first part describes it.
pub(super) struct Split {
    first: PathBuf,
    /// What stands in front of `-00001-of-00003.gguf`.
    stem: String,
    pub count: u64,
    tensors: u64,
}

impl Split {
    /// `None` for a file that is the whole model.
    pub(super) fn of(path: &Path, contents: &Contents) -> Result<Option<Split>, GgufError> {
        let Some(count) = contents.metadata.get(COUNT) else {
            return Ok(None);
        };
        let required = |key: &'static str| contents.number(key).ok_or_else(|| missing(contents, key));
        let count = count.as_u64().ok_or_else(|| missing(contents, COUNT))?;
        if count > COUNT_MAX {
            return Err(GgufError::AboveLimit {
                reading: format!("the metadata key \"{COUNT}\""),
                value: count,
                limit: COUNT_MAX,
            });
        }
        if count <= 1 {
            return Ok(None);
        }
        let number = required(NUMBER)?;
        let file_name = path.file_name().unwrap_or_default().to_string_lossy();
        let ending = name_of_part("", number, count);
        let named = file_name.strip_suffix(&ending);
        match (number, named) {
            (0, Some(stem)) => Ok(Some(Split {
                first: path.to_path_buf(),
                stem: stem.to_owned(),
                count,
                tensors: required(TENSORS)?,
            })),
            (0, None) => Err(GgufError::PartName {
                path: path.to_path_buf(),
                count,
            }),
            (number, named) => Err(GgufError::NotTheFirstPart {
                path: path.to_path_buf(),
                part: number.saturating_add(1),
                first: path.with_file_name(name_of_part(named.unwrap_or("NAME"), 0, count)),
            }),
        }
    }

    /// Opens part `index`, counted from zero.
    pub(super) fn open_part(&self, index: u64) -> Result<Part, GgufError> {
        let path = self.first.with_file_name(name_of_part(&self.stem, index, self.count));
        if !path.exists() {
            let count = self.count;
            return Err(GgufError::MissingPart { path, count });
        }
        let part = Part::open(&path)?;
        let expected = [(NUMBER, index), (COUNT, self.count), (TENSORS, self.tensors)];
        for (key, expected) in expected {
            let found = part.contents.number(key);
            if found != Some(expected) {
                return Err(GgufError::PartDisagrees {
                    path,
                    key,
                    found: found.map_or_else(|| "nothing".to_owned(), |number| number.to_string()),
                    expected,
                });
            }
        }
        Ok(part)
    }

    pub(super) fn check_tensor_count(&self, found: usize) -> Result<(), GgufError> {
        let (found, expected) = (found as u64, self.tensors);
        if found == expected {
            Ok(())
        } else {
            Err(GgufError::PartTensors { found, expected })
        }
    }
}

fn name_of_part(stem: &str, index: u64, count: u64) -> String {
    format!("{stem}-{:05}-of-{count:05}.gguf", index.saturating_add(1))
}

/// The key is absent, or holds no number.
fn missing(contents: &Contents, key: &'static str) -> GgufError {
    let key_name = key.to_owned();
    match contents.metadata.get(key) {
        None => GgufError::MissingKey { key: key_name },
        Some(value) => GgufError::WrongType {
            key: key_name,
            expected: "a number of parts or tensors",
            found: value.type_name(),
        },
    }
}
