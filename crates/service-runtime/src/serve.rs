//! One port per node: gRPC services, gRPC health, and `/metrics`, `/health`, `/ready` over HTTP/1.1.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{Extensions, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use identity::{Caller, Identity, check_call};
use prometheus_client::registry::Registry;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::service::Routes;
use tonic::transport::Server;

use crate::admin::{self, BlockLedger};
use crate::health::{Health, ReadyState};
use crate::http_guard::HttpGuard;
use crate::shutdown::Shutdown;

mod closable;
mod incoming;
mod refusals;

pub use incoming::network_of;
pub use refusals::FailedAccepts;
use refusals::Refusals;

/// Enough bytes in flight for 1 MiB frames on a 100 Gb/s link with a round trip of 0.5 ms (6 MiB).
pub const HTTP2_STREAM_WINDOW_BYTES: u32 = 8 << 20;
pub const HTTP2_CONNECTION_WINDOW_BYTES: u32 = 32 << 20;
/// 3.4-4.3 GB/s on loopback against 2.3-2.7 GB/s at the default of 16 KiB.
pub const HTTP2_FRAME_BYTES_MAX: u32 = 1 << 20;
/// A server that vanished silently (power, cable) is noticed within interval + timeout.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
pub const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// A client that vanished is noticed within interval + timeout. So a coordinator whose host died holds a node's blocks for
/// 30 s at most. (When only its process died it is less than 1 s, because its connections close.) A server waits longer
/// than a client: a coordinator that stands still for less than the timeout must find its streams as it left them, because
/// closing them would move every request.
pub const SERVER_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
pub const SERVER_KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// Calls that a caller may have open, or cancelled and not yet handled, where no permits limit them.
const CALLS_MAX_DEFAULT: u32 = 256;
/// The upper limit, whatever a node's permits allow. h2 keeps about a kilobyte for each call, so this is 64 MiB for one
/// caller.
const CALLS_MAX: u32 = 1 << 16;
/// Calls that need no permit, beside those that do: health, clocks, membership.
const CALLS_WITHOUT_PERMIT_MAX: u32 = 64;
/// Answers to a cancelled call may come for this long when the caller stood still. After that its connection is dead.
const LATE_ANSWERS_MAX: Duration = SERVER_KEEPALIVE_INTERVAL.saturating_add(SERVER_KEEPALIVE_TIMEOUT);
/// Streams that are still open when a process stops get this long to end by themselves.
const STREAM_END_TIME_LIMIT: Duration = Duration::from_secs(2);

#[derive(Debug, Error)]
pub enum ServeError {
    #[error("cannot listen on {address}: {source}; is another process using the port?")]
    Bind { address: String, source: std::io::Error },
    #[error(
        "listening on {bound}, which is every address of this host; other processes need one address that they can reach: give it as --advertise HOST:PORT (a coordinator: --control-advertise HOST:PORT), or listen on that address"
    )]
    NoAddress { bound: SocketAddr },
    #[error(transparent)]
    PlainText(#[from] identity::FileError),
    #[error("the server on {address} failed: {source}")]
    Serve {
        address: SocketAddr,
        source: tonic::transport::Error,
    },
}

/// Binds a port; port 0 lets the system pick. The address holds the real port.
///
/// # Errors
/// [`ServeError::Bind`].
pub async fn bind(address: &str) -> Result<(TcpListener, SocketAddr), ServeError> {
    let error = |source| ServeError::Bind {
        address: address.to_owned(),
        source,
    };
    let listener = TcpListener::bind(address).await.map_err(error)?;
    let bound = listener.local_addr().map_err(error)?;
    Ok((listener, bound))
}

/// A port that a process keeps from one life to the next. A caller that dials in between waits (where processes have
/// certificates, it dials again), and no other process gets the port. Clones share it. The default has no port yet.
#[derive(Clone, Debug, Default)]
pub struct KeptPort(Arc<Mutex<Option<std::net::TcpListener>>>);

impl KeptPort {
    /// The kept port. If there is none yet, a port is bound and kept.
    ///
    /// # Errors
    /// [`ServeError::Bind`].
    pub async fn bind(&self, address: &str) -> Result<(TcpListener, SocketAddr), ServeError> {
        let error = |source| ServeError::Bind {
            address: address.to_owned(),
            source,
        };
        let kept = self.kept().as_ref().map(std::net::TcpListener::try_clone);
        let listener = match kept {
            Some(kept) => kept.map_err(error)?,
            None => {
                let (listener, _) = bind(address).await?;
                let listener = listener.into_std().map_err(error)?;
                *self.kept() = Some(listener.try_clone().map_err(error)?);
                listener
            }
        };
        let listener = TcpListener::from_std(listener).map_err(error)?;
        let bound = listener.local_addr().map_err(error)?;
        Ok((listener, bound))
    }

    /// Closes the port. Callers are refused from now on.
    pub fn release(&self) {
        *self.kept() = None;
    }

