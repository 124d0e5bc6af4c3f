//! A prefill node without its port and membership: engine, scheduler, step thread, transport. `run` and the tests use it.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use engine::{OpenedEngine, SampleError, StepRunner};
use kv_transfer::pairs::{PairConfig, PairTransport};
use kv_transfer::shm::DirectWish;
use kv_transfer::transport::{PairPeer, Transport};
use prometheus_client::registry::Registry;
use proto::messages::Peer;
use service_runtime::admin::BlockLedger;
use service_runtime::metrics::membership::MembershipGauges;
use service_runtime::metrics::vllm_node::PoolFacts;
use serving_core::ids::{NodeEpoch, NodeId, NodeName};
use serving_core::kv::prefix_log::PrefixLog;
use serving_core::node::{CompatibilityHash, NodeCapacity, NodeRecord, NodeRole, NodeState, NodeStatus, PairHealth};
use serving_core::scheduler::{NodeLimits, Scheduler, SchedulerConfig};
use thiserror::Error;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tonic::service::RoutesBuilder;

use crate::config::Config;
use crate::handoff::{Handoffs, PushQueue};
use crate::inbox::{Command, INBOX_MAX, Ledger};
use crate::metrics::Metrics;
use crate::service::{self, ServiceFacts};
use crate::step_loop::{StepLoop, StepLoopParts};

/// After the drain's own limit: time for given-up requests to tell their callers.
const GIVE_UP_TIME_LIMIT: Duration = Duration::from_secs(1);

/// The configuration's or the machine's fault; nothing to retry.
#[derive(Debug, Error)]
pub enum NodeError {
    #[error("the model cannot be sampled from: {0}")]
    Sampler(#[from] SampleError),
    #[error("`max_model_len` is {max_model_tokens}, the model has {context} positions; lower it or leave it out")]
    BeyondContext { max_model_tokens: u32, context: u32 },
    #[error("the step thread cannot be started: {0}")]
    Thread(std::io::Error),
}

/// A node without its port and membership: what `run` is made of, and what tests drive.
#[derive(Debug)]
pub struct Node {
    pub record: NodeRecord,
    pub status: watch::Receiver<NodeStatus>,
    /// What the prefix cache lists.
    pub prefixes: watch::Receiver<PrefixLog>,
    pub transport: Arc<dyn Transport>,
    pub gauges: MembershipGauges,
    /// The prefill service, to be served on the node's port.
    pub routes: RoutesBuilder,
    inbox: mpsc::Sender<Command>,
    /// Its other end lives in the step loop's thread.
    alive: mpsc::Receiver<()>,
    pairs_watch: JoinHandle<()>,
}

impl Node {
    /// Starts the step loop.
    ///
    /// # Errors
    /// A vocabulary too large to sample from, a `max_model_len` beyond the model, no thread.
    pub fn start(
        config: &Config,
        (opened, address): (OpenedEngine, String),
        registry: &mut Registry,
    ) -> Result<Self, NodeError> {
        let runner = StepRunner::new(opened.engine)?;
        let record = record(config, (&runner, opened.compatibility), address)?;
        let limits = node_limits(config, &record.capacity, runner.engine().model().vocab_size);
        let pairs = PairConfig::new(record.id.clone(), opened.compatibility);
        let geometry = *runner.engine().kv().geometry();
        let direct = config.shm_direct_secret.clone().map(|secret| DirectWish {
            secret,
            layers: geometry.layer_count,
            layer_bytes: u32::try_from(geometry.layer_bytes()).unwrap_or(u32::MAX),
        });
        let pairs = PairTransport::new(pairs.writing_in_place(direct).over(config.transports.clone()));
        let aliases = PoolFacts::if_wanted(config.metrics, &config.served_model_name, &limits);
        let metrics = Metrics::new(registry, pairs.fallbacks(), aliases);
        let gauges = metrics.membership();
        let transport: Arc<dyn Transport> = Arc::new(pairs);
        let (inbox, commands) = mpsc::channel(INBOX_MAX);
        let last_chunk_tokens = NonZeroU32::new(config.last_chunk_tokens);
        let scheduler = Scheduler::new(SchedulerConfig::prefill(limits, config.hold(), last_chunk_tokens));
        let (status_in, status) = watch::channel(scheduler.status(NodeState::Ready));
        let (prefixes_in, prefixes) = watch::channel(PrefixLog::default());
        let queue_max = config.push_queue_blocks_max.unwrap_or(limits.kv_blocks / 2).max(1);
        let handoffs = Handoffs {
            transport: transport.clone(),
            kv: runner.engine().kv().clone(),
            queue: Arc::new(PushQueue::new(queue_max as usize)),
            step_loop: inbox.downgrade(),
            metrics: metrics.clone(),
            runtime: Handle::current(),
        };
        let step_loop = StepLoop::new(StepLoopParts {
            runner,
            scheduler,
            inbox: commands,
            handoffs,
            status: status_in,
            prefixes: prefixes_in,
            pairs: transport.health(),
            metrics,
        });
        let alive = spawn(step_loop)?;
        let facts = ServiceFacts {
            epoch: record.id.epoch,
            block_tokens: limits.block_tokens,
        };
        let mut routes = RoutesBuilder::default();
        service::add_to_routes(&mut routes, facts, inbox.clone());
        Ok(Self {
            pairs_watch: tokio::spawn(watch_pairs(transport.health(), inbox.clone())),
            record,
            status,
            prefixes,
            transport,
            gauges,
            routes,
            inbox,
            alive,
        })
    }

