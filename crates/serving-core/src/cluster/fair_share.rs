//! Which owner is next when several wait: the one that has had the least work for its weight. Work is counted when it is done: the
//! tokens of a prompt when its request is placed, and the tokens of the output as they come, because nobody knows before how long an
//! answer gets (Sheng et al., "Fairness in Serving Large Language Models", 2024). An owner that comes back starts at the level of the
//! owner that was served last, so nobody can save up turns. When nobody waits, no owner has taken anything from another, so all start
//! at the same level again (Goyal et al., "Start-time Fair Queueing", 1996).

use std::collections::BTreeMap;

use crate::ids::QueueOwner;
use crate::request::{QueueShare, Request};

/// `None` is the owner of all requests whose owner is not known.
pub(super) type Owner = Option<QueueOwner>;

/// A token of the output counts as so many tokens of the prompt, because the tokens of a prompt are computed together and those of an
/// answer one after the other. The paper takes 2 for the same reason.
const OUTPUT_TOKEN: u64 = 2;
/// With so many bits a weight of up to 2^32 divides a single token exactly enough that no work becomes free by rounding.
const SCALE_BITS: u32 = 32;

/// Work that an owner has had: tokens divided by its weight, in units of 2^-32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Work(u128);

impl Work {
    fn of_tokens(tokens: u64, share: Option<QueueShare>) -> Self {
        let weight = share.map_or(1, |share| u128::from(share.weight.get()));
        Self((u128::from(tokens) << SCALE_BITS) / weight)
    }

    /// The work of the prompt alone.
    pub(super) fn of_prompt(request: &Request) -> Self {
        Self::of_tokens(u64::from(request.prompt_tokens()), request.share)
    }

    #[must_use]
    pub(super) fn and(self, more: Self) -> Self {
        Self(self.0.saturating_add(more.0))
    }
}

/// The work that the owners have had in one lane. What an owner has had in another lane does not count here.
#[derive(Debug, Default)]
pub(super) struct FairShare {
    had: BTreeMap<Owner, Work>,
    /// What the owner that was served last had had before that. After a moment in which nobody waited: the most that any owner had had.
    level: Work,
}

impl FairShare {
    pub(super) fn had(&self, owner: Owner) -> Work {
        self.had.get(&owner).copied().unwrap_or(self.level)
    }

    /// An owner that did not wait begins to wait. `is_waiting` says which of the others wait. An owner that neither waits nor has had more
    /// than the level is like a new one and is forgotten. If none of them waits, all start at the same level.
    pub(super) fn begins_to_wait(&mut self, owner: Owner, is_waiting: impl Fn(Owner) -> bool) {
        // Every owner that waits is in `had`, since it began to wait.
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
