//! The life of a node's process: port, engine, membership, work, drain, goodbye.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use engine::{KeptWeights, OpenError, OpenedEngine};
use identity::{Identity, IdentityError, PeerRole};
use prometheus_client::registry::Registry;
use service_runtime::announce::{Announcement, Listening};
use service_runtime::health::{Health, ReadyState};
use service_runtime::http_guard::HttpGuard;
use service_runtime::joined::{JoinedCoordinators, Leaving, LifeEnd};
use service_runtime::membership::{
    self, AddressError, BadRecord, CoordinatorsAt, JoinConfig, Membership, MixedCoordinators,
};
use service_runtime::serve::{self, Calls, KeptPort, Ops, ServeError};
use service_runtime::shutdown::Shutdown;
use service_runtime::{certificates, freed_memory};
use serving_core::ids::NodeEpoch;
use serving_core::node::AssignedRole;
use serving_core::scheduler::permits::permitted_requests_max;
use thiserror::Error;
use tokio::net::TcpListener;
use tonic::service::RoutesBuilder;

use crate::config::NodeConfig;
use crate::handle::Handle;
use crate::node::{Drained, Node, NodeError};
use crate::settings::{NodeSettings, RoleSettings};

/// Why a node ended with a failure. All but `Loop`, `Membership` and `Task` are the configuration's or the machine's fault.
#[derive(Debug, Error)]
pub enum RunError {
    #[error(transparent)]
    Serve(#[from] ServeError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Coordinators(#[from] MixedCoordinators),
    #[error("coordinators: {0}")]
    Etcd(#[from] AddressError),
    #[error("this node cannot be registered: {0}; fix its name, address or served_model_name")]
    Registration(#[from] BadRecord),
    #[error(
        "another process that was started later is called {name} (epoch {by_epoch}); this one has left. Names are unique: give one of them another"
    )]
    Fenced { name: String, by_epoch: NodeEpoch },
    #[error("cannot open the engine: {0}")]
    Open(#[from] OpenError),
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error(
        "the node's loop ended by itself; its last words are above: if the device is lost or hangs, start the node again, else this is a bug in baton"
    )]
    Loop,
    #[error("the node's membership ended by itself; its last words are above: this is a bug in baton")]
    Membership,
    #[error(
        "a step of the model takes longer than the drain, so the process cannot take another role; it is to be started again"
    )]
    StillComputing,
    #[error("a task of the node broke: {0}; this is a bug in baton")]
    Task(#[from] tokio::task::JoinError),
}

/// One life of a process that may have another in another role, with the same weights and port.
pub struct Life<O, S> {
    pub settings: NodeSettings,
    /// Opens the engine. Takes seconds for a real model: it runs off the async threads.
    pub open: O,
    /// Adds the role's gRPC service to the port.
    pub service: S,
    pub kept: (KeptWeights, KeptPort),
}

