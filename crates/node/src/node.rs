//! A node without its port and membership: engine, scheduler, loop, transports. `live` and the tests put it together.

use std::sync::Arc;
use std::time::Duration;

use engine::{Engine, OpenedEngine};
use grammar::Grammars;
use kv_transfer::pairs::PairConfig;
use kv_transfer::receiver::{MappedPool, Receiver, WrittenPool};
use kv_transfer::transport::{PairPeer, Transport};
use kv_transfer::{DeviceFault, DevicePlace, DirectOffer, DirectWish, ReceivingEnd, Serving, transports};
use prometheus_client::registry::Registry;
use proto::messages::Peer;
use service_runtime::admin::BlockLedger;
use service_runtime::clock::Clock;
use service_runtime::freed_memory;
use service_runtime::metrics::membership::MembershipGauges;
use service_runtime::metrics::vllm_node::PoolFacts;
use serving_core::compatibility::Compatibility;
use serving_core::ids::{NodeEpoch, NodeId, NodeName};
use serving_core::kv::prefix_log::PrefixLog;
use serving_core::node::{NodeCapacity, NodeRecord, NodeState, NodeStatus, PairHealth};
use serving_core::scheduler::{NodeLimits, Scheduler};
use thiserror::Error;
use tokio::runtime::Handle as RuntimeHandle;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use tonic::service::RoutesBuilder;

use crate::cache_service;
use crate::constraints::{COMPILED_AT_ONCE, grammars_of};
use crate::engine_thread::{EngineThread, NodeWork};
use crate::handle::Handle;
use crate::handoff_in::Reservations;
use crate::handoff_out::{Handoffs, PushQueue};
use crate::inbox::Inbox;
use crate::kv_access::KvAccess;
use crate::kv_pool::KvPool;
use crate::metrics::Metrics;
use crate::node_loop::{Incoming, LoopParts, NodeLoop, Outgoing};
use crate::settings::{DecodeSettings, NodeSettings, PrefillSettings, RoleSettings};

/// Longer than the loop itself needs after the grace: it must not be cut off while it says goodbye.
const DRAIN_MARGIN: Duration = Duration::from_secs(3);
/// Prefill nodes close a decode node's GPU memory within milliseconds of its goodbye. One that stands still is not waited for longer.
const OPENERS_LEAVE_WITHIN: Duration = Duration::from_secs(1);

/// The configuration's or the machine's fault; nothing to retry.
#[derive(Debug, Error)]
pub enum NodeError {
    #[error("`max_model_len` is {max_model_tokens}, the model has {context} positions; lower it or leave it out")]
    BeyondContext { max_model_tokens: u32, context: u32 },
    #[error("the system started no thread for the node: {0}; raise the process limit")]
    Thread(#[from] std::io::Error),
    #[error(
        "`speculative_tokens` needs an engine that checks guesses, and this one does not (GPUs do not); leave it out"
    )]
    Guesses,
    #[error("the transports cannot use the engine's device: {0}")]
    Device(#[from] DeviceFault),
}

/// A running node. Dropping it does not stop the loop: `drain` does.
#[derive(Debug)]
pub struct Node {
    pub record: NodeRecord,
    pub status: watch::Receiver<NodeStatus>,
    /// What the prefix cache lists.
    pub prefixes: watch::Receiver<PrefixLog>,
    pub gauges: MembershipGauges,
    inbox: Arc<Inbox>,
    grammars: Arc<Grammars>,
    compiling: Arc<Semaphore>,
    metrics: Metrics,
    sender: Option<Sender>,
    receiver: Option<Arc<Receiver>>,
    /// Prefill nodes may use other transports than gRPC as long as these live.
    _transports: Vec<Serving>,
    /// Ends with the loop's thread, however it ends.
    ended: watch::Receiver<()>,
}

/// The pairs of a node that pushes.
#[derive(Debug)]
struct Sender {
    transport: Arc<dyn Transport>,
    watch: JoinHandle<()>,
}

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    AtRest,
    /// A step takes longer than the whole drain.
    StillComputing,
}

