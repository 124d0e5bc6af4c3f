//! The life of a coordinator: model text, control loop, both listeners, announcement, drain.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use identity::{Identity, PeerRole, ServerCertificate};
use proto::messages::CONTROL_MESSAGE_BYTES_MAX;
use proto::v1::membership_service_server::MembershipServiceServer;
use service_runtime::announce::{Announcement, Listening};
use service_runtime::certificates;
use service_runtime::config::Program;
use service_runtime::health::{Health, ReadyState};
use service_runtime::http_guard::HttpGuard;
use service_runtime::serve::{self, Calls, Ops, ServeError};
use service_runtime::shutdown::{self, Shutdown};
use serving_core::ids::{NodeEpoch, NodeId, NodeName};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tonic::service::Routes;

use crate::api::{self, ApiLimits, AppParts, AppState, HttpPort};
use crate::config::Config;
use crate::control_handle::ControlHandle;
use crate::control_loop::{ControlLoop, LoopParts};
use crate::flight_recorder::{FlightRecorder, RecordStart, RecordedCluster};
use crate::insight::Insight;
use crate::keys::Keys;
use crate::membership::{MembershipEndpoint, Terms};
use crate::metrics::Metrics;
use crate::node_clocks::NodeClocks;
use crate::records::{RecordLimits, RecordStore};
use crate::registry::{Facts, MembershipKind, Registry};
use crate::request_handle::Readiness;
use crate::slo::SloRules;
use crate::text::TextModel;

pub const PROGRAM: Program = Program {
    name: "baton-coordinator",
    about: "Takes OpenAI-style requests, places them on prefill and decode nodes, streams the answers.",
    version: env!("CARGO_PKG_VERSION"),
};

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
    membership: MembershipKind,
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

