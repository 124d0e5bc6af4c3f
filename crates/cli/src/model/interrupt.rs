//! The signals that end a fetch of a model. They are noticed between two steps, so that everything half-done is
//! removed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tokio::sync::oneshot;

use crate::model::error::PullError;
use crate::signals::Signals;

/// Says whether the user wants to stop.
#[derive(Debug)]
pub struct Interrupt {
    requested: Arc<AtomicBool>,
    /// Dropping it ends the watching thread.
    _watch: Option<oneshot::Sender<()>>,
}

impl Interrupt {
    /// Watches for signals until dropped. Where no handler can be set, a signal ends the process as usual, and the next
    /// pull removes what is left.
    pub fn watch() -> Interrupt {
        let requested = Arc::new(AtomicBool::new(false));
        let (watch, dropped) = oneshot::channel::<()>();
        let seen = Arc::clone(&requested);
        let started = thread::Builder::new().name("pull-signals".to_owned()).spawn(move || {
            let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_io().build() else {
                return;
            };
            runtime.block_on(async {
                let Ok(mut signals) = Signals::install() else { return };
                tokio::select! {
                    _ = signals.next() => seen.store(true, Ordering::Relaxed),
                    _ = dropped => {}
                }
            });
        });
        Interrupt {
            requested,
            _watch: started.is_ok().then_some(watch),
        }
    }

    /// An interrupt that the test fires itself.
    #[cfg(test)]
    pub fn by_hand(requested: Arc<AtomicBool>) -> Interrupt {
        Interrupt {
            requested,
            _watch: None,
        }
    }

    /// # Errors
    /// [`PullError::Interrupted`] once a signal has come.
    pub fn check(&self) -> Result<(), PullError> {
        if self.requested.load(Ordering::Relaxed) {
            Err(PullError::Interrupted)
        } else {
            Ok(())
        }
    }
}
