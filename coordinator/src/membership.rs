//! The membership endpoint: nodes join here, report, and get leases, peers and drain orders. The brain decides.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt as _};
use identity::{Caller, PeerRole};
use proto::messages::{CoordinatorReport, NodeReport, Peer, RegisterRefusedReason, Welcome};
use proto::v1;
use proto::v1::membership_service_server::MembershipService;
use service_runtime::clock::Clock;
use service_runtime::clock_offset;
use serving_core::cluster::{ClusterEvent, DropCause, JoinRefusal, StreamId};
use serving_core::compatibility::Incompatibility;
use serving_core::ids::NodeId;
use serving_core::node::{AssignedRole, NodeRecord, NodeRole, PermitNote};
use tokio::sync::{mpsc, oneshot};
use tonic::{Request, Response, Status, Streaming};

use crate::control_handle::Input;
use crate::node_clocks::NodeClocks;
use crate::node_notes::{NodeNotes, NodeStream};

/// A new stream must register within this time.
const REGISTER_TIME_LIMIT: Duration = Duration::from_secs(5);
/// A node hears of its renewed lease this many times within one lease. Statuses come more often than that.
const RENEWALS_PER_LEASE: u32 = 4;

/// Implements the gRPC service and hands everything to the control loop.
#[derive(Debug)]
pub(crate) struct MembershipEndpoint {
    inbox: mpsc::Sender<Input>,
    clocks: NodeClocks,
    next_stream: Arc<AtomicU64>,
}

impl MembershipEndpoint {
    pub(crate) fn new(inbox: mpsc::Sender<Input>, clocks: NodeClocks) -> Self {
        Self {
            inbox,
            clocks,
            next_stream: Arc::new(AtomicU64::new(1)),
        }
    }
}

type Reports = Pin<Box<dyn Stream<Item = Result<v1::CoordinatorReport, Status>> + Send>>;

#[tonic::async_trait]
impl MembershipService for MembershipEndpoint {
    type JoinStream = Reports;

    async fn join(&self, request: Request<Streaming<v1::NodeReport>>) -> Result<Response<Self::JoinStream>, Status> {
        let caller = request.extensions().get().cloned().unwrap_or(Caller::Nobody);
        let mut incoming = request.into_inner();
        let first = tokio::time::timeout(REGISTER_TIME_LIMIT, incoming.message()).await;
        let first = first.map_err(|_| Status::deadline_exceeded("no registration came"))??;
        let report = first.ok_or_else(|| Status::invalid_argument("the stream ended before it registered"))?;
        let report = NodeReport::try_from(report).map_err(|error| proto::status::convert_status(&error))?;
        let NodeReport::Register(record) = report else {
            return Err(Status::invalid_argument("the first report must be a registration"));
        };
        let record = named(record, &caller)?;
        let stream = StreamId(self.next_stream.fetch_add(1, Ordering::Relaxed));
        let notes = NodeNotes::default();
        let outgoing = notes.told().map(|report| Ok(report.into()));
        let (closed, is_closed) = oneshot::channel();
        let node = record.id.clone();
        let node_stream = NodeStream {
            node: record.id.clone(),
            compatibility: record.compatibility.clone(),
            notes,
            _closed: closed,
        };
        let join = Input::Join {
            record: Box::new(record),
            stream,
            node_stream,
        };
        self.inbox
            .send(join)
            .await
            .map_err(|_| Status::unavailable("the coordinator is stopping"))?;
        let reader = Reader {
            stream,
            node,
            inbox: self.inbox.clone(),
            clocks: self.clocks.clone(),
        };
        tokio::spawn(reader.run(incoming, is_closed));
        Ok(Response::new(Box::pin(outgoing)))
    }

    async fn read_clock(&self, _: Request<v1::ClockQuestion>) -> Result<Response<v1::ClockReading>, Status> {
        Ok(Response::new(clock_offset::read_clock().into()))
    }
}

/// The record of a node that is who its certificate names. Of the roles that it could take, those are left that are named there.
///
/// # Errors
/// It registers with another name or role.
fn named(record: NodeRecord, caller: &Caller) -> Result<NodeRecord, Status> {
    let name = record.id.name.as_str();
    let check = |role: NodeRole| {
        let role = match role {
            NodeRole::Prefill => PeerRole::Prefill,
            NodeRole::Decode => PeerRole::Decode,
        };
        caller.check_name(role, name)
    };
    check(record.role).map_err(|refused| Status::permission_denied(refused.to_string()))?;
    let is_named = |role: &AssignedRole| check(role.node_role()).is_ok();
    let roles = record.roles.iter().copied().filter(is_named).collect();
    Ok(NodeRecord { roles, ..record })
}

/// Reads one node's reports.
struct Reader {
    stream: StreamId,
    node: NodeId,
    inbox: mpsc::Sender<Input>,
    clocks: NodeClocks,
}

