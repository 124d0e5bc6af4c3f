//! What a [`crate::Directory`] shows: the registered members, the time of the view, and its quality.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::trouble::EtcdTrouble;

/// The registered members. While etcd is away the last view stays, marked as stale.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View<T> {
    /// By name. Members that vanished are in it too, as long as they are in `vanished`.
    pub members: BTreeMap<String, T>,
    /// When etcd last sent a message; `None` before the first list. It changes without a change notice.
    pub as_of: Option<Instant>,
    /// No message came for a whole lease, or ever: the members may be others by now.
    pub is_stale: bool,
    /// Records skipped since the start because they cannot be read. Each revision counts once.
    pub skipped: u64,
    /// Members whose entries are gone, and since when, in a way that looks like trouble in etcd and not like theirs. They
    /// are kept until the grace period is over or they register again.
    pub vanished: BTreeMap<String, Instant>,
    /// Why etcd cannot be used right now.
    pub trouble: Option<EtcdTrouble>,
}
