//! Keys of clients: who may ask this coordinator for what, and for how much of it. Without `--api-keys` nobody is asked who they are.
//!
//! Read `file` first: what is kept of a key. `api::access` asks for a key at each route; `KeySet` finds it, `usage` counts.

pub mod file;
mod follow;
pub mod secret;
mod session;
mod tenant;
#[cfg(test)]
pub(crate) mod test_kit;
mod usage;

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

use file::{ClientKey, KeyFile, KeyFileError, Scope};
use secret::KeyHash;
use service_runtime::watched_file;
use serving_core::ids::QueueOwner;
use serving_core::request::QueueShare;
pub(crate) use session::SESSION_TIME;
use session::Sessions;
use sha2::{Digest as _, Sha256};
pub use tenant::TenantSalt;
pub(crate) use tenant::prefix_salt;
use usage::Usage;
pub(crate) use usage::{OverLimit, Room};

/// A key of the file, with what its holder uses.
#[derive(Debug)]
pub(crate) struct HeldKey {
    pub entry: ClientKey,
    pub tenant: TenantSalt,
    pub share: QueueShare,
    /// It outlives a new reading of the file.
    usage: Arc<Mutex<Usage>>,
}

impl HeldKey {
    fn usage(&self) -> MutexGuard<'_, Usage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for one request.
    ///
    /// # Errors
    /// The key's holder is over a limit.
    pub(crate) fn begin(self: &Arc<Self>, now: Instant) -> Result<(InUse, Room), OverLimit> {
        let room = self.usage().begin(&self.entry.limits, now)?;
        Ok((InUse { key: self.clone() }, room))
    }
}

/// One request of a key's holder, until it is dropped.
#[derive(Debug)]
pub(crate) struct InUse {
    key: Arc<HeldKey>,
}

impl InUse {
    /// The tokens of the prompt and of the answer are known only now.
    pub(crate) fn used_tokens(&self, tokens: u32, now: Instant) {
        self.key.usage().used_tokens(tokens, &self.key.entry.limits, now);
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.key.usage().ended();
    }
}

/// Keys take turns in the queue. A key keeps its turn when the file is read again, and has the same on every coordinator.
fn share_of(key: &ClientKey) -> QueueShare {
    QueueShare {
        owner: QueueOwner(tenant::first_word(Sha256::digest(key.name.as_str()).into())),
        weight: key.weight.unwrap_or(NonZeroU32::MIN),
    }
}

/// All keys as the file had them at one reading.
#[derive(Debug, Default)]
struct KeySet(Vec<Arc<HeldKey>>);

impl KeySet {
    /// The keys of a file. A key that was there before goes on counting what it used.
    fn new(file: KeyFile, before: &KeySet) -> Self {
        let held = |entry: ClientKey| {
            // A key of the same name may be somebody else's.
            let known = before.0.iter().find(|held| held.entry.sha256.is(&entry.sha256));
            let usage = known.map(|held| held.usage.clone()).unwrap_or_default();
            let tenant = TenantSalt::of(file.cache_secret.as_ref(), &entry);
            let share = share_of(&entry);
            Arc::new(HeldKey {
                entry,
                tenant,
                share,
                usage,
            })
        };
        Self(file.keys.into_iter().map(held).collect())
    }

    /// Compares with every key, so that the time says nothing about where, or whether, one was found.
    fn find(&self, hash: &KeyHash) -> Option<&Arc<HeldKey>> {
        let mut found = None;
        for held in &self.0 {
            if held.entry.sha256.is(hash) {
                found = Some(held);
            }
        }
        found
    }
}

/// The keys of a coordinator. Clones share them.
#[derive(Clone, Debug)]
pub struct Keys(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    /// The name of the console's cookie. Cookies of one host go to all its ports, so the port is part of it.
    cookie_name: String,
    /// What the file looked like before it was read for the first time.
    first_look: watched_file::Seen,
    current: RwLock<KeySet>,
    sessions: Mutex<Sessions>,
}

impl Keys {
    /// For a coordinator that listens at this port.
    ///
    /// # Errors
    /// The file cannot be used.
    pub fn open(path: &Path, port: u16) -> Result<Self, KeyFileError> {
        let first_look = watched_file::look(path);
        let read = KeyFile::load(path)?;
        if read.cache_secret.is_none() {
            tracing::warn!(
                file = %path.display(),
                "the file of keys has no cache_secret, so tenants' salts follow from their names; the next `baton keys create` or `revoke` draws one"
            );
        }
        let current = KeySet::new(read, &KeySet::default());
        Ok(Self(Arc::new(Shared {
            path: path.to_owned(),
            cookie_name: format!("baton_session_{port}"),
            first_look,
            current: RwLock::new(current),
            sessions: Mutex::default(),
        })))
    }

    pub(crate) fn find(&self, text: &str) -> Option<Arc<HeldKey>> {
        self.with_hash(&KeyHash::of(text))
    }

    fn with_hash(&self, hash: &KeyHash) -> Option<Arc<HeldKey>> {
        let current = self.0.current.read().unwrap_or_else(PoisonError::into_inner);
        current.find(hash).cloned()
    }

    pub(crate) fn cookie_name(&self) -> &str {
        &self.0.cookie_name
    }

