//! What this coordinator believes about the prefix caches: which node has which prompts. It is built anew from the nodes' reports after
//! every start and on every stream. It is used only to decide where to send a request.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::kv::ChainLink;
use crate::kv::prefix_log::{PREFIX_KEYS_MAX, PrefixKey, PrefixReport, prefix_keys};
use crate::request::Request;

/// What one node has said of its cache since its stream began.
#[derive(Clone, Debug, Default)]
pub struct CachedPrefixes(BTreeSet<PrefixKey>);

impl CachedPrefixes {
    /// Takes a report in. A node cannot list more blocks than it has, and reports at most [`PREFIX_KEYS_MAX`]. What goes beyond is left out.
    pub(super) fn take(&mut self, report: PrefixReport, kv_blocks: u32) {
        match report {
            PrefixReport::Whole(keys) => self.0 = keys,
            PrefixReport::Changes { listed, gone } => {
                gone.iter().for_each(|key| {
                    self.0.remove(key);
                });
                self.0.extend(listed);
            }
        }
        while self.0.len() > PREFIX_KEYS_MAX.min(kv_blocks as usize) {
            self.0.pop_last();
        }
    }

    pub fn blocks(&self) -> usize {
        self.0.len()
    }
}

/// A request's prompt, block by block, for each size of block in the cluster. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptKeys(Arc<BTreeMap<u32, Vec<PrefixKey>>>);

impl PromptKeys {
    /// The keys of its whole blocks of this size, first block first.
    pub fn of_blocks(&self, block_tokens: u32) -> &[PrefixKey] {
        self.0.get(&block_tokens).map_or(&[], Vec::as_slice)
    }

    /// The number of keys, over all block sizes.
    pub fn blocks(&self) -> usize {
        self.0.values().map(Vec::len).sum()
    }

    /// Computes the keys for the block sizes of all nodes, once for each prompt, because a waiting request is looked at again at every
    /// event. A node that joins later with another block size counts as a node with nothing cached. Prompt logprobs bypass the caches.
    pub(super) fn of(request: &Request, block_sizes: impl Iterator<Item = u32>) -> Self {
        if request.prompt_logprobs.is_some() {
            return Self::default();
        }
        let sizes: BTreeSet<u32> = block_sizes.collect();
        // The last token is computed in any case, because its logits give the first token of the answer.
        let prompt = request.prompt.split_last().map_or(&[][..], |(_, before)| before);
        let root = ChainLink::root(request.prefix_salt);
        let keys = |size| (size, prefix_keys(root, prompt, size).collect());
        Self(Arc::new(sizes.into_iter().map(keys).collect()))
    }

    /// Prompt tokens that a node need not compute: whole blocks from the start on.
    pub(super) fn cached_tokens(&self, cached: &CachedPrefixes, block_tokens: u32) -> u32 {
        let keys = self.0.get(&block_tokens).into_iter().flatten();
        let blocks = keys.take_while(|key| cached.0.contains(key)).count();
        u32::try_from(blocks).unwrap_or(u32::MAX).saturating_mul(block_tokens)
    }
}

impl PromptKeys {
    /// Whether so many of the prompt's tokens are cached there. If they are not, one lookup shows it, because this is checked for every
    /// decode node at every event while a request waits.
    pub(super) fn has_cached(&self, tokens: u32, (cached, block_tokens): (&CachedPrefixes, u32)) -> bool {
        let blocks = tokens.div_ceil(block_tokens.max(1)) as usize;
        let keys = self.0.get(&block_tokens).and_then(|keys| keys.get(..blocks));
        keys.is_some_and(|keys| {
            let is_there = |key| cached.0.contains(key);
            keys.last().is_none_or(is_there) && keys.iter().all(is_there)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::fixtures::request;
    use crate::ids::PrefixSalt;

    fn keys(prompt_tokens: u32) -> BTreeSet<PrefixKey> {
        prefix_keys(ChainLink::ROOT, &request(1, prompt_tokens, 1).prompt, 16).collect()
    }

    #[test]
    fn the_same_prompt_under_another_salt_has_other_keys() {
        let keys_of = |salt: Option<u64>| {
            let mut salted = request(1, 64, 1);
            salted.prefix_salt = salt.map(PrefixSalt);
            PromptKeys::of(&salted, [16].into_iter())
        };
        let all = [None, Some(1), Some(2)].map(keys_of);
        assert_eq!(all[0].blocks(), 3, "whole blocks before the last token");
        for (place, keys) in all.iter().enumerate() {
            let others = all.iter().enumerate().filter(|(other, _)| *other != place);
            let mut elsewhere = others.flat_map(|(_, other)| other.of_blocks(16));
            assert!(!elsewhere.any(|key| keys.of_blocks(16).contains(key)));
        }
    }

    fn cached(keys: BTreeSet<PrefixKey>, kv_blocks: u32) -> CachedPrefixes {
        let mut cached = CachedPrefixes::default();
        cached.take(PrefixReport::Whole(keys), kv_blocks);
        cached
    }

    #[test]
    fn whole_blocks_from_the_start_count_and_never_the_last_token() {
        let prompt = PromptKeys::of(&request(1, 48, 1), [16].into_iter());
        assert_eq!(
            prompt.cached_tokens(&cached(keys(48), 64), 16),
            32,
            "48 tokens leave 47 to look up"
        );
        assert_eq!(prompt.cached_tokens(&cached(keys(20), 64), 16), 16);
        let has = |tokens| prompt.has_cached(tokens, (&cached(keys(20), 64), 16));
        assert_eq!([0, 1, 16, 17, 48].map(has), [true, true, true, false, false]);
        assert_eq!(
            prompt.cached_tokens(&cached(keys(48), 64), 32),
            0,
            "blocks of another size"
        );
        let mut headless = keys(48);
        let first: Vec<PrefixKey> = keys(16).into_iter().collect();
        headless.remove(&first[0]);
        assert_eq!(
            prompt.cached_tokens(&cached(headless, 64), 16),
            0,
            "without its first block"
        );
    }

    #[test]
    fn changes_add_and_remove_and_a_whole_report_replaces() {
        let prompt = PromptKeys::of(&request(1, 64, 1), [16].into_iter());
        let mut known = cached(keys(16), 64);
        let listed = keys(32).into_iter().collect();
        let gone = vec![PrefixKey(0)];
        known.take(PrefixReport::Changes { listed, gone }, 64);
        assert_eq!(prompt.cached_tokens(&known, 16), 32);
        known.take(PrefixReport::Whole(BTreeSet::new()), 64);
        assert_eq!((prompt.cached_tokens(&known, 16), known.blocks()), (0, 0));
    }

    #[test]
    fn a_node_that_lists_more_than_it_has_is_not_believed_beyond() {
        assert_eq!(cached(keys(160), 4).blocks(), 4);
    }

    #[test]
    fn prompt_logprobs_want_every_token_computed() {
        let mut echo = request(1, 64, 1);
        echo.prompt_logprobs = Some(0);
        let prompt = PromptKeys::of(&echo, [16].into_iter());
        assert_eq!(prompt.cached_tokens(&cached(keys(64), 64), 16), 0);
    }
}
