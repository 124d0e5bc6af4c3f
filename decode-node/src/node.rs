//! A decode node without its port: engine, scheduler, step thread, handoff desk. `run` and the tests put it together.

use std::sync::Arc;
use std::time::Duration;

use engine::{
    EngineError, KeptWeights, KvBacking, KvMemory, OpenError, OpenOptions, OpenedEngine, SampleError, StepRunner,
    open_engine,
};
use kv_transfer::choice::TransportKind;
use kv_transfer::receiver::{MappedPool, Receiver};
use kv_transfer::shm::{self, DirectOffer, ShmConfig};
use prometheus_client::registry::Registry;
use proto::messages::{CONTROL_MESSAGE_BYTES_MAX, PROTOCOL_VERSION};
use proto::v1::decode_service_server::DecodeServiceServer;
use service_runtime::admin::BlockLedger;
use service_runtime::clock::Clock;
use service_runtime::metrics::membership::MembershipGauges;
use service_runtime::metrics::vllm_node::PoolFacts;
use serving_core::ids::{NodeEpoch, NodeId, NodeName};
use serving_core::kv::prefix_log::PrefixLog;
use serving_core::node::{NodeCapacity, NodeRecord, NodeRole, NodeState, NodeStatus};
use serving_core::scheduler::{NodeLimits, Scheduler, SchedulerConfig};
use thiserror::Error;
use tokio::sync::{oneshot, watch};
use tonic::service::{Routes, RoutesBuilder};

use crate::config::Config;
use crate::handoff::HandoffDesk;
use crate::inbox::Inbox;
use crate::kv_pool::KvPool;
use crate::metrics::Metrics;
use crate::service::DecodeApi;
use crate::step_loop::{LoopParts, StepLoop};

/// Longer than the loop itself needs after the grace: it must not be cut off while it says goodbye.
const DRAIN_MARGIN: Duration = Duration::from_secs(3);