    fn kept(&self) -> MutexGuard<'_, Option<std::net::TcpListener>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The address at which others reach this process: the advertised one, else the bound one.
///
/// # Errors
/// [`ServeError::NoAddress`] for a wildcard address, which no process can dial.
pub fn reachable_address(bound: SocketAddr, advertised: Option<&str>) -> Result<String, ServeError> {
    match advertised {
        Some(address) => Ok(address.to_owned()),
        None if bound.ip().is_unspecified() => Err(ServeError::NoAddress { bound }),
        None => Ok(bound.to_string()),
    }
}

/// The content of the endpoints for operators.
#[derive(Clone, Debug)]
pub struct Ops {
    pub role: &'static str,
    pub name: String,
    pub version: &'static str,
    pub health: Health,
    pub metrics: Arc<Registry>,
    /// `None` on a process without KV blocks. It has no `/admin/blocks`.
    pub ledger: Option<Arc<dyn BlockLedger>>,
    /// Decides which HTTP/1.1 requests are answered.
    pub guard: HttpGuard,
}

impl Ops {
    /// `/metrics`, `/health`, `/ready` and, where there are blocks, `/admin/blocks`, for any axum router.
    pub fn router(&self) -> axum::Router {
        let router = axum::Router::new()
            .route("/metrics", get(metrics))
            .route("/health", get(health))
            .route("/ready", get(ready))
            .route("/admin/spans/{trace_id}", get(admin::spans))
            .with_state(self.clone());
        match &self.ledger {
            Some(ledger) => router.merge(admin::router(ledger.clone())),
            None => router,
        }
    }
}

async fn guarded(
    State((guard, refusals)): State<(HttpGuard, Arc<Refusals>)>,
    request: Request,
    next: Next,
) -> Response {
    let (head, body) = request.into_parts();
    if let Err(refusal) = guard.check(&head) {
        let error = serde_json::json!({ "error": refusal.message, "code": refusal.code });
        return (refusal.status, axum::Json(error)).into_response();
    }
    let caller = caller_of(&head.extensions);
    match check_call(caller, head.uri.path()) {
        Ok(()) => next.run(Request::from_parts(head, body)).await,
        Err(refused) => {
            refusals.tell(&caller.words(), &refused.to_string());
            match head.headers.contains_key("te") {
                true => Status::permission_denied(refused.to_string()).into_http(),
                false => (StatusCode::FORBIDDEN, refused.to_string()).into_response(),
            }
        }
    }
}

/// Every connection has a caller. A request without one would be a fault of this program, and is nobody's.
fn caller_of(extensions: &Extensions) -> &Caller {
    extensions.get().unwrap_or(&Caller::Nobody)
}

/// The services of a port, how many calls one connection may bring, and who may make them.
///
/// The limit protects the server against a flood of calls that are cancelled at once. h2's own limit is 20 calls that were
/// cancelled before the server looked at them; then the connection ends with all its other calls. An innocent coordinator
/// can reach that limit: its node stood still, and its clients went away.
#[derive(Clone, Debug)]
pub struct Calls {
    routes: Routes,
    per_connection_max: u32,
    identity: Identity,
}

impl Calls {
    /// `permits_max`: the most calls for which one caller can have permits. All of them may be open, or cancelled while
    /// this process stood still. A caller that wants more open calls waits for the end of one. A caller that cancels more
    /// loses its connection.
    pub fn new(routes: Routes, permits_max: u32) -> Self {
        let per_connection_max = permits_max.clamp(CALLS_MAX_DEFAULT, CALLS_MAX) + CALLS_WITHOUT_PERMIT_MAX;
        Self {
            routes,
            per_connection_max,
            identity: Identity::none(),
        }
    }

