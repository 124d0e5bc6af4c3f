//! The blocks of one node: free list, generations, LRU eviction of cached blocks.
//!
//! A block's state follows from who holds it (`block_holds.rs`), so it cannot disagree with the holders: quarantined if any hold is a
//! quarantine, else in-transfer, else reserved, else active; with no hold at all it is cached when the prefix cache
//! lists it, else free. Holds are move-only [`BlockHandle`]s with one way back, [`BlockPool::release`]; a handle that
//! is dropped instead (a task that panicked, a bug) comes back on the scheduler's next tick and is counted.

#[cfg(test)]
use std::collections::BTreeSet;
use std::sync::mpsc;

use crate::ids::{BlockId, CacheTenant, Generation, TokenId};
use crate::kv::block_holds::{Block, BlockHandle, BlockState, BlockUse, Hold, take_hold};
use crate::kv::cached_blocks::{CacheEvictions, CachedBlocks};
use crate::kv::prefix::{ChainLink, PrefixIndex, Published};
use crate::kv::prefix_log::PrefixChanges;
#[cfg(test)]
use crate::kv::prefix_log::PrefixKey;
use crate::node::KvBlockCounts;

/// What a reset of the prefix cache did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheReset {
    /// Blocks that only the cache kept, and that are free now.
    pub dropped_blocks: u32,
    /// Blocks that the cache still lists, because something uses them.
    pub kept_blocks: u32,
}

/// Leading blocks of a prompt that the cache already has, held by the caller from now on.
#[derive(Debug)]
pub(crate) struct PrefixMatch {
    pub blocks: Vec<BlockHandle>,
    /// Where to go on publishing.
    pub link: ChainLink,
}

/// The pool. All operations are O(log blocks).
#[derive(Debug)]
pub struct BlockPool {
    block_tokens: u32,
    blocks: Vec<Block>,
    free: Vec<BlockId>,
    cached: CachedBlocks,
    counts: KvBlockCounts,
    clock: u64,
    prefix: Option<PrefixIndex>,
    dropped: mpsc::Receiver<Hold>,
    if_dropped: mpsc::Sender<Hold>,
    dropped_total: u64,
}

