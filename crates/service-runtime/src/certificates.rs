//! Reads a process's certificate again when its files have changed.

use std::time::{Duration, SystemTime};

use identity::Renewed;
use tokio::time::MissedTickBehavior;

use crate::shutdown::Shutdown;
use crate::watched_file::{Seen, look};

/// Certificates are renewed hours before they end. A look at three files takes microseconds.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Time enough to notice a warning and to make a new certificate. Those of cert-manager live for 90 days and are renewed a month before.
const ENDS_SOON: Duration = Duration::from_secs(7 * 24 * 3600);

/// Until `stop`. Files that cannot be used, because one of them is not written yet for example, leave the certificate as it is and
/// are tried again each time; the log says so once for each change. Open connections go on in every case.
pub fn follow(certificate: &impl Renewed, stop: &Shutdown) {
    if !certificate.paths().is_empty() {
        tokio::spawn(follow_on(certificate.clone(), stop.clone()));
    }
}

fn look_at(own: &impl Renewed) -> Vec<Seen> {
    own.paths().into_iter().map(look).collect()
}

async fn follow_on(own: impl Renewed, stop: Shutdown) {
    // The files may have changed since they were read, while the model was loaded for minutes. So they are read once more.
    let (mut seen, mut failed) = (Vec::new(), None);
    let mut told = Told::default();
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.requested() => return,
            _ = looks.tick() => {}
        }
        told.of_end(&own);
        let now = look_at(&own);
        if now == seen {
            continue;
        }
        let before = own.certificate();
        match own.read_again() {
            Ok(()) => {
                if own.certificate() != before || failed.take().is_some() {
                    tracing::info!(certificate = ?own, "the certificate was read again; new connections use it");
                }
                seen = now;
            }
            Err(error) if failed.as_ref() != Some(&now) => {
                tracing::warn!(%error, certificate = ?own, "the certificate stays as it was");
                failed = Some(now);
            }
            Err(_) => {}
        }
    }
}

/// The certificate of which the log has told that it ends soon, and that it has ended.
#[derive(Debug, Default)]
struct Told {
    soon: Option<Vec<u8>>,
    ended: Option<Vec<u8>>,
}

impl Told {
    /// Once of each certificate.
    fn of_end(&mut self, own: &impl Renewed) {
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        if own.is_valid_at(now.saturating_add(ENDS_SOON)) {
            return;
        }
        let days = ENDS_SOON.as_secs() / (24 * 3600);
        let certificate = own.certificate();
        if own.is_valid_at(now) {
            if self.soon != certificate {
                tracing::warn!(
                    certificate = ?own,
                    "the certificate ends within {days} days; put a new one into its files in time"
                );
                self.soon = certificate;
            }
        } else if self.ended != certificate {
            tracing::error!(
                certificate = ?own,
                "the certificate is no longer good, by its dates or by its authority: new connections are refused; put a new one into its files"
            );
            self.ended = certificate;
        }
    }
}
