//! Tells how far the weights are packed, when that takes long enough to be worth a word.

use std::io::IsTerminal as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use engine::LoadProgress;
use service_runtime::announce::Announcement;

use crate::model::progress::Progress;

/// Nobody waits consciously for less.
const WORTH_A_WORD: Duration = Duration::from_millis(500);
const ANNOUNCE_EVERY: Duration = Duration::from_millis(250);
const LOG_EVERY: Duration = Duration::from_secs(5);

/// A bar where stderr is a terminal. Else a log line every few seconds, and announcements for a launcher.
pub(super) fn watch(name: String) -> impl Fn(LoadProgress) + Send + Sync + 'static {
    let state = Mutex::new((Pace::default(), None::<Progress>));
    let has_terminal = std::io::stderr().is_terminal();
    move |progress: LoadProgress| {
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        let (pace, bar) = &mut *state;
        let told = pace.at(progress, Instant::now());
        if has_terminal {
            if told.announce {
                let start = || Progress::start("packing the weights", Some(progress.total_bytes), false);
                bar.get_or_insert_with(start).at(progress.done_bytes);
            }
            if progress.done_bytes >= progress.total_bytes {
                *bar = None;
            }
            return;
        }
        if told.announce {
            Announcement::Packing {
                name: name.clone(),
                done_bytes: progress.done_bytes,
                total_bytes: progress.total_bytes,
            }
            .print();
        }
        if told.log {
            let megabytes = |bytes: u64| bytes / 1_000_000;
            tracing::info!(
                done_mb = megabytes(progress.done_bytes),
                total_mb = megabytes(progress.total_bytes),
                "packing the weights"
            );
        }
    }
}

/// Decides which reports are told.
#[derive(Debug, Default)]
struct Pace {
    started: Option<Instant>,
    announced: Option<Instant>,
    logged: Option<Instant>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Told {
    announce: bool,
    log: bool,
}

impl Pace {
    fn at(&mut self, progress: LoadProgress, now: Instant) -> Told {
        if progress.done_bytes >= progress.total_bytes {
            let was_told = self.announced.is_some();
            // The process may load again, in another role.
            *self = Self::default();
            return Told {
                announce: was_told,
                log: was_told,
            };
        }
        let started = *self.started.get_or_insert(now);
        if now - started < WORTH_A_WORD {
            return Told::default();
        }
        Told {
            announce: is_due(&mut self.announced, ANNOUNCE_EVERY, now),
            log: is_due(&mut self.logged, LOG_EVERY, now),
        }
    }
}

fn is_due(last: &mut Option<Instant>, every: Duration, now: Instant) -> bool {
    let is_due = last.is_none_or(|last| now - last >= every);
    if is_due {
        *last = Some(now);
    }
    is_due
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(pace: &mut Pace, begin: Instant, done_bytes: u64, at_ms: u64) -> (bool, bool) {
        let progress = LoadProgress {
            done_bytes,
            total_bytes: 100,
        };
        let told = pace.at(progress, begin + Duration::from_millis(at_ms));
        (told.announce, told.log)
    }

    #[test]
    fn quick_packing_is_not_told_and_slow_packing_is_told_at_intervals_and_at_its_end() {
        let (mut pace, begin) = (Pace::default(), Instant::now());
        for (done, at_ms) in [(10, 0), (60, 499), (100, 600)] {
            assert_eq!(told(&mut pace, begin, done, at_ms), (false, false), "{done}");
        }
        let slow = [
            (10, 1_000, (false, false)),
            (20, 1_500, (true, true)),
            (30, 1_700, (false, false)),
            (40, 1_750, (true, false)),
            (50, 6_500, (true, true)),
            (100, 6_501, (true, true)),
            (10, 6_502, (false, false)),
        ];
        for (done, at_ms, expected) in slow {
            assert_eq!(told(&mut pace, begin, done, at_ms), expected, "{done} at {at_ms}");
        }
    }
}