impl Reader {
    async fn run(self, incoming: Streaming<v1::NodeReport>, is_closed: oneshot::Receiver<()>) {
        self.read(incoming, is_closed).await;
        // This also covers a stream that was never admitted. A node that is still there reports again on its next stream.
        self.clocks.forget(&self.node);
    }

    async fn read(&self, mut incoming: Streaming<v1::NodeReport>, mut is_closed: oneshot::Receiver<()>) {
        let end = loop {
            let message = tokio::select! {
                message = incoming.message() => message,
                _ = &mut is_closed => return,
            };
            let event = match message {
                Ok(Some(message)) => self.event(message),
                Ok(None) => Err("the node ended it".to_owned()),
                Err(status) => Err(format!("{:?}: {}", status.code(), status.message())),
            };
            match event {
                Ok(None) => {}
                Ok(Some(event)) => {
                    let is_last = matches!(event, ClusterEvent::NodeLeft { .. });
                    if self.inbox.send(Input::Event(event)).await.is_err() || is_last {
                        return;
                    }
                }
                Err(why) => break why,
            }
        };
        tracing::debug!(stream = self.stream.0, why = end, "membership stream ended");
        let _ = self
            .inbox
            .send(Input::Event(ClusterEvent::NodeDisconnected { stream: self.stream }))
            .await;
    }

    /// Turns a report into an event. A report that breaks the contract ends the stream: the node reconnects, and its log
    /// says why. `None` is a report that decides nothing.
    fn event(&self, message: v1::NodeReport) -> Result<Option<ClusterEvent>, String> {
        let stream = self.stream;
        if message.report.is_none() {
            // Only later versions have this kind of report. A node that is upgraded first stays a member.
            return Ok(None);
        }
        match NodeReport::try_from(message).map_err(|error| error.to_string())? {
            NodeReport::Status { epoch, status } if epoch == self.node.epoch => {
                let read_at = Clock::now();
                Ok(Some(ClusterEvent::NodeReported {
                    stream,
                    read_at,
                    status,
                }))
            }
            NodeReport::Status { .. } => Err("a status of another epoch".to_owned()),
            NodeReport::Leave { .. } => Ok(Some(ClusterEvent::NodeLeft { stream })),
            NodeReport::Prefixes(report) => Ok(Some(ClusterEvent::PrefixesReported { stream, report })),
            NodeReport::Clock(offset) => {
                self.clocks.report(&self.node, offset);
                Ok(None)
            }
            NodeReport::Register(_) => Err("a second registration".to_owned()),
        }
    }
}

/// What each node is told when it joins.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    pub coordinator: NodeId,
    pub lease: Duration,
    pub status_interval: Duration,
}

#[derive(Debug)]
struct Open {
    stream: NodeStream,
    renewed_at: Instant,
    /// Peers that do not fit and of which the log has told.
    misfits: BTreeSet<NodeId>,
}

impl Open {
    /// Says once of each pair why it will never be used. The prefill node is told of the peer all the same: it says so itself.
    fn tell_misfits(&mut self, peers: &[NodeRecord]) {
        self.misfits.retain(|node| peers.iter().any(|peer| peer.id == *node));
        let mine = (&self.stream.node.name, &self.stream.compatibility);
        for peer in peers {
            let Some(why) = Incompatibility::between(mine, (&peer.id.name, &peer.compatibility)) else {
                continue;
            };
            if self.misfits.insert(peer.id.clone()) {
                let (prefill, decode) = (&self.stream.node, &peer.id);
                tracing::warn!(%prefill, %decode, %why, "two nodes do not fit, so no request goes over this pair; start both alike");
            }
        }
    }
}

/// The control loop's handle of all membership streams.
#[derive(Debug)]
pub(crate) struct NodeStreams {
    terms: Terms,
    open: BTreeMap<StreamId, Open>,
}

impl NodeStreams {
    pub(crate) fn new(terms: Terms) -> Self {
        Self {
            terms,
            open: BTreeMap::new(),
        }
    }

    pub(crate) fn insert(&mut self, id: StreamId, stream: NodeStream) {
        self.open.insert(
            id,
            Open {
                stream,
                renewed_at: Instant::now(),
                misfits: BTreeSet::new(),
            },
        );
    }

    pub(crate) fn welcome(&mut self, id: StreamId) {
        let welcome = Welcome {
            coordinator: self.terms.coordinator.clone(),
            lease: self.terms.lease,
            status_interval: self.terms.status_interval,
            takes_prefixes: true,
        };
        let Some(open) = self.open.get(&id) else {
            return;
        };
        tracing::info!(node = %open.stream.node, "node joined");
        open.stream.notes.verdict(CoordinatorReport::Welcome(welcome));
        // A node that dialled several times while this coordinator stood still may be found here in another order than it
        // dialled. Only the last stream counts from now on, so its other streams end. If that is the wrong one, the node
        // dials again.
        let node = open.stream.node.clone();
        self.open.retain(|other, open| *other == id || open.stream.node != node);
    }

