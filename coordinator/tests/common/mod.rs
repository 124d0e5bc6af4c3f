//! Scripted nodes over real gRPC: they join as real nodes do and answer as the test says.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coordinator::api::EdgeMetrics as _;
use coordinator::request_handle::{ClientEvent, RequestHandle, Submission, Submit as _};
use coordinator::{Config, Coordinator};
use futures::future::BoxFuture;
use futures::{Stream, StreamExt as _};
use proto::messages::{DecodeEvent, OpenRequest, PrefillEvent, PrefillRequest};
use proto::v1;
use proto::v1::decode_service_server::{DecodeService, DecodeServiceServer};
use proto::v1::prefill_service_server::{PrefillService, PrefillServiceServer};
use service_runtime::health::Health;
use service_runtime::membership::{self, CoordinatorsAt, JoinConfig, Membership};
use service_runtime::metrics::membership::MembershipGauges;
use service_runtime::serve::{self, Ops};
use service_runtime::shutdown::Shutdown;
use serving_core::compatibility::CompatibilityHash;
use serving_core::ids::{ChoiceIndex, NodeEpoch, NodeId, NodeName, OutputIndex, RequestId, TokenId, TransferId};
use serving_core::kv::prefix_log::PrefixLog;
use serving_core::node::{KvBlockCounts, NodeCapacity, NodeRecord, NodeRole, NodeState, NodeStatus, Ticket};
use serving_core::request::{FinishReason, Lane, Request, SamplingParams, StopConditions, TokenEvent};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Routes;
use tonic::{Response, Status};

/// Nothing a test waits for takes longer, even on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(20);

type Script<Q, E> = Arc<dyn Fn(Q, mpsc::Sender<E>) -> BoxFuture<'static, ()> + Send + Sync>;
pub type DecodeScript = Script<OpenRequest, DecodeEvent>;
pub type PrefillScript = Script<PrefillRequest, PrefillEvent>;

