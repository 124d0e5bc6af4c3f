//! A small HTTP client with TLS, for the verbs that ask a server.
//!
//! reqwest has TLS, too. With it each client of reqwest in the tree, also the exporters', which never use TLS, would need a
//! process-wide provider and the authorities of the machine.

use std::error::Error as StdError;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, BodyStream, Collected, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpInfo;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::ClientConfig;
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::time::{Instant, timeout_at};

use super::connect::{Connector, TimeLimit};

/// The largest page of a coordinator, a thousand records with the fingerprints of long prompts, has some tens of megabytes.
const BODY_BYTES_MAX: usize = 256 << 20;

#[derive(Debug, Error)]
pub enum HttpError {
    #[error("`{0}` is no URL of HTTP")]
    Url(String),
    #[error("a header has characters that HTTP does not allow")]
    Header(#[from] http::Error),
    #[error("nothing came within the time limit")]
    Silent,
    #[error(transparent)]
    Request(#[from] legacy::Error),
    #[error("the answer broke off")]
    Body(#[from] hyper::Error),
    #[error("the answer has more than {bytes_max} bytes; is this the server that is meant?")]
    TooLong { bytes_max: usize },
    #[error("the body is not the JSON that was expected")]
    Json(#[from] serde_json::Error),
}

impl HttpError {
    /// Of a body with a limit: the connection's error, or that of the limit.
    fn of_body(error: Box<dyn StdError + Send + Sync>, bytes_max: usize) -> Self {
        match error.downcast::<hyper::Error>() {
            Ok(broken) => HttpError::Body(*broken),
            Err(_) => HttpError::TooLong { bytes_max },
        }
    }

    /// Why the two ends did not agree on TLS, if that is what happened.
    pub(super) fn of_tls(&self) -> Option<&rustls::Error> {
        let mut cause: Option<&(dyn StdError + 'static)> = Some(self);
        while let Some(error) = cause {
            if let Some(found) = error.downcast_ref() {
                return Some(found);
            }
            // An error of input and output names the source of what it wraps, and not what it wraps.
            let wrapped = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
            cause = match wrapped {
                Some(wrapped) => Some(wrapped),
                None => error.source(),
            };
        }
        None
    }
}

/// Clones share the connections.
#[derive(Clone, Debug)]
pub struct Client {
    inner: legacy::Client<TimeLimit<HttpsConnector<Connector>>, Full<Bytes>>,
    headers: HeaderMap,
}

impl Client {
    /// `connect_within`: the time for a connection with all that belongs to it.
    pub(super) fn new(connect_within: Duration, tls: ClientConfig, headers: HeaderMap) -> Self {
        let connector = Connector::from_env(connect_within);
        let builder = HttpsConnectorBuilder::new().with_tls_config(tls);
        let connector = builder.https_or_http().enable_http1().wrap_connector(connector);
        let inner = legacy::Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .build(TimeLimit::new(connector, connect_within));
        Self { inner, headers }
    }

    pub fn get(&self, url: impl AsRef<str>) -> Asking {
        self.request(Method::GET, url)
    }

    pub fn post(&self, url: impl AsRef<str>) -> Asking {
        self.request(Method::POST, url)
    }

    pub(crate) fn request(&self, method: Method, url: impl AsRef<str>) -> Asking {
        Asking {
            client: self.clone(),
            request: request(method, url.as_ref(), self.headers.clone()),
            within: None,
        }
    }
}

/// The header of a key. It is shown in no log.
pub(super) fn bearer(key: &str) -> Result<HeaderValue, http::Error> {
    let mut value = HeaderValue::from_str(&format!("Bearer {key}"))?;
    value.set_sensitive(true);
    Ok(value)
}

fn request(method: Method, url: &str, headers: HeaderMap) -> Result<Request<Full<Bytes>>, HttpError> {
    let is_http = |uri: &Uri| uri.host().is_some() && matches!(uri.scheme_str(), Some("http" | "https"));
    let uri = url.parse().ok().filter(is_http);
    let mut request = Request::new(Full::default());
    *request.method_mut() = method;
    *request.uri_mut() = uri.ok_or_else(|| HttpError::Url(url.to_owned()))?;
    *request.headers_mut() = headers;
    Ok(request)
}

/// A request that is being put together. What is wrong with it is told when it is sent.
#[derive(Debug)]
pub struct Asking {
    client: Client,
    request: Result<Request<Full<Bytes>>, HttpError>,
    within: Option<Duration>,
}

impl Asking {
    #[must_use]
    pub(crate) fn header(self, name: &str, value: &str) -> Self {
        let parsed = HeaderName::try_from(name).map_err(http::Error::from);
        self.with(parsed.and_then(|name| Ok((name, HeaderValue::from_str(value)?))))
    }

    fn with(mut self, header: Result<(HeaderName, HeaderValue), http::Error>) -> Self {
        self.request = self.request.and_then(|mut request| {
            let (name, value) = header?;
            request.headers_mut().insert(name, value);
            Ok(request)
        });
        self
    }

    #[must_use]
    pub(crate) fn bearer_auth(self, key: &str) -> Self {
        self.with(bearer(key).map(|value| (AUTHORIZATION, value)))
    }

    #[must_use]
    pub fn json(self, body: &impl Serialize) -> Self {
        let mut asking = self.header(CONTENT_TYPE.as_str(), "application/json");
        asking.request = asking.request.and_then(|mut request| {
            *request.body_mut() = Full::new(serde_json::to_vec(body)?.into());
            Ok(request)
        });
        asking
    }

    /// For the whole answer.
    #[must_use]
    pub(crate) fn timeout(self, within: Duration) -> Self {
        Self {
            within: Some(within),
            ..self
        }
    }

    /// # Errors
    /// No answer came, or the request could not be made.
    pub async fn send(self) -> Result<Answer, HttpError> {
        let until = self.within.map(|within| Instant::now() + within);
        let sent = async { Ok(self.client.inner.request(self.request?).await?) };
        let response = in_time(until, sent).await?;
        Ok(Answer { response, until })
    }
}

/// The head of an answer, and its body to come.
#[derive(Debug)]
pub struct Answer {
    response: Response<Incoming>,
    until: Option<Instant>,
}

impl Answer {
    pub fn status(&self) -> StatusCode {
        self.response.status()
    }

    pub(crate) fn headers(&self) -> &HeaderMap {
        self.response.headers()
    }

    /// The other end of the connection.
    pub(crate) fn remote_addr(&self) -> Option<SocketAddr> {
        self.response.extensions().get().map(HttpInfo::remote_addr)
    }

    /// # Errors
    /// The body does not come to its end, or it has no end.
    pub(crate) async fn bytes(self) -> Result<Bytes, HttpError> {
        self.at_most(BODY_BYTES_MAX).await
    }

    async fn at_most(self, bytes_max: usize) -> Result<Bytes, HttpError> {
        let body = Limited::new(self.response.into_body(), bytes_max);
        let whole = async {
            let collected = body.collect().await.map(Collected::to_bytes);
            collected.map_err(|error| HttpError::of_body(error, bytes_max))
        };
        in_time(self.until, whole).await
    }

    /// What is not UTF-8 is replaced.
    ///
    /// # Errors
    /// The body does not come to its end.
    pub async fn text(self) -> Result<String, HttpError> {
        Ok(String::from_utf8_lossy(&self.bytes().await?).into_owned())
    }

    /// # Errors
    /// The body does not come to its end, or is something else.
    pub async fn json<T: DeserializeOwned>(self) -> Result<T, HttpError> {
        Ok(serde_json::from_slice(&self.bytes().await?)?)
    }

    /// The body as it comes, without a time limit.
    pub fn bytes_stream(self) -> impl Stream<Item = Result<Bytes, HttpError>> + Send + Unpin {
        let frames = BodyStream::new(self.response.into_body());
        frames.filter_map(|frame| {
            let data = match frame {
                Ok(frame) => frame.into_data().ok().map(Ok),
                Err(error) => Some(Err(error.into())),
            };
            std::future::ready(data)
        })
    }
}

async fn in_time<T>(until: Option<Instant>, work: impl Future<Output = Result<T, HttpError>>) -> Result<T, HttpError> {
    match until {
        Some(until) => timeout_at(until, work).await.unwrap_or(Err(HttpError::Silent)),
        None => work.await,
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn an_answer_that_is_too_long_is_not_kept_in_memory() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                let _ = socket.read(&mut [0; 4096]).await;
                let answer = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 9\r\n\r\n123456789";
                let _ = socket.write_all(answer.as_bytes()).await;
            }
        });
        let client = crate::http::client(&url, None).expect("a client");
        let answer = async || client.get(&url).send().await.expect("an answer");
        let whole = answer().await.at_most(9).await.expect("all of it");
        assert_eq!(whole.as_ref(), b"123456789");
        let error = answer().await.at_most(8).await.expect_err("one byte too many");
        assert!(matches!(error, HttpError::TooLong { bytes_max: 8 }), "{error:?}");
    }
}
