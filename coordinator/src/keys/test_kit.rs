//! Keys for the unit tests of this crate.

use std::path::Path;

use super::Keys;
use super::file::{ClientKey, KeyFile, Limits, Scope};
use super::secret::KeyHash;

/// The entry of a key that has this text, with the scope inference.
pub(crate) fn entry(name: &str, text: &str, limits: Limits) -> ClientKey {
    ClientKey {
        name: name.parse().expect("a name"),
        sha256: KeyHash::of(text),
        scopes: [Scope::Inference].into(),
        tenant: None,
        lane: None,
        weight: None,
        limits,
    }
}

/// What a coordinator has of a file with these entries.
pub(crate) fn keys_of(file: &Path, entries: Vec<ClientKey>) -> Keys {
    let all = KeyFile {
        keys: entries,
        ..KeyFile::default()
    };
    all.save(file).expect("it is written");
    Keys::open(file, 8000).expect("it is read")
}
