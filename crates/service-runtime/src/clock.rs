//! The process's monotonic clock. It is the only place where time is read; all code below takes time as an argument.

use std::sync::OnceLock;
use std::time::Instant;

use serving_core::time::Time;

static STARTED: OnceLock<Instant> = OnceLock::new();

/// Nanoseconds since this process first asked for the time. There is one clock per process, and its values are never sent.
#[derive(Clone, Copy, Debug)]
pub struct Clock;

impl Clock {
    pub fn now() -> Time {
        Self::time_of(Instant::now())
    }

    /// Instants before the clock's start count as zero.
    pub fn time_of(instant: Instant) -> Time {
        let started = *STARTED.get_or_init(Instant::now);
        let elapsed = instant.saturating_duration_since(started);
        Time(u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX))
    }

    /// The instant at which `now()` will be `time`, for timers. Saturates a century ahead.
    pub fn instant_of(time: Time) -> Instant {
        const CENTURY_SECONDS: u64 = 100 * 365 * 86_400;
        let started = *STARTED.get_or_init(Instant::now);
        let ahead = std::time::Duration::from_nanos(time.0);
        started + ahead.min(std::time::Duration::from_secs(CENTURY_SECONDS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_never_goes_back_and_maps_to_instants_and_back() {
        let first = Clock::now();
        let second = Clock::now();
        assert!(second >= first);
        assert_eq!(Clock::time_of(Clock::instant_of(second)), second);
        assert!(Clock::instant_of(Time(u64::MAX)) > Instant::now());
    }
}
