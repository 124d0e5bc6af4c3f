//! The blocks that only the prefix cache keeps, and which of them goes when a block is needed.
//!
//! The longest unused one goes. Where the cache lists as many blocks of a tenant as its share, or more, the longest unused one of
//! that tenant goes instead, so that a flood of one tenant's prompts cannot push those of all others out. Listed blocks count also
//! while they are in use: a flood is many requests at once. The share takes nothing from a tenant while blocks are free.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{BlockId, CacheTenant};

/// Cached blocks that had to go because a block was needed, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheEvictions {
    pub all: u64,
    /// Those that went in the place of a block that was unused for longer, because their tenant had its share or more.
    pub over_share: u64,
}

/// When a block was last used, and the block.
type Place = (u64, BlockId);

#[derive(Debug)]
pub(super) struct CachedBlocks {
    /// The longest unused one first.
    places: BTreeSet<Place>,
    /// Each tenant of which the cache lists any block. Blocks of requests without a tenant are not here.
    tenants: BTreeMap<CacheTenant, OfTenant>,
    /// The same tenants, by how many blocks are listed.
    by_count: BTreeSet<(u32, CacheTenant)>,
    /// A tenant's share.
    of_tenant_max: u32,
    evictions: CacheEvictions,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct OfTenant {
    /// Listed blocks, those in use included.
    listed: u32,
    cached: BTreeSet<Place>,
}

impl CachedBlocks {
    pub fn new(of_tenant_max: u32) -> Self {
        Self {
            places: BTreeSet::new(),
            tenants: BTreeMap::new(),
            by_count: BTreeSet::new(),
            of_tenant_max,
            evictions: CacheEvictions::default(),
        }
    }

    pub fn len(&self) -> usize {
        self.places.len()
    }
    pub fn blocks(&self) -> Vec<BlockId> {
        self.places.iter().map(|(_, block)| *block).collect()
    }
    pub fn evictions(&self) -> CacheEvictions {
        self.evictions
    }

    /// The cache lists one block more of this tenant.
    pub fn listed(&mut self, tenant: Option<CacheTenant>) {
        if let Some(tenant) = tenant {
            self.recount(tenant, |listed| listed + 1);
        }
    }

    /// The cache lists one block less of this tenant. The block is not cached.
    pub fn unlisted(&mut self, tenant: Option<CacheTenant>) {
        if let Some(tenant) = tenant {
            self.recount(tenant, |listed| listed - 1);
        }
    }

    /// A listed block is in use no more.
    pub fn insert(&mut self, place: Place, tenant: Option<CacheTenant>) {
        self.places.insert(place);
        if let Some(own) = tenant.and_then(|tenant| self.tenants.get_mut(&tenant)) {
            own.cached.insert(place);
        }
    }

    pub fn remove(&mut self, place: Place, tenant: Option<CacheTenant>) {
        self.places.remove(&place);
        if let Some(own) = tenant.and_then(|tenant| self.tenants.get_mut(&tenant)) {
            own.cached.remove(&place);
        }
    }

    /// The block that goes now. It stays here until it is removed, and is counted as gone.
    pub fn evict(&mut self) -> Option<BlockId> {
        let oldest = *self.places.first()?;
        // A share is a part of the pool, so few tenants can have as much.
        let by_count = self.by_count.iter().rev();
        let mut full = by_count.take_while(|(listed, _)| *listed >= self.of_tenant_max);
        let own = full.find_map(|(_, tenant)| self.tenants.get(tenant)?.cached.first());
        let goes = *own.unwrap_or(&oldest);
        self.evictions.all += 1;
        self.evictions.over_share += u64::from(goes != oldest);
        Some(goes.1)
    }

    fn recount(&mut self, tenant: CacheTenant, change: impl FnOnce(u32) -> u32) {
        let own = self.tenants.entry(tenant).or_default();
        let before = own.listed;
        own.listed = change(before);
        let after = own.listed;
        self.by_count.remove(&(before, tenant));
        if after == 0 {
            self.tenants.remove(&tenant);
        } else {
            self.by_count.insert((after, tenant));
        }
    }

    /// Whether it is as if made anew from these: listed blocks with their tenants, and their places where nothing uses them.
    pub fn check(&self, listed: impl Iterator<Item = (Option<CacheTenant>, Option<Place>)>) {
        let mut again = Self::new(self.of_tenant_max);
        for (tenant, place) in listed {
            again.listed(tenant);
            if let Some(place) = place {
                again.insert(place, tenant);
            }
        }
        assert_eq!(again.places, self.places);
        assert_eq!(again.tenants, self.tenants);
        assert_eq!(again.by_count, self.by_count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOOD: Option<CacheTenant> = Some(CacheTenant(1));
    const OTHER: Option<CacheTenant> = Some(CacheTenant(2));

    /// Blocks 0, 1, .. of these tenants, block 0 unused for longest.
    fn cached(of_tenant_max: u32, tenants: &[Option<CacheTenant>]) -> CachedBlocks {
        let mut cached = CachedBlocks::new(of_tenant_max);
        for (number, tenant) in (0..).zip(tenants) {
            cached.listed(*tenant);
            cached.insert((u64::from(number), BlockId(number)), *tenant);
        }
        cached
    }

    /// The blocks in the order in which they go.
    fn evicted(mut cached: CachedBlocks, tenants: &[Option<CacheTenant>]) -> (Vec<u32>, CacheEvictions) {
        let mut gone = Vec::new();
        while let Some(block) = cached.evict() {
            let tenant = tenants[block.0 as usize];
            cached.remove((u64::from(block.0), block), tenant);
            cached.unlisted(tenant);
            gone.push(block.0);
        }
        (gone, cached.evictions())
    }

    #[test]
    fn a_tenant_that_has_its_share_loses_its_own_blocks_first() {
        let tenants = [OTHER, FLOOD, OTHER, FLOOD, FLOOD, FLOOD];
        let counts = |all, over_share| CacheEvictions { all, over_share };
        let gone = |share| evicted(cached(share, &tenants), &tenants);
        assert_eq!(gone(5), (vec![0, 1, 2, 3, 4, 5], counts(6, 0)), "nobody has five");
        assert_eq!(gone(3), (vec![1, 3, 0, 2, 4, 5], counts(6, 2)));
        assert_eq!(gone(4), (vec![1, 0, 2, 3, 4, 5], counts(6, 1)));
    }

    #[test]
    fn blocks_in_use_count_too() {
        let tenants = [OTHER, FLOOD];
        let mut cached = cached(3, &tenants);
        cached.listed(FLOOD);
        cached.listed(FLOOD);
        assert_eq!(
            evicted(cached, &tenants).0,
            [1, 0],
            "one of the flood's three is not in use"
        );
    }

    #[test]
    fn requests_without_a_tenant_have_no_share() {
        let tenants = [None, None, OTHER, None];
        assert_eq!(evicted(cached(2, &tenants), &tenants).0, [0, 1, 2, 3]);
    }
}
