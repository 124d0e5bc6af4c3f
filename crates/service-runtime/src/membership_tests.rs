//! The node's membership against a scripted coordinator over real gRPC.

use std::pin::Pin;

use proto::messages::{CoordinatorReport, NodeReport, Welcome};
use proto::v1;
use proto::v1::membership_service_server::{MembershipService, MembershipServiceServer};
use serving_core::compatibility::CompatibilityHash;
use serving_core::ids::{NodeEpoch, NodeName, TokenId};
use serving_core::kv::prefix_log::{PrefixLog, PrefixReport};
use serving_core::kv::{BlockPool, BlockUse, ChainLink};
use serving_core::node::{AssignedRole, KvBlockCounts, NodeCapacity, NodeRole, NodeState, PermitNote};
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};

use super::*;

const PATIENCE: Duration = Duration::from_secs(10);

fn node(name: &str) -> NodeId {
    NodeId {
        name: NodeName::new(name),
        epoch: NodeEpoch(3),
    }
}

pub(super) fn record() -> NodeRecord {
    NodeRecord {
        id: node("prefill-0"),
        role: NodeRole::Prefill,
        is_co_located: false,
        address: "127.0.0.1:7410".to_owned(),
        kv_address: "127.0.0.1:7410".to_owned(),
        compatibility: CompatibilityHash([7; 32]).into(),
        transports: vec!["grpc".to_owned()],
        version: "0.1.0".to_owned(),
        capacity: NodeCapacity {
            kv_blocks: 8,
            block_tokens: 16,
            max_sequences: 4,
            max_batch_tokens: 64,
            max_model_tokens: 128,
            block_bytes: 1,
        },
        model_name: "m".to_owned(),
        state: NodeState::Joining,
        roles: Vec::new(),
    }
}

pub(super) fn status(granted: u64, received: u64) -> NodeStatus {
    NodeStatus {
        state: NodeState::Ready,
        permits_granted_total: granted,
        permits_received_total: received,
        permits_recalled_total: 0,
        permits_received_by: vec![(NodeEpoch(3), received)],
        coordinators: 0,
        kv_blocks: KvBlockCounts {
            free: 8,
            ..KvBlockCounts::default()
        },
        running_sequences: 0,
        waiting_sequences: 0,
        waiting_tokens: 0,
        computed_tokens_total: 0,
        prefix_query_tokens_total: 0,
        prefix_hit_tokens_total: 0,
        preemptions_total: 0,
        pairs: Vec::new(),
    }
}

/// One stream as the scripted coordinator has it.
struct Joined {
    reports: Streaming<v1::NodeReport>,
    answers: mpsc::Sender<Result<v1::CoordinatorReport, Status>>,
    takes_prefixes: bool,
}

impl Joined {
    async fn any(&mut self) -> Option<NodeReport> {
        let report = tokio::time::timeout(PATIENCE, self.reports.message())
            .await
            .expect("a report in time");
        Some(report.ok().flatten()?.try_into().expect("a good report"))
    }
    async fn next(&mut self) -> Option<NodeReport> {
        loop {
            let report = self.any().await?;
            if !matches!(report, NodeReport::Clock(_) | NodeReport::Prefixes(_)) {
                return Some(report);
            }
        }
    }
    async fn prefixes(&mut self) -> PrefixReport {
        loop {
            match self.any().await {
                Some(NodeReport::Prefixes(report)) => return report,
                Some(_) => {}
                None => panic!("the stream ended"),
            }
        }
    }
    async fn status(&mut self) -> NodeStatus {
        match self.next().await {
            Some(NodeReport::Status { epoch, status }) => {
                assert_eq!(epoch, NodeEpoch(3));
                status
            }
            other => panic!("{other:?}"),
        }
    }
    /// The next status that differs from `known` in its permits.
    async fn permits(&mut self) -> (u64, u64) {
        let status = self.status().await;
        (status.permits_granted_total, status.permits_received_total)
    }
    /// The status in which the node wants so many back.
    async fn recalled(&mut self, total: u64) -> NodeStatus {
        loop {
            let status = self.status().await;
            if status.permits_recalled_total == total {
                return status;
            }
        }
    }
    async fn say(&self, report: CoordinatorReport) {
        self.answers.send(Ok(report.into())).await.unwrap();
    }
    async fn welcome(&mut self, lease_ms: u64) {
        self.welcome_as(lease_ms, "c-0", 3).await;
    }
    async fn welcome_as(&mut self, lease_ms: u64, name: &str, epoch: u64) {
        assert!(matches!(self.next().await, Some(NodeReport::Register(_))));
        let welcome = Welcome {
            coordinator: NodeId {
                name: NodeName::new(name),
                epoch: NodeEpoch(epoch),
            },
            lease: Duration::from_millis(lease_ms),
            status_interval: Duration::from_millis(50),
            takes_prefixes: self.takes_prefixes,
        };
        self.say(CoordinatorReport::Welcome(welcome)).await;
    }
}

