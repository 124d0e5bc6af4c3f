//! The file of keys. It has the hashes of keys and never a key.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{File, TryLockError};
use std::io::{Read as _, Write as _};
use std::num::NonZeroU32;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serving_core::request::Lane;
use thiserror::Error;

use super::secret::{CacheSecret, KeyHash};

/// Each request is compared with every key, at some 20 ns each.
const KEYS_MAX: usize = 1_000;
/// A key with all its limits is some 300 bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
const NAME_CHARS_MAX: usize = 64;
/// Of a wrong name in a message. Somebody may have pasted a key where a name belongs.
const SHOWN_CHARS_MAX: usize = 12;

/// What a key's holder may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Generation, models and tokens.
    Inference,
    /// Records, nodes, caches: everything that an operator sees and does.
    Admin,
    /// `/metrics` and `/load`.
    Metrics,
}

impl Scope {
    pub const ALL: [Self; 3] = [Self::Inference, Self::Admin, Self::Metrics];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Inference => "inference",
            Self::Admin => "admin",
            Self::Metrics => "metrics",
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The name of a key's holder, for operators: it stands in the access log.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct KeyName(String);

#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "a text that begins with `{0}` is no name of a key: write 1 to {NAME_CHARS_MAX} of a-z, A-Z, 0-9, `-`, `_` and `.`"
)]
pub struct BadKeyName(String);

impl KeyName {
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for KeyName {
    type Err = BadKeyName;

    fn from_str(text: &str) -> Result<Self, BadKeyName> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if text.is_empty() || text.len() > NAME_CHARS_MAX || !text.chars().all(is_plain) {
            return Err(BadKeyName(text.chars().take(SHOWN_CHARS_MAX).collect()));
        }
        Ok(Self(text.to_owned()))
    }
}

impl TryFrom<String> for KeyName {
    type Error = BadKeyName;

    fn try_from(text: String) -> Result<Self, BadKeyName> {
        text.parse()
    }
}

impl From<KeyName> for String {
    fn from(name: KeyName) -> Self {
        name.0
    }
}

impl fmt::Display for KeyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// How much a key's holder may use; `None`: as much as there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct Limits {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests_per_minute: Option<NonZeroU32>,
    /// Of prompts and answers together. They are counted when a request ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_minute: Option<NonZeroU32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub concurrent_requests: Option<NonZeroU32>,
}

/// What is kept of a key.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ClientKey {
    pub name: KeyName,
    pub sha256: KeyHash,
    /// At least one.
    pub scopes: BTreeSet<Scope>,
    /// Keys of one tenant share cached prefixes; `None`: the key shares them with no other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<KeyName>,
    /// The only lane in which its requests wait; `None`: a request says which.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lane: Option<Lane>,
    /// While others wait, too, it gets so many times the tokens of a key of weight 1. `None`: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<NonZeroU32>,
    #[serde(flatten)]
    pub limits: Limits,
}

impl ClientKey {
    /// An operator sees the metrics, too.
    #[must_use]
    pub fn may(&self, scope: Scope) -> bool {
        let is_seen_by_admins = scope == Scope::Metrics && self.scopes.contains(&Scope::Admin);
        self.scopes.contains(&scope) || is_seen_by_admins
    }
}

/// Fields of a key. With a flattened part serde cannot refuse others by itself.
const FIELDS: [&str; 9] = [
    "name",
    "sha256",
    "scopes",
    "tenant",
    "lane",
    "weight",
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_requests",
];

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct KeyFile {
    /// `baton keys` draws it when it writes the first key. Without it the salts of tenants follow from their names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_secret: Option<CacheSecret>,
    /// In the order of the file, with names that are unique.
    #[serde(default, rename = "key")]
    pub keys: Vec<ClientKey>,
}

/// Why a file of keys is refused. A message shows no value of the file but names: somebody may have pasted a key where it does not belong.
#[derive(Debug, Error)]
pub enum KeyFileError {
    #[error("there is no file of keys {file}; `baton keys create NAME --file {file}` makes one", file = .file.display())]
    Missing { file: PathBuf },
    #[error("cannot read the file of keys {file}: {source}", file = .file.display())]
    Read { file: PathBuf, source: std::io::Error },
    #[error("cannot write the file of keys {file}: {source}", file = .file.display())]
    Write { file: PathBuf, source: std::io::Error },
    #[error("{file} is no file of keys: {why}. `baton keys create` writes one", file = .file.display())]
    Wrong { file: PathBuf, why: BadKeys },
    #[error("another `baton keys` changes {file} at this moment; run the command again", file = .file.display())]
    Busy { file: PathBuf },
}

