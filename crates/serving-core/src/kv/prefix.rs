//! Which blocks hold which token prefixes: a chain of whole blocks, looked up by hash, believed only by its tokens.

use std::collections::BTreeMap;

use crate::ids::{BlockId, CacheTenant, PrefixSalt, TokenId};

use super::prefix_log::UntoldChanges;

/// One verified position in a chain of published blocks.
///
/// `key` is a 64-bit mix of the parent's key and the block's tokens. It is an index and nothing more: anybody may
/// choose prompts that collide, so a hit is taken only when the stored tokens are equal and the stored parent is the
/// very block that was verified before it (`serial`, never reused). A collision costs a miss, never a wrong block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainLink {
    key: u64,
    serial: u64,
    /// Whose the blocks of the chain are.
    tenant: Option<CacheTenant>,
}

impl ChainLink {
    /// Before the first block of requests without a salt.
    pub const ROOT: ChainLink = ChainLink {
        key: 0,
        serial: 0,
        tenant: None,
    };
    /// No block has a serial with this bit, because blocks are counted from 1.
    const SALTED: u64 = 1 << 63;

    /// Before the first block of requests with this salt. A first block is taken only under the root that it was made under: where two
    /// roots and two texts have the same key, the serials differ, and where two roots have the same serial, no text gives both one key.
    #[must_use]
    pub fn root(salt: Option<PrefixSalt>) -> Self {
        match salt {
            None => Self::ROOT,
            Some(PrefixSalt(salt)) => Self {
                key: salt,
                serial: salt | Self::SALTED,
                tenant: None,
            },
        }
    }

    /// The same place. Blocks that are published after it count as this tenant's.
    #[must_use]
    pub fn counted_for(self, tenant: Option<CacheTenant>) -> Self {
        Self { tenant, ..self }
    }

    pub(super) fn key(self) -> u64 {
        self.key
    }
    pub(super) fn tenant(self) -> Option<CacheTenant> {
        self.tenant
    }
}

#[derive(Debug)]
struct Entry {
    serial: u64,
    parent_serial: u64,
    tokens: Box<[TokenId]>,
    block: BlockId,
}

/// The index. Each block is listed at most once, so its size is bounded by the pool's.
#[derive(Debug, Default)]
pub(super) struct PrefixIndex {
    entries: BTreeMap<u64, Entry>,
    last_serial: u64,
    pub untold: UntoldChanges,
}

/// What publishing one block did.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Published {
    /// The block is now found under this link; `displaced` is a block that was found under its key before.
    New {
        link: ChainLink,
        displaced: Option<BlockId>,
    },
    /// Another block with the same content is published already; the caller's stays private.
    AlreadyThere { link: ChainLink },
}

impl PrefixIndex {
    /// The block that continues `parent` with exactly `tokens`.
    pub fn find(&self, parent: ChainLink, tokens: &[TokenId]) -> Option<(ChainLink, BlockId)> {
        self.find_under(chain_key(parent.key, tokens), parent, tokens)
    }

    fn find_under(&self, key: u64, parent: ChainLink, tokens: &[TokenId]) -> Option<(ChainLink, BlockId)> {
        let entry = self.entries.get(&key)?;
        if entry.parent_serial != parent.serial || *entry.tokens != *tokens {
            return None;
        }
        let serial = entry.serial;
        Some((ChainLink { key, serial, ..parent }, entry.block))
    }

    pub fn publish(&mut self, parent: ChainLink, tokens: &[TokenId], block: BlockId) -> Published {
        let key = chain_key(parent.key, tokens);
        if let Some((link, _)) = self.find_under(key, parent, tokens) {
            return Published::AlreadyThere { link };
        }
        self.last_serial += 1;
        let serial = self.last_serial;
        let entry = Entry {
            serial,
            parent_serial: parent.serial,
            tokens: tokens.into(),
            block,
        };
        // What was there is a collision or the child of a parent that was evicted since: nobody can reach it with
        // this parent, so the newer block takes the key.
        let displaced = self.entries.insert(key, entry).map(|old| old.block);
        if displaced.is_none() {
            self.untold.listed(key);
        }
        let link = ChainLink { key, serial, ..parent };
        Published::New { link, displaced }
    }

