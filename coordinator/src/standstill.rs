//! Notices that the control loop stood still: the process was stopped, the machine was frozen, or other programs took the
//! CPU.

use std::time::Duration;

use serving_core::time::Time;

/// The loop wakes at least this often by itself, to refresh the gauges. A longer pause is a standstill.
pub(crate) const WAKE_INTERVAL: Duration = Duration::from_millis(250);
/// A shorter pause is the scheduler's normal delay, and no lease is that short.
const STILLNESS_MIN: Duration = Duration::from_millis(50);
/// A shorter standstill is not logged. The shortest lease in use is longer.
const STILLNESS_TOLD: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Standstill {
    woke_at: Time,
}

impl Standstill {
    pub(crate) fn since(now: Time) -> Self {
        Self { woke_at: now }
    }

    /// Called at each wake. Returns how long the loop stood still before it, if it did.
    pub(crate) fn woke(&mut self, now: Time) -> Option<Duration> {
        let away = now.since(std::mem::replace(&mut self.woke_at, now));
        let stillness = away.saturating_sub(WAKE_INTERVAL);
        if stillness >= STILLNESS_TOLD {
            tracing::warn!(
                still_ms = u64::try_from(stillness.as_millis()).unwrap_or(u64::MAX),
                "the coordinator stood still; all leases are extended by as long. Was the process stopped, or is the machine out of CPU?"
            );
        }
        (stillness >= STILLNESS_MIN).then_some(stillness)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_beyond_the_wake_interval_is_standing_still() {
        let mut standstill = Standstill::since(Time::from_millis(1_000));
        assert_eq!(standstill.woke(Time::from_millis(1_001)), None);
        assert_eq!(
            standstill.woke(Time::from_millis(1_251)),
            None,
            "it slept until its tick"
        );
        assert_eq!(
            standstill.woke(Time::from_millis(1_520)),
            None,
            "the tick was a little late"
        );
        let stopped = standstill.woke(Time::from_millis(9_520));
        assert_eq!(stopped, Some(Duration::from_millis(7_750)));
        assert_eq!(standstill.woke(Time::from_millis(9_521)), None, "counted once");
    }
}
