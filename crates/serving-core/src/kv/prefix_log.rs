//! What a node's prefix cache lists, told to coordinators: everything first on each stream, from then on what changed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::ids::TokenId;

use super::prefix::{ChainLink, chain_key};

/// Names the tokens from a prompt's start to the end of one of its whole blocks; equal on every node with equal blocks.
/// A hint where to look and proof of nothing: anybody may choose prompts that collide, and a listed block may be out of
/// reach (its parent was evicted). What a node takes from its cache it compares token by token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PrefixKey(pub u64);

/// The keys of a prompt's whole blocks after `root`, first block first.
pub fn prefix_keys(root: ChainLink, prompt: &[TokenId], block_tokens: u32) -> impl Iterator<Item = PrefixKey> {
    let blocks = prompt.chunks_exact(block_tokens.max(1) as usize);
    blocks.scan(root.key(), |parent, tokens| {
        *parent = chain_key(*parent, tokens);
        Some(PrefixKey(*parent))
    })
}

/// Keys of one node that are told at most: a million tokens in blocks of 16. What a cache lists beyond is not told, so
/// that requests are placed as if it were not there.
pub const PREFIX_KEYS_MAX: usize = 65_536;
/// Changes kept for streams that have not been told yet; one that is further behind is told everything.
const CHANGES_KEPT: usize = 8_192;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Listed,
    Gone,
}

/// Net changes of an index since they were last taken: at most one for each key that is listed now or was then.
#[derive(Debug, Default)]
pub(super) struct UntoldChanges(BTreeMap<PrefixKey, Change>);

impl UntoldChanges {
    pub fn listed(&mut self, key: u64) {
        self.note(PrefixKey(key), Change::Listed);
    }

    pub fn gone(&mut self, key: u64) {
        self.note(PrefixKey(key), Change::Gone);
    }

    /// A key alternates between the two: whoever takes a change back leaves nothing to tell.
    fn note(&mut self, key: PrefixKey, change: Change) {
        if self.0.remove(&key).is_none() {
            self.0.insert(key, change);
        }
    }

    pub fn take(&mut self) -> PrefixChanges {
        PrefixChanges(std::mem::take(&mut self.0))
    }
}

/// Changes on their way from a node's pool to its log.
#[derive(Debug)]
pub struct PrefixChanges(BTreeMap<PrefixKey, Change>);

impl PrefixChanges {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// What a coordinator is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PrefixReport {
    /// Everything; what was told before is void.
    Whole(BTreeSet<PrefixKey>),
    Changes {
        listed: Vec<PrefixKey>,
        gone: Vec<PrefixKey>,
    },
}

/// How far a stream has been told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LogPosition(u64);

/// One node's listed keys and their latest changes, shared by its streams.
#[derive(Debug, Default)]
pub struct PrefixLog {
    keys: BTreeSet<PrefixKey>,
    /// The latest, oldest first.
    changes: VecDeque<(PrefixKey, Change)>,
    /// Changes ever.
    end: u64,
}

impl PrefixLog {
    pub fn apply(&mut self, changes: PrefixChanges) {
        // What is gone first: it makes room.
        let (gone, listed): (Vec<_>, Vec<_>) = changes.0.into_iter().partition(|(_, change)| *change == Change::Gone);
        for (key, change) in gone.into_iter().chain(listed) {
            let is_news = match change {
                Change::Listed => self.keys.len() < PREFIX_KEYS_MAX && self.keys.insert(key),
                Change::Gone => self.keys.remove(&key),
            };
            if is_news {
                if self.changes.len() == CHANGES_KEPT {
                    self.changes.pop_front();
                }
                self.changes.push_back((key, change));
                self.end += 1;
            }
        }
    }

