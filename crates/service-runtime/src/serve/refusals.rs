//! Says that callers were turned away, and not more often than somebody can read.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A caller that tries again and again fills no log.
const TOLD_EVERY: Duration = Duration::from_secs(10);
/// The pause after a failed accept (no descriptors left, for example). The error comes again at once until a connection ends.
pub(super) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Callers or calls of one kind that were turned away at a port. The log has one line of them in ten seconds.
#[derive(Debug)]
pub(super) struct Refusals {
    what: &'static str,
    told: Mutex<Told>,
}

#[derive(Debug, Default)]
struct Told {
    at: Option<Instant>,
    since: u64,
}

impl Refusals {
    pub(super) fn of(what: &'static str) -> Self {
        Self {
            what,
            told: Mutex::default(),
        }
    }

    /// `from`: who it was, as far as that is known.
    pub(super) fn tell(&self, from: &str, why: &str) {
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

/// Errors of a listener. None of them ends the server.
#[derive(Debug)]
pub struct FailedAccepts(Refusals);

impl Default for FailedAccepts {
    fn default() -> Self {
        Self(Refusals::of("accepting a connection failed; trying again"))
    }
}

impl FailedAccepts {
    /// Returns when the listener may be asked again: at once if the caller had gone before it was accepted.
    pub async fn pause_after(&self, error: &io::Error) {
        use io::ErrorKind::{ConnectionAborted, ConnectionReset};
        if !matches!(error.kind(), ConnectionAborted | ConnectionReset) {
            self.0.tell("unknown", &error.to_string());
            tokio::time::sleep(ACCEPT_PAUSE).await;
        }
    }
}