impl<O, S> std::fmt::Debug for Life<O, S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Life")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// Runs a node until `shutdown`, or until it is to leave or to have another role; then drains. A node that is to stop while its engine
/// opens has nothing to drain.
///
/// # Errors
/// [`RunError`].
pub async fn live<O, S>(life: Life<O, S>, shutdown: Shutdown) -> Result<LifeEnd, RunError>
where
    O: FnOnce(KeptWeights) -> Result<OpenedEngine, OpenError> + Send + 'static,
    S: FnOnce(&mut RoutesBuilder, Handle),
{
    let Life {
        mut settings,
        open,
        service,
        kept: (weights, port),
    } = life;
    let role = settings.node_role().name();
    let identity = own_identity(&mut settings)?;
    let ((listener, bound), coordinators) = port_and_coordinators(&port, &settings.config).await?;
    let Some(opened) = opened(open, weights, &shutdown).await? else {
        return Ok(LifeEnd::Left);
    };
    let address = serve::reachable_address(bound, settings.config.advertise.as_deref())?;
    let mut registry = Registry::default();
    let mut node = Node::start(&settings, (opened, &address), &mut registry)?;
    let health = Health::new("no coordinator has welcomed this node yet");
    let ops = Ops {
        role,
        name: settings.config.name.clone(),
        version: settings.version,
        health: health.clone(),
        metrics: Arc::new(registry),
        ledger: Some(node.ledger()),
        guard: HttpGuard::new(&settings.config.guard, &[&settings.config.listen, &address]),
    };
    let calls = calls(service, &node, &identity);
    let stop_serving = Shutdown::new();
    certificates::follow(&identity, &stop_serving);
    let mut server = tokio::spawn(serve::serve_node(listener, calls, ops, stop_serving.clone()));
    Announcement::Listening(Listening::node(role, &settings.config.name, &bound.to_string())).print();
    node.read_vocabulary_soon();
    let join = JoinConfig {
        coordinators,
        record: node.record.clone(),
        prefixes: node.prefixes.clone(),
        gauges: node.gauges.clone(),
        identity,
    };
    let mut membership = membership::join(join, node.status.clone())?;
    let mut joined = JoinedCoordinators::new(role, &node.record, health.clone());
    let leaving = tokio::select! {
        () = shutdown.requested() => Ok(None),
        ended = attend(&mut node, &mut membership, &mut joined) => ended,
        served = &mut server => served.map_err(RunError::from).and_then(|served| Ok(served.map(|()| None)?)),
    };
    health.set(ReadyState::Draining);
    let goodbye = async {
        let drained = wind_down(&mut node, &leaving, settings.config.drain()).await;
        // The last reports first: a coordinator that hears the goodbye closes its streams to this node.
        stop_serving.request();
        if !server.is_finished() {
            let _ = server.await;
        }
        drained
    };
    let why = leaving.as_ref().copied().unwrap_or_default();
    let (why, drained) = joined.hear_during(&mut membership, (why, goodbye)).await;
    if !matches!(why, Some(Leaving::ForRole(_))) {
        port.release();
    }
    membership.leave().await;
    end(leaving.map(|_| why)?, drained, settings.config.name)
}

/// The port, if this process may have it open, and where the coordinators are, if it may ask there.
async fn port_and_coordinators(
    port: &KeptPort,
    config: &NodeConfig,
) -> Result<((TcpListener, SocketAddr), CoordinatorsAt), RunError> {
    let (listener, bound) = port.bind(&config.listen).await?;
    config.tls.check_address(bound).map_err(ServeError::from)?;
    let coordinators = CoordinatorsAt::of(&config.coordinators)?.used_by(&config.tls)?;
    Ok(((listener, bound), coordinators))
}

/// Reads the certificate. The process can take the roles that are in it.
fn own_identity(settings: &mut NodeSettings) -> Result<Identity, IdentityError> {
    let config = &mut settings.config;
    let role = match settings.role {
        RoleSettings::Prefill(_) => PeerRole::Prefill,
        RoleSettings::Decode(_) => PeerRole::Decode,
    };
    config.identity = Identity::open(&config.tls, role, &config.name)?;
    if config.identity.is_on() {
        let names = config.identity.names();
        let is_named = |role: &AssignedRole| names.iter().any(|known| known.role.name() == role.node_role().name());
        config.roles.retain(is_named);
    }
    Ok(config.identity.clone())
}

/// Opens the engine. `None`: the process is to stop before it is there. What still reads the model then ends with the process.
async fn opened<O>(open: O, weights: KeptWeights, shutdown: &Shutdown) -> Result<Option<OpenedEngine>, RunError>
where
    O: FnOnce(KeptWeights) -> Result<OpenedEngine, OpenError> + Send + 'static,
{
    let opening = tokio::task::spawn_blocking(move || and_give_back(|| open(weights)));
    tokio::select! {
        opened = opening => Ok(Some(opened??)),
        () = shutdown.requested() => {
            tracing::info!("the node is to stop before its engine is open");
            Ok(None)
        }
    }
}

