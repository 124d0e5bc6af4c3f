//! Reads a process's certificate again when its files have changed.

use std::time::Duration;

use identity::Identity;
use tokio::time::MissedTickBehavior;

use crate::shutdown::Shutdown;
use crate::watched_file::{Seen, look};

/// Certificates are renewed hours before they end. A look at three files takes microseconds.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Time enough to notice a warning and to make a new certificate. Those of cert-manager live for 90 days and are renewed a month before.
const ENDS_SOON: Duration = Duration::from_secs(7 * 24 * 3600);

/// Until `stop`. Files that cannot be used, because one of them is not written yet for example, leave the certificate as it is and
/// are tried again each time; the log says so once for each change. Open connections go on in every case.
pub fn follow(identity: &Identity, stop: &Shutdown) {
    if identity.is_on() {
        tokio::spawn(follow_on(identity.clone(), stop.clone()));
    }
}

fn look_at(identity: &Identity) -> Vec<Seen> {
    identity.paths().into_iter().map(look).collect()
}

async fn follow_on(identity: Identity, stop: Shutdown) {
    // The files may have changed since they were read, while the model was loaded for minutes. So they are read once more.
    let (mut seen, mut failed) = (Vec::new(), None);
    let mut is_told_of_end = false;
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.requested() => return,
            _ = looks.tick() => {}
        }
        is_told_of_end = tell_of_end(&identity, is_told_of_end);
        let now = look_at(&identity);
        if now == seen {
            continue;
        }
        match identity.read_again() {
            Ok(()) => {
                if !seen.is_empty() {
                    tracing::info!(?identity, "the certificate was read again; new connections use it");
                }
                seen = now;
            }
            Err(error) if failed.as_ref() != Some(&now) => {
                tracing::warn!(%error, "the certificate stays as it was");
                failed = Some(now);
            }
            Err(_) => {}
        }
    }
}

/// A certificate that ends soon is told of once, and again when another one does. Returns whether this one ends soon.
fn tell_of_end(identity: &Identity, is_told: bool) -> bool {
    let ends_soon = !identity.is_valid_in(ENDS_SOON);
    if ends_soon && !is_told {
        let days = ENDS_SOON.as_secs() / (24 * 3600);
        tracing::warn!(
            ?identity,
            "the certificate ends within {days} days; then no new connection is possible: give the process a new one (`baton certs issue`)"
        );
    }
    ends_soon
}
