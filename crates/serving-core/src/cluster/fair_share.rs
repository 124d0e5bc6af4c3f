//! Which owner is next when several wait: the one that has had the least work for its weight. Work is counted as it is done, a
//! prompt's tokens when the request is placed and the output's as they come: nobody knows before how long an answer gets (Sheng et
//! al., "Fairness in Serving Large Language Models", 2024). An owner that comes back starts level with the one that was served last,
//! so nobody saves up turns. When nobody waits, what anybody has had took nothing from the others: all start level again (Goyal et al.,
//! "Start-time Fair Queueing", 1996).

use std::collections::BTreeMap;

use crate::ids::QueueOwner;
use crate::request::{QueueShare, Request};

/// `None`: all requests of which nobody knows whose they are.
pub(super) type Owner = Option<QueueOwner>;

/// What a token of the output counts, in tokens of the prompt. A prompt's tokens are computed together, an answer's one after the
/// other; the paper takes 2 for the same reason.
const OUTPUT_TOKEN: u64 = 2;
/// So that a weight of up to 2^32 divides a single token without a loss that would be free work.
const SCALE_BITS: u32 = 32;

/// Work that an owner has had: tokens divided by its weight, in units of 2^-32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Work(u128);

impl Work {
    fn of_tokens(tokens: u64, share: Option<QueueShare>) -> Self {
        let weight = share.map_or(1, |share| u128::from(share.weight.get()));
        Self((u128::from(tokens) << SCALE_BITS) / weight)
    }

    /// Of the prompt alone.
    pub(super) fn of_prompt(request: &Request) -> Self {
        Self::of_tokens(u64::from(request.prompt_tokens()), request.share)
    }

    #[must_use]
    pub(super) fn and(self, more: Self) -> Self {
        Self(self.0.saturating_add(more.0))
    }
}

/// Of one lane: what an owner has had in another lane is neither a debt nor a right here.
#[derive(Debug, Default)]
pub(super) struct FairShare {
    had: BTreeMap<Owner, Work>,
    /// What the owner that was served last had had before, or the most that any had had when last nobody waited.
    level: Work,
}

impl FairShare {
    pub(super) fn had(&self, owner: Owner) -> Work {
        self.had.get(&owner).copied().unwrap_or(self.level)
    }

    /// An owner that did not wait begins to. `is_waiting` says it of the others: who neither waits nor has had more than the level is
    /// as good as new, and is forgotten. If none of them waits, nobody owes anybody.
    pub(super) fn begins_to_wait(&mut self, owner: Owner, is_waiting: impl Fn(Owner) -> bool) {
        // All that wait are known here, since they began to.
        if !self.had.keys().any(|other| is_waiting(*other)) {
            let most = self.had.values().copied().max().unwrap_or_default();
            self.level = self.level.max(most);
        }
        let level = self.level;
        self.had.retain(|other, had| *had > level || is_waiting(*other));
        self.had.entry(owner).or_insert(level);
    }

    /// A request of this owner is placed for the first time.
    pub(super) fn placed(&mut self, owner: Owner, prompt: Work) {
        let had = self.had(owner);
        self.level = self.level.max(had);
        self.had.insert(owner, had.and(prompt));
    }

    /// Output tokens of one of its requests came.
    pub(super) fn answered(&mut self, share: Option<QueueShare>, tokens: u32) {
        let owner = share.map(|share| share.owner);
        let work = Work::of_tokens(OUTPUT_TOKEN * u64::from(tokens), share);
        self.had.insert(owner, self.had(owner).and(work));
    }
}
