//! The notes that a node has not read yet: the latest of each kind, so that a node that reads late still gets all that
//! counts.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::{Stream, stream};
use proto::messages::{CoordinatorReport, Peer};
use serving_core::compatibility::Compatibility;
use serving_core::ids::NodeId;
use serving_core::node::{AssignedRole, PermitNote};
use tokio::sync::{Notify, oneshot};

/// At most one note of each kind. They are sent in the order of the fields.
#[derive(Debug, Default)]
struct Pending {
    /// The welcome or the refusal. Each stream has one, and it comes before everything else.
    verdict: Option<CoordinatorReport>,
    /// The outer `None` means that no order is pending. The brain has decided which order counts: the latest.
    drain: Option<Option<AssignedRole>>,
    peers: Option<Vec<Peer>>,
    /// The permits, with the time at which the number was true.
    permits: Option<(PermitNote, Instant)>,
    renewed: Option<Duration>,
    is_over: bool,
}

impl Pending {
    fn take(&mut self) -> Option<CoordinatorReport> {
        if let Some(verdict) = self.verdict.take() {
            return Some(verdict);
        }
        if let Some(next_role) = self.drain.take() {
            let reason = match next_role {
                Some(_) => "change of role requested",
                None => "drain requested",
            };
            let reason = reason.to_owned();
            return Some(CoordinatorReport::Drain { reason, next_role });
        }
        if let Some(peers) = self.peers.take() {
            return Some(CoordinatorReport::Peers(peers));
        }
        if let Some((note, at)) = self.permits.take() {
            let waited = match note.wanted {
                0 => note.waited,
                _ => note.waited + at.elapsed(),
            };
            return Some(CoordinatorReport::Permits(PermitNote { waited, ..note }));
        }
        let lease = self.renewed.take()?;
        Some(CoordinatorReport::Renewed { lease })
    }
}

#[derive(Debug, Default)]
struct Shared {
    pending: Mutex<Pending>,
    /// One reader waits for it.
    changed: Notify,
}

/// The control loop's end. It never waits. A later note replaces an earlier note of its kind: permits are totals, peers are
/// the whole list, a lease is the time that is left from now. When the loop drops it, the stream ends after the last notes.
#[derive(Debug, Default)]
pub(crate) struct NodeNotes(Arc<Shared>);

impl NodeNotes {
    /// The notes as the node's stream sends them. Call it once.
    pub(crate) fn told(&self) -> impl Stream<Item = CoordinatorReport> + Send + use<> {
        stream::unfold(self.0.clone(), |shared| async move {
            loop {
                let (next, is_over) = {
                    let mut pending = shared.pending.lock().unwrap_or_else(PoisonError::into_inner);
                    (pending.take(), pending.is_over)
                };
                match next {
                    Some(report) => return Some((report, shared)),
                    None if is_over => return None,
                    None => shared.changed.notified().await,
                }
            }
        })
    }

    pub(crate) fn verdict(&self, verdict: CoordinatorReport) {
        self.change(|pending| pending.verdict = Some(verdict));
    }
    pub(crate) fn drain(&self, next_role: Option<AssignedRole>) {
        self.change(|pending| pending.drain = Some(next_role));
    }
    pub(crate) fn peers(&self, peers: Vec<Peer>) {
        self.change(|pending| pending.peers = Some(peers));
    }
    pub(crate) fn permits(&self, note: PermitNote) {
        self.change(|pending| pending.permits = Some((note, Instant::now())));
    }
    pub(crate) fn renewed(&self, lease: Duration) {
        self.change(|pending| pending.renewed = Some(lease));
    }

    fn change(&self, change: impl FnOnce(&mut Pending)) {
        change(&mut self.0.pending.lock().unwrap_or_else(PoisonError::into_inner));
        self.0.changed.notify_one();
    }
}

impl Drop for NodeNotes {
    fn drop(&mut self) {
        self.change(|pending| pending.is_over = true);
    }
}

/// The coordinator's end of one node's stream, as the control loop holds it. Dropping it ends the stream.
#[derive(Debug)]
pub(crate) struct NodeStream {
    pub node: NodeId,
    pub compatibility: Compatibility,
    pub notes: NodeNotes,
    /// Dropped with this struct, which stops the reader.
    pub _closed: oneshot::Sender<()>,
}