struct Service(mpsc::Sender<Joined>);

#[tonic::async_trait]
impl MembershipService for Service {
    type JoinStream = Pin<Box<dyn Stream<Item = Result<v1::CoordinatorReport, Status>> + Send>>;
    async fn join(&self, request: Request<Streaming<v1::NodeReport>>) -> Result<Response<Self::JoinStream>, Status> {
        let (answers, queue) = mpsc::channel(16);
        let joined = Joined {
            reports: request.into_inner(),
            answers,
            takes_prefixes: true,
        };
        self.0.send(joined).await.map_err(|_| Status::unavailable("over"))?;
        Ok(Response::new(Box::pin(ReceiverStream::new(queue))))
    }
    async fn read_clock(&self, _: Request<v1::ClockQuestion>) -> Result<Response<v1::ClockReading>, Status> {
        Ok(Response::new(crate::clock_offset::read_clock().into()))
    }
}

struct Coordinator {
    address: String,
    joins: mpsc::Receiver<Joined>,
}

impl Coordinator {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (joins_in, joins) = mpsc::channel(4);
        let server = tonic::transport::Server::builder().add_service(MembershipServiceServer::new(Service(joins_in)));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        Self { address, joins }
    }
    async fn joined(&mut self) -> Joined {
        tokio::time::timeout(PATIENCE, self.joins.recv())
            .await
            .expect("a join in time")
            .unwrap()
    }
}

async fn event(membership: &mut Membership) -> MembershipEvent {
    tokio::time::timeout(PATIENCE, membership.next_event())
        .await
        .expect("an event in time")
        .unwrap()
}

fn join_all(coordinators: &[&Coordinator], status: watch::Receiver<NodeStatus>) -> Membership {
    join_with(coordinators, status, watch::channel(PrefixLog::default()).1)
}

fn join_with(
    coordinators: &[&Coordinator],
    status: watch::Receiver<NodeStatus>,
    prefixes: watch::Receiver<PrefixLog>,
) -> Membership {
    let coordinators = coordinators
        .iter()
        .map(|coordinator| coordinator.address.clone())
        .collect();
    join(
        JoinConfig {
            coordinators: CoordinatorsAt::Fixed(coordinators),
            record: record(),
            prefixes,
            gauges: MembershipGauges::default(),
            identity: Default::default(),
        },
        status,
    )
    .expect("a good record")
}

#[tokio::test]
async fn registers_reports_at_once_and_on_the_interval_and_passes_on_what_it_hears() {
    let mut coordinator = Coordinator::start().await;
    let (status_in, status_out) = watch::channel(status(10, 0));
    let mut membership = join_all(&[&coordinator], status_out);
    let mut joined = coordinator.joined().await;
    joined.welcome(60_000).await;
    assert!(
        matches!(event(&mut membership).await, MembershipEvent::Welcomed { coordinator, .. } if coordinator == node("c-0"))
    );
    assert_eq!(joined.permits().await, (10, 0));
    assert_eq!(joined.permits().await, (10, 0), "the interval passed");
    status_in.send(status(12, 1)).unwrap();
    assert_eq!(joined.permits().await, (12, 1));
    let peer = Peer {
        node: node("decode-0"),
        address: "d:1".into(),
        transports: vec![],
        compatibility: CompatibilityHash([7; 32]).into(),
    };
    joined.say(CoordinatorReport::Peers(vec![peer.clone()])).await;
    let mut peers = membership.peers();
    let list = tokio::time::timeout(PATIENCE, peers.wait_for(|peers| !peers.is_empty()))
        .await
        .unwrap()
        .unwrap()
        .clone();
    assert_eq!(list, [peer]);
    joined
        .say(CoordinatorReport::Drain {
            reason: "maintenance".into(),
            next_role: Some(AssignedRole::Prefill),
        })
        .await;
    assert_eq!(
        event(&mut membership).await,
        MembershipEvent::DrainRequested {
            reason: "maintenance".into(),
            next_role: Some(AssignedRole::Prefill),
        }
    );
    drop(joined);
    assert!(matches!(
        event(&mut membership).await,
        MembershipEvent::ConnectionLost { .. }
    ));
    assert_eq!(peers.borrow().len(), 1, "links outlive a coordinator's stream");
}

