//! GET requests to the hub and to the servers that it sends to. The token goes to the hub alone.

use std::time::Duration;

use http::header::{AUTHORIZATION, ETAG, LOCATION, RANGE, USER_AGENT};
use http::{HeaderMap, HeaderName, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::{Bytes, Incoming};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy;
use hyper_util::rt::TokioExecutor;
use rustls::{ClientConfig, RootCertStore, crypto};

use super::settings::HubSettings;
use crate::http::connect::Connector;
use crate::model::error::PullError;
use crate::model::hub_error::{HubError, Unreachable};
use crate::model::interrupt::Interrupt;

const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// From request to head, and between two pieces of a body.
const SILENT_MAX: Duration = Duration::from_secs(30);
/// How often a wait looks whether the user wants to stop.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The hub sends to a server that holds the file, which may send on once or twice.
const REDIRECTS_MAX: usize = 8;

pub(super) struct Client {
    inner: legacy::Client<HttpsConnector<Connector>, Empty<Bytes>>,
    endpoint: String,
    token: Option<String>,
}

/// The head of a file, and its body to come.
pub(super) struct Answer {
    /// Of the last server.
    pub status: StatusCode,
    /// What the hub itself says of the file, before it sends to another server.
    pub entity: Entity,
    body: Incoming,
}

/// What identifies a file's content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Entity {
    /// SHA-256 of a large file, the Git id of a small one.
    pub id: Option<String>,
    pub bytes: Option<u64>,
}

impl Client {
    pub(super) fn new(settings: &HubSettings) -> Result<Client, HubError> {
        let builder = HttpsConnectorBuilder::new();
        let builder = match settings.endpoint.starts_with("http://") {
            // A mirror without TLS: the machine may have no certificates at all.
            true => builder.with_tls_config(without_certificates()?),
            false => builder
                .with_provider_and_native_roots(crypto::ring::default_provider())
                .map_err(HubError::Certificates)?,
        };
        let connector = builder
            .https_or_http()
            .enable_http1()
            .wrap_connector(Connector::from_env(CONNECT_WITHIN));
        Ok(Client {
            inner: legacy::Client::builder(TokioExecutor::new()).build(connector),
            endpoint: settings.endpoint.clone(),
            token: settings.token.clone(),
        })
    }

    /// The URL of a page of the hub.
    pub(super) fn url(&self, path: &str) -> String {
        format!("{}/{path}", self.endpoint)
    }

    /// Asks for `url`, from its byte `from` on, and follows where it sends to.
    pub(super) async fn get(&self, url: &str, from: u64, interrupt: &Interrupt) -> Result<Answer, PullError> {
        let mut place = parse(url)?;
        let own = parse(&self.endpoint)?;
        let mut entity: Option<Entity> = None;
        for _ in 0..REDIRECTS_MAX {
            let mut request = Request::get(&place).header(USER_AGENT, concat!("baton/", env!("CARGO_PKG_VERSION")));
            let is_hub = (place.scheme(), place.authority()) == (own.scheme(), own.authority());
            if let Some(token) = self.token.as_ref().filter(|_| is_hub) {
                request = request.header(AUTHORIZATION, format!("Bearer {token}"));
            }
            if from > 0 {
                request = request.header(RANGE, format!("bytes={from}-"));
            }
            let request = request.body(Empty::new()).map_err(|_| no_url(url))?;
            let answer = patiently(self.inner.request(request), interrupt).await?;
            let answer = answer
                .map_err(|silent| unreachable(url, silent))?
                .map_err(|cause| unreachable(url, Unreachable::Request(cause)))?;
            let own_entity = entity.get_or_insert_with(|| Entity::of(answer.headers())).clone();
            if !answer.status().is_redirection() {
                return Ok(Answer {
                    status: answer.status(),
                    entity: own_entity,
                    body: answer.into_body(),
                });
            }
            let next = answer.headers().get(LOCATION).and_then(|next| next.to_str().ok());
            let next = next.and_then(|next| join(&place, next));
            place = next.ok_or_else(|| redirects(url, 1))?;
        }
        Err(redirects(url, REDIRECTS_MAX).into())
    }
}