impl Node {
    /// Starts the loop. `address` is where others reach this node.
    ///
    /// # Errors
    /// [`NodeError`].
    pub fn start(
        settings: &NodeSettings,
        (opened, address): (OpenedEngine, &str),
        registry: &mut Registry,
    ) -> Result<Self, NodeError> {
        let OpenedEngine {
            engine,
            compatibility,
            model_name,
        } = opened;
        let model_name = settings.config.served_model_name.first().unwrap_or(&model_name);
        let limits = node_limits(settings, &*engine)?;
        let record = record(settings, (&*engine, &limits), (address, model_name), compatibility);
        let inbox: Arc<Inbox> = Arc::default();
        let aliases = PoolFacts::if_wanted(settings.config.metrics, model_name, &limits);
        let kv = KvAccess::of(engine.kv())?;
        let ends = match &settings.role {
            RoleSettings::Prefill(prefill) => {
                sending_end(settings, prefill, (&record, &kv), (registry, aliases), inbox.clone())
            }
            RoleSettings::Decode(decode) => {
                receiving_end(settings, decode, (&record, &kv), (registry, aliases), inbox.clone())
            }
        };
        let scheduler = Scheduler::new(settings.scheduler(limits));
        let (status_in, status) = watch::channel(scheduler.status(NodeState::Ready));
        let (prefixes_in, prefixes) = watch::channel(PrefixLog::default());
        let gauges = ends.metrics.membership();
        let work = NodeWork {
            hands_over: ends.outgoing.is_some(),
            decodes: ends.incoming.is_some(),
        };
        let grammars = Arc::new(grammars_of(settings.config.model.clone()));
        let node_loop = NodeLoop::new(LoopParts {
            node: record.id.clone(),
            engine: EngineThread::start(engine, inbox.clone(), work, grammars.clone())?,
            scheduler,
            inbox: inbox.clone(),
            metrics: ends.metrics.clone(),
            status: status_in,
            prefixes: prefixes_in,
            outgoing: ends.outgoing,
            incoming: ends.incoming,
        });
        Ok(Self {
            record,
            status,
            prefixes,
            gauges,
            inbox,
            grammars,
            compiling: Arc::new(Semaphore::new(COMPILED_AT_ONCE)),
            metrics: ends.metrics,
            sender: ends.sender,
            receiver: ends.receiver,
            _transports: ends.transports,
            ended: spawn(node_loop)?,
        })
    }

    /// For the role's service.
    pub fn handle(&self) -> Handle {
        Handle {
            inbox: self.inbox.clone(),
            grammars: self.grammars.clone(),
            compiling: self.compiling.clone(),
            metrics: self.metrics.clone(),
            epoch: self.record.id.epoch,
            block_tokens: self.record.capacity.block_tokens,
        }
    }

    pub fn ledger(&self) -> Arc<dyn BlockLedger> {
        self.inbox.clone()
    }

    /// Reads the model's tokenizer for grammars, in the background.
    pub fn read_vocabulary_soon(&self) {
        self.grammars.read_vocabulary_soon(freed_memory::give_back);
    }

    /// Adds the services that are no role's to a node's port: those that move KV, and that of the prefix cache.
    pub fn add_to_routes(&self, routes: &mut RoutesBuilder) {
        cache_service::add_to_routes(routes, self.inbox.clone());
        if let Some(receiver) = &self.receiver {
            kv_transfer::grpc::add_to_routes(routes, receiver.clone());
        }
    }

    /// Pends until the loop's thread is gone. Cancel-safe.
    pub async fn loop_ended(&mut self) {
        while self.ended.changed().await.is_ok() {}
    }

    /// The decode nodes to keep pairs with.
    pub fn keep_pairs(&self, peers: &[Peer]) {
        let kept = peers.iter().map(|peer| PairPeer {
            node: peer.node.clone(),
            address: peer.address.clone(),
            compatibility: peer.compatibility.clone(),
        });
        if let Some(sender) = &self.sender {
            sender.transport.keep_pairs(kept.collect());
        }
    }

