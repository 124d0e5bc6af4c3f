//! Connections to a server, through the proxy that the environment names for `https://` (`HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY`).

use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::proxy::matcher::Matcher;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tower::Service;

/// Keepalive notices a dead link under a stream. A request may take minutes, and nothing is sent until it ends.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(15);

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Opens connections, below TLS.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    tcp: HttpConnector,
    proxies: Arc<Matcher>,
}

impl Connector {
    /// `connect_within`: the time for all addresses of a host.
    pub(crate) fn from_env(connect_within: Duration) -> Connector {
        Connector::new(Matcher::from_env(), connect_within)
    }

    fn new(proxies: Matcher, connect_within: Duration) -> Connector {
        let mut tcp = HttpConnector::new();
        tcp.set_connect_timeout(Some(connect_within));
        tcp.set_keepalive(Some(KEEP_ALIVE_EVERY));
        tcp.set_nodelay(true);
        tcp.enforce_http(false);
        Connector {
            tcp,
            proxies: Arc::new(proxies),
        }
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<TcpStream>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.tcp.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        // A server without TLS is in the own network, and no proxy reaches this machine's loopback.
        let has_proxy = uri.scheme_str() == Some("https") && !is_loopback(&uri);
        let Some(proxy) = self.proxies.intercept(&uri).filter(|_| has_proxy) else {
            let connected = self.tcp.call(uri);
            return Box::pin(async { Ok(connected.await?) });
        };
        let mut tunnel = Tunnel::new(proxy.uri().clone(), self.tcp.clone());
        if let Some(login) = proxy.basic_auth() {
            tunnel = tunnel.with_auth(login.clone());
        }
        let connected = tunnel.call(uri);
        Box::pin(async { Ok(connected.await?) })
    }
}

fn is_loopback(uri: &Uri) -> bool {
    let host = uri.host().unwrap_or_default();
    let address: Result<IpAddr, _> = host.trim_matches(['[', ']']).parse();
    address.map_or_else(
        |_| host.eq_ignore_ascii_case("localhost"),
        |address| address.to_canonical().is_loopback(),
    )
}

/// Limits the time that an inner connector has, proxy and TLS included.
#[derive(Clone, Debug)]
pub(super) struct TimeLimit<C> {
    inner: C,
    within: Duration,
}

impl<C> TimeLimit<C> {
    pub(super) fn new(inner: C, within: Duration) -> Self {
        Self { inner, within }
    }
}

impl<C> Service<Uri> for TimeLimit<C>
where
    C: Service<Uri, Error = BoxError, Future: Send + 'static>,
{
    type Response = C::Response;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<C::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connected = tokio::time::timeout(self.within, self.inner.call(uri));
        Box::pin(async { connected.await? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncBufReadExt as _, BufReader};
    use tokio::net::TcpListener;

    /// The first line that the server at `listener` is asked.
    async fn asked(listener: TcpListener) -> String {
        let (stream, _) = listener.accept().await.unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).await.unwrap();
        line
    }

    #[test]
    fn loopback_is_known_by_its_names() {
        for (url, is_here) in [
            ("https://127.0.0.1:8443/", true),
            ("https://127.8.0.1/", true),
            ("https://[::1]:8443/", true),
            ("https://LocalHost/", true),
            ("https://10.0.0.1/", false),
            ("https://localhost.invalid/", false),
        ] {
            assert_eq!(is_loopback(&url.parse().unwrap()), is_here, "{url}");
        }
    }

    #[tokio::test]
    async fn a_server_that_takes_a_connection_and_says_nothing_of_tls_is_left_in_time() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}/", silent.local_addr().unwrap());
        let tcp = Connector::new(Matcher::builder().build(), Duration::from_secs(10));
        let tls = crate::http::tls::config(None, None).unwrap();
        let tls = hyper_rustls::HttpsConnectorBuilder::new().with_tls_config(tls);
        let https = tls.https_only().enable_http1().wrap_connector(tcp);
        let connected = TimeLimit::new(https, Duration::from_millis(50))
            .call(url.parse().unwrap())
            .await;
        assert!(connected.is_err_and(|error| error.is::<tokio::time::error::Elapsed>()));
    }

    #[tokio::test]
    async fn a_proxy_is_asked_for_a_server_with_tls_and_not_for_what_it_is_not_for() {
        let proxy = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = proxy.local_addr().unwrap();
        let matcher = Matcher::builder()
            .https(format!("http://{address}"))
            .no("near.invalid")
            .build();
        let mut connector = Connector::new(matcher, Duration::from_secs(10));
        let refused = connector.call("https://hub.invalid/x".parse().unwrap());
        let (line, refused) = tokio::join!(asked(proxy), refused);
        assert_eq!(line.trim_end(), "CONNECT hub.invalid:443 HTTP/1.1");
        assert!(refused.is_err(), "the proxy has hung up");
        // The proxy is gone, and these do not need it.
        let mirror = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let place = format!("http://{}/x", mirror.local_addr().unwrap());
        assert!(connector.call(place.parse().unwrap()).await.is_ok());
    }
}