/// What is wrong with the content of a file.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum BadKeys {
    #[error("it has more than {FILE_BYTES_MAX} bytes")]
    TooLarge,
    #[error(
        "line {line} is not as it has to be. cache_secret, if it is there, has 64 hexadecimal digits and stands before the keys. A key has name, sha256 (64 hexadecimal digits) and scopes (inference, admin, metrics), and may have tenant, lane (interactive or batch), weight, requests_per_minute, tokens_per_minute and concurrent_requests, whole numbers from 1"
    )]
    Form { line: usize },
    #[error("key {place} of the file has a field that is not known, or a name or tenant that is none")]
    Field { place: usize },
    #[error("two keys are called {0}")]
    Twice(KeyName),
    #[error("the keys {0} and {1} have the same hash")]
    SameHash(KeyName, KeyName),
    #[error("the key {0} has no scope, so its holder may do nothing")]
    NoScope(KeyName),
    #[error("it has more than {KEYS_MAX} keys")]
    TooMany,
}

impl KeyFile {
    /// # Errors
    /// There is no such file, or it is no file of keys.
    pub fn load(file: &Path) -> Result<Self, KeyFileError> {
        let cannot_read = |source| KeyFileError::Read {
            file: file.to_owned(),
            source,
        };
        let wrong = |why| KeyFileError::Wrong {
            file: file.to_owned(),
            why,
        };
        let mut text = String::new();
        let opened = File::open(file).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => KeyFileError::Missing { file: file.to_owned() },
            _ => cannot_read(source),
        })?;
        let mut limited = opened.take(FILE_BYTES_MAX + 1);
        limited.read_to_string(&mut text).map_err(cannot_read)?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(wrong(BadKeys::TooLarge));
        }
        Self::parse(&text).map_err(wrong)
    }

    fn parse(text: &str) -> Result<Self, BadKeys> {
        let form = |error: toml::de::Error| {
            let before = error.span().map_or(0, |span| span.start);
            let line = text.bytes().take(before).filter(|byte| *byte == b'\n').count() + 1;
            BadKeys::Form { line }
        };
        let table: toml::Table = toml::from_str(text).map_err(form)?;
        let keys = table.get("key").and_then(toml::Value::as_array).into_iter().flatten();
        for (place, key) in keys.enumerate() {
            let mut fields = key.as_table().into_iter().flat_map(toml::Table::keys);
            if fields.any(|field| !FIELDS.contains(&field.as_str())) {
                return Err(BadKeys::Field { place: place + 1 });
            }
        }
        let file: Self = toml::from_str(text).map_err(form)?;
        file.check()?;
        Ok(file)
    }

    fn check(&self) -> Result<(), BadKeys> {
        if self.keys.len() > KEYS_MAX {
            return Err(BadKeys::TooMany);
        }
        for (place, key) in self.keys.iter().enumerate() {
            if key.scopes.is_empty() {
                return Err(BadKeys::NoScope(key.name.clone()));
            }
            for other in &self.keys[..place] {
                if other.name == key.name {
                    return Err(BadKeys::Twice(key.name.clone()));
                }
                if other.sha256.is(&key.sha256) {
                    return Err(BadKeys::SameHash(other.name.clone(), key.name.clone()));
                }
            }
        }
        Ok(())
    }

    /// Writes the file in one piece: a reader sees the old one or the new one.
    ///
    /// # Errors
    /// The keys are no file that could be read, or it cannot be written.
    pub fn save(&self, file: &Path) -> Result<(), KeyFileError> {
        self.check().map_err(|why| KeyFileError::Wrong {
            file: file.to_owned(),
            why,
        })?;
        let text = toml::to_string(self).map_err(std::io::Error::other);
        let written = text.and_then(|text| replace(file, &text));
        written.map_err(|source| KeyFileError::Write {
            file: file.to_owned(),
            source,
        })
    }

    /// Reads the file, lets `change` change it, and writes it, while no other process does the same. A file that is not there
    /// is empty.
    ///
    /// # Errors
    /// The file cannot be read or written, another process changes it, or `change` fails.
    pub fn change<T, E: From<KeyFileError>>(
        file: &Path,
        change: impl FnOnce(&mut Self) -> Result<T, E>,
    ) -> Result<T, E> {
        // A link stays one: its target is what a coordinator reads.
        let target = match std::fs::symlink_metadata(file) {
            Ok(found) if found.is_symlink() => std::fs::canonicalize(file).map_err(|source| KeyFileError::Read {
                file: file.to_owned(),
                source,
            })?,
            _ => file.to_owned(),
        };
        let file = target.as_path();
        // The lock is on the folder: the file itself is replaced.
        let folder = File::open(folder_of(file)).map_err(|source| KeyFileError::Read {
            file: folder_of(file).to_owned(),
            source,
        })?;
        match folder.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(KeyFileError::Busy { file: file.to_owned() }.into()),
            Err(TryLockError::Error(source)) => {
                return Err(KeyFileError::Write {
                    file: file.to_owned(),
                    source,
                }
                .into());
            }
        }
        let mut keys = match file.try_exists() {
            Ok(false) => Self::default(),
            _ => Self::load(file)?,
        };
        let done = change(&mut keys)?;
        keys.cache_secret.get_or_insert_with(CacheSecret::random);
        keys.save(file)?;
        Ok(done)
    }
}

