//! Decides which process owns a name, from the record at its key. Pure code. A name has one owner at a time.
//!
//! Epochs are random and compared for equality only (PROTOCOL, identities). So the order of events decides which of two
//! lives is the newer one. What a life finds at its name when it first looks is older and is taken over. Any other epoch
//! that it finds there later came after it: the life is *fenced* and never writes again. Every write is guarded by the
//! revision that was judged, so of two lives that start at the same time one wins and the other is fenced.

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
    /// The record of an older life or of nobody: put, provided that it is unchanged.
    TakeOver { mod_revision: i64 },
    /// A newer life has the name.
    Fenced { by_epoch: NodeEpoch },
}

/// One life's claim to its name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    epoch: NodeEpoch,
    first_look: FirstLook,
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
        }
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
        match (found, other) {
            (None, _) => Verdict::Free,
            (_, Some(by_epoch)) if Some(by_epoch) != predecessor => Verdict::Fenced { by_epoch },
            (Some(found), None) if found.epoch.is_some() => Verdict::Ours {
                mod_revision: found.mod_revision,
            },
            (Some(found), _) => Verdict::TakeOver {
                mod_revision: found.mod_revision,
            },
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
}
