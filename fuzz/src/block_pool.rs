//! Any order of calls to a pool of KV blocks: no block is lost, given twice or kept after the last hold on it.

use serving_core::ids::{CacheTenant, TokenId};
use serving_core::kv::{BlockHandle, BlockPool, BlockUse, ChainLink};

use crate::choices::Choices;

const BLOCKS: u32 = 6;
const BLOCK_TOKENS: u32 = 2;
const USES: [BlockUse; 4] = [
    BlockUse::Active,
    BlockUse::Reserved,
    BlockUse::InTransfer,
    BlockUse::Quarantined,
];

pub(crate) fn check(data: &[u8]) {
    let mut choices = Choices::of(data);
    let has_cache = choices.flag();
    let mut pool = BlockPool::new(BLOCKS, BLOCK_TOKENS, has_cache).with_tenant_share(BLOCKS / 3);
    let mut held: Vec<BlockHandle> = Vec::new();
    // Where somebody may go on publishing.
    let tenants = [None, Some(CacheTenant(1)), Some(CacheTenant(2))];
    let mut links = tenants.map(|tenant| ChainLink::ROOT.counted_for(tenant)).to_vec();
    while let Some(call) = choices.next() {
        let which = choices.below(held.len());
        match call % 8 {
            0 | 1 => allocate(&mut pool, &mut choices, &mut held),
            2 if !held.is_empty() => pool.release(held.swap_remove(which)),
            3 if !held.is_empty() => held.push(pool.share(&held[which])),
            4 if !held.is_empty() => pool.change(&mut held[which], USES[choices.below(4)]),
            5 | 6 if !held.is_empty() => {
                let parent = links[choices.below(links.len())];
                let tokens = [choices.below(4), choices.below(4)].map(|token| TokenId(token as u32));
                links.push(pool.publish(&held[which], parent, &tokens));
            }
            7 => {
                pool.reset_prefix_cache();
                let _ = pool.take_prefix_changes();
            }
            _ => {}
        }
        agree(&pool, &held);
    }
    for handle in held.drain(..) {
        pool.release(handle);
    }
    agree(&pool, &held);
    assert_eq!(pool.available(), BLOCKS, "a block is kept by nobody");
    pool.reset_prefix_cache();
    assert_eq!(pool.counts().free, BLOCKS);
}

fn allocate(pool: &mut BlockPool, choices: &mut Choices<'_>, held: &mut Vec<BlockHandle>) {
    let (count, held_as) = (choices.below(4) as u32, USES[choices.below(4)]);
    let available = pool.available();
    match pool.allocate(count, held_as) {
        Some(given) => {
            assert!(count <= available && given.len() == count as usize);
            for handle in &given {
                assert!(
                    held.iter().all(|other| other.block() != handle.block()),
                    "a held block was given"
                );
            }
            held.extend(given);
        }
        None => assert!(count > available),
    }
}

fn agree(pool: &BlockPool, held: &[BlockHandle]) {
    pool.check();
    let mut blocks: Vec<_> = held.iter().map(BlockHandle::block).collect();
    blocks.sort_unstable();
    blocks.dedup();
    assert_eq!(pool.available() + blocks.len() as u32, BLOCKS);
}