impl Answer {
    /// The next piece of the body; `None` at its end.
    pub(super) async fn next(
        &mut self,
        interrupt: &Interrupt,
    ) -> Result<Result<Option<Bytes>, Unreachable>, PullError> {
        loop {
            let frame = match patiently(self.body.frame(), interrupt).await? {
                Ok(None) => return Ok(Ok(None)),
                Ok(Some(frame)) => frame,
                Err(silent) => return Ok(Err(silent)),
            };
            match frame.map(|frame| frame.into_data()) {
                Ok(Ok(data)) => return Ok(Ok(Some(data))),
                // Trailers.
                Ok(Err(_)) => {}
                Err(cause) => return Ok(Err(Unreachable::Body(cause))),
            }
        }
    }
}

impl Entity {
    /// The hub has the large file's own values in headers of its own, because it sends to another server.
    fn of(headers: &HeaderMap) -> Entity {
        let text = |name: HeaderName| headers.get(name)?.to_str().ok();
        let linked = HeaderName::from_static("x-linked-etag");
        let id = text(linked).or_else(|| text(ETAG)).map(|tag| {
            let tag = tag.trim_start_matches("W/").trim_matches('"');
            tag.to_ascii_lowercase()
        });
        let bytes = text(HeaderName::from_static("x-linked-size")).and_then(|bytes| bytes.parse().ok());
        Entity { id, bytes }
    }
}

/// Waits at most [`SILENT_MAX`], and looks for an interrupt meanwhile.
async fn patiently<T>(
    work: impl Future<Output = T>,
    interrupt: &Interrupt,
) -> Result<Result<T, Unreachable>, PullError> {
    let mut work = std::pin::pin!(tokio::time::timeout(SILENT_MAX, work));
    loop {
        interrupt.check()?;
        match tokio::time::timeout(LOOK_EVERY, &mut work).await {
            Err(_) => {}
            Ok(Ok(done)) => return Ok(Ok(done)),
            Ok(Err(_)) => {
                return Ok(Err(Unreachable::Silent {
                    seconds: SILENT_MAX.as_secs(),
                }));
            }
        }
    }
}

fn parse(url: &str) -> Result<Uri, HubError> {
    let uri: Uri = url.parse().map_err(|_| no_url(url))?;
    let is_http = matches!(uri.scheme_str(), Some("http" | "https"));
    is_http.then_some(uri).ok_or_else(|| no_url(url))
}

/// The address that `next` is, seen from `place`. A page behind TLS never sends to one without.
fn join(place: &Uri, next: &str) -> Option<Uri> {
    let next: Uri = match next.starts_with('/') {
        true => format!("{}://{}{next}", place.scheme()?, place.authority()?)
            .parse()
            .ok()?,
        false => next.parse().ok()?,
    };
    match (place.scheme_str(), next.scheme_str()) {
        (Some("http"), Some("http" | "https")) | (Some("https"), Some("https")) => Some(next),
        _ => None,
    }
}

fn without_certificates() -> Result<ClientConfig, HubError> {
    let builder = ClientConfig::builder_with_provider(crypto::ring::default_provider().into());
    let builder = builder.with_safe_default_protocol_versions().map_err(HubError::Tls)?;
    Ok(builder
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth())
}

fn unreachable(url: &str, cause: Unreachable) -> HubError {
    HubError::Unreachable {
        url: url.to_owned(),
        cause,
    }
}

fn no_url(url: &str) -> HubError {
    unreachable(url, Unreachable::NoUrl)
}

fn redirects(url: &str, count: usize) -> HubError {
    HubError::Redirects {
        url: url.to_owned(),
        count,
    }
}

/// A name as a part of a URL.
pub(super) fn encoded(text: &str, keeps_slashes: bool) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        let is_plain = byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~');
        if is_plain || (keeps_slashes && byte == b'/') {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_stays_behind_tls_and_may_leave_out_the_host() {
        let place = parse("https://hub.example/a/b").unwrap();
        let join = |next: &str| super::join(&place, next).map(|uri| uri.to_string());
        assert_eq!(join("/c?d=1").as_deref(), Some("https://hub.example/c?d=1"));
        assert_eq!(join("https://cdn.example/x").as_deref(), Some("https://cdn.example/x"));
        assert_eq!(join("http://cdn.example/x"), None);
        assert_eq!(join("file:///etc/passwd"), None);
        assert_eq!(encoded("refs/pr 1", false), "refs%2Fpr%201");
        assert_eq!(encoded("a/ü.gguf", true), "a/%C3%BC.gguf");
    }
}
