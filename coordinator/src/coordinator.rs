//! The coordinator without its HTTP edge: the control loop, the listener of the membership endpoint, and how both end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use identity::{Identity, PeerRole};
use proto::messages::CONTROL_MESSAGE_BYTES_MAX;
use proto::v1::membership_service_server::MembershipServiceServer;
use service_runtime::certificates;
use service_runtime::health::{Health, ReadyState};
use service_runtime::http_guard::HttpGuard;
use service_runtime::serve::{self, Calls, Ops, ServeError};
use service_runtime::shutdown::Shutdown;
use serving_core::ids::{NodeEpoch, NodeId, NodeName};
use tokio::task::JoinHandle;
use tonic::service::Routes;

use crate::config::Config;
use crate::control_handle::ControlHandle;
use crate::control_loop::{ControlLoop, LoopParts};
use crate::flight_recorder::{FlightRecorder, RecordStart, RecordedCluster};
use crate::membership::{MembershipEndpoint, Terms};
use crate::metrics::Metrics;
use crate::node_clocks::NodeClocks;
use crate::registry::MembershipKind;
use crate::request_handle::Readiness;
use crate::slo::SloRules;

/// How long each task of a coordinator that stops is waited for.
const TASK_END_MAX: Duration = Duration::from_secs(3);

/// The control loop and its membership listener, without the HTTP edge. `run` starts it, and tests start it alone.
#[derive(Debug)]
pub struct Coordinator {
    pub handle: ControlHandle,
    pub metrics: Arc<Metrics>,
    pub clocks: NodeClocks,
    pub slo_rules: SloRules,
    pub health: Health,
    pub control_address: SocketAddr,
    /// The epoch of this life of the coordinator.
    pub id: NodeId,
    /// What its certificate says.
    pub identity: Identity,
    /// etcd is asked when clients can be answered, with this process's certificate where it has no other.
    pub(crate) membership: MembershipKind,
    stop: Shutdown,
    control: JoinHandle<CoordinatorEnd>,
    listener: JoinHandle<CoordinatorEnd>,
    tasks: Vec<JoinHandle<()>>,
}

/// How a coordinator has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CoordinatorEnd {
    /// It was told to.
    Stopped,
    LoopPanicked,
    /// Nodes can no longer join.
    ListenerFailed {
        address: SocketAddr,
    },
}

impl Coordinator {
    /// # Errors
    /// The SLO profiles or rules cannot be used, the membership address cannot be bound, etcd may not be asked in plain text, or the
    /// flight record cannot be written.
    pub async fn start(config: &Config, drain: Shutdown) -> anyhow::Result<Self> {
        let slo_rules = config.slo_rules()?;
        let identity = Identity::open(&config.tls, PeerRole::Coordinator, &config.name)?;
        let (listener, control_address) = serve::bind(&config.control_listen).await?;
        config.tls.check_address(control_address).context("--control-listen")?;
        let membership = config.membership.used_by(&config.tls).context("--membership")?;
        let served_model = config.served_model_name.first().map_or("unknown", String::as_str);
        let metrics = Arc::new(Metrics::new(served_model, config.metrics, slo_rules.config()));
        let clocks = NodeClocks::default();
        let id = NodeId {
            name: NodeName::new(&config.name),
            epoch: NodeEpoch(rand::random()),
        };
        let terms = Terms {
            coordinator: id.clone(),
            lease: config.lease(),
            status_interval: config.status_interval(),
        };
        let (recorder, record) = start_recorder(config)?.unzip();
        let (control, handle) = ControlLoop::new(LoopParts {
            cluster: RecordedCluster::new(config.cluster(), recorder),
            when_unsplit: config.when_unsplit(),
            terms,
            metrics: metrics.clone(),
            clocks: clocks.clone(),
            identity: identity.clone(),
        });
        let stop = Shutdown::new();
        certificates::follow(&identity, &stop);
        let health = Health::new("no node has joined yet");
        let ops = Ops {
            role: "coordinator",
            name: config.name.clone(),
            version: env!("CARGO_PKG_VERSION"),
            health: health.clone(),
            metrics: metrics.registry(),
            ledger: None,
            guard: HttpGuard::new(&config.guard, &control_names(config)),
        };
        let endpoint = MembershipServiceServer::new(MembershipEndpoint::new(handle.membership(), clocks.clone()))
            .max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX);
        let control = tokio::spawn(run_loop(control.run(drain.clone(), stop.clone()), drain.clone()));
        let calls = Calls::from(Routes::new(endpoint)).known_as(identity.clone());
        let serving = serve::serve_node(listener, calls, ops, stop.clone());
        let listener = tokio::spawn(run_listener(serving, control_address, (stop.clone(), drain)));
        let mut tasks = vec![tokio::spawn(follow_readiness(handle.clone(), health.clone()))];
        tasks.extend(record);
        Ok(Self {
            handle,
            metrics,
            clocks,
            slo_rules,
            health,
            control_address,
            id,
            identity,
            membership,
            stop,
            control,
            listener,
            tasks,
        })
    }

    /// Ends the loop, every leg and every membership stream, and says how the coordinator has ended.
    pub async fn stop(self) -> CoordinatorEnd {
        self.stop.request();
        let ends = [
            tokio::time::timeout(TASK_END_MAX, self.control).await,
            tokio::time::timeout(TASK_END_MAX, self.listener).await,
        ];
        for task in self.tasks {
            // The readiness task ends when the loop's sender is dropped. Each of these tasks ends within the streams' own
            // limit.
            let _ = tokio::time::timeout(TASK_END_MAX, task).await;
        }
        let mut known = ends.into_iter().flatten().flatten();
        known
            .find(|end| *end != CoordinatorEnd::Stopped)
            .unwrap_or(CoordinatorEnd::Stopped)
    }
}

