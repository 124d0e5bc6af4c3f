//! Takes connections. Where this process has a certificate, each caller is greeted before its first call.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use identity::{Caller, Connection, Identity};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;

use super::closable::Closable;
use super::refusals::Refusals;

/// A greeting is two round trips and a millisecond of computing. Callers of ours give up after the same time
/// (`CONNECT_TIME_LIMIT`).
const GREETING_TIME_LIMIT: Duration = Duration::from_secs(2);
/// Callers that are greeted at the same time. Further ones wait in the listener's queue.
const GREETED_AT_ONCE: usize = 256;
/// Of them from one address. Further ones are turned away, so that one host which says nothing keeps no other host waiting.
const GREETED_AT_ONCE_FROM_ONE: usize = 64;
/// Connections without a certificate: probes, of which one host has a few. Further ones are turned away.
const NOBODYS_CONNECTIONS_MAX: usize = 128;

/// A connection, and who is at its other end. tonic gives [`Caller`] to each request of it.
#[derive(Debug)]
pub(super) struct Accepted {
    connection: Connection<Closable>,
    caller: Caller,
    /// Of a connection without a certificate.
    _place: Option<OwnedSemaphorePermit>,
}

pub(super) fn incoming(
    listener: TcpListener,
    identity: Identity,
    over: CancellationToken,
) -> impl Stream<Item = io::Result<Accepted>> {
    let door = Arc::new(Door {
        identity,
        over,
        greeted: Mutex::default(),
        places: Arc::new(Semaphore::new(NOBODYS_CONNECTIONS_MAX)),
        refusals: Refusals::of("a connection is refused"),
    });
    let greet = move |stream: io::Result<TcpStream>| {
        let door = door.clone();
        async move {
            match stream {
                Ok(stream) => door.greet(stream).await.map(Ok),
                Err(error) => Some(Err(error)),
            }
        }
    };
    let greeted = TcpListenerStream::new(listener).map(greet);
    greeted.buffer_unordered(GREETED_AT_ONCE).filter_map(std::future::ready)
}

/// Where callers are greeted.
#[derive(Debug)]
struct Door {
    identity: Identity,
    over: CancellationToken,
    /// Callers that are being greeted, by address.
    greeted: Mutex<BTreeMap<IpAddr, usize>>,
    places: Arc<Semaphore>,
    refusals: Refusals,
}

impl Door {
    async fn greet(self: &Arc<Self>, stream: TcpStream) -> Option<Accepted> {
        let _ = stream.set_nodelay(true);
        let address = stream
            .peer_addr()
            .map_or(Ipv4Addr::UNSPECIFIED.into(), |from| from.ip());
        let greeted = self.accept(stream, address).await;
        greeted
            .inspect_err(|why| self.refusals.tell(&address.to_string(), why))
            .ok()
    }

    /// # Errors
    /// Why the caller is turned away, for the log.
    async fn accept(self: &Arc<Self>, stream: TcpStream, address: IpAddr) -> Result<Accepted, String> {
        let stream = Closable::new(stream, self.over.clone());
        if !self.identity.is_on() {
            let accepted = self.identity.accept(stream).await.map_err(|error| error.to_string())?;
            return Ok(Accepted::of(accepted, None));
        }
        let _turn = Turn::of(self, address)
            .ok_or_else(|| format!("{GREETED_AT_ONCE_FROM_ONE} others of this address have not said who they are"))?;
        let accepting = tokio::time::timeout(GREETING_TIME_LIMIT, self.identity.accept(stream));
        let accepted = accepting
            .await
            .map_err(|_| format!("it did not say within {} s who it is", GREETING_TIME_LIMIT.as_secs()))?
            .map_err(|error| error.to_string())?;
        let place = match accepted.1 {
            Caller::Nobody => Some(self.places.clone().try_acquire_owned().map_err(|_| {
                format!("it has no certificate, and {NOBODYS_CONNECTIONS_MAX} connections without one are open")
            })?),
            _ => None,
        };
        Ok(Accepted::of(accepted, place))
    }

    fn greeted(&self) -> MutexGuard<'_, BTreeMap<IpAddr, usize>> {
        self.greeted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One caller of an address that is being greeted, until this is dropped.
struct Turn {
    door: Arc<Door>,
    address: IpAddr,
}

impl Turn {
    fn of(door: &Arc<Door>, address: IpAddr) -> Option<Self> {
        let mut greeted = door.greeted();
        let count = greeted.entry(address).or_default();
        if *count >= GREETED_AT_ONCE_FROM_ONE {
            return None;
        }
        *count += 1;
        Some(Self {
            door: door.clone(),
            address,
        })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut greeted = self.door.greeted();
        if let Some(count) = greeted.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                greeted.remove(&self.address);
            }
        }
    }
}

impl Accepted {
    fn of((connection, caller): (Connection<Closable>, Caller), place: Option<OwnedSemaphorePermit>) -> Self {
        Self {
            connection,
            caller,
            _place: place,
        }
    }
}

impl Connected for Accepted {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.caller.clone()
    }
}

impl AsyncRead for Accepted {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_read(context, into)
    }
}

impl AsyncWrite for Accepted {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.connection).poll_write(context, bytes)
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.connection).poll_write_vectored(context, slices)
    }
    fn is_write_vectored(&self) -> bool {
        self.connection.is_write_vectored()
    }
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_flush(context)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_shutdown(context)
    }
}