/// What the node's port answers: the role's service, and those that every node has.
fn calls(service: impl FnOnce(&mut RoutesBuilder, Handle), node: &Node, identity: &Identity) -> Calls {
    let mut routes = RoutesBuilder::default();
    service(&mut routes, node.handle());
    node.add_to_routes(&mut routes);
    let permits_max = permitted_requests_max(node.record.role, &node.record.capacity);
    Calls::new(routes.routes(), permits_max).known_as(identity.clone())
}

/// Gives back what reading the model took on the way: its tokenizer alone is tens of megabytes.
fn and_give_back<T>(open: impl FnOnce() -> T) -> T {
    let opened = open();
    freed_memory::give_back();
    opened
}

/// Ends the loop. After a failure nobody waits for what runs.
async fn wind_down(node: &mut Node, leaving: &Result<Option<Leaving>, RunError>, drain: Duration) -> Drained {
    let grace = leaving.as_ref().map_or(Duration::ZERO, |_| drain);
    let drained = node.drain(grace).await;
    if !matches!(leaving, Ok(Some(Leaving::ForRole(_)))) {
        return drained;
    }
    // The next role needs the memory of this one's engine, so it waits for a step that takes longer than the drain.
    node.loop_ended().await;
    Drained::AtRest
}

/// How the process goes on after a life of `name` that ended well.
fn end(why: Option<Leaving>, drained: Drained, name: String) -> Result<LifeEnd, RunError> {
    match why {
        Some(Leaving::Fenced { by_epoch }) => Err(RunError::Fenced { name, by_epoch }),
        // A second engine beside one that still computes: rather a new process.
        Some(Leaving::ForRole(_)) if drained == Drained::StillComputing => Err(RunError::StillComputing),
        why => Ok(why.into()),
    }
}

/// Follows membership until the node is to leave.
async fn attend(
    node: &mut Node,
    membership: &mut Membership,
    joined: &mut JoinedCoordinators,
) -> Result<Option<Leaving>, RunError> {
    let mut peers = membership.peers();
    loop {
        tokio::select! {
            event = membership.next_event() => {
                // Never before the node leaves, unless its task has panicked: a supervisor must start the node again.
                let Some(event) = event else { return Err(RunError::Membership) };
                if let Some(leaving) = joined.take(event) {
                    return Ok(Some(leaving));
                }
            }
            changed = peers.changed() => {
                if changed.is_ok() {
                    node.keep_pairs(&peers.borrow_and_update());
                }
            }
            () = node.loop_ended() => return Err(RunError::Loop),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use engine::EngineKind;

    use super::*;
    use crate::settings::PrefillSettings;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        config: NodeConfig,
    }

    #[tokio::test]
    async fn a_node_that_is_to_stop_does_not_wait_for_its_model() {
        let flags = ["node", "--name=prefill-0", "--listen=127.0.0.1:0", "--engine=stand-in"];
        let (open_gate, gate) = std::sync::mpsc::sync_channel::<()>(1);
        let life = Life {
            settings: NodeSettings {
                config: Flags::parse_from(flags).config,
                version: "test",
                role: RoleSettings::Prefill(PrefillSettings {
                    hold: Duration::from_secs(1),
                    last_chunk_tokens: None,
                    direct_secret: None,
                    push_queue_blocks_max: None,
                }),
            },
            open: move |_: KeptWeights| -> Result<OpenedEngine, OpenError> {
                // A model that takes long to read.
                let _ = gate.recv();
                Err(OpenError::NoSuchDevice {
                    engine: EngineKind::StandIn,
                    device: "none".to_owned(),
                })
            },
            service: |_: &mut RoutesBuilder, _: Handle| {},
            kept: Default::default(),
        };
        let shutdown = Shutdown::new();
        let living = live(life, shutdown.clone());
        shutdown.request();
        let end = tokio::time::timeout(Duration::from_secs(20), living).await;
        drop(open_gate);
        assert_eq!(end.expect("it ends").expect("nothing failed"), LifeEnd::Left);
    }
}