    pub fn ledger(&self) -> Arc<dyn BlockLedger> {
        Arc::new(Ledger(self.inbox.downgrade()))
    }

    /// Ends when the step loop has died.
    pub async fn step_thread_ended(&mut self) {
        let _ = self.alive.recv().await;
    }

    /// The decode nodes to keep pairs with.
    pub fn keep_pairs(&self, peers: &[Peer]) {
        let kept = peers.iter().map(|peer| PairPeer {
            node: peer.node.clone(),
            address: peer.address.clone(),
            compatibility: peer.compatibility,
        });
        self.transport.keep_pairs(kept.collect());
    }

    /// Refuses new requests and lets those here end, at most for `limit`; then gives them up.
    pub async fn drain(&mut self, limit: Duration) {
        let _ = self.inbox.send(Command::Drain).await;
        if self.at_rest(limit).await {
            return;
        }
        tracing::warn!("the drain's time is over: giving up what is left");
        let _ = self.inbox.send(Command::GiveUp).await;
        self.at_rest(GIVE_UP_TIME_LIMIT).await;
    }

    /// Waits until no request is here and no transfer touches a block.
    async fn at_rest(&mut self, limit: Duration) -> bool {
        let at_rest = self.status.wait_for(|status| {
            let blocks = &status.kv_blocks;
            status.state == NodeState::Draining && blocks.active + blocks.in_transfer + blocks.quarantined == 0
        });
        matches!(tokio::time::timeout(limit, at_rest).await, Ok(Ok(_)))
    }

    /// Ends the step loop and the pairs.
    pub async fn stop(mut self) {
        let _ = self.inbox.send(Command::Stop).await;
        self.pairs_watch.abort();
        self.transport.keep_pairs(Vec::new());
        // Ends with the thread.
        let _ = self.alive.recv().await;
    }
}

/// Runs the loop in a thread of its own; what comes back ends with it, also when it panics.
fn spawn(step_loop: StepLoop) -> Result<mpsc::Receiver<()>, NodeError> {
    let (life, alive) = mpsc::channel(1);
    let thread = std::thread::Builder::new().name("step-loop".to_owned());
    let spawned = thread.spawn(move || {
        let _life = life;
        step_loop.run();
    });
    spawned.map_err(NodeError::Thread)?;
    Ok(alive)
}

/// The loop publishes the pairs' health with its status: it must hear of changes while it sleeps.
async fn watch_pairs(mut health: watch::Receiver<Vec<PairHealth>>, inbox: mpsc::Sender<Command>) {
    while health.changed().await.is_ok() {
        if inbox.send(Command::Wake).await.is_err() {
            return;
        }
    }
}

fn record(
    config: &Config,
    (runner, compatibility): (&StepRunner, CompatibilityHash),
    address: String,
) -> Result<NodeRecord, NodeError> {
    let (model, limits, kv) = (runner.engine().model(), runner.engine().limits(), runner.engine().kv());
    let context = model.context_length;
    let max_model_tokens = config.max_model_len.unwrap_or(context);
    if max_model_tokens > context {
        return Err(NodeError::BeyondContext {
            max_model_tokens,
            context,
        });
    }
    Ok(NodeRecord {
        id: NodeId {
            name: NodeName::new(&config.name),
            epoch: NodeEpoch(rand::random()),
        },
        role: NodeRole::Prefill,
        is_co_located: false,
        kv_address: address.clone(),
        address,
        compatibility,
        transports: config.transports.iter().map(|kind| kind.name().to_owned()).collect(),
        version: crate::PROGRAM.version.to_owned(),
        capacity: NodeCapacity {
            kv_blocks: kv.block_count(),
            block_tokens: kv.geometry().block_tokens,
            max_sequences: limits.max_sequences,
            max_batch_tokens: limits.max_batch_tokens,
            max_model_tokens,
            block_bytes: kv.geometry().block_bytes() as u64,
        },
        model_name: config.served_model_name.clone(),
        state: NodeState::Ready,
        roles: config.roles.clone(),
    })
}

fn node_limits(config: &Config, capacity: &NodeCapacity, vocab_size: u32) -> NodeLimits {
    NodeLimits {
        kv_blocks: capacity.kv_blocks,
        block_tokens: capacity.block_tokens,
        max_batch_tokens: capacity.max_batch_tokens,
        max_sequences: capacity.max_sequences,
        max_model_tokens: capacity.max_model_tokens,
        vocab_size,
        prefix_cache: config.prefix_cache,
    }
}
