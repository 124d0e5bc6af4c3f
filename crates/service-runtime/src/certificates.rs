//! Reads a process's certificate again when its files have changed.

use std::time::Duration;

use identity::Identity;
use tokio::time::MissedTickBehavior;

use crate::shutdown::Shutdown;
use crate::watched_file::{Seen, look};

/// Certificates are renewed hours before they end. A look at three files takes microseconds.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Until `stop`. Files that cannot be used, because one of them is not written yet for example, leave the certificate as it is and
/// are tried again each time; the log says so once for each change. Open connections go on in every case.
pub fn follow(identity: &Identity, stop: &Shutdown) {
    if identity.is_on() {
        tokio::spawn(follow_on(identity.clone(), look_at(identity), stop.clone()));
    }
}

fn look_at(identity: &Identity) -> Vec<Seen> {
    identity.paths().into_iter().map(look).collect()
}

async fn follow_on(identity: Identity, mut seen: Vec<Seen>, stop: Shutdown) {
    let mut failed = None;
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.requested() => return,
            _ = looks.tick() => {}
        }
        let now = look_at(&identity);
        if now == seen {
            continue;
        }
        match identity.read_again() {
            Ok(()) => {
                seen = now;
                tracing::info!(?identity, "the certificate was read again; new connections use it");
            }
            Err(error) if failed.as_ref() != Some(&now) => {
                tracing::warn!(%error, "the certificate stays as it was");
                failed = Some(now);
            }
            Err(_) => {}
        }
    }
}