impl BlockPool {
    /// `block_tokens` tokens fit a block; `prefix_cache` off makes `publish` and `match_prefix` do nothing.
    pub fn new(block_count: u32, block_tokens: u32, prefix_cache: bool) -> Self {
        let block = Block {
            generation: Generation(0),
            active: 0,
            reserved: 0,
            in_transfer: 0,
            quarantined: 0,
            published: None,
            tenant: None,
            cached_at: 0,
        };
        #[allow(
            clippy::disallowed_methods,
            reason = "bounded by the handles: each sends once at most"
        )]
        let (if_dropped, dropped) = mpsc::channel();
        Self {
            block_tokens: block_tokens.max(1),
            blocks: vec![block; block_count as usize],
            // Popped from the end: the lowest ids go out first.
            free: (0..block_count).rev().map(BlockId).collect(),
            cached: CachedBlocks::new(block_count),
            counts: KvBlockCounts {
                free: block_count,
                ..KvBlockCounts::default()
            },
            clock: 0,
            prefix: prefix_cache.then(PrefixIndex::default),
            dropped,
            if_dropped,
            dropped_total: 0,
        }
    }

    /// Where blocks are needed, a tenant of which the cache lists so many loses its own first. For a pool that was not used yet.
    #[must_use]
    pub fn with_tenant_share(self, blocks: u32) -> Self {
        debug_assert_eq!(self.cached.len(), 0);
        Self {
            cached: CachedBlocks::new(blocks),
            ..self
        }
    }

    /// Takes back the blocks of handles that were dropped instead of released. The scheduler calls it on every tick.
    pub(crate) fn reclaim_dropped(&mut self) {
        while let Ok(hold) = self.dropped.try_recv() {
            self.dropped_total += 1;
            self.update(hold.block, |block| take_hold(block, hold.held_as));
        }
    }
    /// Handles that were dropped instead of released, ever: each is a bug, none is a leak.
    pub(crate) fn dropped_total(&self) -> u64 {
        self.dropped_total
    }

    pub fn counts(&self) -> KvBlockCounts {
        self.counts
    }
    pub fn block_count(&self) -> u32 {
        u32::try_from(self.blocks.len()).unwrap_or(u32::MAX)
    }
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }
    /// Blocks that can be handed out now: free ones and cached ones.
    pub fn available(&self) -> u32 {
        self.counts.free + self.counts.cached
    }
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_tokens)
    }
    pub fn state(&self, block: BlockId) -> Option<BlockState> {
        self.blocks.get(block.0 as usize).map(Block::state)
    }

    /// Hands out `count` blocks under new generations, evicting cached blocks when the free ones do not suffice
    /// (which: `cached_blocks.rs`). All or nothing: `None` when fewer are available.
    pub fn allocate(&mut self, count: u32, held_as: BlockUse) -> Option<Vec<BlockHandle>> {
        if self.available() < count {
            return None;
        }
        Some((0..count).filter_map(|_| self.take_one(held_as)).collect())
    }

    /// One block, as `allocate(1, ..)` but without a list.
    pub fn allocate_one(&mut self, held_as: BlockUse) -> Option<BlockHandle> {
        self.take_one(held_as)
    }

    /// The longest chain of cached blocks after `root` that starts `tokens`. The caller holds them as active.
    pub(crate) fn match_prefix(&mut self, root: ChainLink, tokens: &[TokenId]) -> PrefixMatch {
        let mut found = PrefixMatch {
            blocks: Vec::new(),
            link: root,
        };
        for chunk in tokens.chunks_exact(self.block_tokens as usize) {
            let Some((link, block)) = self.prefix.as_ref().and_then(|index| index.find(found.link, chunk)) else {
                break;
            };
            found.link = link;
            found.blocks.push(self.hold(block, BlockUse::Active));
        }
        found
    }

    /// Lists a block whose bytes are complete and verified. `tokens` are the block's own, `parent` the link before it.
    /// Returns the link to go on from. With equal content listed already, that block keeps the place.
    pub fn publish(&mut self, handle: &BlockHandle, parent: ChainLink, tokens: &[TokenId]) -> ChainLink {
        debug_assert_eq!(
            tokens.len(),
            self.block_tokens as usize,
            "only whole blocks are published"
        );
        let Some(index) = self.prefix.as_mut() else {
            return parent;
        };
        match index.publish(parent, tokens, handle.block()) {
            Published::AlreadyThere { link } => link,
            Published::New { link, displaced } => {
                let own = handle.block();
                if let Some(old) = displaced.filter(|old| *old != own) {
                    self.update(old, |block| block.published = None);
                }
                let before = self.blocks[own.0 as usize].published;
                if let (Some(stale), Some(index)) = (before.filter(|key| *key != link.key()), self.prefix.as_mut()) {
                    index.remove(stale);
                }
                self.update(own, |block| {
                    block.published = Some(link.key());
                    block.tenant = link.tenant();
                });
                link
            }
        }
    }

    /// Frees every block that only the prefix cache keeps. Blocks in use stay, and stay listed.
    pub fn reset_prefix_cache(&mut self) -> CacheReset {
        let cached = self.cached.blocks();
        for block in &cached {
            self.unlist(*block);
        }
        let kept = self.prefix.as_ref().map_or(0, PrefixIndex::len);
        CacheReset {
            dropped_blocks: u32::try_from(cached.len()).unwrap_or(u32::MAX),
            kept_blocks: u32::try_from(kept).unwrap_or(u32::MAX),
        }
    }

    /// What the prefix cache has listed or dropped since this was last asked; `None` without a change.
    pub fn take_prefix_changes(&mut self) -> Option<PrefixChanges> {
        let changes = self.prefix.as_mut()?.untold.take();
        Some(changes).filter(|changes| !changes.is_empty())
    }

    pub fn evictions(&self) -> CacheEvictions {
        self.cached.evictions()
    }

    /// What the prefix cache lists.
    #[cfg(test)]
    pub(crate) fn listed(&self) -> BTreeSet<PrefixKey> {
        let index = self.prefix.iter();
        index.flat_map(PrefixIndex::keys).map(PrefixKey).collect()
    }

    /// A second hold on the same block, for a sequence that shares it by reference.
    pub fn share(&mut self, handle: &BlockHandle) -> BlockHandle {
        self.hold(handle.block(), BlockUse::Active)
    }

    /// Changes what the holder does with the block.
    pub fn change(&mut self, handle: &mut BlockHandle, held_as: BlockUse) {
        let before = std::mem::replace(&mut handle.hold.held_as, held_as);
        self.update(handle.block(), |block| {
            take_hold(block, before);
            *block.holds(held_as) += 1;
        });
    }

    /// The one way back. The last holder's release makes the block cached (when published) or free.
    pub fn release(&mut self, mut handle: BlockHandle) {
        handle.if_dropped = None;
        let Hold { block, held_as } = handle.hold;
        self.update(block, |block| take_hold(block, held_as));
    }

    fn hold(&mut self, block: BlockId, held_as: BlockUse) -> BlockHandle {
        self.update(block, |block| *block.holds(held_as) += 1);
        let generation = self.blocks[block.0 as usize].generation;
        BlockHandle {
            hold: Hold { block, held_as },
            generation,
            if_dropped: Some(self.if_dropped.clone()),
        }
    }

    fn take_one(&mut self, held_as: BlockUse) -> Option<BlockHandle> {
        if self.free.is_empty() {
            let goes = self.cached.evict()?;
            self.unlist(goes);
        }
        let block = *self.free.last()?;
        let entry = &mut self.blocks[block.0 as usize];
        entry.generation = Generation(entry.generation.0.wrapping_add(1));
        Some(self.hold(block, held_as))
    }

    /// Takes a block out of the prefix cache.
    fn unlist(&mut self, block: BlockId) {
        if let (Some(key), Some(index)) = (self.blocks[block.0 as usize].published, self.prefix.as_mut()) {
            index.remove(key);
        }
        self.update(block, |block| block.published = None);
    }

    /// Applies one change to a block and moves it between the free list, the cached set and the counters.
    fn update(&mut self, id: BlockId, change: impl FnOnce(&mut Block)) {
        let block = &mut self.blocks[id.0 as usize];
        let before = block.state();
        let (stamp, was_listed) = (block.cached_at, block.published.map(|_| block.tenant));
        change(block);
        let after = block.state();
        let is_listed = block.published.map(|_| block.tenant);
        if let Some(tenant) = is_listed.filter(|_| was_listed != is_listed) {
            self.cached.listed(tenant);
        }
        if before != after {
            self.moved(id, (before, after), (stamp, was_listed.flatten()));
        }
        if let Some(tenant) = was_listed.filter(|_| was_listed != is_listed) {
            self.cached.unlisted(tenant);
        }
    }

    /// A block has another state. `stamp` and `tenant` are those that it had before.
    fn moved(
        &mut self,
        id: BlockId,
        (before, after): (BlockState, BlockState),
        (stamp, tenant): (u64, Option<CacheTenant>),
    ) {
        let block = &mut self.blocks[id.0 as usize];
        self.clock += 1;
        block.cached_at = self.clock;
        match before {
            BlockState::Free => {
                // Taken from the end in `take_one`; from elsewhere only by publishing a block that nobody holds.
                let position = self.free.iter().rposition(|free| *free == id);
                self.free.remove(position.expect("a free block is on the free list"));
            }
            BlockState::Cached => {
                self.cached.remove((stamp, id), tenant);
            }
            _ => {}
        }
        match after {
            BlockState::Free => self.free.push(id),
            BlockState::Cached => {
                self.cached.insert((self.clock, id), block.tenant);
            }
            _ => {}
        }
        *counter(&mut self.counts, before) -= 1;
        *counter(&mut self.counts, after) += 1;
        // Two comparisons: the sum and the two lists are the whole invariant, checked on every change in release too.
        assert_eq!(
            self.counts.total(),
            self.blocks.len() as u32,
            "a block was lost or invented"
        );
        assert_eq!(
            self.counts.free as usize,
            self.free.len(),
            "the free list disagrees with the counters"
        );
        debug_assert_eq!(self.counts.cached as usize, self.cached.len());
    }

    /// Recounts everything; for tests and the simulator's checkers.
    pub fn check(&self) {
        let mut recount = KvBlockCounts::default();
        for block in &self.blocks {
            *counter(&mut recount, block.state()) += 1;
        }
        assert_eq!(recount, self.counts);
        let listed = (0..).zip(&self.blocks).filter(|(_, block)| block.published.is_some());
        self.cached.check(listed.map(|(id, block)| {
            let is_cached = block.state() == BlockState::Cached;
            (block.tenant, is_cached.then_some((block.cached_at, BlockId(id))))
        }));
        let listed = self.blocks.iter().filter(|block| block.published.is_some()).count();
        assert_eq!(
            listed,
            self.prefix.as_ref().map_or(0, PrefixIndex::len),
            "the prefix index lists other blocks"
        );
    }
}

