//! The decode node: reserves KV blocks, verifies and commits handoffs, computes prompts itself when told to, and
//! generates tokens in one continuously changing batch.
//! Never sees text, never routes, never takes a KV byte it did not reserve a place for; the scheduler decides, this acts.
//! Read first: `run` (the life of the node), then `step_loop::StepLoop::run`.
//! Modules in the order of a request: service, inbox, step_loop, handoff, delivery.
//! Tests: beside the code; `tests/` drives a node over real gRPC with the stand-in engine.

pub mod config;
mod delivery;
mod handoff;
mod inbox;
mod kv_pool;
mod metrics;
mod node;
mod service;
mod step_loop;

use engine::KeptWeights;
use service_runtime::announce::{Announcement, Listening};
use service_runtime::config::Program;
use service_runtime::health::{Health, ReadyState};
use service_runtime::http_guard::HttpGuard;
use service_runtime::membership::{self, BadRecord, CoordinatorsAt, JoinConfig, MixedCoordinators};
use service_runtime::serve::{self, Calls, KeptPort, Ops, ServeError};
use service_runtime::shutdown::Shutdown;
use service_runtime::welcomes::{Leaving, LifeEnd, Welcomes};
use serving_core::ids::NodeEpoch;
use serving_core::scheduler::permits::permitted_requests_max;
use thiserror::Error;

pub use config::Config;
pub use kv_pool::KvPool;
pub use node::{DecodeNode, Drained, NodeError};
pub use service::EVENTS_QUEUED_MAX;

const ROLE: &str = "decode";

pub const PROGRAM: Program = Program {
    name: "baton-decode-node",
    about: "A decode node of a baton cluster: receives KV, generates tokens",
    version: env!("CARGO_PKG_VERSION"),
};

/// Why a node ended with a failure. All but `StepThread` are the configuration's or the machine's fault.
#[derive(Debug, Error)]
pub enum RunError {
    #[error(transparent)]
    Serve(#[from] ServeError),
    #[error(transparent)]
    Coordinators(#[from] MixedCoordinators),
    #[error("this node cannot be registered: {0}; fix its name, address or served_model_name")]
    Registration(#[from] BadRecord),
    #[error(
        "another process that was started later is called {name} (epoch {by_epoch}); this one has left. Names are unique: give one of them another"
    )]
    Fenced { name: String, by_epoch: NodeEpoch },
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error("the step thread ended by itself; its last words are on stderr; this is a bug in baton")]
    StepThread,
    #[error("the server task broke: {0}")]
    ServerTask(tokio::task::JoinError),
}

/// Runs a decode node until `shutdown`, then drains.
///
/// # Errors
/// [`RunError`].
pub async fn run(config: Config, shutdown: Shutdown) -> Result<(), RunError> {
    live(config, Default::default(), shutdown).await.map(drop)
}

/// One life of a process that may have another in another role (`config.roles`), with the same weights and port: engine,
/// membership, work, drain.
///
/// # Errors
/// [`RunError`].
pub async fn live(
    config: Config,
    (weights, port): (KeptWeights, KeptPort),
    shutdown: Shutdown,
) -> Result<LifeEnd, RunError> {
    let (listener, bound) = port.bind(&config.listen).await?;
    let address = serve::reachable_address(bound, config.advertise.as_deref())?;
    let mut node = DecodeNode::open(&config, &address, weights).await?;
    let health = Health::new("no coordinator has welcomed this node yet");
    let guard = HttpGuard::new(&config.guard, &[&config.listen, &address]);
    let ops = ops(&config, (&node, &health), guard);
    let stop_serving = Shutdown::new();
    let record = node.record();
    let calls = Calls::new(node.routes(), permitted_requests_max(record.role, &record.capacity));
    let mut server = tokio::spawn(serve::serve_node(listener, calls, ops, stop_serving.clone()));
    Announcement::Listening(Listening::node(ROLE, &config.name, &bound.to_string())).print();
    let join = JoinConfig {
        coordinators: CoordinatorsAt::of(&config.coordinators)?,
        record: node.record(),
        prefixes: node.prefixes(),
        gauges: node.membership_gauges(),
    };
    let mut members = membership::join(join, node.status())?;
    let mut welcomes = Welcomes::new(ROLE, &node.record(), health.clone());
    let mut leaving = None;
    loop {
        tokio::select! {
            () = shutdown.requested() => break,
            () = node.step_thread_ended() => return Err(RunError::StepThread),
            served = &mut server => {
                served.map_err(RunError::ServerTask)??;
                break;
            }
            event = members.next_event() => {
                let Some(event) = event else { break };
                leaving = welcomes.take(event);
                if leaving.is_some() {
                    break;
                }
            }
        }
    }
    health.set(ReadyState::Draining);
    let goodbye = async {
        let drained = node.drain(config.drain()).await;
        // The last reports first: a coordinator that hears the goodbye closes its streams to this node.
        stop_serving.request();
        if !server.is_finished() {
            server.await.map_err(RunError::ServerTask)??;
        }
        Ok::<_, RunError>(drained)
    };
    let (leaving, drained) = welcomes.hear_during(&mut members, (leaving, goodbye)).await;
    let drained = drained?;
    if !matches!(leaving, Some(Leaving::ForRole(_))) {
        port.release();
    }
    members.leave().await;
    match leaving {
        Some(Leaving::Fenced { by_epoch }) => Err(RunError::Fenced {
            name: config.name,
            by_epoch,
        }),
        // A second engine beside one that still computes: rather a new process.
        Some(Leaving::ForRole(_)) if drained == Drained::StillComputing => Err(RunError::StepThread),
        leaving => Ok(leaving.into()),
    }
}

fn ops(config: &Config, (node, health): (&DecodeNode, &Health), guard: HttpGuard) -> Ops {
    Ops {
        role: ROLE,
        name: config.name.clone(),
        version: PROGRAM.version,
        health: health.clone(),
        metrics: node.registry(),
        ledger: Some(node.ledger()),
        guard,
    }
}