    /// This process shows its certificate, and each call needs one of the right role ([`check_call`]). Without this call, or without a
    /// certificate, everything is in plain text.
    #[must_use]
    pub fn known_as(self, identity: Identity) -> Self {
        Self { identity, ..self }
    }
}

/// Services that are called without permits.
impl From<Routes> for Calls {
    fn from(routes: Routes) -> Self {
        Self::new(routes, CALLS_MAX_DEFAULT)
    }
}

async fn metrics(State(ops): State<Ops>) -> Response {
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, &ops.metrics) {
        Ok(()) => ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// The process lives and answers.
async fn health(State(ops): State<Ops>, request: Request) -> Response {
    answer(&ops, StatusCode::OK, &request)
}

/// The process can take work.
async fn ready(State(ops): State<Ops>, request: Request) -> Response {
    let status = match ops.health.get().is_ready() {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    answer(&ops, status, &request)
}

fn answer(ops: &Ops, status: StatusCode, request: &Request) -> Response {
    let state = ops.health.get();
    // A probe without a certificate may be anybody's. Why a process is not ready can name others and their addresses.
    if caller_of(request.extensions()) == &Caller::Nobody {
        let body = serde_json::json!({ "ready": state.is_ready(), "state": state.name() });
        return (status, axum::Json(body)).into_response();
    }
    let body = serde_json::json!({
        "role": ops.role,
        "name": ops.name,
        "version": ops.version,
        "ready": state.is_ready(),
        "state": state.words(),
    });
    (status, axum::Json(body)).into_response()
}

/// A server that runs. It is boxed, so that the HTTP code is compiled in this crate, and not again in each that serves.
pub type Serving = Pin<Box<dyn Future<Output = Result<(), ServeError>> + Send>>;

/// Serves until `stop`, then lets open streams end for two seconds.
///
/// # Errors
/// [`ServeError::Serve`] when the listener breaks.
pub fn serve_node(listener: TcpListener, calls: impl Into<Calls>, ops: Ops, stop: Shutdown) -> Serving {
    boxed(listener, calls.into(), ops, stop)
}

fn boxed(listener: TcpListener, calls: Calls, ops: Ops, stop: Shutdown) -> Serving {
    Box::pin(serve(listener, calls, ops, stop))
}

async fn serve(listener: TcpListener, calls: Calls, ops: Ops, stop: Shutdown) -> Result<(), ServeError> {
    let address = listener.local_addr().map_err(|source| ServeError::Bind {
        address: "?".to_owned(),
        source,
    })?;
    let (reporter, health_service) = tonic_health::server::health_reporter();
    let health_task = tokio::spawn(report_health(reporter, ops.health.clone()));
    let router = calls
        .routes
        .add_service(health_service)
        .into_axum_router()
        .merge(ops.router());
    // The guard is around the gRPC services too: a page could call them over HTTP/1.1.
    let router = router.layer(from_fn_with_state(
        (ops.guard.clone(), Arc::new(Refusals::of("a call is refused"))),
        guarded,
    ));
    let over = CancellationToken::new();
    let incoming = incoming::incoming(TcpListenerStream::new(listener), calls.identity, over.clone());
    let stopping = stop.clone();
    let serving = Server::builder()
        .accept_http1(true)
        .max_frame_size(HTTP2_FRAME_BYTES_MAX)
        .initial_stream_window_size(HTTP2_STREAM_WINDOW_BYTES)
        .initial_connection_window_size(HTTP2_CONNECTION_WINDOW_BYTES)
        .http2_keepalive_interval(Some(SERVER_KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(SERVER_KEEPALIVE_TIMEOUT))
        .max_concurrent_streams(calls.per_connection_max)
        .http2_max_pending_accept_reset_streams(Some(calls.per_connection_max as usize))
        .add_routes(Routes::from(router))
        .serve_with_incoming_shutdown(incoming, async move { stopping.requested().await });
    let overdue = async {
        stop.requested().await;
        tokio::time::sleep(STREAM_END_TIME_LIMIT).await;
    };
    let served = tokio::select! {
        served = serving => served,
        () = overdue => Ok(()),
    };
    // This task does not own the tasks of connections whose stream never ends. Those tasks hold the services.
    over.cancel();
    health_task.abort();
    served.map_err(|source| ServeError::Serve { address, source })
}

/// A channel to another process, with the same windows as the servers here. It connects when it is first used.
///
/// It remembers every call that it cancelled until no answer can come any more. By default h2 remembers 50 such calls for a
/// second, and ends the connection after 1,024 late answers to others over its whole life.
///
/// # Errors
/// The address is not a host and port.
pub fn endpoint(address: &str) -> Result<tonic::transport::Endpoint, tonic::transport::Error> {
    const CONNECT_TIME_LIMIT: Duration = Duration::from_secs(2);
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}"))?;
    Ok(endpoint
        .connect_timeout(CONNECT_TIME_LIMIT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .http2_max_concurrent_reset_streams(CALLS_MAX as usize)
        .http2_reset_stream_duration(LATE_ANSWERS_MAX)
        .initial_stream_window_size(HTTP2_STREAM_WINDOW_BYTES)
        .initial_connection_window_size(HTTP2_CONNECTION_WINDOW_BYTES))
}

async fn report_health(reporter: tonic_health::server::HealthReporter, health: Health) {
    let mut states = health.watch();
    loop {
        let status = match *states.borrow_and_update() {
            ReadyState::Ready => tonic_health::ServingStatus::Serving,
            _ => tonic_health::ServingStatus::NotServing,
        };
        reporter.set_service_status("", status).await;
        if states.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};

    use super::*;
    use crate::http_guard::GuardConfig;

    async fn told(caller: Caller) -> String {
        let ops = Ops {
            role: "decode",
            name: "decode-0".to_owned(),
            version: "1",
            health: Health::new("no coordinator: none is registered in etcds://user@10.0.0.1:2379/prod"),
            metrics: Arc::default(),
            ledger: None,
            guard: HttpGuard::new(&GuardConfig::default(), &[]),
        };
        let mut request = Request::new(Body::empty());
        request.extensions_mut().insert(caller);
        let answer = answer(&ops, StatusCode::SERVICE_UNAVAILABLE, &request);
        let bytes = to_bytes(answer.into_body(), 1 << 16).await.expect("a body");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    #[tokio::test]
    async fn a_probe_without_a_certificate_hears_the_state_alone() {
        assert_eq!(told(Caller::Nobody).await, r#"{"ready":false,"state":"not_ready"}"#);
        // Without certificates nobody is told apart.
        let text = told(Caller::PlainText).await;
        assert!(text.contains("decode-0") && text.contains("10.0.0.1"), "{text}");
    }
}