    pub(crate) fn refuse(&mut self, id: StreamId, refusal: &JoinRefusal) {
        let (reason, detail) = match refusal {
            JoinRefusal::NameTaken => (RegisterRefusedReason::NameTaken, "a live node has this name".to_owned()),
            JoinRefusal::IncompatibleModel { expected, got } => (
                RegisterRefusedReason::IncompatibleModel,
                format!("this cluster serves {expected}, not {got}"),
            ),
            JoinRefusal::Invalid { field } => (RegisterRefusedReason::Invalid, format!("field {field}")),
        };
        if let Some(open) = self.open.remove(&id) {
            tracing::warn!(node = %open.stream.node, reason = refusal.name(), detail, "node refused");
            let refused = CoordinatorReport::RegisterRefused { reason, detail };
            open.stream.notes.verdict(refused);
        }
    }

    pub(crate) fn renew(&mut self, id: StreamId) {
        let lease = self.terms.lease;
        if let Some(open) = self.open.get_mut(&id)
            && open.renewed_at.elapsed() >= lease / RENEWALS_PER_LEASE
        {
            open.renewed_at = Instant::now();
            open.stream.notes.renewed(lease);
        }
    }

    pub(crate) fn peers(&mut self, id: StreamId, peers: Vec<NodeRecord>) {
        if let Some(open) = self.open.get_mut(&id) {
            open.tell_misfits(&peers);
        }
        let peers = peers.into_iter().map(|record| Peer {
            node: record.id,
            address: record.kv_address,
            transports: record.transports,
            compatibility: record.compatibility,
        });
        if let Some(notes) = self.notes(id) {
            notes.peers(peers.collect());
        }
    }

    pub(crate) fn coordinator(&self) -> &NodeId {
        &self.terms.coordinator
    }

    pub(crate) fn permits(&mut self, id: StreamId, note: PermitNote) {
        if let Some(notes) = self.notes(id) {
            notes.permits(note);
        }
    }

    pub(crate) fn drain(&mut self, id: StreamId, next_role: Option<AssignedRole>) {
        if let Some(notes) = self.notes(id) {
            notes.drain(next_role);
        }
    }

    pub(crate) fn close_stream(&mut self, id: StreamId) {
        self.open.remove(&id);
    }

    pub(crate) fn close_node(&mut self, node: &NodeId) {
        self.open.retain(|_, open| open.stream.node != *node);
    }

    fn notes(&self, id: StreamId) -> Option<&NodeNotes> {
        self.open.get(&id).map(|open| &open.stream.notes)
    }
}

/// Text for the log.
pub(crate) fn tell_dropped(node: &NodeId, cause: DropCause) {
    match cause {
        DropCause::Left => tracing::info!(%node, "a node left after its drain"),
        DropCause::Restarted => tracing::warn!(%node, "a node's earlier life is over: its name has registered anew"),
        DropCause::LeaseExpired => tracing::warn!(
            %node,
            "a node is lost: no status within its lease (lease_ms). Is the process alive and reachable? It rejoins by itself"
        ),
    }
}

#[cfg(test)]
mod tests {
    use identity::PeerName;
    use serving_core::compatibility::CompatibilityHash;
    use serving_core::ids::{NodeEpoch, NodeName};
    use serving_core::node::{NodeCapacity, NodeState};

    use super::*;

    fn record() -> NodeRecord {
        NodeRecord {
            id: NodeId {
                name: NodeName::new("node-0"),
                epoch: NodeEpoch(1),
            },
            role: NodeRole::Decode,
            is_co_located: false,
            address: "127.0.0.1:1".into(),
            kv_address: "127.0.0.1:1".into(),
            compatibility: CompatibilityHash([7; 32]).into(),
            transports: Vec::new(),
            version: String::new(),
            capacity: NodeCapacity {
                kv_blocks: 1,
                block_tokens: 16,
                max_sequences: 1,
                max_batch_tokens: 16,
                max_model_tokens: 16,
                block_bytes: 1,
            },
            model_name: String::new(),
            state: NodeState::Ready,
            roles: AssignedRole::ALL.to_vec(),
        }
    }

    #[test]
    fn a_node_is_offered_the_roles_of_its_certificate_only() {
        let named_as = |roles: &[PeerRole]| {
            let name = |role: &PeerRole| PeerName {
                cluster: "demo".to_owned(),
                role: *role,
                name: "node-0".to_owned(),
            };
            Caller::Named(roles.iter().map(name).collect())
        };
        let roles = |caller: Caller| named(record(), &caller).map(|record| record.roles).ok();
        let decode_only = vec![AssignedRole::Decode, AssignedRole::CoLocated];
        assert_eq!(roles(named_as(&[PeerRole::Decode])), Some(decode_only));
        let both = named_as(&[PeerRole::Prefill, PeerRole::Decode]);
        assert_eq!(roles(both), Some(AssignedRole::ALL.to_vec()));
        assert_eq!(roles(Caller::PlainText), Some(AssignedRole::ALL.to_vec()));
        assert_eq!(roles(named_as(&[PeerRole::Prefill])), None);
        assert_eq!(roles(Caller::Nobody), None);
    }
}