/// The first name stays the first one. A name that is given twice is listed once.
fn served_names(given: &[String]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for name in given {
        if !names.contains(name) {
            names.push(name.clone());
        }
    }
    names
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

/// How long each task of a coordinator that stops is waited for.
const TASK_END_MAX: Duration = Duration::from_secs(3);

/// Time of a drain after the requests: late probes are answered, connections closed, nodes told, the entry in etcd removed.
/// It takes 30 ms when everybody listens.
const GOODBYE_TIME: Duration = Duration::from_millis(500);

/// How long requests of operators may go on after the last client has its answer.
const OPERATORS_END_MAX: Duration = Duration::from_millis(200);

/// Runs a coordinator until `shutdown`, then drains: no new request is admitted, and running requests get most of
/// `drain_ms_max`.
///
/// # Errors
/// A wrong address, a port in use, or a model file that cannot be used; each says what to do.
pub fn run(config: Config, shutdown: Shutdown) -> Running {
    Box::pin(run_here(config, shutdown))
}

/// A coordinator that runs. It is boxed, so that it is compiled and optimised in this crate, not in a program's.
pub type Running = Pin<Box<dyn Future<Output = anyhow::Result<()>> + Send>>;

/// The store of the requests that are remembered.
fn records(config: &Config) -> Arc<RecordStore> {
    Arc::new(RecordStore::new(RecordLimits {
        records_max: config.request_records,
        ..RecordLimits::default()
    }))
}

async fn run_here(mut config: Config, shutdown: Shutdown) -> anyhow::Result<()> {
    let (model, max_model_len) = (config.model.clone(), config.max_model_len);
    let text = tokio::task::spawn_blocking(move || TextModel::open(&model, max_model_len)).await?;
    let text = text.with_context(|| format!("cannot use the model file {}", config.model.display()))?;
    if config.served_model_name.is_empty() {
        config.served_model_name.push(text.name.clone());
    }
    let drained = Shutdown::new();
    let certificate = open_certificate(&config, &drained)?;
    let (http_listener, http_address) = bind_http("--listen", &config.listen).await?;
    let admin = match &config.admin_listen {
        Some(address) => Some(bind_http("--admin-listen", address).await?),
        None => None,
    };
    let admin_address = admin.as_ref().map(|(_, address)| *address);
    let port_of_console = admin_address.unwrap_or(http_address).port();
    let keys = open_keys(&config, port_of_console, drained.clone())?;
    let coordinator = Coordinator::start(&config, shutdown.clone()).await?;
    let registry = register(&config, (&coordinator, http_address), shutdown.clone())?;
    let insight = Insight {
        registry: registry.as_ref().map(Registry::view).unwrap_or_default(),
        records: records(&config),
        slo_rules: coordinator.slo_rules.clone(),
        node_clocks: coordinator.clocks.clone(),
        cluster: Some(coordinator.metrics.clone()),
        name: config.name.clone(),
        epoch: Some(coordinator.id.epoch),
        nodes: Some(coordinator.handle.clone()),
        listen: http_address.to_string(),
        control: config
            .control_advertise
            .clone()
            .unwrap_or_else(|| coordinator.control_address.to_string()),
        identity: coordinator.identity.clone(),
        drain: shutdown.clone(),
        reports_dir: config.reports_dir.clone(),
        traces_content: config.trace_content,
        trace_viewer: config.trace_viewer_url.clone(),
        ..Insight::default()
    };
    let closing = insight.records.closing.clone();
    let state = AppState::new(AppParts {
        submit: Arc::new(coordinator.handle.clone()),
        text: Arc::new(text),
        served_models: served_names(&config.served_model_name),
        metrics: coordinator.metrics.clone(),
        limits: limits(&config),
        insight: Arc::new(insight),
        guard: HttpGuard::new(&config.guard, &http_names(&config)).with_origins(&config.cors_origin),
        cors_origins: config.cors_origin.clone(),
        keys,
    });
    announce(&config.name, (http_address, admin_address), coordinator.control_address);
    state.read_vocabulary_soon();
    let port = |listener| HttpPort {
        listener,
        connections_max: config.connections_max,
        certificate: certificate.clone(),
    };
    let ports = (port(http_listener), admin.map(|(listener, _)| port(listener)));
    serve_http(state, ports, &config, &shutdown).await;
    drained.request();
    // The answers are sent. Their records end with the nodes' last reports.
    closing.settled().await;
    let end = coordinator.stop().await;
    // A report that did not come in time is no longer awaited.
    closing.settled().await;
    leave(registry, &config.name, end).await
}

/// Takes the entry out of etcd.
///
/// # Errors
/// Another coordinator has this one's name, the loop has panicked, or the membership listener has failed.
async fn leave(registry: Option<Registry>, name: &str, end: CoordinatorEnd) -> anyhow::Result<()> {
    let fenced_by = match registry {
        Some(registry) => registry.leave().await,
        None => None,
    };
    match (fenced_by, end) {
        (Some(by_epoch), _) => bail!(
            "another coordinator that was started later is called {name} (epoch {by_epoch}); this one has left. Names are unique: give one of them another"
        ),
        (None, CoordinatorEnd::LoopPanicked) => {
            bail!(
                "the control loop panicked; its last words are above: this is a bug in baton. Start the coordinator again"
            )
        }
        (None, CoordinatorEnd::ListenerFailed { address }) => {
            bail!("the membership listener on {address} failed; its last words are above. Start the coordinator again")
        }
        (None, CoordinatorEnd::Stopped) => Ok(()),
    }
}

/// The certificate that the API shows, where one is configured. Its files are followed until `stop`.
fn open_certificate(config: &Config, stop: &Shutdown) -> anyhow::Result<Option<ServerCertificate>> {
    let certificate = config.api_certificate()?;
    if let Some(own) = &certificate {
        certificates::follow(own, stop);
    }
    Ok(certificate)
}

/// The clients' keys, where they are asked for. Their file is followed until `shutdown`.
fn open_keys(config: &Config, port: u16, drained: Shutdown) -> anyhow::Result<Option<Keys>> {
    let Some(file) = &config.api_keys else {
        return Ok(None);
    };
    let keys = Keys::open(file, port).context("--api-keys")?;
    // A key that is revoked during the drain is refused as at any time.
    tokio::spawn(keys.clone().follow(drained));
    Ok(Some(keys))
}

async fn bind_http(setting: &str, address: &str) -> anyhow::Result<(TcpListener, SocketAddr)> {
    let first = tokio::net::lookup_host(address)
        .await
        .with_context(|| format!("{setting} {address} is not host:port"))?
        .next()
        .with_context(|| format!("{setting} {address} names no address"))?;
    let listener = api::bind(first).await?;
    let bound = listener.local_addr()?;
    Ok((listener, bound))
}

/// The names under which browsers call the HTTP listeners.
fn http_names(config: &Config) -> Vec<&str> {
    let admin = config.admin_listen.as_deref();
    admin.into_iter().chain([config.listen.as_str()]).collect()
}

/// Serves until `shutdown`, and drains. Where operators have an address of their own, clients find only what is theirs at the other.
async fn serve_http(
    state: AppState,
    (http, admin): (HttpPort, Option<HttpPort>),
    config: &Config,
    shutdown: &Shutdown,
) {
    let drain = shutdown::time_for_requests(Duration::from_millis(config.drain_ms_max), GOODBYE_TIME);
    let Some(admin) = admin else {
        return api::serve_http(http, api::router(state), shutdown.requested(), drain).await;
    };
    let (for_clients, for_operators) = api::routers(state);
    // Operators look on until the last client has its answer.
    let drained = Shutdown::new();
    tokio::join!(
        async {
            api::serve_http(http, for_clients, shutdown.requested(), drain).await;
            drained.request();
        },
        api::serve_http(admin, for_operators, drained.requested(), OPERATORS_END_MAX),
    );
}

fn announce(name: &str, (http, admin): (SocketAddr, Option<SocketAddr>), control: SocketAddr) {
    let listening = Listening {
        admin: admin.map(|address| address.to_string()),
        ..Listening::coordinator(name, &http.to_string(), &control.to_string())
    };
    Announcement::Listening(listening).print();
    let (role, name) = ("coordinator".to_owned(), name.to_owned());
    Announcement::Ready { role, name }.print();
}

/// `None` with embedded membership.
fn register(
    config: &Config,
    (coordinator, http): (&Coordinator, SocketAddr),
    shutdown: Shutdown,
) -> anyhow::Result<Option<Registry>> {
    let MembershipKind::Etcd(address) = &coordinator.membership else {
        return Ok(None);
    };
    let facts = Facts {
        id: coordinator.id.clone(),
        control: coordinator.control_address,
        control_advertise: config.control_advertise.as_deref(),
        http,
    };
    Registry::start(address, facts, (coordinator.metrics.membership(), shutdown)).map(Some)
}

fn limits(config: &Config) -> ApiLimits {
    ApiLimits {
        body_bytes_max: usize::try_from(config.body_bytes_max.bytes()).unwrap_or(usize::MAX),
        request_bytes_in_flight_max: usize::try_from(config.request_bytes_in_flight_max.bytes()).unwrap_or(usize::MAX),
        request_time_limit: Duration::from_millis(config.request_time_limit_ms),
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
    async fn a_membership_listener_that_ends_untold_drains_the_process_which_ends_with_a_failure() {
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
        assert!(leave(None, "c", failed).await.is_err());
        let drain = Shutdown::new();
        stop.request();
        let told = run_listener(async { Ok(()) }, address, (stop, drain.clone())).await;
        assert_eq!((told, drain.is_requested()), (CoordinatorEnd::Stopped, false));
        assert!(leave(None, "c", told).await.is_ok());
    }
}