/// Runs the loop until it ends. After a panic the process can serve nobody, so it drains: a supervisor must start it again.
async fn run_loop(control: impl Future<Output = ()> + Send + 'static, drain: Shutdown) -> CoordinatorEnd {
    match tokio::spawn(control).await {
        Err(error) if error.is_panic() => {
            tracing::error!(%error, "the control loop has panicked: its requests have failed, and the process ends");
            drain.request();
            CoordinatorEnd::LoopPanicked
        }
        Ok(()) | Err(_) => CoordinatorEnd::Stopped,
    }
}

/// Runs the membership listener until `stop`. When it ends before, no node can join, and no node that has lost its stream comes back. So
/// the process drains: a supervisor must start it again.
async fn run_listener(
    serving: impl Future<Output = Result<(), ServeError>> + Send + 'static,
    address: SocketAddr,
    (stop, drain): (Shutdown, Shutdown),
) -> CoordinatorEnd {
    let ended = tokio::spawn(serving).await;
    if stop.is_requested() {
        return CoordinatorEnd::Stopped;
    }
    let why = match ended {
        Ok(Ok(())) => "it ended by itself".to_owned(),
        Ok(Err(error)) => error.to_string(),
        Err(error) => error.to_string(),
    };
    tracing::error!(%address, why, "the membership listener has failed: nodes can no longer join, and the process ends");
    drain.request();
    CoordinatorEnd::ListenerFailed { address }
}

/// The flight recorder, if one is wanted, and what ends when its file is complete.
fn start_recorder(config: &Config) -> anyhow::Result<Option<(FlightRecorder, JoinHandle<()>)>> {
    let Some(target) = &config.flight_record else {
        return Ok(None);
    };
    let start = RecordStart {
        target,
        coordinator: &config.name,
        cluster: config.cluster(),
    };
    FlightRecorder::start(start)
        .map(Some)
        .with_context(|| format!("--flight-record {target}"))
}

/// The name under which nodes and operators call the membership endpoint.
fn control_names(config: &Config) -> Vec<&str> {
    let advertised = config.control_advertise.as_deref();
    advertised.into_iter().chain([config.control_listen.as_str()]).collect()
}

async fn follow_readiness(handle: ControlHandle, health: Health) {
    let mut readiness = handle.watch_readiness();
    drop(handle);
    loop {
        let next = match readiness.borrow_and_update().clone() {
            Readiness::Ready(_) => ReadyState::Ready,
            Readiness::NotReady(why) => ReadyState::NotReady(why),
            Readiness::Draining => ReadyState::Draining,
        };
        health.set(next);
        if readiness.changed().await.is_err() {
            // The loop has ended, by a panic too, and its last word counts no more.
            return health.set(ReadyState::Draining);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_loop_that_panics_drains_the_process_and_one_that_ends_does_not() {
        async fn broken() {
            panic!("a bug of the brain");
        }
        let drain = Shutdown::new();
        assert_eq!(run_loop(async {}, drain.clone()).await, CoordinatorEnd::Stopped);
        assert!(!drain.is_requested());
        assert_eq!(run_loop(broken(), drain.clone()).await, CoordinatorEnd::LoopPanicked);
        assert!(drain.is_requested());
    }

    #[tokio::test]
    async fn a_membership_listener_that_ends_untold_drains_the_process() {
        async fn broken() -> Result<(), ServeError> {
            panic!("a bug of the server");
        }
        let address = SocketAddr::from(([127, 0, 0, 1], 7400));
        let failed = CoordinatorEnd::ListenerFailed { address };
        let (stop, drain) = (Shutdown::new(), Shutdown::new());
        let both = || (stop.clone(), drain.clone());
        assert_eq!(run_listener(async { Ok(()) }, address, both()).await, failed);
        assert!(drain.is_requested());
        assert_eq!(run_listener(broken(), address, both()).await, failed);
        let drain = Shutdown::new();
        stop.request();
        let told = run_listener(async { Ok(()) }, address, (stop, drain.clone())).await;
        assert_eq!((told, drain.is_requested()), (CoordinatorEnd::Stopped, false));
    }
}
