//! Reads the file of keys again when it has changed.

use std::time::Duration;

use service_runtime::shutdown::Shutdown;
use service_runtime::watched_file::look;
use tokio::time::MissedTickBehavior;

use super::Keys;

/// A revoked key is refused after this time at the latest. A look at a file takes microseconds.
const LOOK_EVERY: Duration = Duration::from_secs(1);

impl Keys {
    /// Until `stop`. A file that cannot be used leaves the keys as they are and is tried again each time; the log says so once for each
    /// change.
    pub(crate) async fn follow(self, stop: Shutdown) {
        let (mut seen, mut failed) = (self.0.first_look, None);
        let mut looks = tokio::time::interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.requested() => return,
                _ = looks.tick() => {}
            }
            let now = look(&self.0.path);
            if now == seen {
                continue;
            }
            match self.read_again() {
                Ok(count) => {
                    seen = now;
                    tracing::info!(count, "the file of keys was read again");
                }
                Err(error) if failed != Some(now) => {
                    failed = Some(now);
                    tracing::warn!(%error, "the keys stay as they were");
                }
                Err(_) => {}
            }
        }
    }
}
