//! Connections to the server: one for each running stream, used again when the stream has ended.

use std::collections::HashSet;
use std::future::{Ready, ready};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::Context as _;
use http::{Extensions, HeaderMap, HeaderName, HeaderValue, Request, Response, Uri, header};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::client::legacy::connect::{HttpConnector, HttpInfo};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tower::Service;

use super::plan::{Endpoint, Server};
use crate::exit::{Exit, WithExit};
use crate::http::{base_url, tls};

/// A server that stands still may take as long to accept as it stands still, and this wait is measured.
const CONNECT_WITHIN: Duration = Duration::from_secs(60);

type Connector = HttpsConnector<HttpConnector<Resolved>>;

/// How often a request is sent again because the connection that it was given had been closed. Each time takes one such
/// connection out of the pool; more of them than this at once is a server that closes everything.
const RESENDS_MAX: usize = 16;

/// Sends requests to one endpoint of one server.
#[derive(Clone, Debug)]
pub(super) struct Connections {
    http: legacy::Client<Connector, Full<Bytes>>,
    uri: Uri,
    headers: HeaderMap,
    /// This side's address of each connection on which an answer has come: at most as many as this machine has ports.
    answered: Arc<Mutex<HashSet<SocketAddr>>>,
}

impl Connections {
    /// # Errors
    /// The URL or a header cannot be used (usage), or the host has no address (unreachable).
    pub(super) async fn open(server: &Server) -> anyhow::Result<Self> {
        let base = base_url(&server.url);
        let path = server.path.as_deref().unwrap_or(match server.endpoint {
            Endpoint::Completions => "/v1/completions",
            Endpoint::Chat => "/v1/chat/completions",
        });
        let uri: Uri = format!("{base}/{}", path.trim_start_matches('/'))
            .parse()
            .ok()
            .filter(|uri: &Uri| uri.host().is_some() && matches!(uri.scheme_str(), Some("http" | "https")))
            .with_context(|| format!("`{}` is no URL; write http://HOST:PORT", server.url))
            .exit(Exit::Usage)?;
        let addresses = resolve(&uri).await.exit(Exit::Unreachable)?;
        let mut tcp = HttpConnector::new_with_resolver(Resolved(addresses));
        tcp.set_connect_timeout(Some(CONNECT_WITHIN));
        tcp.set_nodelay(true);
        tcp.enforce_http(false);
        let tls = tls::config(uri.scheme_str(), server.ca.as_deref())?;
        let builder = HttpsConnectorBuilder::new().with_tls_config(tls);
        let connector = builder.https_or_http().enable_http1().wrap_connector(tcp);
        let http = legacy::Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .build(connector);
        Ok(Self {
            http,
            uri,
            headers: headers(server)?,
            answered: Arc::default(),
        })
    }

    /// Sends a request until there is an answer or an error. A server may close a connection after an answer without saying so
    /// (llama-server does). Then the next request on it finds a closed connection, and is sent again on another one, as curl does
    /// it. A connection on which no answer has come yet gets no second chance: that is a failed request.
    pub(super) async fn post(
        &self,
        id: &str,
        lane: Option<&'static str>,
        body: Bytes,
    ) -> Result<Response<Incoming>, legacy::Error> {
        let mut resends = 0;
        loop {
            match self.http.request(self.request(id, lane, body.clone())).await {
                Ok(response) => {
                    if let Some(address) = address_of(response.extensions()) {
                        self.answered().insert(address);
                    }
                    return Ok(response);
                }
                Err(error) if resends < RESENDS_MAX && self.was_closed_after_an_answer(&error) => resends += 1,
                Err(error) => return Err(error),
            }
        }
    }

    fn was_closed_after_an_answer(&self, error: &legacy::Error) -> bool {
        let mut of_connection = Extensions::new();
        let Some(connection) = error.connect_info() else {
            return false;
        };
        connection.get_extras(&mut of_connection);
        address_of(&of_connection).is_some_and(|address| self.answered().remove(&address))
    }

    fn answered(&self) -> MutexGuard<'_, HashSet<SocketAddr>> {
        self.answered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn request(&self, id: &str, lane: Option<&'static str>, body: Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = http::Method::POST;
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.headers.clone();
        if let Ok(id) = HeaderValue::from_str(id) {
            request
                .headers_mut()
                .insert(HeaderName::from_static("x-request-id"), id);
        }
        if let Some(lane) = lane {
            let lane = HeaderValue::from_static(lane);
            request.headers_mut().insert(HeaderName::from_static("x-lane"), lane);
        }
        request
    }
}

/// This side's address of a connection, which no other connection has while it is open.
fn address_of(of_connection: &Extensions) -> Option<SocketAddr> {
    of_connection.get::<HttpInfo>().map(HttpInfo::local_addr)
}

fn headers(server: &Server) -> anyhow::Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::ACCEPT, HeaderValue::from_static("text/event-stream"));
    let key = server.api_key.iter();
    let key = key.map(|key| ("authorization", format!("Bearer {key}")));
    let more = server
        .headers
        .iter()
        .map(|(name, value)| (name.as_str(), value.clone()));
    for (name, value) in key.chain(more) {
        // The value may be a secret, so the error does not show it.
        let parsed = (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_str(&value));
        let (Ok(name), Ok(value)) = parsed else {
            return Err(anyhow::anyhow!(
                "the header `{name}` has a name or a value that HTTP does not allow"
            ))
            .exit(Exit::Usage);
        };
        headers.insert(name, value);
    }
    Ok(headers)
}

/// The addresses of the server, asked for once: a look-up for each connection would be measured, too.
async fn resolve(uri: &Uri) -> anyhow::Result<Vec<SocketAddr>> {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let usual = if uri.scheme_str() == Some("https") { 443 } else { 80 };
    let found = tokio::net::lookup_host((host, uri.port_u16().unwrap_or(usual))).await;
    let found = found.with_context(|| format!("cannot find the host {host}"))?;
    Ok(found.collect())
}

#[derive(Clone, Debug)]
struct Resolved(Vec<SocketAddr>);

impl Service<Name> for Resolved {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = Ready<Result<Self::Response, io::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), io::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Name) -> Self::Future {
        ready(Ok(self.0.clone().into_iter()))
    }
}
