//! Sets aside what fails again and again although it can be reached: a pair whose transfers break, a node whose engine fails requests. What a
//! broken connection means for a node is in `suspicion.rs`.

use std::collections::VecDeque;
use std::time::Duration;

use crate::ids::RequestId;
use crate::time::Time;

use super::trust::Trust;

/// Uses that are remembered.
const REMEMBERED: usize = 8;
/// So many failures among them are too many: one is an accident, and every request survives two.
const FAILURES_MAX: usize = 3;
/// A third of the 10 s in which a cluster must be back to normal (row T22 of docs/measurements/reliability.md).
const REST: Duration = Duration::from_secs(3);

#[derive(Clone, Debug, Default)]
pub(super) struct Breaker {
    /// The last uses, oldest first; true for a failure.
    recent: VecDeque<bool>,
    failed_at: Option<Time>,
    trust: Trust,
}

impl Breaker {
    /// True when it rests from now on, and did not before.
    pub(super) fn failed(&mut self, now: Time) -> bool {
        self.remember(true);
        self.failed_at = Some(now);
        // Without full trust one is too many, also when older uses have brought successes meanwhile.
        if self.trust == Trust::Full && self.failures() < FAILURES_MAX {
            return false;
        }
        let rested = self.trust.wake().is_some_and(|until| now < until);
        // The first failure after a rest is one too many again; a success clears the record.
        self.recent.clear();
        self.recent.extend([true; FAILURES_MAX - 1]);
        self.trust = Trust::SetAside { until: now + REST };
        !rested
    }

    /// The trial brings tokens, so others may follow before it ends. One more failure is one too many until something succeeds.
    pub(super) fn answered(&mut self, request: RequestId) {
        if self.trust == (Trust::OnTrial { by: Some(request) }) {
            self.trust = Trust::Full;
        }
    }

    /// A use of this request that was started at `started_at` ended well. What had begun before the last failure says nothing of the
    /// time since, so it ends no rest.
    pub(super) fn succeeded(&mut self, request: RequestId, started_at: Time) {
        let is_trial = self.trust == (Trust::OnTrial { by: Some(request) });
        let is_older = self.failed_at.is_some_and(|at| started_at <= at);
        if self.trust == Trust::Full || (is_older && !is_trial) {
            return self.remember(false);
        }
        self.trust = Trust::Full;
        self.recent.clear();
    }

    /// It rests, or the one request that tries it is under way.
    pub(super) fn is_resting(&self, now: Time) -> bool {
        !self.trust.admits(now)
    }

    /// A request was given it: after a rest this is the trial.
    pub(super) fn placed(&mut self, request: RequestId) {
        self.trust.placed(request);
    }

    /// That request has left it.
    pub(super) fn released(&mut self, request: RequestId) {
        self.trust.released(request);
    }

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

    fn at(seconds: u64) -> Time {
        Time::from_millis(seconds * 1000)
    }

    #[test]
    fn three_of_the_last_eight_are_a_rest_and_then_a_trial() {
        let mut breaker = Breaker::default();
        assert!(!breaker.failed(at(0)));
        assert!(!breaker.failed(at(0)));
        assert!(!breaker.is_resting(at(0)));
        assert!(breaker.failed(at(1)));
        assert!(breaker.is_resting(at(3)));
        assert!(!breaker.is_resting(at(4)), "three seconds later");
        breaker.placed(RequestId(1));
        assert!(breaker.is_resting(at(4)), "one request tries it");
        breaker.released(RequestId(1));
        assert!(!breaker.is_resting(at(4)), "it left without a word: the next one tries");
        breaker.placed(RequestId(2));
        assert!(breaker.failed(at(4)), "one failure on trial is enough");
        breaker.placed(RequestId(3));
        breaker.succeeded(RequestId(3), at(7));
        assert!(!breaker.failed(at(8)), "a success on trial clears the record");
    }

    #[test]
    fn what_began_before_the_failures_ends_no_rest() {
        let mut breaker = Breaker::default();
        for _ in 0..FAILURES_MAX {
            breaker.failed(at(2));
        }
        for _ in 0..REMEMBERED {
            breaker.succeeded(RequestId(1), at(1));
        }
        assert!(breaker.is_resting(at(3)));
        breaker.placed(RequestId(2));
        breaker.succeeded(RequestId(1), at(1));
        assert!(breaker.is_resting(at(5)), "the trial is still on");
        assert!(
            breaker.failed(at(5)),
            "one failure on trial is enough, whatever came before"
        );
        assert!(breaker.is_resting(at(6)));
        breaker.succeeded(RequestId(3), at(6));
        assert!(!breaker.is_resting(at(6)), "it began after the last failure");
    }

    #[test]
    fn a_rest_counts_once_and_a_trial_that_answers_lets_others_follow() {
        let mut breaker = Breaker::default();
        let rests = (0..5).filter(|_| breaker.failed(at(1))).count();
        assert_eq!(rests, 1);
        breaker.placed(RequestId(1));
        breaker.answered(RequestId(2));
        assert!(breaker.is_resting(at(5)), "it is another request that answers");
        breaker.answered(RequestId(1));
        assert!(!breaker.is_resting(at(5)));
        assert!(breaker.failed(at(6)), "nothing has succeeded yet");
    }

    #[test]
    fn old_failures_are_forgotten() {
        let mut breaker = Breaker::default();
        breaker.failed(at(0));
        breaker.failed(at(0));
        for _ in 0..REMEMBERED {
            breaker.succeeded(RequestId(1), at(0));
        }
        assert!(!breaker.failed(at(1)));
        assert!(!breaker.failed(at(1)));
        assert!(breaker.failed(at(1)));
    }
}
