//! How a process reaches another one.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::Uri;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{CertificateError, OtherError};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint};

use crate::connection::Connection;
use crate::expected::Expected;
use crate::own::Identity;

/// For all addresses of a name together. Callers have the same limit for a whole connection.
const CONNECT_TIME_LIMIT: Duration = Duration::from_secs(2);

impl Identity {
    /// A channel to `endpoint`, connected. With a certificate the other end has to be the one that is expected.
    ///
    /// # Errors
    /// Nobody answers in time, or it is another process; in words, from the outermost cause to the innermost.
    pub async fn connect(&self, endpoint: Endpoint, expected: Expected) -> Result<Channel, String> {
        let connected = match self.is_on() {
            true => endpoint.connect_with_connector(self.connector(expected)).await,
            false => endpoint.connect().await,
        };
        connected.map_err(|error| chain(&error))
    }

    /// The same, connected when it is first used and again whenever it broke.
    pub fn connect_lazy(&self, endpoint: &Endpoint, expected: Expected) -> Channel {
        match self.is_on() {
            true => endpoint.connect_with_connector_lazy(self.connector(expected)),
            false => endpoint.connect_lazy(),
        }
    }

    fn connector(&self, expected: Expected) -> impl Connector {
        let identity = self.clone();
        tower::service_fn(move |to: Uri| {
            let (identity, expected) = (identity.clone(), expected.clone());
            let dialled: Dialled = Box::pin(async move {
                let address = to.authority().map(ToString::to_string).unwrap_or_default();
                Ok(TokioIo::new(identity.dial(&address, expected).await?))
            });
            dialled
        })
    }

    /// One connection to `address`, host and port. The caller limits how long it may take.
    ///
    /// # Errors
    /// Nobody listens there, or it is another process.
    pub async fn dial(&self, address: &str, expected: Expected) -> io::Result<Connection<TcpStream>> {
        let stream = connected(address).await?;
        stream.set_nodelay(true)?;
        let Some(config) = self.client_config(expected).map_err(io::Error::other)? else {
            return Ok(Connection::Plain(stream));
        };
        // The name is not sent. Who answers is decided by the URI of its certificate.
        let name = ServerName::try_from("baton.invalid").map_err(io::Error::other)?;
        let connecting = TlsConnector::from(Arc::new(config)).connect(name, stream);
        let encrypted = connecting.await.map_err(in_own_words)?;
        Ok(Connection::Encrypted(Box::new(encrypted.into())))
    }
}

/// A name may have several addresses. Each of them gets its part of the time that is left, so that the first one may be dead.
async fn connected(address: &str) -> io::Result<TcpStream> {
    let until = Instant::now() + CONNECT_TIME_LIMIT;
    let all: Vec<_> = tokio::net::lookup_host(address).await?.collect();
    let mut left = u32::try_from(all.len()).unwrap_or(u32::MAX);
    let mut last = io::Error::new(io::ErrorKind::NotFound, format!("{address} has no address"));
    for one in all {
        let each = until.saturating_duration_since(Instant::now()) / left.max(1);
        left = left.saturating_sub(1);
        match tokio::time::timeout(each, TcpStream::connect(one)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_) => last = io::Error::new(io::ErrorKind::TimedOut, format!("{one} does not answer")),
        }
    }
    Err(last)
}

type Dialled = Pin<Box<dyn Future<Output = io::Result<TokioIo<Connection<TcpStream>>>> + Send>>;

/// What tonic asks of a connector.
trait Connector:
    tower::Service<Uri, Response = TokioIo<Connection<TcpStream>>, Error = io::Error, Future = Dialled> + Send + 'static
{
}

impl<T> Connector for T where
    T: tower::Service<Uri, Response = TokioIo<Connection<TcpStream>>, Error = io::Error, Future = Dialled>
        + Send
        + 'static
{
}

/// rustls shows an error of ours as a value of Rust.
fn in_own_words(error: io::Error) -> io::Error {
    let of_rustls = error.get_ref().and_then(|inner| inner.downcast_ref());
    match of_rustls {
        Some(rustls::Error::InvalidCertificate(CertificateError::Other(OtherError(ours)))) => {
            io::Error::other(ours.to_string())
        }
        _ => error,
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Wrappers repeat what they wrap.
        if !words.ends_with(&next) {
            words = format!("{words}: {next}");
        }
        cause = error.source();
    }
    words
}
