//! When a coordinator counts as silent. Pure: time is an argument.

use std::time::Duration;

use tokio::time::Instant;

/// A timer that is noticed this late belongs to a process that stood still: it was stopped, its machine was frozen, or it
/// got no CPU. Timers of a busy process are late by some ms.
const LATE_MIN: Duration = Duration::from_millis(100);
/// What a living coordinator said during a standstill waits in the socket, and the connection's own task reads it some ms
/// after the process goes on. This is enough time for that also where the CPU is short, and less than the shortest lease in use.
const GRACE: Duration = Duration::from_millis(250);

/// The time since the last word of a coordinator.
#[derive(Debug)]
pub(super) struct Silence {
    heard: Instant,
    /// There is one grace between two words, so a node that stands still again and again does notice a silence.
    grace_end: Option<Instant>,
}

impl Silence {
    /// The coordinator has just said something.
    pub(super) fn since(now: Instant) -> Self {
        Self {
            heard: now,
            grace_end: None,
        }
    }

    /// When to ask `is_over`, if nothing is heard before.
    pub(super) fn end(&self, limit: Duration) -> Instant {
        self.grace_end.unwrap_or(self.heard + limit)
    }

    /// To be asked at `end` or later. `false` means that the grace begins and `end` has moved.
    pub(super) fn is_over(&mut self, now: Instant, limit: Duration) -> bool {
        let is_late = now > self.end(limit) + LATE_MIN;
        if self.grace_end.is_some() || !is_late {
            return true;
        }
        self.grace_end = Some(now + GRACE);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(3);

    #[test]
    fn a_silence_that_is_noticed_in_time_is_over_at_once() {
        let start = Instant::now();
        let mut silence = Silence::since(start);
        assert_eq!(silence.end(LIMIT), start + LIMIT);
        assert!(silence.is_over(start + LIMIT + LATE_MIN, LIMIT));
    }

    #[test]
    fn a_node_that_stood_still_reads_what_waits_before_it_calls_the_coordinator_silent() {
        let start = Instant::now();
        let mut silence = Silence::since(start);
        let awake = start + LIMIT * 2;
        assert!(!silence.is_over(awake, LIMIT));
        assert_eq!(silence.end(LIMIT), awake + GRACE);
        let read = awake + GRACE / 10;
        silence = Silence::since(read);
        assert_eq!(silence.end(LIMIT), read + LIMIT, "the message counts as any other");
    }

    #[test]
    fn a_node_that_stands_still_again_and_again_has_one_grace() {
        let start = Instant::now();
        let mut silence = Silence::since(start);
        let awake = start + LIMIT * 2;
        assert!(!silence.is_over(awake, LIMIT));
        assert!(silence.is_over(awake + LIMIT, LIMIT), "noticed late once more");
    }
}
