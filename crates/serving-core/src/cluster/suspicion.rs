//! Doubt about a node whose connections break: it counts connections, not the legs that were on them.

use std::time::Duration;

use crate::time::Time;

use super::trust::Trust;

/// After the first connection that broke; doubles with each further one.
const SUSPICION_FIRST: Duration = Duration::from_secs(1);
const SUSPICION_MAX: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Suspicion {
    pub trust: Trust,
    /// When a connection to the node last broke.
    failed_at: Option<Time>,
    /// How many have broken since the node last answered.
    failures: u32,
}

impl Suspicion {
    /// A leg that was started at `leg_started_at` broke. All legs of one connection break with it, so those that were
    /// started before the last failure say nothing new.
    pub(super) fn failed(&mut self, now: Time, leg_started_at: Time) {
        if self.was_before_failure(leg_started_at) {
            return;
        }
        let factor = 1_u32 << self.failures.min(5);
        self.failures = self.failures.saturating_add(1);
        self.failed_at = Some(now);
        let until = now + (SUSPICION_FIRST * factor).min(SUSPICION_MAX);
        self.trust = Trust::SetAside { until };
    }

    /// The node answered on a leg: it can be reached. What an older connection brought before it broke does not count.
    pub(super) fn answered(&mut self, leg_started_at: Time) {
        if !self.was_before_failure(leg_started_at) {
            self.trust = Trust::Full;
            self.failures = 0;
        }
    }

    /// A status was read, so the process and its network are there: after one broken connection the trial may begin at once.
    /// When trials fail as well, the address that others dial is in doubt, and only an answer there helps.
    pub(super) fn seen_alive(&mut self, read_at: Time) {
        let is_newer = self.failed_at.is_some_and(|at| read_at > at);
        if is_newer && self.failures == 1 && self.trust.wake().is_some() {
            self.trust = Trust::OnTrial { by: None };
        }
    }

    fn was_before_failure(&self, leg_started_at: Time) -> bool {
        self.failed_at.is_some_and(|at| leg_started_at <= at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Time {
        Time::from_millis(ms)
    }

    #[test]
    fn it_doubles_with_each_broken_connection_and_ends_with_an_answer() {
        let mut suspicion = Suspicion::default();
        let mut now = 10;
        for (failures, seconds) in [(1, 1), (2, 2), (3, 4), (4, 8), (5, 16), (6, 30), (7, 30)] {
            suspicion.failed(ms(now), ms(now - 1));
            suspicion.failed(ms(now + 1), ms(now - 2));
            suspicion.answered(ms(now - 2));
            now += seconds * 1_000;
            assert!(!suspicion.trust.admits(ms(now - 1)), "after {failures}");
            assert!(suspicion.trust.admits(ms(now)), "after {failures}");
            now += 1;
        }
        suspicion.answered(ms(now));
        assert_eq!(suspicion.trust, Trust::Full);
    }

    #[test]
    fn a_status_begins_the_trial_after_one_failure_only() {
        let mut suspicion = Suspicion::default();
        suspicion.failed(ms(10), ms(1));
        suspicion.seen_alive(ms(9));
        assert!(!suspicion.trust.admits(ms(20)), "read before it broke");
        suspicion.seen_alive(ms(20));
        assert!(suspicion.trust.admits(ms(20)));
        suspicion.failed(ms(40), ms(30));
        suspicion.seen_alive(ms(50));
        assert!(!suspicion.trust.admits(ms(50)), "the trial failed as well");
    }
}