    /// Begins a session of the console for a key. Returns the text of its cookie.
    pub(crate) fn begin_session(&self, key: &HeldKey, now: Instant) -> String {
        self.sessions().begin(key.entry.sha256, now)
    }

    /// The key of a session that has not ended, and that the file still has.
    pub(crate) fn find_session(&self, cookie: &str, now: Instant) -> Option<Arc<HeldKey>> {
        let of_session = self.sessions().find(cookie, now)?;
        self.with_hash(&of_session)
    }

    pub(crate) fn end_session(&self, cookie: &str) {
        self.sessions().end(cookie);
    }

    fn sessions(&self) -> MutexGuard<'_, Sessions> {
        self.0.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the file again.
    ///
    /// # Errors
    /// The file cannot be used. The keys stay as they are.
    fn read_again(&self) -> Result<usize, KeyFileError> {
        let file = KeyFile::load(&self.0.path)?;
        let mut current = self.0.current.write().unwrap_or_else(PoisonError::into_inner);
        *current = KeySet::new(file, &current);
        Ok(current.0.len())
    }
}

/// Who asked for an answer that goes on: its key or session may end before the answer does.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub keys: Keys,
    pub key: KeyHash,
    pub cookie: Option<String>,
}

impl Caller {
    /// Whether it could ask for the same again.
    pub(crate) fn may_still(&self, scope: Scope, now: Instant) -> bool {
        let key = match &self.cookie {
            Some(cookie) => self.keys.find_session(cookie, now),
            None => self.keys.with_hash(&self.key),
        };
        key.is_some_and(|key| key.entry.may(scope))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::file::Limits;
    use super::secret::SecretKey;
    use super::test_kit::{entry, keys_of};
    use super::*;

    #[test]
    fn a_key_is_found_by_its_text_alone_and_no_longer_when_the_file_has_it_no_more() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("keys.toml");
        let (ours, other) = (SecretKey::random(), SecretKey::random());
        let keys = keys_of(&file, vec![entry("ours", ours.text(), Limits::default())]);
        let found = keys.find(ours.text()).expect("is there");
        assert_eq!(found.entry.name.as_str(), "ours");
        let cut = &ours.text()[..ours.text().len() - 1];
        for wrong in [other.text(), "", "ours", cut, &found.entry.sha256.to_string()] {
            assert!(keys.find(wrong).is_none(), "{wrong}");
        }
        let now = Instant::now();
        let cookie = keys.begin_session(&found, now);
        assert!(keys.find_session(&cookie, now).is_some());
        let caller = |cookie: Option<&str>| Caller {
            keys: keys.clone(),
            key: found.entry.sha256,
            cookie: cookie.map(str::to_owned),
        };
        let callers = [caller(None), caller(Some(&cookie))];
        assert!(callers.iter().all(|caller| caller.may_still(Scope::Inference, now)));
        assert!(!callers.iter().any(|caller| caller.may_still(Scope::Admin, now)));
        KeyFile::default().save(&file).expect("is written");
        assert_eq!(keys.read_again().expect("is read"), 0);
        assert!(keys.find(ours.text()).is_none(), "revoked");
        assert!(keys.find_session(&cookie, now).is_none(), "a session ends with its key");
        assert!(!callers.iter().any(|caller| caller.may_still(Scope::Inference, now)));
    }

    #[test]
    fn a_session_has_an_end() {
        let folder = tempfile::tempdir().expect("a folder");
        let secret = SecretKey::random();
        let file = folder.path().join("keys.toml");
        let keys = keys_of(&file, vec![entry("a", secret.text(), Limits::default())]);
        let (key, now) = (keys.find(secret.text()).expect("is there"), Instant::now());
        let (first, second) = (keys.begin_session(&key, now), keys.begin_session(&key, now));
        assert_ne!(first, second);
        keys.end_session(&first);
        assert!(keys.find_session(&first, now).is_none(), "logged out");
        assert!(keys.find_session(&second, now).is_some());
        assert!(
            keys.find_session(&second, now + Duration::from_secs(24 * 3600))
                .is_none()
        );
        assert!(keys.find_session("", now).is_none());
    }

    #[test]
    fn a_new_reading_forgets_no_use() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("keys.toml");
        let secret = SecretKey::random();
        let limits = Limits {
            concurrent_requests: std::num::NonZeroU32::new(1),
            ..Limits::default()
        };
        let keys = keys_of(&file, vec![entry("a", secret.text(), limits)]);
        let now = Instant::now();
        let (running, _) = keys
            .find(secret.text())
            .expect("is there")
            .begin(now)
            .expect("the first");
        keys.read_again().expect("is read");
        let again = keys.find(secret.text()).expect("is there");
        assert!(again.begin(now).is_err(), "one runs already");
        drop(running);
        assert!(again.begin(now).is_ok());
    }

    #[test]
    fn a_file_that_cannot_be_read_leaves_the_keys_as_they_are() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("keys.toml");
        let secret = SecretKey::random();
        let keys = keys_of(&file, vec![entry("a", secret.text(), Limits::default())]);
        std::fs::write(&file, "[[key]]\nname = 3\n").expect("is written");
        keys.read_again().expect_err("no key file");
        std::fs::remove_file(&file).expect("is removed");
        keys.read_again().expect_err("no file");
        assert!(keys.find(secret.text()).is_some());
    }
}