#[tokio::test]
async fn what_was_granted_and_not_used_on_a_lost_stream_is_granted_again() {
    let mut coordinator = Coordinator::start().await;
    let (status_in, status_out) = watch::channel(status(100, 40));
    let mut membership = join_all(&[&coordinator], status_out);
    let mut joined = coordinator.joined().await;
    joined.welcome(60_000).await;
    event(&mut membership).await;
    assert_eq!(
        joined.permits().await,
        (60, 0),
        "the stream starts at what was received before it"
    );
    drop(joined);
    assert!(matches!(
        event(&mut membership).await,
        MembershipEvent::ConnectionLost { .. }
    ));
    status_in.send(status(100, 55)).unwrap();
    let mut joined = coordinator.joined().await;
    joined.welcome(60_000).await;
    let (granted, received) = joined.permits().await;
    assert_eq!(granted - received, 45, "granted {granted}, received {received}");
    event(&mut membership).await;
}

#[tokio::test]
async fn permits_are_divided_between_coordinators_and_recalled_for_who_waits() {
    let (mut one, mut two) = (Coordinator::start().await, Coordinator::start().await);
    let (_status_in, status_out) = watch::channel(status(30, 10));
    let mut membership = join_all(&[&one, &two], status_out);
    let mut second = two.joined().await;
    second.welcome_as(60_000, "c-1", 4).await;
    event(&mut membership).await;
    assert_eq!(second.permits().await, (20, 0), "alone, it holds all that is free");
    let mut first = one.joined().await;
    first.welcome(60_000).await;
    event(&mut membership).await;
    let status = second.recalled(10).await;
    assert_eq!(status.coordinators, 2);
    second.say(CoordinatorReport::Permits(returned(0, 10))).await;
    while first.permits().await != (10, 0) {}
    second.say(CoordinatorReport::Permits(returned(15, 10))).await;
    let status = first.recalled(5).await;
    assert_eq!(status.permits_granted_total, 10);
    first.say(CoordinatorReport::Permits(returned(0, 5))).await;
    while second.permits().await != (25, 0) {}
    drop(second);
    drop(two);
    while first.permits().await != (25, 0) {}
}

fn returned(wanted: u64, returned_total: u64) -> PermitNote {
    PermitNote {
        wanted,
        waited: Duration::ZERO,
        returned_total,
    }
}

#[tokio::test]
async fn a_refusal_says_why_and_is_tried_again() {
    let mut coordinator = Coordinator::start().await;
    let (_status_in, status_out) = watch::channel(status(1, 0));
    let mut membership = join_all(&[&coordinator], status_out);
    let joined = coordinator.joined().await;
    let refused = CoordinatorReport::RegisterRefused {
        reason: RegisterRefusedReason::NameTaken,
        detail: "prefill-0 lives".into(),
    };
    joined.say(refused).await;
    let MembershipEvent::ConnectionLost { reason, .. } = event(&mut membership).await else {
        panic!("no refusal")
    };
    assert!(
        reason.to_string().contains("name_taken") && reason.to_string().contains("prefill-0 lives"),
        "{reason}"
    );
    coordinator.joined().await.welcome(60_000).await;
    assert!(matches!(event(&mut membership).await, MembershipEvent::Welcomed { .. }));
}

#[tokio::test]
async fn a_silent_coordinator_is_lost_after_its_lease_and_renewals_keep_it() {
    let mut coordinator = Coordinator::start().await;
    let (_status_in, status_out) = watch::channel(status(1, 0));
    let mut membership = join_all(&[&coordinator], status_out);
    let mut joined = coordinator.joined().await;
    joined.welcome(200).await;
    event(&mut membership).await;
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(500) {
        joined.status().await;
        joined
            .say(CoordinatorReport::Renewed {
                lease: Duration::from_millis(200),
            })
            .await;
    }
    let lost = event(&mut membership).await;
    assert!(
        matches!(
            lost,
            MembershipEvent::ConnectionLost {
                reason: LostReason::Silent { .. },
                ..
            }
        ),
        "{lost:?}"
    );
    assert!(started.elapsed() >= Duration::from_millis(600));
}

