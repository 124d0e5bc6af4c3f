//! Takes turns, blind to load: the baseline that other policies are compared with.

use super::{Candidate, Choice, Pool, RequestFacts, RouteReason, Router};
use crate::ids::NodeId;

/// Remembers whose turn was last, by id, so that a node coming or going does not restart the round.
#[derive(Clone, Debug, Default)]
pub struct RoundRobin {
    last_decode: Option<NodeId>,
    last_prefill: Option<NodeId>,
}

impl Router for RoundRobin {
    fn rank(&mut self, pool: Pool, _request: &RequestFacts, candidates: &[Candidate]) -> Option<Choice> {
        let last = match pool {
            Pool::Decode => &mut self.last_decode,
            Pool::Prefill => &mut self.last_prefill,
        };
        let after = candidates
            .iter()
            .position(|c| last.as_ref().is_some_and(|l| c.node > *l));
        let index = after.unwrap_or(0);
        let chosen = candidates.get(index)?;
        *last = Some(chosen.node.clone());
        let reason = if candidates.len() == 1 {
            RouteReason::OnlyCandidate
        } else {
            RouteReason::Turn
        };
        Some(Choice { index, reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::tests::{candidate, facts};

    #[test]
    fn turns_go_round_per_pool_and_survive_a_missing_node() {
        let nodes = [candidate("a", 0, 0), candidate("b", 0, 0), candidate("c", 0, 0)];
        let mut router = RoundRobin::default();
        let mut turn = |pool, nodes: &[Candidate]| {
            router
                .rank(pool, &facts(), nodes)
                .map(|c| nodes[c.index].node.name.to_string())
        };
        assert_eq!(turn(Pool::Decode, &nodes).as_deref(), Some("a"));
        assert_eq!(turn(Pool::Prefill, &nodes).as_deref(), Some("a"));
        assert_eq!(turn(Pool::Decode, &nodes).as_deref(), Some("b"));
        assert_eq!(turn(Pool::Decode, &nodes[..2]).as_deref(), Some("a"));
        assert_eq!(turn(Pool::Decode, &nodes[1..]).as_deref(), Some("b"));
        assert_eq!(turn(Pool::Decode, &nodes).as_deref(), Some("c"));
    }
}