/// Why a node could not be made.
#[derive(Debug, Error)]
pub enum NodeError {
    #[error("cannot open the engine: {0}")]
    Open(#[from] OpenError),
    #[error("cannot sample from this model: {0}")]
    Sampler(#[from] SampleError),
    #[error("`max_model_len` is {max_model_tokens}, the model has {context} positions; lower it or leave it out")]
    BeyondContext { max_model_tokens: u32, context: u32 },
    #[error("cannot run the model: {0}")]
    Engine(#[from] EngineError),
    #[error("the system started no step thread: {0}; raise the process limit")]
    Thread(std::io::Error),
    #[error("opening the engine broke off; its last words are on stderr; this is a bug in baton")]
    OpeningPanicked,
}

/// A running decode node. Dropping it does not stop the step thread: `drain` does.
#[derive(Debug)]
pub struct DecodeNode {
    record: NodeRecord,
    inbox: Arc<Inbox>,
    receiver: Arc<Receiver>,
    /// Prefill nodes of this host may share memory as long as it lives.
    _shared_memory: Option<shm::Serving>,
    registry: Arc<Registry>,
    gauges: MembershipGauges,
    status: watch::Receiver<NodeStatus>,
    prefixes: watch::Receiver<PrefixLog>,
    /// Ends with the step thread, however it ends.
    ended: oneshot::Receiver<()>,
}

impl DecodeNode {
    /// Opens the engine (seconds for a real model whose weights are not kept) and starts the step thread. `address` is
    /// where others reach this node.
    ///
    /// # Errors
    /// [`NodeError`].
    pub async fn open(config: &Config, address: &str, weights: KeptWeights) -> Result<Self, NodeError> {
        let for_engine = config.clone();
        let opening = tokio::task::spawn_blocking(move || open(&for_engine, weights));
        let opened = opening.await.map_err(|_| NodeError::OpeningPanicked)??;
        let context = opened.engine.model().context_length;
        if let Some(max_model_tokens) = config.max_model_len.filter(|wanted| *wanted > context) {
            return Err(NodeError::BeyondContext {
                max_model_tokens,
                context,
            });
        }
        let kv = opened.engine.kv().clone();
        let limits = node_limits(config, &opened);
        let id = NodeId {
            name: NodeName::new(&config.name),
            epoch: NodeEpoch(rand::random()),
        };
        let record = record(config, (&id, address), &opened);
        let inbox = Arc::new(Inbox::default());
        let desk = Arc::new(HandoffDesk::new(kv.clone(), inbox.clone()));
        let receiver = Receiver::new(id.clone(), opened.compatibility, desk.clone());
        let shared_memory = share_memory(config, (&receiver, &kv));
        let mut registry = Registry::default();
        let aliases = PoolFacts::if_wanted(config.metrics, &config.served_model_name, &limits);
        let metrics = Metrics::register(&mut registry, aliases);
        let scheduler = Scheduler::new(SchedulerConfig::decode(limits, config.reservation()));
        let gauges = metrics.membership();
        let (status_in, status) = watch::channel(scheduler.status(NodeState::Ready));
        let (prefixes_in, prefixes) = watch::channel(PrefixLog::default());
        let parts = LoopParts {
            node: id,
            kv_address: record.kv_address.clone(),
            reservation: config.reservation(),
            inbox: inbox.clone(),
            desk,
            receiver: receiver.clone(),
            metrics,
            status: status_in,
            prefixes: prefixes_in,
        };
        let step_loop = StepLoop::new(parts, StepRunner::new(opened.engine)?, scheduler);
        let (ending, ended) = oneshot::channel();
        let thread = std::thread::Builder::new().name("decode-step".to_owned());
        let spawned = thread.spawn(move || {
            // Dropped when the loop returns or panics: that is the signal.
            let _ending: oneshot::Sender<()> = ending;
            step_loop.run();
        });
        spawned.map_err(NodeError::Thread)?;
        Ok(Self {
            record,
            inbox,
            receiver,
            _shared_memory: shared_memory,
            registry: Arc::new(registry),
            gauges,
            status,
            prefixes,
            ended,
        })
    }

    pub fn record(&self) -> NodeRecord {
        self.record.clone()
    }
    pub fn status(&self) -> watch::Receiver<NodeStatus> {
        self.status.clone()
    }
    /// What the prefix cache lists.
    pub fn prefixes(&self) -> watch::Receiver<PrefixLog> {
        self.prefixes.clone()
    }
    pub fn ledger(&self) -> Arc<dyn BlockLedger> {
        self.inbox.clone()
    }
    pub fn membership_gauges(&self) -> MembershipGauges {
        self.gauges.clone()
    }
    pub fn registry(&self) -> Arc<Registry> {
        self.registry.clone()
    }

    /// The node's gRPC services.
    pub fn routes(&self) -> Routes {
        let api = DecodeServiceServer::new(DecodeApi::new(self.inbox.clone()));
        let mut routes = RoutesBuilder::default();
        routes.add_service(api.max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX));
        kv_transfer::grpc::add_to_routes(&mut routes, self.receiver.clone());
        routes.routes()
    }

    /// Pends until the step thread is gone. Cancel-safe; not to be asked again after it ended.
    pub async fn step_thread_ended(&mut self) {
        let _ = (&mut self.ended).await;
    }

    /// Takes nothing new, finishes what runs within `grace`, gives the rest up, ends the step thread and the pairs' streams.
    pub async fn drain(&mut self, grace: Duration) -> Drained {
        self.inbox.drain(Clock::now() + grace);
        let ended = tokio::time::timeout(grace + DRAIN_MARGIN, &mut self.ended).await;
        self.receiver.close();
        if ended.is_ok() {
            return Drained::AtRest;
        }
        tracing::error!("the step thread did not end in time");
        Drained::StillComputing
    }
}

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    AtRest,
    /// A step takes longer than the whole drain.
    StillComputing,
}

/// A node that cannot share memory is a good node: its pairs use gRPC.
fn share_memory(config: &Config, (receiver, kv): (&Arc<Receiver>, &Arc<KvMemory>)) -> Option<shm::Serving> {
    if !config.transports.contains(&TransportKind::Shm) {
        return None;
    }
    let direct = config.direct_secret().cloned().and_then(|secret| {
        let pool: Arc<dyn MappedPool> = Arc::new(KvPool::of(kv)?);
        let has_checksums = config.direct_checksums;
        Some(DirectOffer {
            secret,
            pool,
            has_checksums,
        })
    });
    let shm_config = ShmConfig {
        direct,
        ..ShmConfig::new(kv.geometry().layer_bytes())
    };
    shm::serve(receiver.clone(), shm_config)
        .inspect_err(|error| tracing::warn!(%error, "no shared memory for prefill nodes of this host; they use gRPC"))
        .ok()
}

fn open(config: &Config, kept_weights: KeptWeights) -> Result<OpenedEngine, OpenError> {
    open_engine(OpenOptions {
        kind: config.engine,
        model: config.model.as_deref(),
        numerics: config.numerics,
        kernel: config.kernel,
        threads: config.threads(),
        block_tokens: config.block_size,
        kv_bytes: config.kv_cache_memory.bytes(),
        kv_backing: match config.direct_secret() {
            Some(_) => KvBacking::Shareable,
            None => KvBacking::Private,
        },
        limits: config.engine_limits(),
        protocol_version: PROTOCOL_VERSION,
        kept_weights,
        progress: None,
    })
}

/// What the node says of itself when it joins.
fn record(config: &Config, (id, address): (&NodeId, &str), opened: &OpenedEngine) -> NodeRecord {
    let limits = node_limits(config, opened);
    NodeRecord {
        id: id.clone(),
        role: NodeRole::Decode,
        is_co_located: config.co_located,
        address: address.to_owned(),
        kv_address: config.kv_advertise.clone().unwrap_or_else(|| address.to_owned()),
        compatibility: opened.compatibility,
        transports: config.transports.iter().map(|kind| kind.name().to_owned()).collect(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        capacity: NodeCapacity {
            kv_blocks: limits.kv_blocks,
            block_tokens: limits.block_tokens,
            max_sequences: limits.max_sequences,
            max_batch_tokens: limits.max_batch_tokens,
            max_model_tokens: limits.max_model_tokens,
            block_bytes: opened.engine.model().kv.block_bytes() as u64,
        },
        model_name: config.served_model_name.clone(),
        state: NodeState::Ready,
        roles: config.roles.clone(),
    }
}

fn node_limits(config: &Config, opened: &OpenedEngine) -> NodeLimits {
    let (model, kv) = (opened.engine.model(), opened.engine.kv());
    let context = model.context_length;
    NodeLimits {
        kv_blocks: kv.block_count(),
        block_tokens: kv.geometry().block_tokens,
        max_batch_tokens: config.max_num_batched_tokens,
        max_sequences: config.max_num_seqs,
        max_model_tokens: config.max_model_len.unwrap_or(context),
        vocab_size: model.vocab_size,
        prefix_cache: config.prefix_cache,
    }
}
