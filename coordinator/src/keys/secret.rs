//! The text of a key, and the hash of it that is kept.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use thiserror::Error;

/// What each key begins with: people, and programs that look for leaked secrets, know it by that.
const PREFIX: &str = "baton-";
/// 256 bits: nobody finds a key by trying.
const SECRET_BYTES: usize = 32;

/// The text of a new key. Its holder alone keeps it.
pub struct SecretKey(String);

impl SecretKey {
    #[must_use]
    pub fn random() -> Self {
        Self(format!("{PREFIX}{}", random_text()))
    }

    /// For its holder. It belongs into no log and no file of ours.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretKey(..)")
    }
}

/// 256 random bits in hexadecimal digits. rand's generator of a thread is made for secrets: ChaCha12, seeded by the operating
/// system (the documentation of `rand::rngs::ThreadRng`).
pub(super) fn random_text() -> String {
    let bytes: [u8; SECRET_BYTES] = rand::random();
    hex(&bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The SHA-256 of a key's text. A key has 256 random bits, so a fast hash is enough: there is no list of likely keys to try.
#[derive(Clone, Copy, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct KeyHash([u8; 32]);

#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("a SHA-256 has 64 hexadecimal digits")]
pub struct NoHash;

impl KeyHash {
    #[must_use]
    pub fn of(text: &str) -> Self {
        Self(Sha256::digest(text).into())
    }

    /// Compares in a time that does not depend on the bytes.
    pub(super) fn is(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl fmt::Display for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for KeyHash {
    type Err = NoHash;

    fn from_str(text: &str) -> Result<Self, NoHash> {
        bytes_of(text).map(Self)
    }
}

fn bytes_of(text: &str) -> Result<[u8; 32], NoHash> {
    let digits = text.as_bytes();
    if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return Err(NoHash);
    }
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let pair = std::str::from_utf8(pair).map_err(|_| NoHash)?;
        *byte = u8::from_str_radix(pair, 16).map_err(|_| NoHash)?;
    }
    Ok(bytes)
}

impl TryFrom<String> for KeyHash {
    type Error = NoHash;

    fn try_from(text: String) -> Result<Self, NoHash> {
        text.parse()
    }
}

impl From<KeyHash> for String {
    fn from(hash: KeyHash) -> Self {
        hash.to_string()
    }
}

/// The salts of tenants' cached prompts are made with this. Somebody without it cannot compute where another tenant's prompt is in a
/// cache. All coordinators of a cluster need the same one. They have it with the file of keys.
#[derive(Clone, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct CacheSecret([u8; 32]);

impl CacheSecret {
    #[must_use]
    pub fn random() -> Self {
        Self(rand::random())
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for CacheSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CacheSecret(..)")
    }
}

impl TryFrom<String> for CacheSecret {
    type Error = NoHash;

    fn try_from(text: String) -> Result<Self, NoHash> {
        bytes_of(&text).map(Self)
    }
}

impl From<CacheSecret> for String {
    fn from(secret: CacheSecret) -> Self {
        hex(&secret.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_long_and_no_two_are_alike() {
        let (one, other) = (SecretKey::random(), SecretKey::random());
        assert_ne!(one.text(), other.text());
        for key in [&one, &other] {
            assert_eq!(key.text().len(), PREFIX.len() + 64, "{}", key.text());
            assert!(!format!("{key:?}").contains(&key.text()[PREFIX.len()..]));
        }
    }

    #[test]
    fn a_hash_is_read_as_it_is_written() {
        // The first test vector of FIPS 180-2.
        let hash = KeyHash::of("abc");
        let text = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hash.to_string(), text);
        assert!(text.parse::<KeyHash>().expect("a hash").is(&hash));
        assert!(!KeyHash::of("abd").is(&hash));
        for wrong in [
            "",
            "ba78",
            &text[1..],
            &format!("{}g", &text[1..]),
            &format!("{text}00"),
        ] {
            assert!(wrong.parse::<KeyHash>().is_err(), "{wrong}");
        }
    }
}
