//! A push and how far it is: which blocks of a prompt are complete and have not been handed to it.

use crate::kv::{BlockPool, BlockUse};
use crate::scheduler::sequence::Sequence;
use crate::scheduler::{PushBlock, PushPlan};

/// A push and how far it is.
#[derive(Debug)]
pub(super) struct Push {
    pub plan: PushPlan,
    /// The last chunk has been cut off: what is left is computed in one step.
    pub is_cut: bool,
    /// Blocks below this have been given to the push, or are not wanted by it.
    pushed_to: u32,
    /// The push has at least one block and has not been reported as ended.
    pub is_pushing: bool,
}

impl Push {
    pub fn new(plan: PushPlan) -> Self {
        Self {
            plan,
            is_cut: false,
            pushed_to: plan.skip_blocks,
            is_pushing: false,
        }
    }

    /// Of the whole prompt, those whose KV has not been given to the push, computed or not.
    pub fn tokens_left(&self, sequence: &Sequence, block_tokens: u32) -> u32 {
        let pushed = self.pushed_to.saturating_mul(block_tokens);
        sequence.len().saturating_sub(pushed)
    }

    /// Hands on the blocks that became complete; with the last chunk also the partial one.
    pub fn complete(&mut self, sequence: &mut Sequence, pool: &mut BlockPool) -> Option<Vec<PushBlock>> {
        let complete = match sequence.pending() {
            0 => sequence.table.len(),
            _ => sequence.computed / pool.block_tokens(),
        };
        if complete <= self.pushed_to {
            return None;
        }
        let range = self.pushed_to as usize..complete as usize;
        sequence.table.change(pool, range.clone(), BlockUse::InTransfer);
        let blocks = sequence.table.ids()[range].iter();
        let blocks = blocks.zip(self.pushed_to - self.plan.skip_blocks..);
        let blocks = blocks.map(|(block, ticket_index)| PushBlock {
            ticket_index,
            block: *block,
        });
        let blocks = blocks.collect();
        self.pushed_to = complete;
        self.is_pushing = true;
        Some(blocks)
    }
}