    /// Takes nothing new, finishes what runs within `grace`, gives the rest up, ends the loop and the streams of its pairs.
    pub async fn drain(&mut self, grace: Duration) -> Drained {
        self.inbox.drain(Clock::now() + grace);
        let ended = tokio::time::timeout(grace + DRAIN_MARGIN, self.loop_ended()).await;
        if let Some(receiver) = &self.receiver {
            receiver.close();
            if tokio::time::timeout(OPENERS_LEAVE_WITHIN, receiver.is_left())
                .await
                .is_err()
            {
                tracing::warn!(
                    "a prefill node does not close this node's GPU memory: it stays until one of the two processes ends"
                );
            }
        }
        if let Some(sender) = &self.sender {
            sender.watch.abort();
            sender.transport.keep_pairs(Vec::new());
        }
        if ended.is_ok() {
            return Drained::AtRest;
        }
        tracing::error!("the node's loop did not end in time");
        Drained::StillComputing
    }
}

/// A role's ends of handoffs.
struct Ends {
    metrics: Metrics,
    outgoing: Option<Outgoing>,
    incoming: Option<Incoming>,
    sender: Option<Sender>,
    receiver: Option<Arc<Receiver>>,
    transports: Vec<Serving>,
}

type Registering<'a> = (&'a mut Registry, Option<PoolFacts>);

fn sending_end(
    settings: &NodeSettings,
    prefill: &PrefillSettings,
    (record, kv): (&NodeRecord, &KvAccess),
    (registry, aliases): Registering<'_>,
    inbox: Arc<Inbox>,
) -> Ends {
    let geometry = kv.memory().geometry();
    let direct = prefill.direct_secret.clone().map(|secret| DirectWish {
        secret,
        layers: geometry.layer_count,
        layer_bytes: u32::try_from(geometry.layer_bytes()).unwrap_or(u32::MAX),
    });
    let pairs = PairConfig::new(record.id.clone(), record.compatibility.clone());
    let pairs = pairs.writing_in_place(direct).on_device(kv.device_end(None, false));
    let pairs = pairs.known_as(settings.config.identity.clone());
    let pairs = transports::pairs(pairs.over(settings.config.transports.clone()));
    let metrics = Metrics::of_prefill(registry, pairs.fallbacks(), aliases);
    let transport: Arc<dyn Transport> = Arc::new(pairs);
    let blocks = kv.memory().block_count();
    let queue_max = prefill.push_queue_blocks_max.unwrap_or(blocks / 2).max(1);
    let handoffs = Handoffs {
        transport: transport.clone(),
        kv: kv.clone(),
        queue: Arc::new(PushQueue::new(queue_max as usize)),
        inbox: inbox.clone(),
        metrics: metrics.clone(),
        runtime: RuntimeHandle::current(),
    };
    let pairs = transport.health();
    Ends {
        metrics,
        outgoing: Some(Outgoing { handoffs, pairs }),
        incoming: None,
        sender: Some(Sender {
            watch: tokio::spawn(watch_pairs(transport.health(), inbox)),
            transport,
        }),
        receiver: None,
        transports: Vec::new(),
    }
}

fn receiving_end(
    settings: &NodeSettings,
    decode: &DecodeSettings,
    (record, kv): (&NodeRecord, &KvAccess),
    (registry, aliases): Registering<'_>,
    inbox: Arc<Inbox>,
) -> Ends {
    let reservations = Arc::new(Reservations::new(kv.clone(), inbox));
    let receiver = Receiver::new(record.id.clone(), record.compatibility.clone(), reservations.clone());
    Ends {
        metrics: Metrics::of_decode(registry, aliases),
        outgoing: None,
        incoming: Some(Incoming {
            reservations,
            receiver: receiver.clone(),
            kv_address: record.kv_address.clone(),
            reservation: decode.reservation,
        }),
        sender: None,
        transports: serve_transports(settings, decode, (&receiver, kv)),
        receiver: Some(receiver),
    }
}

