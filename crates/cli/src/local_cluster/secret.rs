//! What the nodes of one start hold and nobody else.

use std::fmt;

/// A secret that only the nodes of one start know. They get it in the environment, which other users cannot read, and never
/// on a command line, which they can.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterSecret(String);

impl ClusterSecret {
    /// The nodes' `shm_direct_secret`.
    const VARIABLE: &'static str = "BATON_SHM_DIRECT_SECRET";

    pub(super) fn draw() -> Self {
        let word: [u8; 32] = rand::random();
        Self(word.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// The variable to add to the environment of a prefill or decode node. When the user has set the variable, even to nothing (no direct
    /// mode), that counts.
    pub(super) fn variable(&self, set: &[(String, String)]) -> Option<(&'static str, &str)> {
        let is_decided =
            set.iter().any(|(name, _)| name == Self::VARIABLE) || std::env::var_os(Self::VARIABLE).is_some();
        (!is_decided).then_some((Self::VARIABLE, self.0.as_str()))
    }
}

impl fmt::Debug for ClusterSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("redacted")
    }
}
