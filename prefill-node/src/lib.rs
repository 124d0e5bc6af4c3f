//! Owns a prefill node: takes prompts against permits, computes them in chunks, draws the first token, pushes the KV.
//! Never sees text, never decides where a request goes, never waits for a push or a client while it could compute.
//! Read first: `run`, then `step_loop` (the node's one loop), `handoff` (its pushes), `service` (its edge).
//! Modules stand in the order of a request. Tests: `tests/`, over real gRPC with a scripted decode side.

pub mod config;
mod delivery;
mod handoff;
mod inbox;
mod kv_source;
mod metrics;
mod node;
mod service;
mod step_loop;

use std::sync::Arc;

use engine::{KeptWeights, OpenError};
use prometheus_client::registry::Registry;
use service_runtime::announce::{Announcement, Listening};
use service_runtime::config::Program;
use service_runtime::health::{Health, ReadyState};
use service_runtime::http_guard::HttpGuard;
use service_runtime::membership::{self, BadRecord, CoordinatorsAt, JoinConfig, Membership, MixedCoordinators};
use service_runtime::serve::{self, Calls, KeptPort, Ops, ServeError};
use service_runtime::shutdown::Shutdown;
use service_runtime::welcomes::{Leaving, LifeEnd, Welcomes};
use serving_core::ids::NodeEpoch;
use serving_core::scheduler::permits::permitted_requests_max;
use thiserror::Error;

pub use config::Config;
pub use node::{Node, NodeError};
pub use service::EVENTS_QUEUED_MAX;

const ROLE: &str = "prefill";

pub const PROGRAM: Program = Program {
    name: "baton-prefill-node",
    about: "Prefill node of baton: computes prompts and hands their KV to decode nodes",
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
    Open(#[from] OpenError),
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error("the step thread ended by itself; its last words are on stderr; this is a bug in baton")]
    StepThread,
    #[error("a task of the node broke: {0}; this is a bug in baton")]
    Task(#[from] tokio::task::JoinError),
}

/// Runs a prefill node until `shutdown`, then drains.
///
/// # Errors
/// The configuration, the model file or the port cannot be used, or the step loop has died.
pub async fn run(config: Config, shutdown: Shutdown) -> Result<(), RunError> {
    live(config, Default::default(), shutdown).await.map(drop)
}

/// One life of a process that may have another in another role (`config.roles`), with the same weights and port.
///
/// # Errors
/// As [`run`].
pub async fn live(
    config: Config,
    (weights, port): (KeptWeights, KeptPort),
    shutdown: Shutdown,
) -> Result<LifeEnd, RunError> {
    let (listener, bound) = port.bind(&config.listen).await?;
    let opening = config.clone();
    let opened = tokio::task::spawn_blocking(move || opening.open_engine(weights)).await??;
    let address = serve::reachable_address(bound, config.advertise.as_deref())?;
    let guard = HttpGuard::new(&config.guard, &[&config.listen, &address]);
    let mut registry = Registry::default();
    let mut node = Node::start(&config, (opened, address), &mut registry)?;
    let health = Health::new("no coordinator has welcomed this node yet");
    let ops = Ops {
        role: ROLE,
        name: config.name.clone(),
        version: PROGRAM.version,
        health: health.clone(),
        metrics: Arc::new(registry),
        ledger: Some(node.ledger()),
        guard,
    };
    let stop_serving = Shutdown::new();
    let permits_max = permitted_requests_max(node.record.role, &node.record.capacity);
    let calls = Calls::new(std::mem::take(&mut node.routes).routes(), permits_max);
    let mut server = tokio::spawn(serve::serve_node(listener, calls, ops, stop_serving.clone()));
    Announcement::Listening(Listening::node(ROLE, &config.name, &bound.to_string())).print();
    let join = JoinConfig {
        coordinators: CoordinatorsAt::of(&config.coordinators)?,
        record: node.record.clone(),
        prefixes: node.prefixes.clone(),
        gauges: node.gauges.clone(),
    };
    let mut membership = membership::join(join, node.status.clone())?;
    let mut welcomes = Welcomes::new(ROLE, &node.record, health.clone());
    let leaving = tokio::select! {
        () = shutdown.requested() => Ok(None),
        ended = attend(&mut node, &mut membership, &mut welcomes) => ended,
        served = &mut server => served.map_err(RunError::from).and_then(|served| Ok(served.map(|()| None)?)),
    };
    health.set(ReadyState::Draining);
    let goodbye = async {
        if leaving.is_ok() {
            node.drain(config.drain()).await;
        }
        // The last reports first: a coordinator that hears the goodbye closes its streams to this node.
        stop_serving.request();
        if !server.is_finished() {
            let _ = server.await;
        }
    };
    let why = leaving.as_ref().copied().unwrap_or_default();
    let (why, ()) = welcomes.hear_during(&mut membership, (why, goodbye)).await;
    if !matches!(why, Some(Leaving::ForRole(_))) {
        port.release();
    }
    membership.leave().await;
    node.stop().await;
    match leaving.map(|_| why)? {
        Some(Leaving::Fenced { by_epoch }) => Err(RunError::Fenced {
            name: config.name,
            by_epoch,
        }),
        leaving => Ok(leaving.into()),
    }
}

/// Follows membership until the node is to leave.
async fn attend(
    node: &mut Node,
    membership: &mut Membership,
    welcomes: &mut Welcomes,
) -> Result<Option<Leaving>, RunError> {
    let mut peers = membership.peers();
    loop {
        tokio::select! {
            event = membership.next_event() => {
                let Some(event) = event else { return Ok(None) };
                if let Some(leaving) = welcomes.take(event) {
                    return Ok(Some(leaving));
                }
            }
            changed = peers.changed() => {
                if changed.is_ok() {
                    node.keep_pairs(&peers.borrow_and_update());
                }
            }
            () = node.step_thread_ended() => return Err(RunError::StepThread),
        }
    }
}
