//! Rests a pair that breaks transfers although its stream stands: a bad link or card (FAILURES B12, C6) would otherwise cost
//! every request a retry, and the retry budget would turn the rest into errors.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::ids::NodeId;
use crate::time::Time;

/// Transfers of a pair that are remembered.
const REMEMBERED: usize = 8;
/// So many failures among them rest the pair: one is an accident, and every request survives two.
const FAILURES_MAX: usize = 3;
/// A third of what T22 allows for the way back to normal.
const REST: Duration = Duration::from_secs(3);

/// (prefill node, decode node)
type PairOf = (NodeId, NodeId);

/// Bounded by the pairs of live nodes: a node that is lost is forgotten.
#[derive(Debug, Default)]
pub(super) struct PairBreaker {
    pairs: BTreeMap<PairOf, History>,
}

#[derive(Debug, Default)]
struct History {
    /// The last transfers, oldest first; true for a failure.
    recent: VecDeque<bool>,
    rests_until: Option<Time>,
}

impl PairBreaker {
    /// True when the pair rests from now on.
    pub(super) fn failed(&mut self, now: Time, pair: PairOf) -> bool {
        let history = self.pairs.entry(pair).or_default();
        history.remember(true);
        if history.failures() < FAILURES_MAX {
            return false;
        }
        // The first failure after a rest is one too many again; a success clears the record.
        history.recent.clear();
        history.recent.extend([true; FAILURES_MAX - 1]);
        history.rests_until = Some(now + REST);
        true
    }

    pub(super) fn succeeded(&mut self, pair: &PairOf) {
        if let Some(history) = self.pairs.get_mut(pair) {
            match history.rests_until.take() {
                Some(_) => history.recent.clear(),
                None => history.remember(false),
            }
        }
    }

    pub(super) fn is_resting(&self, now: Time, pair: &PairOf) -> bool {
        let history = self.pairs.get(pair);
        history
            .and_then(|history| history.rests_until)
            .is_some_and(|until| now < until)
    }

    pub(super) fn forget(&mut self, node: &NodeId) {
        self.pairs
            .retain(|(prefill, decode), _| prefill != node && decode != node);
    }
}

impl History {
    fn remember(&mut self, is_failure: bool) {
        if self.recent.len() == REMEMBERED {
            self.recent.pop_front();
        }
        self.recent.push_back(is_failure);
    }

    fn failures(&self) -> usize {
        self.recent.iter().filter(|is_failure| **is_failure).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{NodeEpoch, NodeName};

    fn node_id(name: &str, epoch: u64) -> NodeId {
        NodeId {
            name: NodeName::new(name),
            epoch: NodeEpoch(epoch),
        }
    }

    fn pair() -> PairOf {
        (node_id("p0", 1), node_id("d0", 1))
    }

    fn at(seconds: u64) -> Time {
        Time::from_millis(seconds * 1000)
    }

    #[test]
    fn three_of_the_last_eight_rest_a_pair_and_it_comes_back_on_trial() {
        let mut breaker = PairBreaker::default();
        assert!(!breaker.failed(at(0), pair()));
        assert!(!breaker.failed(at(0), pair()));
        assert!(!breaker.is_resting(at(0), &pair()));
        assert!(breaker.failed(at(1), pair()));
        assert!(breaker.is_resting(at(3), &pair()));
        assert!(!breaker.is_resting(at(4), &pair()), "three seconds later");
        assert!(breaker.failed(at(4), pair()), "one failure on trial is enough");
        breaker.succeeded(&pair());
        assert!(!breaker.failed(at(8), pair()), "a success on trial clears the record");
    }

    #[test]
    fn old_failures_are_forgotten_and_so_are_lost_nodes() {
        let mut breaker = PairBreaker::default();
        breaker.failed(at(0), pair());
        breaker.failed(at(0), pair());
        for _ in 0..REMEMBERED {
            breaker.succeeded(&pair());
        }
        assert!(!breaker.failed(at(1), pair()));
        breaker.forget(&pair().1);
        assert!(breaker.pairs.is_empty());
    }
}