/// The ways in which prefill nodes can reach this node's memory, beside gRPC.
fn serve_transports(
    settings: &NodeSettings,
    decode: &DecodeSettings,
    (receiver, kv): (&Arc<Receiver>, &KvAccess),
) -> Vec<Serving> {
    let direct = decode.direct_secret.clone().and_then(|secret| {
        let pool: Arc<dyn MappedPool> = Arc::new(KvPool::of(kv.memory())?);
        let has_checksums = decode.direct_checksums;
        Some(DirectOffer {
            secret,
            pool,
            has_checksums,
        })
    });
    let in_place = decode.direct_secret.clone().and_then(|secret| {
        let pool: Arc<dyn WrittenPool> = Arc::new(KvPool::written(kv)?);
        Some(DevicePlace { secret, pool })
    });
    let layer_bytes = kv.memory().geometry().layer_bytes();
    let (kinds, end) = (&settings.config.transports, ReceivingEnd { layer_bytes, direct });
    match kv.device_end(in_place, decode.direct_checksums) {
        Some(device) => transports::serve_on_device(receiver, kinds, (&end, &device)),
        None => transports::serve(receiver, kinds, &end),
    }
}

/// Runs the loop in a thread of its own; what comes back ends with it, also when it panics.
fn spawn(node_loop: NodeLoop) -> Result<watch::Receiver<()>, NodeError> {
    let (ending, ended) = watch::channel(());
    let thread = std::thread::Builder::new().name("node-loop".to_owned());
    let spawned = thread.spawn(move || {
        // Dropped when the loop returns or panics: that is the signal.
        let _ending: watch::Sender<()> = ending;
        node_loop.run();
    });
    spawned?;
    Ok(ended)
}

/// The loop publishes the pairs' health with its status: it must hear of changes while it sleeps.
async fn watch_pairs(mut health: watch::Receiver<Vec<PairHealth>>, inbox: Arc<Inbox>) {
    while health.changed().await.is_ok() {
        inbox.wake();
    }
}

fn node_limits(settings: &NodeSettings, engine: &dyn Engine) -> Result<NodeLimits, NodeError> {
    let (model, limits, kv) = (engine.model(), engine.limits(), engine.kv());
    let context = model.context_length;
    let max_model_tokens = settings.config.max_model_len.unwrap_or(context);
    if settings.config.speculative_tokens > 0 && !engine.checks_guesses() {
        return Err(NodeError::Guesses);
    }
    if max_model_tokens > context {
        return Err(NodeError::BeyondContext {
            max_model_tokens,
            context,
        });
    }
    Ok(NodeLimits {
        kv_blocks: kv.block_count(),
        block_tokens: kv.geometry().block_tokens,
        max_batch_tokens: limits.max_batch_tokens,
        max_sequences: limits.max_sequences,
        max_model_tokens,
        vocab_size: model.vocab_size,
        prefix_cache: settings.config.prefix_cache,
    })
}

/// What the node says of itself when it joins.
fn record(
    settings: &NodeSettings,
    (engine, limits): (&dyn Engine, &NodeLimits),
    (address, model_name): (&str, &str),
    compatibility: Compatibility,
) -> NodeRecord {
    let (is_co_located, kv_address) = match &settings.role {
        RoleSettings::Prefill(_) => (false, None),
        RoleSettings::Decode(decode) => (decode.is_co_located, decode.kv_advertise.clone()),
    };
    NodeRecord {
        id: NodeId {
            name: NodeName::new(&settings.config.name),
            epoch: NodeEpoch(rand::random()),
        },
        role: settings.node_role(),
        is_co_located,
        address: address.to_owned(),
        kv_address: kv_address.unwrap_or_else(|| address.to_owned()),
        compatibility,
        transports: settings
            .config
            .transports
            .iter()
            .map(|kind| kind.name().to_owned())
            .collect(),
        version: settings.version.to_owned(),
        capacity: NodeCapacity {
            kv_blocks: limits.kv_blocks,
            block_tokens: limits.block_tokens,
            max_sequences: limits.max_sequences,
            max_batch_tokens: limits.max_batch_tokens,
            max_model_tokens: limits.max_model_tokens,
            block_bytes: engine.kv().geometry().block_bytes() as u64,
        },
        model_name: model_name.to_owned(),
        state: NodeState::Ready,
        roles: settings.config.roles.clone(),
    }
}
