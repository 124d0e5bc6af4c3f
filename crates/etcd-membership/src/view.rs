//! What a [`crate::Directory`] shows: who is registered, as of when, and what to make of it.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::trouble::EtcdTrouble;

/// Who is registered. While etcd is away the last view stays, marked as stale.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View<T> {
    /// By name; those that vanished are in here too, for as long as they are in `vanished`.
    pub members: BTreeMap<String, T>,
    /// When etcd last said something; `None` before the first list. Moves without a change notice.
    pub as_of: Option<Instant>,
    /// Nothing was heard for a whole lease, or ever: the members may be others by now.
    pub is_stale: bool,
    /// Records skipped since the start because they are not understood, each revision once.
    pub skipped: u64,
    /// Members whose entries are gone, and since when, in a way that looks like trouble of etcd's and not of theirs.
    /// They are kept until the grace is over or they register again.
    pub vanished: BTreeMap<String, Instant>,
    /// Why etcd cannot be used right now.
    pub trouble: Option<EtcdTrouble>,
}
