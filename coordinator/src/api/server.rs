//! The HTTP listener: it binds, runs one task per connection, limits slow and silent clients, and stops gracefully.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use axum::response::IntoResponse as _;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use identity::{Connection, ServerCertificate};
use service_runtime::serve::FailedAccepts;
use service_runtime::shutdown::Shutdown;
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tower::ServiceExt;

use super::connection::{Cut, Encrypted, ResponseBuffers, TimedStream};
use super::error::ApiError;
use super::places::{Place, Places, ProbeConnections, Serves};
use super::probes::is_probe;

/// A connection that is served probes only must ask within this time.
const PROBE_READ_MAX: Duration = Duration::from_secs(2);
/// A greeting is two round trips and a millisecond of computing. Connections between processes have as long.
const GREETING_TIME_MAX: Duration = Duration::from_secs(2);
/// The first byte of a client that speaks TLS (RFC 8446, 5.1: a record of type `handshake`).
const TLS_HANDSHAKE: u8 = 22;
/// The headers of a request must come within this time. An idle kept-alive connection is closed after it as well. OpenAI's
/// client keeps idle connections for 5 s, so it closes first.
const HEADER_READ_MAX: Duration = Duration::from_secs(30);
/// hyper's read and write buffer for one connection. It is the most that the headers of a request may take, and the most
/// unsent bytes before a stream stops taking tokens; over TLS one record more. nginx and Envoy use a similar size.
const BUFFER_BYTES_MAX: usize = 64 << 10;
const HEADERS_MAX: usize = 100;

#[derive(Debug, Error)]
pub enum BindError {
    /// The operator's mistake: another process has the port.
    #[error(
        "port {port} on {host} is already in use. Stop the process that has it (`ss -ltnp 'sport = :{port}'` shows \
         it), or choose another address with --listen, for example --listen {host}:0 for any free port"
    )]
    InUse { host: String, port: u16 },
    #[error("listening on {address} is not allowed: ports below 1024 need privileges. Choose another with --listen")]
    NotAllowed { address: SocketAddr },
    #[error("cannot listen on {address}: {source}. Check --listen: the address must be one of this machine's")]
    Other { address: SocketAddr, source: io::Error },
}

pub async fn bind(address: SocketAddr) -> Result<TcpListener, BindError> {
    TcpListener::bind(address).await.map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => BindError::InUse {
            host: address.ip().to_string(),
            port: address.port(),
        },
        io::ErrorKind::PermissionDenied => BindError::NotAllowed { address },
        _ => BindError::Other { address, source },
    })
}

/// Time for probes and refusals that came during the drain to be written, once the last request has ended.
const LATE_ANSWERS_MAX: Duration = Duration::from_millis(500);

/// A port for clients, and what they see there.
#[derive(Debug)]
pub struct HttpPort {
    pub listener: TcpListener,
    /// Beyond so many connections only probes are answered. One that has not greeted yet counts like any other.
    pub connections_max: usize,
    /// `None`: plain HTTP.
    pub certificate: Option<ServerCertificate>,
}

/// Serves until `shutdown`, then lets open requests finish for at most `drain_max` and closes the rest. New connections are
/// taken meanwhile and told that this server drains. HTTP/1.1 only: a gateway in front can speak other versions.
pub async fn serve_http(port: HttpPort, router: Router, shutdown: impl Future<Output = ()>, drain_max: Duration) {
    let mut server = Server {
        places: Places::new(port.connections_max),
        listener: port.listener,
        answers: Answers {
            router,
            certificate: port.certificate,
            drain: Shutdown::new(),
            cut: Cut::default(),
        },
        buffers: ResponseBuffers::default(),
        probes: ProbeConnections::default(),
        connections: JoinSet::new(),
        failures: FailedAccepts::default(),
    };
    let graceful = GracefulShutdown::new();
    server.serve_until(&graceful, shutdown).await;
    // Connections from now on are none that the drain has surprised.
    std::mem::take(&mut server.answers.drain).request();
    // Probes and refusals are answered until the last request has ended.
    let late = GracefulShutdown::new();
    let drained = tokio::time::timeout(drain_max, graceful.shutdown());
    let is_drained = server.serve_until(&late, drained).await.is_ok();
    let Server {
        listener,
        answers,
        mut connections,
        ..
    } = server;
    drop(listener);
    let _ = tokio::time::timeout(LATE_ANSWERS_MAX, late.shutdown()).await;
    if !is_drained {
        tracing::warn!(
            open = connections.len(),
            "closing connections that did not finish within the drain time"
        );
    }
    answers.cut.begin();
    connections.shutdown().await;
}

/// What each connection has.
#[derive(Clone)]
struct Answers {
    router: Router,
    certificate: Option<ServerCertificate>,
    /// Of the connections that were taken before it.
    drain: Shutdown,
    cut: Cut,
}

