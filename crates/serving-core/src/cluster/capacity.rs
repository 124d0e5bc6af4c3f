//! What a request needs of a node, and whether the node can give it now or ever.

use crate::node::{NodeCapacity, NodeRole};
use crate::request::{RejectReason, Request};
use crate::scheduler::permits::blocks_at_open;
use crate::time::Time;

use super::Cluster;
use super::member::{Life, Node};

/// The part of a node that is kept for an older request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Kept {
    pub permits: u64,
    /// Places for sequences. Only decode nodes have them.
    pub sequences: u32,
}

/// The prefill permits that one request takes. A node grants permits for about two steps. A prompt that is longer than one step takes
/// the permits of one step, because otherwise no node could ever take it.
pub(super) fn prefill_permit(request: &Request, node: &Node) -> u32 {
    request
        .prompt_tokens()
        .min(node.record.capacity.max_batch_tokens)
        .max(1)
}

pub(super) fn prompt_fits(request: &Request, node: &Node) -> bool {
    let capacity = &node.record.capacity;
    let blocks = request.prompt_tokens().div_ceil(capacity.block_tokens.max(1));
    blocks <= capacity.kv_blocks && request.prompt_tokens() <= capacity.max_model_tokens
}

/// Whether the node's last report shows room for the prompt. The permits of a long prompt are fewer than its tokens, and a permit that
/// was granted stays valid while the pool fills. Without this check such a prompt would be refused again after each report.
pub(super) fn has_prompt_room(request: &Request, node: &Node) -> bool {
    let needed = request
        .prompt_tokens()
        .div_ceil(node.record.capacity.block_tokens.max(1));
    let reported = node.status.as_ref().map(|s| s.kv_blocks.free + s.kv_blocks.cached);
    reported.is_none_or(|room| needed <= room)
}

/// The prompt must be within the node's limit of tokens. The answer need not be: an answer that reaches the limit ends there with `length`.
pub(super) fn whole_fits(request: &Request, node: &Node) -> bool {
    let capacity = &node.record.capacity;
    blocks_needed(request, capacity) <= capacity.kv_blocks
        && request.prompt_tokens() <= capacity.max_model_tokens
        && request.choice_count <= capacity.max_sequences
}

/// The node can take this request now and still has what it keeps for an older request.
pub(super) fn decode_has_room(request: &Request, node: &Node, kept: Kept) -> bool {
    let cost = u64::from(decode_permit(request, &node.record.capacity)).saturating_add(kept.permits);
    cost <= node.permits.available() && has_places(request, node, kept.sequences)
}

/// The decode node has places now for all choices and for `kept` further sequences.
pub(super) fn has_places(request: &Request, node: &Node, kept: u32) -> bool {
    let sequences = node.sequences.saturating_add(request.choice_count);
    sequences.saturating_add(kept) <= node.record.capacity.max_sequences
}

/// The KV blocks that the whole request may need on one decode node, where no choice grows beyond the node's limit of tokens. The
/// choices share the whole blocks of the prompt, and each gets a copy of the partial last block (PROTOCOL rule 4).
pub(super) fn blocks_needed(request: &Request, capacity: &NodeCapacity) -> u32 {
    let block = u64::from(capacity.block_tokens.max(1));
    let prompt = u64::from(request.prompt_tokens());
    let room = capacity.max_model_tokens.saturating_sub(request.prompt_tokens());
    let own = (prompt % block + u64::from(request.remaining_tokens().min(room))).div_ceil(block);
    let total = prompt / block + own * u64::from(request.choice_count.max(1));
    u32::try_from(total).unwrap_or(u32::MAX)
}

/// The most output tokens that each choice can have on a decode node of this capacity, for a prompt of this length and this number of
/// choices. 0 where the node cannot take the prompt or the choices.
pub fn answer_tokens_max(prompt_tokens: u32, choice_count: u32, capacity: &NodeCapacity) -> u32 {
    if choice_count > capacity.max_sequences {
        return 0;
    }
    let block = u64::from(capacity.block_tokens.max(1));
    let prompt = u64::from(prompt_tokens);
    let own_blocks = u64::from(capacity.kv_blocks).saturating_sub(prompt / block) / u64::from(choice_count.max(1));
    let in_pool = (own_blocks * block).saturating_sub(prompt % block);
    let in_context = capacity.max_model_tokens.saturating_sub(prompt_tokens);
    u32::try_from(in_pool).unwrap_or(u32::MAX).min(in_context)
}

/// Blocks of the decode permit: what the node will reserve at `Open`. The permit is never larger than the pool, because the node
/// reserves no growth for which the pool has no blocks. So an idle node can grant the permit of a request that fills the pool.
pub(super) fn decode_permit(request: &Request, capacity: &NodeCapacity) -> u32 {
    let blocks = blocks_at_open(request, capacity.block_tokens);
    u32::try_from(blocks).unwrap_or(u32::MAX).min(capacity.kv_blocks)
}