fn counter(counts: &mut KvBlockCounts, state: BlockState) -> &mut u32 {
    match state {
        BlockState::Free => &mut counts.free,
        BlockState::Active => &mut counts.active,
        BlockState::Cached => &mut counts.cached,
        BlockState::Reserved => &mut counts.reserved,
        BlockState::InTransfer => &mut counts.in_transfer,
        BlockState::Quarantined => &mut counts.quarantined,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(from: u32, count: u32) -> Vec<TokenId> {
        (from..from + count).map(TokenId).collect()
    }

    #[test]
    fn each_new_owner_gets_a_new_generation() {
        let mut pool = BlockPool::new(1, 16, true);
        let first = pool.allocate_one(BlockUse::Active).expect("one free");
        let generation = first.generation();
        assert!(pool.allocate(1, BlockUse::Active).is_none());
        pool.release(first);
        let second = pool.allocate_one(BlockUse::Reserved).expect("free again");
        assert_ne!(second.generation(), generation);
        pool.release(second);
        pool.check();
    }

    #[test]
    fn cached_blocks_are_evicted_longest_unused_first() {
        let mut pool = BlockPool::new(2, 4, true);
        let mut blocks = pool.allocate(2, BlockUse::Active).expect("two free");
        let b = blocks.pop().expect("two");
        let a = blocks.pop().expect("two");
        pool.publish(&a, ChainLink::ROOT, &tokens(0, 4));
        pool.publish(&b, ChainLink::ROOT, &tokens(10, 4));
        pool.release(b);
        pool.release(a);
        assert_eq!(pool.counts().cached, 2);
        let taken = pool.allocate_one(BlockUse::Active).expect("evicts");
        assert!(
            pool.match_prefix(ChainLink::ROOT, &tokens(10, 4)).blocks.is_empty(),
            "the older one went"
        );
        let hit = pool.match_prefix(ChainLink::ROOT, &tokens(0, 4));
        assert_eq!(hit.blocks.len(), 1);
        for block in hit.blocks {
            pool.release(block);
        }
        pool.release(taken);
        pool.check();
    }

    #[test]
    fn a_flood_of_one_tenant_leaves_the_others_what_is_not_its_share() {
        let kept_by = |share: u32| {
            let mut pool = BlockPool::new(4, 4, true).with_tenant_share(share);
            let mut cache = |tenant, first_token| {
                let link = ChainLink::ROOT.counted_for(Some(CacheTenant(tenant)));
                let block = pool.allocate_one(BlockUse::Active).expect("cached ones go");
                pool.publish(&block, link, &tokens(first_token, 4));
                pool.release(block);
                pool.check();
            };
            cache(1, 0);
            cache(1, 10);
            for flood in 2..20 {
                cache(2, 10 * flood);
            }
            let hit = |first_token| {
                let found = pool
                    .prefix
                    .as_ref()
                    .expect("on")
                    .find(ChainLink::ROOT, &tokens(first_token, 4));
                found.is_some()
            };
            [hit(0), hit(10)]
        };
        assert_eq!(kept_by(4), [false, false]);
        assert_eq!(kept_by(3), [false, true]);
        assert_eq!(kept_by(2), [true, true]);
    }

    #[test]
    fn a_shared_block_shows_its_strictest_use() {
        let mut pool = BlockPool::new(1, 4, true);
        let mut pushed = pool.allocate_one(BlockUse::Active).expect("free");
        let reader = pool.share(&pushed);
        pool.change(&mut pushed, BlockUse::InTransfer);
        assert_eq!(pool.counts().in_transfer, 1);
        pool.change(&mut pushed, BlockUse::Quarantined);
        assert_eq!(pool.counts().quarantined, 1);
        pool.release(pushed);
        assert_eq!(pool.counts().active, 1);
        pool.release(reader);
        assert_eq!(pool.counts().free, 1);
        pool.check();
    }

    #[test]
    fn a_dropped_handle_comes_back_by_the_same_way_and_is_counted() {
        let mut pool = BlockPool::new(2, 4, false);
        let handle = pool.allocate_one(BlockUse::Active).expect("free");
        let mut shared = pool.share(&handle);
        pool.change(&mut shared, BlockUse::InTransfer);
        drop(shared);
        assert_eq!(pool.counts().in_transfer, 1, "nothing changes under the pool's feet");
        pool.reclaim_dropped();
        assert_eq!((pool.counts().active, pool.dropped_total()), (1, 1));
        // As when the thread that holds it panics.
        let died = std::thread::spawn(move || {
            let _held = handle;
            std::panic::panic_any("the holder dies");
        });
        assert!(died.join().is_err());
        pool.reclaim_dropped();
        assert_eq!((pool.counts().free, pool.dropped_total()), (2, 2));
        pool.check();
    }

    #[test]
    fn a_reset_frees_what_only_the_cache_keeps_and_leaves_the_rest_listed() {
        let mut pool = BlockPool::new(3, 4, true);
        let mut blocks = pool.allocate(2, BlockUse::Active).expect("three free");
        let used = blocks.pop().expect("two");
        let cached = blocks.pop().expect("two");
        pool.publish(&used, ChainLink::ROOT, &tokens(0, 4));
        pool.publish(&cached, ChainLink::ROOT, &tokens(10, 4));
        pool.release(cached);
        assert_eq!(
            pool.take_prefix_changes().map(|changes| changes.is_empty()),
            Some(false)
        );
        let reset = CacheReset {
            dropped_blocks: 1,
            kept_blocks: 1,
        };
        assert_eq!(pool.reset_prefix_cache(), reset);
        assert_eq!(
            (pool.counts().free, pool.counts().active, pool.counts().cached),
            (2, 1, 0)
        );
        assert_eq!(pool.listed().len(), 1);
        assert!(pool.take_prefix_changes().is_some(), "coordinators are told");
        pool.check();
        pool.release(used);
        assert_eq!(pool.counts().cached, 1, "what was in use is cached afterwards");
        assert_eq!(pool.reset_prefix_cache().dropped_blocks, 1);
        assert_eq!(pool.reset_prefix_cache(), CacheReset::default());
        pool.check();
    }

    #[test]
    fn without_a_prefix_cache_nothing_is_ever_cached() {
        let mut pool = BlockPool::new(1, 4, false);
        let block = pool.allocate_one(BlockUse::Active).expect("free");
        pool.publish(&block, ChainLink::ROOT, &tokens(0, 4));
        pool.release(block);
        assert_eq!(pool.counts().free, 1);
        assert!(pool.match_prefix(ChainLink::ROOT, &tokens(0, 4)).blocks.is_empty());
    }
}
