//! Records of answers that have ended while the nodes' last reports are still awaited. Their number and their time are
//! limited.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

/// A further record ends with what is known. A thousand answers a second that each wait for two seconds would be half of
/// this number.
const CLOSING_MAX: usize = 4096;
/// How long a reader waits for the records that are being closed. They are seldom later than one step of a prefill node.
const READERS_WAIT_MAX: Duration = Duration::from_millis(500);

/// The records that are being closed, by their numbers.
#[derive(Clone, Debug, Default)]
pub struct ClosingRecords {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
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
    /// `None` when too many records are being closed. The new one must then end with what is known.
    pub fn begin(&self, seq: u64) -> Option<Closing> {
        let mut closing = self.shared.closing();
        if closing.len() >= CLOSING_MAX {
            return None;
        }
        closing.insert(seq);
        let shared = self.shared.clone();
        Some(Closing { shared, seq })
    }

    pub fn count(&self) -> usize {
        self.shared.closing().len()
    }

    /// Waits until the records that are being closed now are closed, for half a second at most. So a reader that asks right
    /// after an answer gets the whole record.
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

/// One record is being closed while this value lives.
#[derive(Debug)]
pub struct Closing {
    shared: Arc<Shared>,
    seq: u64,
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
        // The second record is never closed.
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