/// The nodes that this request need not avoid. If it should avoid all of them, this is all of them.
pub(super) fn unless_avoided(nodes: Vec<&Node>, is_avoided: impl Fn(&Node) -> bool) -> Vec<&Node> {
    let others: Vec<&Node> = nodes.iter().copied().filter(|n| !is_avoided(n)).collect();
    if others.is_empty() { nodes } else { others }
}

impl Cluster {
    /// Whether any node of the pool can ever hold this request. This is checked at arrival, so that the client gets a clear 400. A node
    /// that is only away counts: it may be back before the request's time is over, or the client may send the request again later.
    pub(super) fn fits_some_pool(&self, request: &Request) -> Result<(), RejectReason> {
        let is_here = |n: &Node| n.is_live() || n.life == Life::Disconnected;
        if self.can_be_answered_by(request, &is_here) {
            return Ok(());
        }
        match self.can_be_answered_by(request, &|_: &Node| true) {
            true => Err(RejectReason::NodeAway),
            false => Err(self.too_large(request)),
        }
    }

    /// Whether the nodes for which `counts` is true can answer the request.
    fn can_be_answered_by(&self, request: &Request, counts: &dyn Fn(&Node) -> bool) -> bool {
        let is_decode = |n: &Node| n.record.role == NodeRole::Decode && counts(n);
        let mut nodes = self.members.iter();
        nodes.any(|n| is_decode(n) && whole_fits(request, n) && self.has_way_to_prefill(request, n, counts))
    }

    /// With local prefill the decode node itself is enough. Without it a prefill node that counts must be able to hold the whole prompt.
    fn has_way_to_prefill(&self, request: &Request, decode: &Node, counts: &dyn Fn(&Node) -> bool) -> bool {
        let is_partner = |p: &Node| {
            p.record.role == NodeRole::Prefill
                && counts(p)
                && p.record.compatibility.hash == decode.record.compatibility.hash
                && prompt_fits(request, p)
        };
        decode.record.is_co_located || self.config.allow_local_prefill || self.members.iter().any(is_partner)
    }

    /// Whether some decode node may be given work now and has a way to prefill. Otherwise no request can be placed, whatever it
    /// needs.
    pub(super) fn can_place_any(&self, now: Time) -> bool {
        let usable = |role| {
            self.members
                .iter()
                .filter(move |n| n.record.role == role && n.is_usable(now))
        };
        let prefills_for = |d: &Node| {
            let mut prefill = usable(NodeRole::Prefill);
            prefill.any(|p| p.record.compatibility.hash == d.record.compatibility.hash)
        };
        usable(NodeRole::Decode).any(|d| d.record.is_co_located || self.config.allow_local_prefill || prefills_for(d))
    }

