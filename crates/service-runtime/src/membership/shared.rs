//! What a node's links share: the node's permits, divided between the coordinators, and the decode nodes that they name.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use proto::messages::Peer;
use serving_core::ids::NodeEpoch;
use serving_core::node::{NodeStatus, PermitNote};
use serving_core::scheduler::permit_shares::{PermitShares, ShareId};
use tokio::sync::watch;

use crate::clock::Clock;

/// The decode nodes that one coordinator names.
#[derive(Debug, Default)]
struct NamedPeers {
    list: Vec<Peer>,
    /// Whether its stream is open.
    is_current: bool,
}

#[derive(Debug)]
pub(super) struct Shared {
    permits: Mutex<PermitShares>,
    named: Mutex<BTreeMap<ShareId, NamedPeers>>,
    peers: watch::Sender<Vec<Peer>>,
    /// Wakes the streams when permits change owners.
    divided_anew: watch::Sender<()>,
}

impl Shared {
    pub(super) fn new(peers: watch::Sender<Vec<Peer>>) -> Self {
        Self {
            permits: Mutex::default(),
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
        self.divided_anew.send_replace(());
    }

    /// Of the connected coordinators, the one that was known first.
    pub(super) fn is_reference(&self, id: ShareId) -> bool {
        self.permits().first() == Some(id)
    }

    /// The stream is lost. Its peers stay known while no other coordinator names any: links to them carry requests that
    /// still run, and the next stream brings a new list.
    pub(super) fn disconnect(&self, id: ShareId) {
        self.permits().disconnect(id);
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

    pub(super) fn note(&self, id: ShareId, note: PermitNote, status: &NodeStatus) {
        let mut permits = self.permits();
        let now = Clock::now();
        permits.note(now, id, note);
        if permits.divide(now, status) {
            drop(permits);
            self.divided_anew.send_replace(());
        }
    }

    /// The status, as one stream may report it.
    pub(super) fn seen_by(&self, id: ShareId, mut status: NodeStatus) -> NodeStatus {
        let mut permits = self.permits();
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
