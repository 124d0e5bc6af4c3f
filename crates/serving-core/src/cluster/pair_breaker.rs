//! Rests a pair that breaks transfers although its stream stands. A bad link or network card would otherwise cost every
//! request a retry, and once the retry budget is spent the requests would fail.

use std::collections::BTreeMap;

use crate::ids::{NodeId, RequestId};
use crate::time::Time;

use super::breaker::Breaker;

/// (prefill node, decode node)
type PairOf = (NodeId, NodeId);

/// Bounded by the pairs of live nodes: a life that is over is forgotten.
#[derive(Debug, Default)]
pub(super) struct PairBreaker {
    pairs: BTreeMap<PairOf, Breaker>,
}

impl PairBreaker {
    /// True when the pair rests from now on.
    pub(super) fn failed(&mut self, now: Time, pair: PairOf) -> bool {
        self.pairs.entry(pair).or_default().failed(now)
    }

    pub(super) fn succeeded(&mut self, pair: &PairOf, request: RequestId, started_at: Time) {
        if let Some(breaker) = self.pairs.get_mut(pair) {
            breaker.succeeded(request, started_at);
        }
    }

    /// Whether one more request may not go over this pair.
    pub(super) fn is_resting(&self, now: Time, pair: &PairOf) -> bool {
        self.pairs.get(pair).is_some_and(|breaker| breaker.is_resting(now))
    }

    /// No pair has failed that is still here.
    pub(super) fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    pub(super) fn placed(&mut self, pair: &PairOf, request: RequestId) {
        if let Some(breaker) = self.pairs.get_mut(pair) {
            breaker.placed(request);
        }
    }

    pub(super) fn released(&mut self, pair: &PairOf, request: RequestId) {
        if let Some(breaker) = self.pairs.get_mut(pair) {
            breaker.released(request);
        }
    }

    pub(super) fn forget(&mut self, node: &NodeId) {
        self.pairs
            .retain(|(prefill, decode), _| prefill != node && decode != node);
    }
}