fn folder_of(file: &Path) -> &Path {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// The new file has the rights and the owner of the one before: a coordinator that runs as somebody else must still read it. The first
/// one can be read by its owner alone.
fn replace(file: &Path, text: &str) -> std::io::Result<()> {
    let mut new = tempfile::NamedTempFile::new_in(folder_of(file))?;
    if let Ok(before) = std::fs::metadata(file) {
        let own = new.as_file().metadata()?;
        if (before.uid(), before.gid()) != (own.uid(), own.gid()) {
            std::os::unix::fs::fchown(new.as_file(), Some(before.uid()), Some(before.gid()))?;
        }
        new.as_file().set_permissions(before.permissions())?;
    }
    new.write_all(text.as_bytes())?;
    new.as_file().sync_all()?;
    new.persist(file)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const HASH: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    fn key(name: &str, more: &str) -> String {
        let hash = KeyHash::of(name);
        format!("[[key]]\nname = \"{name}\"\nsha256 = \"{hash}\"\nscopes = [\"inference\"]\n{more}\n")
    }

    #[test]
    fn a_file_is_read_as_it_is_written_and_only_by_its_owner() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("keys.toml");
        let limits = "requests_per_minute = 60\nconcurrent_requests = 2";
        let keys = KeyFile::parse(&(key("a", limits) + &key("b.c_d-e", ""))).expect("two keys");
        keys.save(&file).expect("is written");
        let again = KeyFile::load(&file).expect("is read");
        let [a, b] = &again.keys[..] else { panic!("{again:?}") };
        assert_eq!(a.limits.requests_per_minute, NonZeroU32::new(60));
        assert_eq!(a.limits.concurrent_requests, NonZeroU32::new(2));
        assert_eq!((a.limits.tokens_per_minute, b.limits), (None, Limits::default()));
        assert_eq!(b.name.as_str(), "b.c_d-e");
        let mode = file.metadata().expect("is there").permissions().mode();
        assert_eq!(mode & 0o077, 0, "{mode:o}");
    }

    #[test]
    fn what_is_no_file_of_keys_is_refused_with_the_reason() {
        let many: String = (0..=KEYS_MAX).map(|number| key(&number.to_string(), "")).collect();
        let same = format!(
            "{}[[key]]\nname = \"b\"\nsha256 = \"{}\"\nscopes = [\"admin\"]\n",
            key("a", ""),
            KeyHash::of("a")
        );
        for (text, reason) in [
            ("key = 3".to_owned(), "line 1"),
            ("\n[[keys]]\nname = \"a\"".to_owned(), "line 2"),
            ("\n\n[[key]\n".to_owned(), "line 3"),
            (key("a", "requests_per_minute = 0"), "is not as it has to be"),
            (key("a", "") + &key("b", "requests_per_hour = 1"), "key 2 of the file"),
            (key("a b", ""), "is not as it has to be"),
            (key("a", "") + &key("a", ""), "two keys are called a"),
            (same, "the same hash"),
            (
                format!("[[key]]\nname = \"a\"\nsha256 = \"{HASH}\"\nscopes = []"),
                "no scope",
            ),
            (
                format!("[[key]]\nname = \"a\"\nsha256 = \"{HASH}\"\nscopes = [\"root\"]"),
                "is not as it has to be",
            ),
            (
                "[[key]]\nname = \"a\"\nsha256 = \"ba78\"\nscopes = [\"admin\"]".to_owned(),
                "64 hexadecimal",
            ),
            (many, "more than 1000 keys"),
        ] {
            let refused = KeyFile::parse(&text).expect_err(reason).to_string();
            assert!(refused.contains(reason), "{refused} lacks {reason:?}");
        }
    }

    #[test]
    fn a_key_that_is_pasted_into_the_file_is_in_no_message() {
        let secret = super::super::secret::SecretKey::random();
        let secret = secret.text();
        let (name, hash, scopes) = ("\"a\"".to_owned(), format!("\"{HASH}\""), "[\"admin\"]".to_owned());
        let quoted = format!("\"{secret}\"");
        for [name, hash, scopes, more] in [
            [&quoted, &hash, &scopes, &String::new()],
            [&name, &quoted, &scopes, &String::new()],
            [&name, &hash, &quoted, &String::new()],
            [&name, &hash, &format!("[{quoted}]"), &String::new()],
            [&name, &hash, &scopes, &format!("tenant = \"{secret}!\"")],
            [&name, &hash, &scopes, &format!("tokens_per_minute = {quoted}")],
            [&name, &hash, &scopes, &format!("{secret} = 1")],
        ] {
            let text = format!("[[key]]\nname = {name}\nsha256 = {hash}\nscopes = {scopes}\n{more}\n");
            let refused = KeyFile::parse(&text).expect_err(&text).to_string();
            assert!(!refused.contains(&secret[8..24]), "{refused}");
        }
    }

    #[test]
    fn a_file_that_is_missing_is_told_from_one_that_cannot_be_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let missing = KeyFile::load(&folder.path().join("keys.toml"));
        assert!(matches!(missing, Err(KeyFileError::Missing { .. })), "{missing:?}");
        let unreadable = KeyFile::load(folder.path());
        assert!(matches!(unreadable, Err(KeyFileError::Read { .. })), "{unreadable:?}");
    }

    #[test]
    fn a_large_file_is_not_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("keys.toml");
        std::fs::write(&file, "#".repeat(FILE_BYTES_MAX as usize + 1)).expect("is written");
        let refused = KeyFile::load(&file).expect_err("too large");
        assert!(refused.to_string().contains("more than 1048576 bytes"), "{refused}");
    }

    #[test]
    fn a_link_stays_one_and_its_target_is_changed() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, link) = (folder.path().join("keys.toml"), folder.path().join("link"));
        KeyFile::parse(&key("a", ""))
            .expect("a key")
            .save(&file)
            .expect("is written");
        std::os::unix::fs::symlink(&file, &link).expect("is linked");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).expect("are given");
        let emptied: Result<(), KeyFileError> = KeyFile::change(&link, |keys| {
            keys.keys.clear();
            Ok(())
        });
        emptied.expect("is changed");
        assert!(link.is_symlink());
        let changed = KeyFile::load(&file).expect("is read");
        assert!(changed.keys.is_empty() && changed.cache_secret.is_some(), "{changed:?}");
        let mode = file.metadata().expect("is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o640, "the rights that it had");
        std::fs::remove_file(&file).expect("is removed");
        let dangling: Result<(), KeyFileError> = KeyFile::change(&link, |_| Ok(()));
        assert!(matches!(dangling, Err(KeyFileError::Read { .. })), "{dangling:?}");
    }

    #[test]
    fn two_that_change_the_file_do_not_lose_a_key() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("keys.toml");
        let outcome: Result<(), KeyFileError> = KeyFile::change(&file, |_| {
            let within: Result<(), KeyFileError> = KeyFile::change(&file, |_| Ok(()));
            assert!(matches!(within, Err(KeyFileError::Busy { .. })), "{within:?}");
            Ok(())
        });
        outcome.expect("nobody else");
        assert!(file.exists());
    }
}