    /// What a stream that was told up to `told` has to be told, and how far that goes; `None` when it knows it all.
    pub fn since(&self, told: Option<LogPosition>) -> Option<(PrefixReport, LogPosition)> {
        let end = LogPosition(self.end);
        if told == Some(end) {
            return None;
        }
        let untold = told.and_then(|told| usize::try_from(self.end.checked_sub(told.0)?).ok());
        let Some(untold) = untold.filter(|untold| *untold <= self.changes.len()) else {
            return Some((PrefixReport::Whole(self.keys.clone()), end));
        };
        let latest = self.changes.range(self.changes.len() - untold..);
        // The last change of a key is what holds.
        let net: BTreeMap<PrefixKey, Change> = latest.copied().collect();
        let all = |wanted: Change| -> Vec<PrefixKey> {
            let of_kind = net.iter().filter(|(_, change)| **change == wanted);
            of_kind.map(|(key, _)| *key).collect()
        };
        let report = PrefixReport::Changes {
            listed: all(Change::Listed),
            gone: all(Change::Gone),
        };
        Some((report, end))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn changes(listed: &[u64], gone: &[u64]) -> PrefixChanges {
        let mut untold = UntoldChanges::default();
        listed.iter().for_each(|key| untold.listed(*key));
        gone.iter().for_each(|key| untold.gone(*key));
        untold.take()
    }

    fn take(known: &mut BTreeSet<PrefixKey>, report: PrefixReport) {
        match report {
            PrefixReport::Whole(keys) => *known = keys,
            PrefixReport::Changes { listed, gone } => {
                known.extend(listed);
                gone.iter()
                    .for_each(|key| assert!(known.remove(key) || !known.contains(key)));
            }
        }
    }

    #[test]
    fn a_stream_is_told_everything_first_then_changes_then_nothing() {
        let mut log = PrefixLog::default();
        log.apply(changes(&[1, 2], &[]));
        let (report, told) = log.since(None).expect("news");
        assert_eq!(
            report,
            PrefixReport::Whole(BTreeSet::from([PrefixKey(1), PrefixKey(2)]))
        );
        assert_eq!(log.since(Some(told)), None);
        log.apply(changes(&[3], &[1]));
        let (report, told) = log.since(Some(told)).expect("news");
        let (listed, gone) = (vec![PrefixKey(3)], vec![PrefixKey(1)]);
        assert_eq!(report, PrefixReport::Changes { listed, gone });
        assert_eq!(log.since(Some(told)), None);
    }

    #[test]
    fn an_empty_cache_is_told_once_too() {
        let (report, told) = PrefixLog::default().since(None).expect("the first report");
        assert_eq!(report, PrefixReport::Whole(BTreeSet::new()));
        assert_eq!(PrefixLog::default().since(Some(told)), None);
    }

    #[test]
    fn what_comes_and_goes_between_two_looks_is_no_news() {
        assert!(changes(&[7], &[7]).is_empty());
    }

    #[test]
    fn more_than_a_node_tells_is_left_out_until_there_is_room() {
        let mut log = PrefixLog::default();
        let full: Vec<u64> = (0..PREFIX_KEYS_MAX as u64 + 10).collect();
        log.apply(changes(&full, &[]));
        assert_eq!(log.keys.len(), PREFIX_KEYS_MAX);
        assert!(log.changes.len() <= CHANGES_KEPT);
        log.apply(changes(&[], &[3, PREFIX_KEYS_MAX as u64 + 5]));
        assert_eq!(log.keys.len(), PREFIX_KEYS_MAX - 1, "only what was told can be gone");
    }

    proptest! {
        /// Streams that look at different times, and one that starts over, all come to know the same.
        #[test]
        fn every_stream_knows_what_is_listed(steps in prop::collection::vec((0u64..40, 0u8..4), 1..300)) {
            let (mut listed, mut untold) = (BTreeSet::new(), UntoldChanges::default());
            let mut log = PrefixLog::default();
            let mut streams = vec![(None, BTreeSet::new()); 3];
            for (key, stream) in steps {
                if listed.insert(key) {
                    untold.listed(key);
                } else {
                    listed.remove(&key);
                    untold.gone(key);
                }
                log.apply(untold.take());
                match streams.get_mut(usize::from(stream)) {
                    Some((told, known)) => if let Some((report, now)) = log.since(*told) {
                        take(known, report);
                        *told = Some(now);
                    },
                    None => streams[0].0 = None,
                }
            }
            let listed: BTreeSet<PrefixKey> = listed.into_iter().map(PrefixKey).collect();
            for (told, mut known) in streams {
                if let Some((report, _)) = log.since(told) {
                    take(&mut known, report);
                }
                prop_assert_eq!(&known, &listed);
            }
        }
    }
}
