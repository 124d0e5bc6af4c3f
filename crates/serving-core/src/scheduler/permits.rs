//! Permits: how much more work a node may be given, as cumulative counters that no lost report can corrupt.

use crate::ids::NodeEpoch;
use crate::node::{NodeCapacity, NodeRole};
use crate::request::Request;

/// Steps of prompt tokens that a prefill node keeps granted: one to compute, one on its way (PROTOCOL rule 7).
const PREFILL_STEPS_AHEAD: u64 = 2;
/// KV blocks of growth that a decode node reserves for each choice at `Open`.
pub const GROWTH_BLOCKS: u32 = 2;

/// Prompt tokens an idle prefill node grants: about two step budgets, at most what its blocks hold.
pub(crate) fn prefill_capacity_tokens(capacity: &NodeCapacity) -> u64 {
    let pool = u64::from(capacity.kv_blocks) * u64::from(capacity.block_tokens);
    (PREFILL_STEPS_AHEAD * u64::from(capacity.max_batch_tokens)).min(pool)
}

/// One part in so many of a step's budget belongs to short prompts, so that they do not wait behind a long one that came
/// before. A fifth makes the long prompt take 1.25 times as long at most.
const SHORT_PROMPTS_SHARE: u32 = 5;

/// Tokens of a budget that belong to short prompts.
pub(crate) fn share_of_short_prompts(budget: u32) -> u32 {
    budget / SHORT_PROMPTS_SHARE
}

/// Prompt tokens that a prefill node goes on granting while a long prompt computes. A prompt of no more tokens is short: the
/// shares of two whole steps compute it. Steps with decode rows may have smaller shares, and take more of them.
pub(crate) fn permits_kept_for_short(max_batch_tokens: u32) -> u64 {
    PREFILL_STEPS_AHEAD * u64::from(share_of_short_prompts(max_batch_tokens))
}

/// Blocks that `Open` reserves in an empty pool: the one formula for the coordinator's permit and the node's reservation.
pub(crate) fn blocks_at_open(request: &Request, block_tokens: u32) -> u64 {
    let block_tokens = block_tokens.max(1);
    u64::from(request.prompt_tokens().div_ceil(block_tokens)) + growth_blocks_total(request, block_tokens)
}

/// Growth reserved for all choices together.
fn growth_blocks_total(request: &Request, block_tokens: u32) -> u64 {
    let first = u64::from(growth_blocks(request, block_tokens, true));
    let other = u64::from(growth_blocks(request, block_tokens, false));
    first + u64::from(request.choice_count.saturating_sub(1)) * other
}

/// Blocks past the prompt that one choice reserves: room for min(remaining, two blocks) tokens. Choice 0 writes on in
/// the prompt's partial last block, every other choice needs a copy of it.
pub(crate) fn growth_blocks(request: &Request, block_tokens: u32, is_first_choice: bool) -> u32 {
    let prompt = request.prompt_tokens();
    // A node registers the size of its blocks, and a coordinator must not stop at a wrong one.
    let growth = GROWTH_BLOCKS.saturating_mul(block_tokens);
    let room = request.remaining_tokens().min(growth);
    if room == 0 {
        return 0;
    }
    let end = prompt.saturating_add(room).div_ceil(block_tokens);
    let have = if is_first_choice {
        prompt.div_ceil(block_tokens)
    } else {
        prompt / block_tokens
    };
    end - have
}

/// Requests that all permits of a node allow at once: each takes at least one.
pub fn permitted_requests_max(role: NodeRole, capacity: &NodeCapacity) -> u32 {
    match role {
        NodeRole::Prefill => u32::try_from(prefill_capacity_tokens(capacity)).unwrap_or(u32::MAX),
        NodeRole::Decode => capacity.kv_blocks,
    }
}

/// Coordinators whose work is counted apart. Far more than are ever connected: lives that are over make room for new ones.
const SENDERS_MAX: usize = 64;

/// The node's side of the counters. Never decreasing, and never more than `capacity` ahead of what was received.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PermitCounters {
    pub granted_total: u64,
    pub received_total: u64,
    /// `received_total` by coordinator, the latest sender last.
    pub received_by: Vec<(NodeEpoch, u64)>,
}

impl PermitCounters {
    /// Work that holds `permits` has reached the node, whether it is then accepted or refused. A sender that claims
    /// more than it was granted gains nothing: it is counted as having used all there was.
    pub fn receive(&mut self, permits: u64, from: NodeEpoch) {
        let before = self.received_total;
        self.received_total = before.saturating_add(permits).min(self.granted_total.max(before));
        let counted = self.received_total - before;
        let known = self.received_by.iter().position(|(sender, _)| *sender == from);
        let total = known.map_or(0, |at| self.received_by.remove(at).1);
        if self.received_by.len() >= SENDERS_MAX {
            self.received_by.remove(0);
        }
        self.received_by.push((from, total + counted));
    }
    /// Raises the grant so that `available` more may come.
    pub fn grant(&mut self, available: u64) {
        self.granted_total = self.granted_total.max(self.received_total.saturating_add(available));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: NodeEpoch = NodeEpoch(1);

    fn totals(permits: &PermitCounters) -> (u64, u64) {
        (permits.granted_total, permits.received_total)
    }

    #[test]
    fn grants_never_fall_and_never_exceed_what_is_available() {
        let mut permits = PermitCounters::default();
        permits.grant(100);
        permits.receive(40, ONE);
        permits.grant(50);
        assert_eq!(totals(&permits), (100, 40));
        permits.grant(90);
        assert_eq!(permits.granted_total, 130);
    }

    #[test]
    fn a_sender_without_permits_cannot_raise_the_grant() {
        let mut permits = PermitCounters::default();
        permits.grant(10);
        permits.receive(u64::MAX, ONE);
        permits.grant(10);
        assert_eq!(totals(&permits), (20, 10));
    }

    #[test]
    fn work_is_counted_by_sender_and_old_senders_make_room() {
        let mut permits = PermitCounters::default();
        permits.grant(1_000);
        permits.receive(4, ONE);
        permits.receive(5, NodeEpoch(2));
        permits.receive(6, ONE);
        assert_eq!(permits.received_by, [(NodeEpoch(2), 5), (ONE, 10)]);
        for epoch in 0..1_000 {
            permits.receive(0, NodeEpoch(100 + epoch));
            permits.receive(0, ONE);
        }
        assert_eq!(permits.received_by.len(), SENDERS_MAX);
        assert_eq!(
            permits.received_by.last(),
            Some(&(ONE, 10)),
            "who sends is not forgotten"
        );
    }
}
