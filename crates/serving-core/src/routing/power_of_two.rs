//! Of two nodes drawn by the request's id, the one with less load. Several coordinators that see the same late reports then do not all
//! choose the same node (Mitzenmacher 2001, "The power of two choices in randomized load balancing").

use super::{Candidate, Choice, LeastLoaded, Pool, RequestFacts, Router};

#[derive(Clone, Copy, Debug, Default)]
pub struct PowerOfTwo {
    all: LeastLoaded,
}

impl Router for PowerOfTwo {
    fn rank(&mut self, pool: Pool, request: &RequestFacts, candidates: &[Candidate]) -> Option<Choice> {
        let count = u64::try_from(candidates.len()).ok()?;
        if count <= 2 {
            return self.all.rank(pool, request, candidates);
        }
        // Request ids are random, so any of their bits draw. The halves make the two draws differ.
        let (high, low) = ((request.id.0 >> 64) as u64, request.id.0 as u64);
        let first = low % count;
        let second = (first + 1 + high % (count - 1)) % count;
        // In the order of ids, as policies get their candidates.
        let drawn = [first.min(second) as usize, first.max(second) as usize];
        let pair = drawn.map(|index| candidates[index].clone());
        let choice = self.all.rank(pool, request, &pair)?;
        Some(Choice {
            index: drawn[choice.index],
            ..choice
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::RequestId;
    use crate::routing::tests::{candidate, facts};

    #[test]
    fn two_are_drawn_and_the_emptier_of_them_wins() {
        let nodes = ["a", "b", "c", "d"].map(|name| candidate(name, if name == "d" { 0 } else { 3 }, 0));
        let mut router = PowerOfTwo::default();
        let mut chosen = [0; 4];
        for (low, high) in (0..4u128).flat_map(|low| (0..3u128).map(move |high| (low, high))) {
            let request = RequestFacts {
                id: RequestId(high << 64 | low),
                ..facts()
            };
            let choice = router
                .rank(Pool::Decode, &request, &nodes)
                .expect("there are candidates");
            chosen[choice.index] += 1;
            let drawn = [low, (low + 1 + high) % 4];
            assert!(drawn.contains(&(choice.index as u128)), "{choice:?} of {drawn:?}");
        }
        // All twelve ordered pairs: the empty node wins each of the six that it is in.
        assert_eq!(chosen[3], 6);
    }
}
