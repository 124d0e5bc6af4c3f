//! What a node's links share: the node's permits, divided between the coordinators, and the decode nodes that they name.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use proto::messages::{ClockOffset, Peer};
use serving_core::ids::NodeEpoch;
use serving_core::node::{NodeStatus, PermitNote};
use serving_core::scheduler::permit_shares::{PermitShares, ShareId};
use tokio::sync::watch;

use crate::clock::Clock;
use crate::wall_clocks;

/// The decode nodes that one coordinator names.
#[derive(Debug, Default)]
struct NamedPeers {
    list: Vec<Peer>,
    /// Whether its stream is open.
    is_current: bool,
}

#[derive(Debug)]
pub(super) struct Shared {
    /// Whoever divides reads the status under this lock: after a division by a newer status, an older one would give permits
    /// out again that the node has already received.
    permits: Mutex<PermitShares>,
    /// The coordinators whose streams are open.
    connected: Mutex<BTreeMap<ShareId, NodeEpoch>>,
    named: Mutex<BTreeMap<ShareId, NamedPeers>>,
    peers: watch::Sender<Vec<Peer>>,
    /// Wakes the streams when permits change owners.
    divided_anew: watch::Sender<()>,
}

impl Shared {
    pub(super) fn new(peers: watch::Sender<Vec<Peer>>) -> Self {
        Self {
            permits: Mutex::default(),
            connected: Mutex::default(),
            named: Mutex::default(),
            peers,
            divided_anew: watch::channel(()).0,
        }
    }

    pub(super) fn divided_anew(&self) -> watch::Receiver<()> {
        self.divided_anew.subscribe()
    }

    pub(super) fn connect(&self, id: ShareId, coordinator: NodeEpoch) {
        self.permits().connect(id, coordinator);
        self.connected().insert(id, coordinator);
        self.divided_anew.send_replace(());
    }

    /// A coordinator's clock was measured. Spans are kept on the clock of one coordinator: of those that are connected, the one
    /// that was known first.
    pub(super) fn note_clock(&self, id: ShareId, offset: ClockOffset) {
        if self.permits().first() == Some(id) {
            wall_clocks::set_reference(offset);
        }
        if let Some(coordinator) = self.connected().get(&id) {
            wall_clocks::note(*coordinator, offset);
        }
    }

    fn connected(&self) -> MutexGuard<'_, BTreeMap<ShareId, NodeEpoch>> {
        self.connected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The stream is lost. Its peers stay known while no other coordinator names any: links to them carry requests that
    /// still run, and the next stream brings a new list.
    pub(super) fn disconnect(&self, id: ShareId) {
        self.permits().disconnect(id);
        // Under the lock: a clock that is being measured may not be noted after this.
        let mut connected = self.connected();
        if let Some(coordinator) = connected.remove(&id) {
            wall_clocks::forget(coordinator);
        }
        drop(connected);
        self.divided_anew.send_replace(());
        self.change_peers(|named| named.entry(id).or_default().is_current = false);
    }

    /// The coordinator is no longer one of this node's.
    pub(super) fn forget(&self, id: ShareId) {
        self.change_peers(|named| {
            let is_last_word = named.len() == 1;
            if !is_last_word {
                named.remove(&id);
            }
        });
    }

    pub(super) fn note(&self, id: ShareId, note: PermitNote, status: &watch::Receiver<NodeStatus>) {
        let mut permits = self.permits();
        let now = Clock::now();
        permits.note(now, id, note);
        let is_news = permits.divide(now, &status.borrow());
        if is_news {
            drop(permits);
            self.divided_anew.send_replace(());
        }
    }

    /// The newest status, as one stream may report it.
    pub(super) fn seen_by(&self, id: ShareId, status: &mut watch::Receiver<NodeStatus>) -> NodeStatus {
        let mut permits = self.permits();
        let mut status = status.borrow_and_update().clone();
        let is_news_to_others = permits.divide(Clock::now(), &status) && permits.count() > 1;
        let seen = permits.of(id);
        status.coordinators = permits.count();
        drop(permits);
        if is_news_to_others {
            self.divided_anew.send_replace(());
        }
        status.permits_granted_total = seen.granted_total;
        status.permits_received_total = seen.received_total;
        status.permits_recalled_total = seen.recalled_total;
        status.permits_received_by.clear();
        status
    }

    pub(super) fn set_peers(&self, id: ShareId, list: Vec<Peer>) {
        let is_current = true;
        self.change_peers(|named| {
            named.insert(id, NamedPeers { list, is_current });
        });
    }

    fn permits(&self) -> MutexGuard<'_, PermitShares> {
        self.permits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change_peers(&self, change: impl FnOnce(&mut BTreeMap<ShareId, NamedPeers>)) {
        let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut named);
        let is_anybody_current = named.values().any(|named| named.is_current);
        let mut merged: Vec<Peer> = Vec::new();
        for named in named.values().filter(|named| named.is_current || !is_anybody_current) {
            for peer in &named.list {
                if !merged.iter().any(|known| known.node == peer.node) {
                    merged.push(peer.clone());
                }
            }
        }
        self.peers.send_if_modified(|peers| {
            let changes = *peers != merged;
            *peers = merged;
            changes
        });
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::tests::status;
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    #[test]
    fn no_stream_divides_by_a_status_that_is_older_than_anothers() {
        let shared = Shared::new(watch::channel(Vec::new()).0);
        let (status_in, mut of_one) = watch::channel(status(8, 0));
        let mut of_other = of_one.clone();
        // `status` is of work received from the coordinator with epoch 3.
        let (one, other) = (ShareId(0), ShareId(1));
        shared.connect(one, NodeEpoch(3));
        shared.connect(other, NodeEpoch(4));
        assert_eq!(shared.seen_by(one, &mut of_one).permits_granted_total, 4);
        std::thread::scope(|threads| {
            // No status can be read in here.
            status_in.send_modify(|newest| {
                threads.spawn(|| shared.seen_by(other, &mut of_other));
                let started = Instant::now();
                while shared.permits.try_lock().is_ok() {
                    assert!(
                        started.elapsed() < PATIENCE,
                        "a stream has read its status before its turn"
                    );
                    std::thread::yield_now();
                }
                *newest = status(8, 4);
            });
        });
        let granted = [(one, &mut of_one), (other, &mut of_other)];
        let granted = granted.map(|(id, status)| shared.seen_by(id, status).permits_granted_total);
        assert!(granted.iter().sum::<u64>() <= 8, "{granted:?}");
    }
}
