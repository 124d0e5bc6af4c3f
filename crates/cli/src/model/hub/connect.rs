//! Connections to the hub, through the proxy that the environment names (`HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY`).

use std::future::Future;
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

const CONNECT_WITHIN: Duration = Duration::from_secs(10);

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Opens connections, below TLS.
#[derive(Clone)]
pub(super) struct Connector {
    tcp: HttpConnector,
    proxies: Arc<Matcher>,
}

impl Connector {
    pub(super) fn from_env() -> Connector {
        Connector::new(Matcher::from_env())
    }

    fn new(proxies: Matcher) -> Connector {
        let mut tcp = HttpConnector::new();
        tcp.set_connect_timeout(Some(CONNECT_WITHIN));
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
        // A server without TLS is a mirror in the own network.
        let is_tls = uri.scheme_str() == Some("https");
        let Some(proxy) = self.proxies.intercept(&uri).filter(|_| is_tls) else {
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

    #[tokio::test]
    async fn a_proxy_is_asked_for_the_hub_and_not_for_what_it_is_not_for() {
        let proxy = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = proxy.local_addr().unwrap();
        let matcher = Matcher::builder()
            .https(format!("http://{address}"))
            .no("near.invalid")
            .build();
        let mut connector = Connector::new(matcher);
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
