//! Decides which process owns a name, from the record at its key. Pure code. A name has one owner at a time.
//!
//! Epochs are random and compared for equality only (PROTOCOL, identities). So the order of events decides which of two
//! lives is the newer one. What a life finds at its name when it first looks is older and is taken over. Any other epoch
//! that it finds there later came after it: the life is *fenced* and never writes again. Every write is guarded by the
//! revision that was judged, so of two lives that start at the same time one wins and the other is fenced.
//!
//! An etcd that was restored from an older backup may bring back the record of a life that this one has superseded. Its
//! revision is lower than that of this life's own write. So is that of a successor which came into the restored etcd before this
//! life wrote there: it loses the name, and has to start anew.

use serving_core::ids::NodeEpoch;

/// The record at the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// `None`: the record cannot be read, so no life owns it.
    pub epoch: Option<NodeEpoch>,
    pub mod_revision: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The key is empty: put, provided that it is still empty.
    Free,
    /// Our own record.
    Ours { mod_revision: i64 },
    /// The record of an older life, perhaps from a backup, or of nobody: put, provided that it is unchanged.
    TakeOver { mod_revision: i64 },
    /// A newer life has the name.
    Fenced { by_epoch: NodeEpoch },
}

/// One life's claim to its name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    epoch: NodeEpoch,
    first_look: FirstLook,
    /// The revision of the life's own last write. A restored etcd counts on from a lower one.
    written: Option<i64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FirstLook {
    NotYet,
    Done { predecessor: Option<NodeEpoch> },
}

impl Claim {
    pub(crate) fn new(epoch: NodeEpoch) -> Self {
        Self {
            epoch,
            first_look: FirstLook::NotYet,
            written: None,
        }
    }

    /// The life's own record is at the key since this revision.
    pub(crate) fn wrote(&mut self, mod_revision: i64) {
        self.written = Some(mod_revision);
    }

    pub(crate) fn judge(&mut self, found: Option<Found>) -> Verdict {
        let other = found.and_then(|found| found.epoch).filter(|epoch| *epoch != self.epoch);
        let predecessor = match self.first_look {
            FirstLook::NotYet => {
                self.first_look = FirstLook::Done { predecessor: other };
                other
            }
            FirstLook::Done { predecessor } => predecessor,
        };
        let Some(Found { epoch, mod_revision }) = found else {
            return Verdict::Free;
        };
        let is_superseded = self.written.is_some_and(|written| mod_revision < written);
        match other {
            Some(by_epoch) if Some(by_epoch) != predecessor && !is_superseded => Verdict::Fenced { by_epoch },
            None if epoch.is_some() => {
                self.wrote(mod_revision);
                Verdict::Ours { mod_revision }
            }
            _ => Verdict::TakeOver { mod_revision },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: NodeEpoch = NodeEpoch(5);

    fn found(epoch: Option<u64>, mod_revision: i64) -> Option<Found> {
        Some(Found {
            epoch: epoch.map(NodeEpoch),
            mod_revision,
        })
    }

    #[test]
    fn what_was_there_first_is_taken_over_whatever_its_number() {
        for predecessor in [1, 9] {
            let mut claim = Claim::new(ME);
            assert_eq!(
                claim.judge(found(Some(predecessor), 3)),
                Verdict::TakeOver { mod_revision: 3 }
            );
            // The answer to the put was lost, and the predecessor wrote again before it died.
            assert_eq!(
                claim.judge(found(Some(predecessor), 4)),
                Verdict::TakeOver { mod_revision: 4 }
            );
            assert_eq!(claim.judge(found(Some(ME.0), 5)), Verdict::Ours { mod_revision: 5 });
        }
    }

    #[test]
    fn what_comes_later_fences() {
        for successor in [1, 9] {
            let by_epoch = NodeEpoch(successor);
            let mut claim = Claim::new(ME);
            assert_eq!(claim.judge(None), Verdict::Free);
            assert_eq!(claim.judge(found(Some(successor), 8)), Verdict::Fenced { by_epoch });
            let mut claim = Claim::new(ME);
            assert_eq!(claim.judge(found(Some(3), 2)), Verdict::TakeOver { mod_revision: 2 });
            assert_eq!(claim.judge(found(Some(successor), 8)), Verdict::Fenced { by_epoch });
        }
    }

    #[test]
    fn a_lost_key_is_free_and_an_unreadable_one_belongs_to_nobody() {
        let mut claim = Claim::new(ME);
        assert_eq!(claim.judge(found(Some(ME.0), 1)), Verdict::Ours { mod_revision: 1 });
        assert_eq!(claim.judge(None), Verdict::Free);
        assert_eq!(claim.judge(found(None, 7)), Verdict::TakeOver { mod_revision: 7 });
    }

    #[test]
    fn a_record_from_before_our_own_write_is_from_a_backup_and_fences_nobody() {
        let by_epoch = NodeEpoch(3);
        let mut claim = Claim::new(ME);
        assert_eq!(claim.judge(None), Verdict::Free);
        assert_eq!(claim.judge(found(Some(ME.0), 500)), Verdict::Ours { mod_revision: 500 });
        assert_eq!(
            claim.judge(found(Some(3), 100)),
            Verdict::TakeOver { mod_revision: 100 }
        );
        assert_eq!(claim.judge(found(Some(3), 600)), Verdict::Fenced { by_epoch });
    }

    #[test]
    fn a_successor_in_a_restored_etcd_fences_after_our_first_write_there() {
        let by_epoch = NodeEpoch(7);
        let mut claim = Claim::new(ME);
        assert_eq!(claim.judge(None), Verdict::Free);
        claim.wrote(500);
        assert_eq!(
            claim.judge(found(Some(3), 100)),
            Verdict::TakeOver { mod_revision: 100 }
        );
        claim.wrote(110);
        assert_eq!(claim.judge(found(Some(7), 120)), Verdict::Fenced { by_epoch });
    }
}