    /// The limit that the request exceeds on all nodes of a role. The decode nodes are checked first, then the prefill nodes.
    fn too_large(&self, request: &Request) -> RejectReason {
        let nodes = |role| self.members.iter().filter(move |n| n.record.role == role);
        let role = match nodes(NodeRole::Decode).any(|n| whole_fits(request, n)) {
            true => NodeRole::Prefill,
            false => NodeRole::Decode,
        };
        let most = |limit: fn(&NodeCapacity) -> u32| nodes(role).map(|n| limit(&n.record.capacity)).max();
        let prompt_tokens = request.prompt_tokens();
        if let Some(longest_tokens) = most(|c| c.max_model_tokens).filter(|longest| prompt_tokens > *longest) {
            return RejectReason::PromptTooLong {
                role,
                prompt_tokens,
                longest_tokens,
            };
        }
        let choices = request.choice_count;
        if let (NodeRole::Decode, Some(most)) = (role, most(|c| c.max_sequences).filter(|most| choices > *most)) {
            return RejectReason::TooManyChoices { choices, most };
        }
        let needed = |n: &Node| match role {
            NodeRole::Prefill => prompt_tokens.div_ceil(n.record.capacity.block_tokens.max(1)),
            NodeRole::Decode => blocks_needed(request, &n.record.capacity),
        };
        // On the other nodes the pool is not what is too small.
        let lacks_blocks_only = |n: &&Node| {
            let capacity = &n.record.capacity;
            let has_sequences = role == NodeRole::Prefill || choices <= capacity.max_sequences;
            prompt_tokens <= capacity.max_model_tokens && has_sequences
        };
        let (needed_blocks, pool_blocks) = nodes(role)
            .filter(lacks_blocks_only)
            .map(|n| (needed(n), n.record.capacity.kv_blocks))
            .max_by_key(|(_, pool)| *pool)
            .unwrap_or((0, 0));
        RejectReason::TooLargeForPool {
            role,
            needed_blocks,
            pool_blocks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{node_record, request};
    use super::*;
    use crate::ids::NodeEpoch;
    use crate::scheduler::{Admission, NodeLimits, Scheduler, SchedulerConfig, Work};

    /// 64 blocks of 16 tokens, 4 sequences, 2048 tokens each.
    fn capacity() -> NodeCapacity {
        node_record("d0", 1, NodeRole::Decode).capacity
    }

    #[test]
    fn blocks_are_counted_as_the_decode_node_uses_them() {
        let mut r = request(1, 40, 24);
        assert_eq!(blocks_needed(&r, &capacity()), 4);
        assert_eq!(
            decode_permit(&r, &capacity()),
            4,
            "the growth of 2 blocks would be one too many"
        );
        r.stop.max_tokens = 100;
        assert_eq!(decode_permit(&r, &capacity()), 3 + 2);
        r.stop.max_tokens = 24;
        r.choice_count = 3;
        // Two shared blocks, and (8 + 24) tokens of its own for each choice.
        assert_eq!(blocks_needed(&r, &capacity()), 2 + 3 * 2);
        assert_eq!(decode_permit(&r, &capacity()), 2 + 3 * 2);
        r.stop.max_tokens = 3;
        assert_eq!(decode_permit(&r, &capacity()), 2 + 3);
    }

    #[test]
    fn a_node_that_registers_blocks_of_any_size_stops_no_coordinator() {
        let mut r = request(1, 40, 5_000);
        r.choice_count = 3;
        let huge = NodeCapacity {
            block_tokens: u32::MAX,
            ..capacity()
        };
        // The block of the prompt, and a copy of it for each of the other choices.
        assert_eq!(decode_permit(&r, &huge), 1 + 2);
    }

    #[test]
    fn what_a_node_would_cut_needs_no_blocks() {
        let mut r = request(1, 40, 5_000);
        let short = NodeCapacity {
            max_model_tokens: 100,
            ..capacity()
        };
        assert_eq!(blocks_needed(&r, &short), 7);
        r.choice_count = 2;
        // Two shared blocks, and (8 + 60) tokens of its own for each choice.
        assert_eq!(blocks_needed(&r, &short), 2 + 2 * 5);
    }

    #[test]
    fn the_largest_budget_fits_and_one_more_token_does_not() {
        let capacity = NodeCapacity {
            kv_blocks: 10,
            ..capacity()
        };
        for prompt in [1, 15, 16, 17, 100, 159, 160] {
            for choices in [1, 3] {
                let needed = |tokens| {
                    let mut r = request(1, prompt, tokens);
                    r.choice_count = choices;
                    blocks_needed(&r, &capacity)
                };
                let most = answer_tokens_max(prompt, choices, &capacity);
                assert!(most == 0 || needed(most) <= 10, "prompt {prompt}, n {choices}: {most}");
                assert!(needed(most + 1) > 10, "prompt {prompt}, n {choices}: {most}");
            }
        }
        let short = NodeCapacity {
            max_model_tokens: 100,
            ..capacity
        };
        assert_eq!(answer_tokens_max(90, 1, &short), 10);
        assert_eq!(answer_tokens_max(101, 1, &short), 0);
        assert_eq!(answer_tokens_max(1, 5, &short), 0, "it computes four at a time");
    }

    #[test]
    fn a_permit_is_what_the_decode_node_will_reserve() {
        let shapes = [1, 15, 16, 17, 31, 32, 33]
            .into_iter()
            .flat_map(|prompt| [2048, prompt + 1, prompt].map(|longest| (prompt, longest)));
        for (prompt, max_model_tokens) in shapes {
            for (max_tokens, choices) in [2, 15, 16, 17, 33, 100]
                .into_iter()
                .flat_map(|m| [1, 3].map(|n| (m, n)))
            {
                let mut r = request(1, prompt, max_tokens);
                r.choice_count = choices;
                let node_limit = NodeCapacity {
                    max_model_tokens,
                    ..capacity()
                };
                // The least that the whole request fits.
                let pool = NodeCapacity {
                    kv_blocks: blocks_needed(&r, &node_limit),
                    ..node_limit
                };
                let limits = NodeLimits {
                    kv_blocks: pool.kv_blocks,
                    block_tokens: pool.block_tokens,
                    max_batch_tokens: 64,
                    max_sequences: pool.max_sequences,
                    max_model_tokens,
                    vocab_size: 4096,
                    prefix_cache: true,
                };
                let reservation = std::time::Duration::from_secs(5);
                let mut node = Scheduler::new(SchedulerConfig::decode(limits, reservation));
                let permit = decode_permit(&r, &pool);
                let admission = Admission {
                    request: std::sync::Arc::new(r),
                    attempt: crate::ids::Attempt(0),
                    permits: u64::from(permit),
                    coordinator: NodeEpoch(1),
                    work: Work::Decode(crate::ids::TransferId(1)),
                };
                node.admit(Time::ZERO, admission)
                    .expect("an empty pool that can hold it takes it");
                let reserved = node.pool().counts().reserved;
                assert_eq!(
                    permit, reserved,
                    "prompt {prompt} of {max_model_tokens}, max_tokens {max_tokens}, n {choices}"
                );
            }
        }
    }

    #[test]
    fn a_migrated_request_needs_no_more_blocks_than_before() {
        let r = request(1, 40, 24);
        let mut migrated = request(1, 50, 24);
        migrated.client_prompt_tokens = 40;
        assert_eq!(blocks_needed(&migrated, &capacity()), blocks_needed(&r, &capacity()));
    }
}
