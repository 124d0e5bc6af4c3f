//! Takes connections. Where this process has a certificate, each caller is greeted before its first call.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
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
/// Connections without a certificate: probes, of which a host has one or two for a moment. Further ones are turned away.
const NOBODYS_CONNECTIONS_MAX: usize = 128;
const NOBODYS_CONNECTIONS_FROM_ONE: usize = 16;
/// Longer than a probe waits for its answer.
const NOBODYS_CONNECTION_TIME_LIMIT: Duration = Duration::from_secs(10);

/// A connection, and who is at its other end. tonic gives [`Caller`] to each request of it.
#[derive(Debug)]
pub(super) struct Accepted {
    connection: Connection<Closable>,
    caller: Caller,
    /// Of a connection without a certificate.
    _place: Option<NobodysPlace>,
}

pub(super) fn incoming(
    listener: TcpListener,
    identity: Identity,
    over: CancellationToken,
) -> impl Stream<Item = io::Result<Accepted>> {
    let door = Arc::new(Door {
        identity,
        over,
        greeted: ByAddress::of(GREETED_AT_ONCE_FROM_ONE),
        nobodies: ByAddress::of(NOBODYS_CONNECTIONS_FROM_ONE),
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
    /// Callers that are being greeted.
    greeted: Arc<ByAddress>,
    /// Connections without a certificate.
    nobodies: Arc<ByAddress>,
    places: Arc<Semaphore>,
    refusals: Refusals,
}

impl Door {
    async fn greet(&self, stream: TcpStream) -> Option<Accepted> {
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
    async fn accept(&self, stream: TcpStream, address: IpAddr) -> Result<Accepted, String> {
        let over = self.over.child_token();
        let stream = Closable::new(stream, over.clone());
        if !self.identity.is_on() {
            let accepted = self.identity.accept(stream).await.map_err(|error| error.to_string())?;
            return Ok(Accepted::of(accepted, None));
        }
        let _turn = self
            .greeted
            .one_of(address)
            .ok_or_else(|| format!("{GREETED_AT_ONCE_FROM_ONE} others of this address have not said who they are"))?;
        let accepting = tokio::time::timeout(GREETING_TIME_LIMIT, self.identity.accept(stream));
        let accepted = accepting
            .await
            .map_err(|_| format!("it did not say within {} s who it is", GREETING_TIME_LIMIT.as_secs()))?
            .map_err(|error| error.to_string())?;
        let place = match accepted.1 {
            Caller::Nobody => Some(self.nobodys_place(address, over)?),
            _ => None,
        };
        Ok(Accepted::of(accepted, place))
    }

    /// The connection `over` ends after its time.
    fn nobodys_place(&self, address: IpAddr, over: CancellationToken) -> Result<NobodysPlace, String> {
        let of_address = self.nobodies.one_of(address).ok_or_else(|| {
            format!(
                "it has no certificate, and {NOBODYS_CONNECTIONS_FROM_ONE} such connections of its address are open"
            )
        })?;
        let of_all = self.places.clone().try_acquire_owned().map_err(|_| {
            format!("it has no certificate, and {NOBODYS_CONNECTIONS_MAX} connections without one are open")
        })?;
        // One task for each place at most, and as long.
        let _ends = tokio::spawn(async move {
            tokio::time::sleep(NOBODYS_CONNECTION_TIME_LIMIT).await;
            over.cancel();
        });
        Ok(NobodysPlace {
            _of_address: of_address,
            _of_all: of_all,
        })
    }
}

/// Of a connection without a certificate, until it ends.
#[derive(Debug)]
struct NobodysPlace {
    _of_address: Turn,
    _of_all: OwnedSemaphorePermit,
}

/// How many there are of each address, up to a number.
#[derive(Debug)]
struct ByAddress {
    most: usize,
    counts: Mutex<BTreeMap<IpAddr, usize>>,
}

impl ByAddress {
    fn of(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            counts: Mutex::default(),
        })
    }

    fn one_of(self: &Arc<Self>, address: IpAddr) -> Option<Turn> {
        let address = network_of(address);
        let mut counts = self.counts();
        let count = counts.entry(address).or_default();
        if *count >= self.most {
            return None;
        }
        *count += 1;
        Some(Turn {
            of: self.clone(),
            address,
        })
    }

    fn counts(&self) -> MutexGuard<'_, BTreeMap<IpAddr, usize>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A host with IPv6 has a network of addresses (RFC 4291: 64 bits).
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address => address,
    }
}

/// One of an address, until this is dropped.
#[derive(Debug)]
struct Turn {
    of: Arc<ByAddress>,
    address: IpAddr,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut counts = self.of.counts();
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

impl Accepted {
    fn of((connection, caller): (Connection<Closable>, Caller), place: Option<NobodysPlace>) -> Self {
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
