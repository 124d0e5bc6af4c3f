//! Goes where the prompt is cached, as long as that node is not much busier than the others.

use super::least_loaded::{SHARE_ONE, decode_load};
use super::{Candidate, Choice, Pool, RequestFacts, RouteReason, Router};

/// Prefill: the node that has computed this prompt first, by tokens waiting there plus tokens of this prompt it lacks.
/// Decode: a hit saves transfer and blocks, not steps, so among the nodes that are about as loaded as the emptiest one
/// the one with most of the prompt.
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefixAware;

/// How much busier than the emptiest a decode node may be and still be taken for its cache: an eighth of its batch, which
/// costs its streams less than a step's jitter.
const LOAD_SLACK: u64 = SHARE_ONE / 8;

fn tokens_to_compute(request: &RequestFacts, c: &Candidate) -> u64 {
    c.waiting_tokens + u64::from(request.prompt_tokens.saturating_sub(c.cached_tokens))
}

/// Rivals are those that could have won without a cache.
fn reason(pool: Pool, candidates: &[Candidate], index: usize) -> Option<RouteReason> {
    let best = candidates.get(index)?;
    let least = candidates.iter().map(|c| decode_load(c).0).min()?;
    let is_rival = |c: &Candidate| match pool {
        Pool::Prefill => c.waiting_tokens <= best.waiting_tokens,
        Pool::Decode => decode_load(c).0 <= least + LOAD_SLACK,
    };
    let others = candidates.iter().filter(|c| c.node != best.node);
    let rivals: Vec<&Candidate> = others.filter(|c| is_rival(c)).collect();
    let is_equal = |c: &&Candidate| c.cached_tokens == best.cached_tokens && decode_load(c) == decode_load(best);
    Some(match pool {
        _ if candidates.len() == 1 => RouteReason::OnlyCandidate,
        _ if rivals.is_empty() => RouteReason::LeastLoaded,
        _ if rivals.iter().all(|c| c.cached_tokens < best.cached_tokens) => RouteReason::Cached,
        Pool::Decode if !rivals.iter().any(is_equal) => RouteReason::LeastLoaded,
        Pool::Prefill | Pool::Decode => RouteReason::Tie,
    })
}

impl Router for PrefixAware {
    fn rank(&mut self, pool: Pool, request: &RequestFacts, candidates: &[Candidate]) -> Option<Choice> {
        let indices = 0..candidates.len();
        let index = match pool {
            Pool::Prefill => {
                indices.min_by_key(|i| (tokens_to_compute(request, &candidates[*i]), &candidates[*i].node))
            }
            Pool::Decode => {
                let least = candidates.iter().map(|c| decode_load(c).0).min()?;
                let near = indices.filter(|i| decode_load(&candidates[*i]).0 <= least + LOAD_SLACK);
                near.min_by_key(|i| {
                    let c = &candidates[*i];
                    (u32::MAX - c.cached_tokens, decode_load(c), &c.node)
                })
            }
        }?;
        let reason = reason(pool, candidates, index)?;
        Some(Choice { index, reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::tests::{candidate, facts};

    fn with_cached(name: &str, (sequences, waiting_tokens): (u32, u64), cached_tokens: u32) -> Candidate {
        Candidate {
            cached_tokens,
            ..candidate(name, sequences, waiting_tokens)
        }
    }

    fn chosen(pool: Pool, candidates: &[Candidate]) -> Option<(usize, RouteReason)> {
        let choice = PrefixAware.rank(pool, &facts(), candidates);
        choice.map(|c| (c.index, c.reason))
    }

    #[test]
    fn prefill_weighs_what_waits_against_what_is_cached() {
        // The prompt has 40 tokens.
        let nodes = [with_cached("a", (0, 0), 0), with_cached("b", (0, 30), 32)];
        assert_eq!(chosen(Pool::Prefill, &nodes), Some((1, RouteReason::Cached)));
        let nodes = [with_cached("a", (0, 0), 0), with_cached("b", (0, 50), 32)];
        assert_eq!(chosen(Pool::Prefill, &nodes), Some((0, RouteReason::LeastLoaded)));
    }

    #[test]
    fn a_decode_node_with_the_prompt_wins_until_it_is_much_busier() {
        let nodes = [with_cached("a", (2, 0), 0), with_cached("b", (4, 0), 32)];
        assert_eq!(chosen(Pool::Decode, &nodes), Some((1, RouteReason::Cached)));
        let nodes = [with_cached("a", (2, 0), 0), with_cached("b", (5, 0), 32)];
        assert_eq!(chosen(Pool::Decode, &nodes), Some((0, RouteReason::LeastLoaded)));
    }

    #[test]
    fn without_a_cache_it_is_a_tie_or_the_load() {
        for pool in [Pool::Prefill, Pool::Decode] {
            let idle = [candidate("a", 0, 0), candidate("b", 0, 0)];
            assert_eq!(chosen(pool, &idle), Some((0, RouteReason::Tie)));
            let one_busy = [candidate("a", 1, 10), candidate("b", 0, 0)];
            assert_eq!(chosen(pool, &one_busy), Some((1, RouteReason::LeastLoaded)));
            let far = [with_cached("a", (0, 0), 16), candidate("b", 9, 90)];
            assert_eq!(chosen(pool, &far), Some((0, RouteReason::LeastLoaded)));
        }
    }

    #[test]
    fn a_shared_prefix_stays_on_one_node() {
        // One after the other: the first goes to the lowest id, which has the prefix from then on.
        let mut hits = [0; 2];
        for i in 0..100 {
            let cached_tokens = if i == 0 { 0 } else { 32 };
            let nodes = [with_cached("a", (0, 0), cached_tokens), with_cached("b", (0, 0), 0)];
            hits[chosen(Pool::Decode, &nodes).expect("one of two").0] += 1;
        }
        assert_eq!(hits, [100, 0]);
    }
}