/// The listener and what its connections share.
struct Server {
    listener: TcpListener,
    places: Places,
    answers: Answers,
    buffers: ResponseBuffers,
    probes: ProbeConnections,
    connections: JoinSet<()>,
    /// Accepts that failed on this side. While no descriptor is left there are ten a second.
    failures: FailedAccepts,
}

impl Server {
    /// Takes connections, which `graceful` can end, until `end`.
    async fn serve_until<T>(&mut self, graceful: &GracefulShutdown, end: impl Future<Output = T>) -> T {
        tokio::pin!(end);
        loop {
            let accepted = tokio::select! {
                biased;
                ended = &mut end => return ended,
                Some(ended) = self.connections.join_next(), if !self.connections.is_empty() => {
                    note_end(ended);
                    continue;
                }
                accepted = accept(&self.listener, &self.places, &self.failures) => accepted,
            };
            if let Some((stream, place)) = accepted {
                let serves = place.serves;
                let (answers, buffers) = (self.answers.clone(), self.buffers.clone());
                let task = self
                    .connections
                    .spawn(answers.connection((stream, buffers), graceful.watcher(), place));
                if serves == Serves::Probes {
                    self.probes.add(task);
                }
            }
        }
    }
}

async fn accept(listener: &TcpListener, places: &Places, failures: &FailedAccepts) -> Option<(TcpStream, Place)> {
    match listener.accept().await {
        Ok((stream, peer)) => {
            let place = places.take(peer.ip());
            // Every token is a small write. Nagle's algorithm would hold it back until the peer's delayed ack.
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%error, "TCP_NODELAY could not be set");
            }
            Some((stream, place))
        }
        Err(error) => {
            failures.pause_after(&error).await;
            None
        }
    }
}

/// What a client speaks, and what this port has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spoken {
    Http,
    Https,
    /// Plain HTTP, to a port that has a certificate.
    HttpNotHttps,
}

impl Answers {
    async fn connection(self, (stream, buffers): (TcpStream, ResponseBuffers), watcher: Watcher, place: Place) {
        let stream = TimedStream::new(stream, buffers);
        let times = stream.times();
        let greeted = tokio::time::timeout(GREETING_TIME_MAX, self.greeted(stream)).await;
        let (connection, spoken) = match greeted.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(greeted) => greeted,
            Err(error) => {
                // Scanners and checks of a balancer open connections and say nothing.
                tracing::debug!(%error, "a client did not greet");
                return;
            }
        };
        // The greeting is no part of the first request.
        if spoken == Spoken::Https {
            times.forget_first_read();
        }
        let drain_began = self.drain.is_requested();
        let serves = place.serves;
        let service = hyper::service::service_fn(move |request: Request<Incoming>| {
            let (router, times, cut) = (self.router.clone(), times.clone(), self.cut.clone());
            async move {
                if spoken == Spoken::HttpNotHttps {
                    return Ok(ApiError::https_only().into_response());
                }
                if serves == Serves::Probes && !is_probe(request.uri().path()) {
                    return Ok(ApiError::no_connection_left().into_response());
                }
                let mut request = request.map(Body::new);
                request.extensions_mut().insert(times.clone());
                request.extensions_mut().insert(cut);
                if spoken == Spoken::Https {
                    request.extensions_mut().insert(Encrypted);
                }
                let response = router.oneshot(request).await;
                times.forget_first_read();
                response
            }
        });
        let is_kept = serves == Serves::Everything && spoken != Spoken::HttpNotHttps && !drain_began;
        let served = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(if is_kept { HEADER_READ_MAX } else { PROBE_READ_MAX })
            .keep_alive(is_kept)
            .max_buf_size(BUFFER_BYTES_MAX)
            .max_headers(HEADERS_MAX)
            .serve_connection(TokioIo::new(connection), service);
        let ended = match drain_began {
            // A watched connection would be closed at once. This one gets an answer for its greeting, and the drain waits for it.
            true => served.await,
            false => watcher.watch(served).await,
        };
        if let Err(error) = ended {
            // Clients that vanish are normal. The access line of the request says what happened to it.
            tracing::debug!(%error, "connection ended");
        }
    }

    async fn greeted(&self, stream: TimedStream) -> io::Result<(Connection<TimedStream>, Spoken)> {
        let Some(certificate) = &self.certificate else {
            return Ok((Connection::Plain(stream), Spoken::Http));
        };
        if stream.first_byte().await? != Some(TLS_HANDSHAKE) {
            return Ok((Connection::Plain(stream), Spoken::HttpNotHttps));
        }
        let stream = stream.below(BUFFER_BYTES_MAX);
        Ok((certificate.accept(stream).await?, Spoken::Https))
    }
}

fn note_end(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "a connection's task panicked; its request ended as internal, the process goes on");
    }
}
