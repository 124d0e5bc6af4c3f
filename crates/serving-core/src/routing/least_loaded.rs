//! The default policy: the node with the least of what limits its phase.

use super::{Candidate, Choice, Pool, RequestFacts, RouteReason, Router};
use crate::ids::RequestId;

/// Prefill is bound by compute, so its load is the prompt tokens that are not computed yet. Decode is bound by the sequences in the
/// batch and by KV blocks, and its load is the one that is the larger share of its limit. Of equal nodes the one that has most of the
/// prompt cached is taken. If several prefill nodes are left, the request's id draws one of them, because always taking the lowest id
/// would fill one cache and leave all others empty.
#[derive(Clone, Copy, Debug, Default)]
pub struct LeastLoaded;

/// Shares are compared in parts per 65,536: integers, so that equal loads are equal on every machine.
pub(super) const SHARE_ONE: u64 = 1 << 16;

fn share(part: u32, whole: u32) -> u64 {
    u64::from(part) * SHARE_ONE / u64::from(whole.max(1))
}

fn load(pool: Pool, c: &Candidate) -> (u64, u64) {
    match pool {
        Pool::Prefill => (c.waiting_tokens, u64::MAX - c.permits_left),
        Pool::Decode => decode_load(c),
    }
}

pub(super) fn decode_load(c: &Candidate) -> (u64, u64) {
    let sequences = share(c.sequences, c.sequences_max);
    let blocks = share(c.kv_blocks_used, c.kv_blocks);
    (sequences.max(blocks), sequences.min(blocks))
}

/// Which of `count` equal nodes a request draws. Ids of a real cluster are random, and those of a simulation count up. The finalizer of
/// SplitMix64 (Steele, Lea, Flood 2014) mixes both equally well. The same id draws the same node at every coordinator.
fn drawn(id: RequestId, count: usize) -> usize {
    let mut bits = id.0 as u64;
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    // 32 of the bits, so that the product with any number of nodes does not overflow.
    (((bits & u64::from(u32::MAX)) * count as u64) >> 32) as usize
}

impl Router for LeastLoaded {
    fn rank(&mut self, pool: Pool, request: &RequestFacts, candidates: &[Candidate]) -> Option<Choice> {
        let key = |c: &Candidate| (load(pool, c), u32::MAX - c.cached_tokens);
        let least = candidates.iter().map(key).min()?;
        let mut best_ones = (0..candidates.len()).filter(|i| key(&candidates[*i]) == least);
        let index = match pool {
            Pool::Prefill => best_ones.clone().nth(drawn(request.id, best_ones.count())),
            Pool::Decode => best_ones.next(),
        }?;
        let best = &candidates[index];
        let others = candidates.iter().enumerate().filter(|(i, _)| *i != index);
        let mut equals = others.filter(|(_, c)| load(pool, c) == load(pool, best)).peekable();
        let reason = if candidates.len() == 1 {
            RouteReason::OnlyCandidate
        } else if equals.peek().is_none() {
            RouteReason::LeastLoaded
        } else if equals.all(|(_, c)| c.cached_tokens < best.cached_tokens) {
            RouteReason::Cached
        } else {
            RouteReason::Tie
        };
        Some(Choice { index, reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::tests::{candidate, facts};

    #[test]
    fn prefill_goes_to_the_fewest_waiting_tokens_and_decode_to_the_emptiest_node() {
        let nodes = [candidate("a", 2, 900), candidate("b", 5, 100)];
        let prefill = LeastLoaded.rank(Pool::Prefill, &facts(), &nodes);
        assert_eq!(
            prefill,
            Some(Choice {
                index: 1,
                reason: RouteReason::LeastLoaded
            })
        );
        let decode = LeastLoaded.rank(Pool::Decode, &facts(), &nodes);
        assert_eq!(
            decode,
            Some(Choice {
                index: 0,
                reason: RouteReason::LeastLoaded
            })
        );
    }

    #[test]
    fn a_node_short_of_blocks_is_loaded_even_with_few_sequences() {
        let mut full = candidate("a", 1, 0);
        full.kv_blocks_used = 120;
        let choice = LeastLoaded.rank(Pool::Decode, &facts(), &[full, candidate("b", 8, 0)]);
        assert_eq!(choice.map(|c| c.index), Some(1));
    }

    #[test]
    fn of_equals_the_one_with_the_prompt_and_a_cache_outweighs_no_load() {
        let mut has_it = candidate("b", 2, 10);
        has_it.cached_tokens = 16;
        let choice = |b: &Candidate, pool| {
            let choice = LeastLoaded.rank(pool, &facts(), &[candidate("a", 2, 10), b.clone()]);
            choice.map(|c| (c.index, c.reason))
        };
        for pool in [Pool::Decode, Pool::Prefill] {
            assert_eq!(choice(&has_it, pool), Some((1, RouteReason::Cached)));
        }
        let busier = Candidate {
            cached_tokens: 16,
            ..candidate("b", 3, 11)
        };
        assert_eq!(choice(&busier, Pool::Decode), Some((0, RouteReason::LeastLoaded)));
    }

    #[test]
    fn a_tie_of_decode_nodes_goes_to_the_lowest_id() {
        let nodes = [candidate("a", 2, 10), candidate("b", 2, 10)];
        let choice = LeastLoaded.rank(Pool::Decode, &facts(), &nodes);
        assert_eq!(
            choice,
            Some(Choice {
                index: 0,
                reason: RouteReason::Tie
            })
        );
    }

    #[test]
    fn a_tie_of_prefill_nodes_is_drawn_by_the_request() {
        let nodes = ["a", "b", "c", "d"].map(|name| candidate(name, 0, 0));
        let mut chosen = [0; 4];
        for id in 0..400 {
            let request = RequestFacts {
                id: RequestId(id),
                ..facts()
            };
            let choice = LeastLoaded.rank(Pool::Prefill, &request, &nodes);
            assert_eq!(choice, LeastLoaded.rank(Pool::Prefill, &request, &nodes));
            let choice = choice.expect("there are candidates");
            assert_eq!(choice.reason, RouteReason::Tie);
            chosen[choice.index] += 1;
        }
        assert!(chosen.iter().all(|count| (60..140).contains(count)), "{chosen:?}");
    }
}