#[tokio::test]
async fn leaving_says_goodbye() {
    let mut coordinator = Coordinator::start().await;
    let (_status_in, status_out) = watch::channel(status(1, 0));
    let mut membership = join_all(&[&coordinator], status_out);
    let mut joined = coordinator.joined().await;
    joined.welcome(60_000).await;
    event(&mut membership).await;
    let leaving = tokio::spawn(membership.leave());
    let mut last = None;
    while let Some(report) = joined.next().await {
        last = Some(report);
        if matches!(last, Some(NodeReport::Leave { .. })) {
            break;
        }
    }
    assert!(matches!(last, Some(NodeReport::Leave { .. })), "{last:?}");
    drop(joined);
    tokio::time::timeout(PATIENCE, leaving).await.unwrap().unwrap();
}

/// Every stream learns the whole cache first: a coordinator that starts anew knows where prompts are cached from then on.
#[tokio::test]
async fn each_stream_is_told_the_cache_whole_and_then_its_changes() {
    let mut coordinator = Coordinator::start().await;
    let (_status_in, status_out) = watch::channel(status(1, 0));
    let (prefixes_in, prefixes) = watch::channel(PrefixLog::default());
    let mut pool = BlockPool::new(4, 2, true);
    let mut compute = |tokens: [u32; 2]| {
        let block = pool.allocate_one(BlockUse::Active).expect("a block");
        pool.publish(&block, ChainLink::ROOT, &tokens.map(TokenId));
        pool.release(block);
        let changes = pool.take_prefix_changes().expect("it is new");
        prefixes_in.send_modify(|log| log.apply(changes));
    };
    compute([1, 2]);
    let _membership = join_with(&[&coordinator], status_out, prefixes);
    let mut first = coordinator.joined().await;
    first.welcome(1_000).await;
    let PrefixReport::Whole(cached) = first.prefixes().await else {
        panic!("not the whole cache");
    };
    assert_eq!(cached.len(), 1);
    compute([3, 4]);
    let PrefixReport::Changes { listed, gone } = first.prefixes().await else {
        panic!("told twice");
    };
    assert_eq!((listed.len(), gone.len()), (1, 0));
    drop(first);
    let mut second = coordinator.joined().await;
    second.welcome(1_000).await;
    let everything = cached.into_iter().chain(listed).collect();
    assert_eq!(second.prefixes().await, PrefixReport::Whole(everything));
}

/// Nodes are upgraded before coordinators.
#[tokio::test]
async fn a_coordinator_of_an_earlier_version_is_told_no_prefixes() {
    let mut coordinator = Coordinator::start().await;
    let (_status_in, status_out) = watch::channel(status(1, 0));
    let _membership = join_all(&[&coordinator], status_out);
    let mut joined = coordinator.joined().await;
    joined.takes_prefixes = false;
    joined.welcome(1_000).await;
    let mut statuses = 0;
    while statuses < 3 {
        match joined.any().await {
            Some(NodeReport::Status { .. }) => statuses += 1,
            Some(NodeReport::Clock(_)) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn nobody_listening_is_an_event_and_not_the_end() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let (_status_in, status_out) = watch::channel(status(1, 0));
    let mut membership = join(
        JoinConfig {
            coordinators: CoordinatorsAt::Fixed(vec![address]),
            record: record(),
            prefixes: watch::channel(PrefixLog::default()).1,
            gauges: MembershipGauges::default(),
            identity: Default::default(),
        },
        status_out,
    )
    .expect("a good record");
    for _ in 0..2 {
        let lost = event(&mut membership).await;
        assert!(
            matches!(
                lost,
                MembershipEvent::ConnectionLost {
                    reason: LostReason::Connect(_),
                    ..
                }
            ),
            "{lost:?}"
        );
    }
}

#[tokio::test]
async fn a_node_whose_brain_has_ended_still_says_goodbye() {
    let mut coordinator = Coordinator::start().await;
    let (status_in, status_out) = watch::channel(status(1, 0));
    let mut membership = join_all(&[&coordinator], status_out);
    let mut joined = coordinator.joined().await;
    joined.welcome(60_000).await;
    event(&mut membership).await;
    joined.permits().await;
    drop(status_in);
    // Past the next report, so that the end of the statuses has been seen.
    joined.permits().await;
    let leaving = tokio::spawn(membership.leave());
    let mut reports = Vec::new();
    while let Some(report) = joined.next().await {
        reports.push(report);
        if matches!(reports.last(), Some(NodeReport::Leave { .. })) {
            break;
        }
    }
    assert!(matches!(reports.last(), Some(NodeReport::Leave { .. })), "{reports:?}");
    drop(joined);
    leaving.await.unwrap();
}
