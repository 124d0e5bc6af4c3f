//! The life of the process: model text, keys and certificate, the ports of clients and operators, announcement, drain.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use identity::ServerCertificate;
use service_runtime::announce::{Announcement, Listening};
use service_runtime::certificates;
use service_runtime::config::Program;
use service_runtime::http_guard::HttpGuard;
use service_runtime::shutdown::{self, Shutdown};
use tokio::net::TcpListener;

use crate::api::{self, ApiLimits, AppParts, AppState, HttpPort};
use crate::config::Config;
use crate::coordinator::{Coordinator, CoordinatorEnd};
use crate::insight::Insight;
use crate::keys::Keys;
use crate::records::{RecordLimits, RecordStore};
use crate::registry::{Facts, MembershipKind, Registry};
use crate::text::TextModel;

pub const PROGRAM: Program = Program {
    name: "baton-coordinator",
    about: "Takes OpenAI-style requests, places them on prefill and decode nodes, streams the answers.",
    version: env!("CARGO_PKG_VERSION"),
};

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
    async fn a_process_without_its_loop_or_its_membership_listener_ends_with_a_failure() {
        let address = SocketAddr::from(([127, 0, 0, 1], 7400));
        for end in [CoordinatorEnd::LoopPanicked, CoordinatorEnd::ListenerFailed { address }] {
            assert!(leave(None, "c", end).await.is_err());
        }
        assert!(leave(None, "c", CoordinatorEnd::Stopped).await.is_ok());
    }
}