/// Wraps an async closure; the leg's stream ends when it returns.
pub fn decode<F>(script: impl Fn(OpenRequest, mpsc::Sender<DecodeEvent>) -> F + Send + Sync + 'static) -> DecodeScript
where
    F: Future<Output = ()> + Send + 'static,
{
    Arc::new(move |request, events| Box::pin(script(request, events)))
}
pub fn prefill<F>(
    script: impl Fn(PrefillRequest, mpsc::Sender<PrefillEvent>) -> F + Send + Sync + 'static,
) -> PrefillScript
where
    F: Future<Output = ()> + Send + 'static,
{
    Arc::new(move |request, events| Box::pin(script(request, events)))
}

struct Decode(DecodeScript);
struct Prefill(PrefillScript);

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl DecodeService for Decode {
    type OpenStream = Events<v1::DecodeEvent>;
    async fn open(&self, request: tonic::Request<v1::OpenRequest>) -> Result<Response<Self::OpenStream>, Status> {
        let open = OpenRequest::try_from(request.into_inner()).map_err(|e| Status::invalid_argument(e.to_string()))?;
        let (sender, receiver) = mpsc::channel(16);
        tokio::spawn((self.0)(open, sender));
        Ok(Response::new(Box::pin(
            ReceiverStream::new(receiver).map(|e| Ok(e.into())),
        )))
    }
}

#[tonic::async_trait]
impl PrefillService for Prefill {
    type PrefillStream = Events<v1::PrefillEvent>;
    async fn prefill(
        &self,
        request: tonic::Request<v1::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let work =
            PrefillRequest::try_from(request.into_inner()).map_err(|e| Status::invalid_argument(e.to_string()))?;
        let (sender, receiver) = mpsc::channel(16);
        tokio::spawn((self.0)(work, sender));
        Ok(Response::new(Box::pin(
            ReceiverStream::new(receiver).map(|e| Ok(e.into())),
        )))
    }
}

/// A running scripted node; dropping it ends its membership.
pub struct Node {
    pub record: NodeRecord,
    pub membership: Membership,
    /// Kept: without its sender a node has nothing to report and leaves.
    #[allow(dead_code, reason = "held, never read")]
    pub status: watch::Sender<NodeStatus>,
    pub stop: Shutdown,
}

pub fn record(name: &str, epoch: u64, role: NodeRole) -> NodeRecord {
    NodeRecord {
        id: NodeId {
            name: NodeName::new(name),
            epoch: NodeEpoch(epoch),
        },
        role,
        is_co_located: false,
        address: "127.0.0.1:1".into(),
        kv_address: "127.0.0.1:1".into(),
        compatibility: CompatibilityHash([7; 32]).into(),
        transports: vec!["grpc".into()],
        version: "test".into(),
        capacity: NodeCapacity {
            kv_blocks: 256,
            block_tokens: 16,
            max_sequences: 8,
            max_batch_tokens: 512,
            max_model_tokens: 2048,
            block_bytes: 64,
        },
        model_name: "smol".into(),
        state: NodeState::Ready,
        roles: Vec::new(),
    }
}

pub fn status(granted: u64) -> NodeStatus {
    NodeStatus {
        state: NodeState::Ready,
        permits_granted_total: granted,
        permits_received_total: 0,
        permits_recalled_total: 0,
        permits_received_by: vec![],
        coordinators: 1,
        kv_blocks: KvBlockCounts {
            free: 200,
            cached: 56,
            ..KvBlockCounts::default()
        },
        running_sequences: 0,
        waiting_sequences: 0,
        waiting_tokens: 0,
        prefix_query_tokens_total: 0,
        prefix_hit_tokens_total: 0,
        preemptions_total: 0,
        computed_tokens_total: 0,
        pairs: vec![],
    }
}

pub async fn start_node(cluster: &Coordinator, name: &str, role: NodeRole, routes: Routes) -> Node {
    let (listener, address) = serve::bind("127.0.0.1:0").await.expect("a free port");
    let mut record = record(name, rand::random(), role);
    record.address = address.to_string();
    record.kv_address = address.to_string();
    let ops = Ops {
        role: role.name(),
        name: name.into(),
        version: "test",
        health: Health::new("scripted"),
        metrics: Arc::default(),
        ledger: None,
        guard: Default::default(),
    };
    let stop = Shutdown::new();
    tokio::spawn(serve::serve_node(listener, routes, ops, stop.clone()));
    let (status, seen) = watch::channel(status(100_000));
    let join = JoinConfig {
        coordinators: CoordinatorsAt::Fixed(vec![cluster.control_address.to_string()]),
        prefixes: watch::channel(PrefixLog::default()).1,
        gauges: MembershipGauges::default(),
        identity: Default::default(),
        record: record.clone(),
    };
    Node {
        record,
        membership: membership::join(join, seen).expect("a good record"),
        status,
        stop,
    }
}

pub async fn decode_node(cluster: &Coordinator, name: &str, script: DecodeScript) -> Node {
    start_node(
        cluster,
        name,
        NodeRole::Decode,
        Routes::new(DecodeServiceServer::new(Decode(script))),
    )
    .await
}

pub async fn prefill_node(cluster: &Coordinator, name: &str, script: PrefillScript) -> Node {
    start_node(
        cluster,
        name,
        NodeRole::Prefill,
        Routes::new(PrefillServiceServer::new(Prefill(script))),
    )
    .await
}

#[derive(clap::Parser)]
struct Args {
    #[command(flatten)]
    config: Config,
}

/// A coordinator on free ports; `more` are further flags.
pub async fn coordinator(more: &[&str]) -> Coordinator {
    let base = [
        "test",
        "--control-listen=127.0.0.1:0",
        "--model=/none.gguf",
        "--served-model-name=smol",
    ];
    // Nodes report twenty times as often: no test waits for a status.
    let lease = "--lease-ms=1000";
    let lease = (!more.iter().any(|flag| flag.starts_with("--lease-ms"))).then_some(&lease);
    let args: Args = clap::Parser::parse_from(base.iter().chain(lease).chain(more));
    Coordinator::start(&args.config, Shutdown::new()).await.expect("starts")
}

/// Polls until `probe` is true.
pub async fn until(what: &str, probe: impl Fn() -> bool) {
    let started = Instant::now();
    while !probe() {
        assert!(
            started.elapsed() < PATIENCE,
            "{what} did not happen within {PATIENCE:?}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub async fn until_metric(cluster: &Coordinator, line: &str) {
    let started = Instant::now();
    loop {
        let text = cluster.metrics.render();
        if text.lines().any(|l| l == line) {
            return;
        }
        assert!(started.elapsed() < PATIENCE, "{line} never came in\n{text}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Until so many nodes of the role are ready and can be given work: a node joins before its first permits come in, and until
/// then another one gets what a test meant for it.
pub async fn until_up(cluster: &Coordinator, role: &str, count: usize) {
    until_metric(
        cluster,
        &format!("baton_node_up{{role=\"{role}\",state=\"ready\"}} {count}.0"),
    )
    .await;
    let role = format!("role=\"{role}\"");
    until("permits from every node", || {
        let text = cluster.metrics.render();
        let permits = text
            .lines()
            .filter(|line| line.starts_with("baton_node_permits_available{"));
        permits
            .filter(|line| line.contains(&role) && !line.ends_with(" 0.0"))
            .count()
            >= count
    })
    .await;
}

pub fn request(id: u128, max_tokens: u32) -> Arc<Request> {
    let prompt: Vec<TokenId> = (0..40).map(TokenId).collect();
    Arc::new(Request {
        id: RequestId(id),
        prompt: prompt.into(),
        client_prompt_tokens: 40,
        constraint: Default::default(),
        sampling: SamplingParams::greedy(),
        stop: StopConditions {
            max_tokens,
            min_tokens: 0,
            end_tokens: vec![],
            stop_token_ids: vec![],
        },
        choice_count: 1,
        seed: 1,
        logprobs: None,
        prompt_logprobs: None,
        prefix_salt: None,
        cache_tenant: None,
        report_kv_hashes: false,
        share: None,
        priority: 0,
        lane: Lane::Interactive,
        time_limit: Duration::from_secs(30),
    })
}

pub async fn submit(cluster: &Coordinator, request: Arc<Request>) -> RequestHandle {
    let submission = Submission {
        request,
        tokenized_at: Instant::now(),
        traceparent: None,
    };
    let answer = tokio::time::timeout(PATIENCE, cluster.handle.submit(submission)).await;
    answer.expect("an answer in time").expect("accepted")
}

/// All events to the end.
pub async fn collect(handle: &mut RequestHandle) -> Vec<ClientEvent> {
    let mut all = Vec::new();
    loop {
        let event = tokio::time::timeout(PATIENCE, handle.next())
            .await
            .expect("an event in time");
        let event = event.expect("an end before the stream's end");
        let is_last = matches!(event, ClientEvent::Done(_) | ClientEvent::Failed(_));
        all.push(event);
        if is_last {
            return all;
        }
    }
}

pub fn token_ids(events: &[ClientEvent]) -> Vec<(u32, u32)> {
    let of = |e: &ClientEvent| match e {
        ClientEvent::Token(t, _) => Some((t.index.0, t.token.0)),
        _ => None,
    };
    events.iter().filter_map(of).collect()
}

pub fn token(index: u32, id: u32) -> TokenEvent {
    TokenEvent {
        choice: ChoiceIndex(0),
        index: OutputIndex(index),
        token: TokenId(id),
        logprobs: None,
        finish: None,
    }
}

pub fn last_token(index: u32, id: u32) -> TokenEvent {
    TokenEvent {
        finish: Some(FinishReason::Length),
        ..token(index, id)
    }
}

pub fn ticket(transfer: u128) -> Ticket {
    Ticket {
        transfer: TransferId(transfer),
        decode_node: NodeId {
            name: NodeName::new("d0"),
            epoch: NodeEpoch(1),
        },
        decode_address: "127.0.0.1:1".into(),
        blocks: vec![],
        prefix_blocks: 0,
        total_bytes: 0,
        expires_in: Duration::from_secs(5),
    }
}