    pub fn remove(&mut self, key: u64) {
        if self.entries.remove(&key).is_some() {
            self.untold.gone(key);
        }
    }

    #[cfg(test)]
    pub fn keys(&self) -> impl Iterator<Item = u64> {
        self.entries.keys().copied()
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }
}

/// Mixes a parent key and tokens, one multiply-xorshift round each (the finalizer of SplitMix64). Not a secure hash;
/// see [`ChainLink`] for why none is needed.
pub(super) fn chain_key(parent: u64, tokens: &[TokenId]) -> u64 {
    let mut state = parent ^ 0x9e37_79b9_7f4a_7c15;
    for token in tokens {
        state = state
            .wrapping_add(u64::from(token.0))
            .wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state ^= state >> 29;
        state = state.wrapping_mul(0x94d0_49bb_1331_11eb);
        state ^= state >> 32;
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(ids: &[u32]) -> Vec<TokenId> {
        ids.iter().copied().map(TokenId).collect()
    }

    #[test]
    fn finds_only_the_same_tokens_after_the_same_parent() {
        let mut index = PrefixIndex::default();
        let Published::New {
            link: first,
            displaced: None,
        } = index.publish(ChainLink::ROOT, &tokens(&[1, 2]), BlockId(7))
        else {
            panic!("an empty index takes the block");
        };
        assert_eq!(index.find(ChainLink::ROOT, &tokens(&[1, 2])), Some((first, BlockId(7))));
        assert_eq!(index.find(ChainLink::ROOT, &tokens(&[2, 1])), None);
        assert_eq!(index.find(first, &tokens(&[1, 2])), None);
    }

    #[test]
    fn a_colliding_key_is_a_miss_and_gives_way_to_the_newer_block() {
        let mut index = PrefixIndex::default();
        index.publish(ChainLink::ROOT, &tokens(&[1, 2]), BlockId(7));
        // A forged entry under the key of another prompt: same key, other tokens.
        let key = chain_key(0, &tokens(&[3, 4]));
        let forged = index
            .entries
            .remove(&chain_key(0, &tokens(&[1, 2])))
            .expect("published");
        index.entries.insert(key, forged);
        assert_eq!(index.find(ChainLink::ROOT, &tokens(&[3, 4])), None);
        let published = index.publish(ChainLink::ROOT, &tokens(&[3, 4]), BlockId(8));
        assert!(matches!(
            published,
            Published::New {
                displaced: Some(BlockId(7)),
                ..
            }
        ));
    }

    #[test]
    fn the_same_tokens_under_another_salt_are_not_found() {
        let mut index = PrefixIndex::default();
        let roots = [None, Some(1), Some(2), Some(1 | 1 << 63), Some(u64::MAX)]
            .map(|salt| ChainLink::root(salt.map(PrefixSalt)));
        let content = tokens(&[1, 2, 3, 4]);
        for (number, root) in roots.iter().enumerate() {
            assert_eq!(index.find(*root, &content), None, "{root:?} finds another's block");
            let block = BlockId(u32::try_from(number).expect("few"));
            assert!(matches!(
                index.publish(*root, &content, block),
                Published::New { displaced: None, .. }
            ));
        }
        for (number, root) in roots.iter().enumerate() {
            let (_, block) = index.find(*root, &content).expect("its own");
            assert_eq!(block.0 as usize, number);
        }
        let collides = ChainLink::root(Some(PrefixSalt(0)));
        assert_eq!(
            index.find(collides, &content),
            None,
            "the key of a request without a salt, and another root"
        );
    }

    #[test]
    fn a_child_of_an_evicted_parent_is_not_found_under_its_successor() {
        let mut index = PrefixIndex::default();
        let Published::New { link: parent, .. } = index.publish(ChainLink::ROOT, &tokens(&[1]), BlockId(0)) else {
            panic!("new");
        };
        index.publish(parent, &tokens(&[2]), BlockId(1));
        index.remove(parent.key);
        let Published::New { link: again, .. } = index.publish(ChainLink::ROOT, &tokens(&[1]), BlockId(2)) else {
            panic!("new");
        };
        assert_eq!(index.find(again, &tokens(&[2])), None);
    }
}
