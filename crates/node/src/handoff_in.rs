//! The decode node's end of a handoff: the reservations that can be claimed, and the receiver's calls, which become work of the loop.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use kv_transfer::choice::TransportKind;
use kv_transfer::receiver::{Arrived, HandoffSink, ImportError, ReceiveEnd, TransferRefusal};
use kv_transfer::span::{DeviceAddress, Lending, Lent, Span};
use serving_core::ids::{BlockId, NodeId, TransferId};
use serving_core::kv::reservation::Reservation;
use tokio::sync::oneshot;

use crate::inbox::{CommitJob, Inbox};
use crate::kv_access::KvAccess;

/// Lives between the loop, which offers reservations, and the receiver's tasks, which claim them. Holds at most
/// one entry per request that waits for its KV.
#[derive(Debug)]
pub struct Reservations {
    kv: KvAccess,
    inbox: Arc<Inbox>,
    offers: Mutex<BTreeMap<TransferId, Reservation>>,
}

impl Reservations {
    pub fn new(kv: KvAccess, inbox: Arc<Inbox>) -> Self {
        Self {
            kv,
            inbox,
            offers: Mutex::default(),
        }
    }
    /// A ticket is about to be sent. From now on its transfer can be claimed once.
    pub fn offer(&self, reservation: Reservation) {
        self.lock().insert(reservation.transfer, reservation);
    }
    /// The transfer can no longer be claimed. If it was claimed before, the receiver has to abort it.
    pub fn withdraw(&self, transfer: TransferId) {
        self.lock().remove(&transfer);
    }
    fn lock(&self) -> MutexGuard<'_, BTreeMap<TransferId, Reservation>> {
        self.offers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reservations {
    /// Ends the node if its GPU hangs: it can take no KV any more. The engine would notice that only in its next step, which may never come.
    fn end_if_given_up(&self) {
        if self.kv.is_given_up() {
            self.inbox.engine_gone();
        }
    }
}

#[async_trait]
impl HandoffSink for Reservations {
    /// Only the prefill node that the coordinator named gets the reservation. If another node asks, the reservation stays unclaimed.
    fn claim(&self, transfer: TransferId, sender: &NodeId) -> Result<Reservation, TransferRefusal> {
        let mut offers = self.lock();
        match offers.get(&transfer) {
            Some(reservation) if reservation.sender == *sender => {
                offers.remove(&transfer).ok_or(TransferRefusal::UnknownTransfer)
            }
            _ => Err(TransferRefusal::UnknownTransfer),
        }
    }

    fn began(&self, transfer: TransferId) {
        self.inbox.began(transfer);
    }

    fn progressed(&self, transfer: TransferId) {
        self.inbox.progressed(transfer);
    }

    fn import(&self, block: BlockId, layers: Range<u32>, data: Span<'_>) -> Result<(), ImportError> {
        let copied = self.kv.import(block, layers, data);
        self.end_if_given_up();
        copied.map_err(|source| ImportError { block, source })
    }

    fn lend(
        &self,
        block: BlockId,
        layers: Range<u32>,
        copy: &mut dyn FnMut(DeviceAddress) -> Lent,
    ) -> Result<Lending, ImportError> {
        let lent = self.kv.lend_to_writer((block, layers), copy);
        self.end_if_given_up();
        lent.map_err(|error| ImportError {
            block,
            source: Box::new(error),
        })
    }

    fn waits(&self) -> bool {
        self.kv.is_on_device()
    }

    fn is_settling(&self) -> bool {
        self.kv.is_settling()
    }

    async fn settled(&self) -> Result<(), TransferRefusal> {
        let settled = self.kv.settled().await;
        self.end_if_given_up();
        settled.map_err(|fault| TransferRefusal::Import(fault.to_string()))
    }

    async fn commit(&self, arrived: Arrived) -> Result<(), TransferRefusal> {
        let (answer, answered) = oneshot::channel();
        self.inbox.commit(CommitJob { arrived, answer });
        answered.await.unwrap_or_else(|_| {
            let detail = "the decode node is shutting down".to_owned();
            Err(TransferRefusal::NotCommitted {
                label: "shutting_down",
                detail,
            })
        })
    }

    fn ended(&self, transfer: TransferId, transport: TransportKind, end: ReceiveEnd) {
        self.inbox.receive_ended(transfer, transport, end);
    }
}

#[cfg(test)]
mod tests {
    use engine::{KvDtype, KvGeometry, KvMemory};
    use serving_core::ids::{Attempt, Generation, NodeEpoch, NodeName, RequestId};
    use serving_core::request::AttemptKey;

    use super::*;

    fn node(epoch: u64) -> NodeId {
        NodeId {
            name: NodeName::new("prefill-0"),
            epoch: NodeEpoch(epoch),
        }
    }

    #[test]
    fn a_reservation_is_given_out_once_to_the_named_node_only() {
        let geometry = KvGeometry {
            layer_count: 1,
            kv_head_count: 1,
            head_dim: 8,
            block_tokens: 16,
            dtype: KvDtype::F16,
        };
        let kv = Arc::new(KvMemory::new(geometry, 2).expect("small"));
        let reservations = Reservations::new(KvAccess::of(&kv).expect("no device"), Arc::default());
        let reservation = |id: u128| Reservation {
            transfer: TransferId(id),
            key: AttemptKey {
                request: RequestId(1),
                attempt: Attempt(0),
            },
            sender: node(1),
            blocks: vec![(BlockId(0), Generation(1))],
            layer_count: 1,
            layer_bytes: geometry.layer_bytes(),
        };
        reservations.offer(reservation(1));
        reservations.offer(reservation(2));
        assert!(
            reservations.claim(TransferId(1), &node(2)).is_err(),
            "another life of the node"
        );
        assert!(reservations.claim(TransferId(1), &node(1)).is_ok());
        assert!(reservations.claim(TransferId(1), &node(1)).is_err(), "only once");
        reservations.withdraw(TransferId(2));
        assert!(reservations.claim(TransferId(2), &node(1)).is_err(), "withdrawn");
    }
}
