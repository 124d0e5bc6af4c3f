//! Records of answers that have ended while their nodes' last reports are still awaited: so many, and each for a while.

use std::collections::BTreeSet;
use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

/// Further records end with what is known of them. A thousand answers a second, each waiting for
/// two seconds, would be half of it.
const CLOSING_MAX: usize = 4096;
/// What a reader waits for records that are being closed when it asks. They are seldom late by more than a prefill node's step.
const READERS_WAIT_MAX: Duration = Duration::from_millis(500);

/// Which records are being closed, by their numbers.
#[derive(Clone, Default)]
pub struct ClosingRecords {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    closing: Mutex<BTreeSet<u64>>,
    closed: Notify,
}

impl Shared {
    fn closing(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.closing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClosingRecords {
    /// `None` when too many are being closed: this one is to end with what is known.
    pub fn begin(&self, seq: u64) -> Option<Closing> {
        let mut closing = self.shared.closing();
        if closing.len() >= CLOSING_MAX {
            return None;
        }
        closing.insert(seq);
        let shared = self.shared.clone();
        Some(Closing { shared, seq })
    }

    /// Waits until the records that are being closed now are closed, for half a second at most: whoever reads right after an
    /// answer reads all of it.
    pub async fn settled(&self) {
        let awaited = self.shared.closing().clone();
        let all = async {
            loop {
                let mut closed = pin!(self.shared.closed.notified());
                closed.as_mut().enable();
                if awaited.is_disjoint(&self.shared.closing()) {
                    return;
                }
                closed.await;
            }
        };
        if !awaited.is_empty() {
            let _ = tokio::time::timeout(READERS_WAIT_MAX, all).await;
        }
    }
}

impl fmt::Debug for ClosingRecords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClosingRecords").finish_non_exhaustive()
    }
}

/// One record is being closed for as long as this lives.
pub struct Closing {
    shared: Arc<Shared>,
    seq: u64,
}

impl fmt::Debug for Closing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Closing")
            .field("seq", &self.seq)
            .finish_non_exhaustive()
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        self.shared.closing().remove(&self.seq);
        self.shared.closed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_reader_waits_for_what_is_closing_when_it_asks_and_not_for_ever() {
        let records = ClosingRecords::default();
        records.settled().await;
        let first = records.begin(1);
        let reader = tokio::spawn({
            let records = records.clone();
            async move { records.settled().await }
        });
        tokio::task::yield_now().await;
        let later = records.begin(2);
        assert!(!reader.is_finished());
        drop(first);
        reader.await.expect("the first is closed");
        // The second never is.
        records.settled().await;
        drop(later);
    }

    #[test]
    fn too_many_are_not_waited_for() {
        let records = ClosingRecords::default();
        let some: Vec<_> = (0..CLOSING_MAX as u64).map(|seq| records.begin(seq)).collect();
        assert!(some.iter().all(Option::is_some));
        assert!(records.begin(u64::MAX).is_none());
        drop(some);
        assert!(records.begin(u64::MAX).is_some());
    }
}
