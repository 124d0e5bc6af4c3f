//! Rests a pair that breaks transfers although its stream stands. A bad link or network card would otherwise cost every
//! request a retry, and once the retry budget is spent the requests would fail.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::ids::{NodeId, RequestId};
use crate::time::Time;

use super::trust::Trust;

/// Transfers of a pair that are remembered.
const REMEMBERED: usize = 8;
/// So many failures among them rest the pair: one is an accident, and every request survives two.
const FAILURES_MAX: usize = 3;
/// A third of the 10 s in which a cluster must be back to normal (row T22 of docs/measurements/reliability.md).
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
    trust: Trust,
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
        history.trust = Trust::SetAside { until: now + REST };
        true
    }

    pub(super) fn succeeded(&mut self, pair: &PairOf) {
        if let Some(history) = self.pairs.get_mut(pair) {
            match std::mem::take(&mut history.trust) {
                Trust::Full => history.remember(false),
                Trust::SetAside { .. } | Trust::OnTrial { .. } => history.recent.clear(),
            }
        }
    }

    /// Whether one more request may not go over this pair: it rests, or the one request that tries it is under way.
    pub(super) fn is_resting(&self, now: Time, pair: &PairOf) -> bool {
        self.pairs.get(pair).is_some_and(|history| !history.trust.admits(now))
    }

    /// No pair has failed that is still here.
    pub(super) fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// A request was given this pair: after a rest it is the trial.
    pub(super) fn placed(&mut self, pair: &PairOf, request: RequestId) {
        if let Some(history) = self.pairs.get_mut(pair) {
            history.trust.placed(request);
        }
    }

    /// That request has left the pair.
    pub(super) fn released(&mut self, pair: &PairOf, request: RequestId) {
        if let Some(history) = self.pairs.get_mut(pair) {
            history.trust.released(request);
        }
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
        breaker.placed(&pair(), RequestId(1));
        assert!(breaker.is_resting(at(4), &pair()), "one request tries it");
        breaker.released(&pair(), RequestId(1));
        assert!(
            !breaker.is_resting(at(4), &pair()),
            "it left without a word: the next one tries"
        );
        breaker.placed(&pair(), RequestId(2));
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
