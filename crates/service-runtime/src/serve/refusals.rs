//! Says that callers were turned away, and not more often than somebody can read.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A caller that tries again and again fills no log.
const TOLD_EVERY: Duration = Duration::from_secs(10);

/// Callers or calls of one kind that were turned away at a port. The log has one line of them in ten seconds.
#[derive(Debug)]
pub struct Refusals {
    what: &'static str,
    told: Mutex<Told>,
}

#[derive(Debug, Default)]
struct Told {
    at: Option<Instant>,
    since: u64,
}

impl Refusals {
    pub fn of(what: &'static str) -> Self {
        Self {
            what,
            told: Mutex::default(),
        }
    }

    /// `from`: who it was, as far as that is known.
    pub fn tell(&self, from: &str, why: &str) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.since += 1;
        if told.at.is_some_and(|at| at.elapsed() < TOLD_EVERY) {
            return;
        }
        tracing::warn!(from, why, count = told.since, "{}", self.what);
        *told = Told {
            at: Some(Instant::now()),
            since: 0,
        };
    }
}
