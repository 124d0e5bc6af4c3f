//! One sequence on a node: its tokens, how far their KV is computed, its blocks and its place in the prefix chain.

use crate::ids::{OutputIndex, TokenId};
use crate::kv::{BlockHandle, BlockPool, BlockTable, BlockUse, ChainLink};

#[derive(Debug)]
pub(super) struct Sequence {
    /// Prompt, then every output of this attempt.
    pub tokens: Vec<TokenId>,
    /// Positions below this have their KV in the table's blocks.
    pub computed: u32,
    pub table: BlockTable,
    /// Blocks reserved for growth.
    pub spare: Vec<BlockHandle>,
    /// Where the chain begins: requests with another salt have another place.
    root: ChainLink,
    link: ChainLink,
    linked_blocks: u32,
}

impl Sequence {
    pub fn empty(root: ChainLink) -> Self {
        Self {
            tokens: Vec::new(),
            computed: 0,
            table: BlockTable::default(),
            spare: Vec::new(),
            root,
            link: root,
            linked_blocks: 0,
        }
    }

    pub fn root(&self) -> ChainLink {
        self.root
    }

    pub fn len(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }
    /// Tokens to feed before the next output can be drawn.
    pub fn pending(&self) -> u32 {
        self.len() - self.computed
    }
    /// Index of the next output, counted over all attempts.
    pub fn next_output(&self, client_prompt_tokens: u32) -> OutputIndex {
        OutputIndex(self.len() - client_prompt_tokens)
    }

    /// Takes the cached prefix of `tokens` (whole blocks, at most all but the last token). The table must be empty.
    pub fn take_prefix(&mut self, pool: &mut BlockPool) -> u32 {
        let usable = self.tokens.len().saturating_sub(1);
        let found = pool.match_prefix(self.root, &self.tokens[..usable]);
        self.link = found.link;
        self.table = BlockTable::new(found.blocks);
        self.linked_blocks = self.table.len();
        self.computed = self.linked_blocks * pool.block_tokens();
        self.linked_blocks
    }

    /// Starts as a copy of `other`, whose prompt is computed: shares its whole blocks by reference. The partial last
    /// block is the caller's business.
    pub fn share_whole_blocks(&mut self, other: &Sequence, pool: &mut BlockPool) {
        let whole = (other.computed / pool.block_tokens()) as usize;
        for handle in &other.table.handles()[..whole] {
            self.table.push(pool.share(handle));
        }
        self.computed = other.computed;
        self.link = other.link;
        self.linked_blocks = other.linked_blocks;
    }

    /// Publishes the whole blocks below `computed` that are not published yet.
    pub fn publish(&mut self, pool: &mut BlockPool) {
        let block_tokens = pool.block_tokens();
        while (self.linked_blocks + 1) * block_tokens <= self.computed {
            let index = self.linked_blocks as usize;
            let from = index * block_tokens as usize;
            let tokens = &self.tokens[from..from + block_tokens as usize];
            self.link = pool.publish(&self.table.handles()[index], self.link, tokens);
            self.linked_blocks += 1;
        }
    }

    /// Makes sure that positions below `end` have blocks: from the spare ones, then from the pool. False when the
    /// pool has none; what was added stays.
    pub fn grow_to(&mut self, pool: &mut BlockPool, end: u32) -> bool {
        while self.table.len() * pool.block_tokens() < end {
            let handle = match self.spare.pop() {
                Some(mut handle) => {
                    pool.change(&mut handle, BlockUse::Active);
                    handle
                }
                None => match pool.allocate_one(BlockUse::Active) {
                    Some(handle) => handle,
                    None => return false,
                },
            };
            self.table.push(handle);
        }
        true
    }

    pub fn holds_blocks(&self) -> bool {
        !self.table.is_empty() || !self.spare.is_empty()
    }

    /// Publishes what is complete and gives every block back. The tokens stay, nothing of them is computed any more.
    pub fn release(&mut self, pool: &mut BlockPool) {
        self.publish(pool);
        for handle in self.spare.drain(..) {
            pool.release(handle);
        }
        self.table.release(pool);
        self.computed = 0;
        self.link = self.root;
        self.linked_blocks = 0;
    }
}
