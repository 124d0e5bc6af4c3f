//! When the state of the nodes is published: at once, but reports that follow each other closely are published together.

use std::time::Duration;

use serving_core::time::Time;

use crate::standstill::WAKE_INTERVAL;

/// A report waits so many times as long as the last publication took, so a twentieth of the loop's time goes there at most. Under load
/// each node reports with every step, and what is published for each report grows with the number of pairs of nodes. Reports are taken
/// before legs and new requests, so these would wait for ever where publishing takes longer than the reports are apart.
const PAUSE_FACTOR: u32 = 19;

/// The last publication, and when the next one is due.
#[derive(Debug, Default)]
pub(super) struct Publishing {
    ended: Time,
    took: Duration,
    /// `Some` while a report waits.
    pub due: Option<Time>,
}

impl Publishing {
    /// A report has come. If this is false, it is published later, with those that come until then.
    pub(super) fn may_publish(&mut self, now: Time) -> bool {
        // A process that stood still while it published does not keep reports back for longer than the loop sleeps.
        let pause = self.took.saturating_mul(PAUSE_FACTOR).min(WAKE_INTERVAL);
        let due = self.ended + pause;
        let is_due = due <= now;
        if !is_due {
            self.due = Some(due);
        }
        is_due
    }

    /// Everything that has come is published.
    pub(super) fn done(&mut self, began: Time, ended: Time) {
        *self = Self {
            ended,
            took: ended.since(began),
            due: None,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Time {
        Time::from_millis(ms)
    }

    #[test]
    fn reports_that_follow_each_other_closely_are_published_together() {
        let mut publishing = Publishing::default();
        assert!(publishing.may_publish(ms(1)), "nothing was published before");
        publishing.done(ms(1), ms(2));
        assert!(!publishing.may_publish(ms(3)));
        assert!(!publishing.may_publish(ms(20)));
        assert_eq!(publishing.due, Some(ms(21)));
        assert!(publishing.may_publish(ms(21)));
        publishing.done(ms(21), ms(22));
        assert_eq!(publishing.due, None);
    }

    #[test]
    fn a_publication_that_was_held_up_keeps_no_report_back_for_long() {
        let mut publishing = Publishing::default();
        publishing.done(ms(0), ms(60_000));
        assert!(!publishing.may_publish(ms(60_249)));
        assert!(publishing.may_publish(ms(60_250)));
    }
}
