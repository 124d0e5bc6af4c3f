//! The handle by which all other tasks reach the control loop: submissions, cancels, readiness.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serving_core::cluster::{ClusterEvent, LastDecodeNode, StreamId};
use serving_core::ids::{ChoiceIndex, NodeName, RequestId};
use serving_core::node::{AssignedRole, NodeRecord};
use serving_core::request::{FinishReason, RejectReason};
use tokio::sync::{Notify, mpsc, oneshot, watch};

use crate::node_notes::NodeStream;
use crate::request_handle::{Readiness, Rejected, RequestControl, RequestHandle, Submission, Submit};

/// A client whose request finds the loop full or stopping is told to wait for this long.
const RETRY_AFTER: Duration = Duration::from_secs(1);

pub(crate) type Reply = oneshot::Sender<Result<RequestHandle, Rejected>>;

/// Every message that the loop takes.
#[derive(Debug)]
pub(crate) enum Input {
    Submit {
        submission: Submission,
        reply: Reply,
    },
    Event(ClusterEvent),
    Drain {
        order: NodeOrder,
        reply: oneshot::Sender<Result<(), LastDecodeNode>>,
    },
    Join {
        record: Box<NodeRecord>,
        stream: StreamId,
        node_stream: NodeStream,
    },
}

/// An operator's order to one node: leave for good, or come back in another role.
#[derive(Clone, Debug)]
pub struct NodeOrder {
    pub name: NodeName,
    pub next_role: Option<AssignedRole>,
    /// The order is obeyed also if no node that decodes is left then.
    pub is_forced: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrderRefused {
    LastDecodeNode(LastDecodeNode),
    /// The control loop has ended.
    Stopping,
}

/// Messages that may neither wait nor be lost: cancels and stop strings. There are at most as many as the existing handles allow.
#[derive(Debug, Default)]
pub(crate) struct ClientSignals {
    pending: Mutex<PendingSignals>,
    pub notify: Notify,
}

#[derive(Debug, Default)]
pub(crate) struct PendingSignals {
    pub cancelled: BTreeSet<RequestId>,
    pub finished: BTreeSet<(RequestId, ChoiceIndex)>,
}

impl ClientSignals {
    fn note(&self, change: impl FnOnce(&mut PendingSignals)) {
        change(&mut self.pending.lock().unwrap_or_else(PoisonError::into_inner));
        self.notify.notify_one();
    }
    pub(crate) fn take(&self) -> PendingSignals {
        std::mem::take(&mut *self.pending.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl RequestControl for ClientSignals {
    fn cancel(&self, id: RequestId) {
        self.note(|pending| {
            pending.cancelled.insert(id);
        });
    }
    fn finish_choice(&self, id: RequestId, choice: ChoiceIndex, _reason: FinishReason) {
        self.note(|pending| {
            pending.finished.insert((id, choice));
        });
    }
}

/// The handle of the loop.
#[derive(Clone, Debug)]
pub struct ControlHandle {
    inbox: mpsc::Sender<Input>,
    membership: mpsc::Sender<Input>,
    signals: Arc<ClientSignals>,
    readiness: watch::Receiver<Readiness>,
}

impl ControlHandle {
    pub(crate) fn new(
        (inbox, membership): (mpsc::Sender<Input>, mpsc::Sender<Input>),
        signals: Arc<ClientSignals>,
        readiness: watch::Receiver<Readiness>,
    ) -> Self {
        Self {
            inbox,
            membership,
            signals,
            readiness,
        }
    }
    /// Where membership streams report.
    pub(crate) fn membership(&self) -> mpsc::Sender<Input> {
        self.membership.clone()
    }
    pub(crate) fn watch_readiness(&self) -> watch::Receiver<Readiness> {
        self.readiness.clone()
    }
    /// Asks a node, by name, to drain, and to come back in another role where one is given. Unknown names change nothing.
    ///
    /// # Errors
    /// No node that decodes would be left, or this coordinator stops. Nothing has changed then.
    pub async fn drain_node(&self, order: NodeOrder) -> Result<(), OrderRefused> {
        let (reply, answer) = oneshot::channel();
        let sent = self.inbox.send(Input::Drain { order, reply }).await;
        sent.map_err(|_| OrderRefused::Stopping)?;
        let answer = answer.await.map_err(|_| OrderRefused::Stopping)?;
        answer.map_err(OrderRefused::LastDecodeNode)
    }
}

/// Cancels a request whose submitter went away before it was answered.
struct CancelUnlessAnswered<'a> {
    signals: &'a ClientSignals,
    id: Option<RequestId>,
}

impl Drop for CancelUnlessAnswered<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.signals.cancel(id);
        }
    }
}

#[async_trait::async_trait]
impl Submit for ControlHandle {
    async fn submit(&self, submission: Submission) -> Result<RequestHandle, Rejected> {
        let rejected = |reason| Rejected {
            reason,
            missing: None,
            retry_after: Some(RETRY_AFTER),
        };
        let id = submission.request.id;
        let (reply, answer) = oneshot::channel();
        match self.inbox.try_send(Input::Submit { submission, reply }) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(_)) => return Err(rejected(RejectReason::QueueFull)),
            Err(mpsc::error::TrySendError::Closed(_)) => return Err(rejected(RejectReason::Draining)),
        }
        let mut guard = CancelUnlessAnswered {
            signals: &self.signals,
            id: Some(id),
        };
        let answered = answer.await;
        guard.id = None;
        answered.unwrap_or_else(|_| Err(rejected(RejectReason::Draining)))
    }

    fn readiness(&self) -> Readiness {
        match self.readiness.has_changed() {
            Ok(_) => self.readiness.borrow().clone(),
            // The loop has ended, perhaps by a panic, so what it said last no longer holds.
            Err(_) => Readiness::Draining,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_that_is_gone_is_not_ready() {
        let (inbox, _events) = mpsc::channel(1);
        let (membership, _reports) = mpsc::channel(1);
        let (told, readiness) = watch::channel(Readiness::NotReady("a test has no nodes".to_owned()));
        let handle = ControlHandle::new((inbox, membership), Arc::default(), readiness);
        assert!(matches!(handle.readiness(), Readiness::NotReady(_)));
        drop(told);
        assert_eq!(handle.readiness(), Readiness::Draining);
    }
}
