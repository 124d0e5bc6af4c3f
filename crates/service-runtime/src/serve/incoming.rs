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
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::server::Connected;

use super::closable::Closable;
use super::refusals::{FailedAccepts, Refusals};

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

/// `streams`: what a listener accepts, and its errors. None of the errors ends the server.
pub(super) fn incoming(
    streams: impl Stream<Item = io::Result<TcpStream>>,
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
        failures: FailedAccepts::default(),
    });
    let at_door = door.clone();
    // One error at a time: callers that have come are greeted during its pause.
    let accepted = streams.filter_map(move |stream| {
        let door = at_door.clone();
        async move {
            match stream {
                Ok(stream) => Some(stream),
                Err(error) => {
                    door.failures.pause_after(&error).await;
                    None
                }
            }
        }
    });
    let greet = move |stream| {
        let door = door.clone();
        async move { door.greet(stream).await.map(Ok) }
    };
    let greeted = accepted.map(greet).buffer_unordered(GREETED_AT_ONCE);
    greeted.filter_map(std::future::ready)
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
    failures: FailedAccepts,
}

impl Door {
    async fn greet(&self, stream: TcpStream) -> Option<Accepted> {
        let _ = stream.set_nodelay(true);
        // The pings of HTTP/2 notice a caller of gRPC that vanished. A caller of HTTP/1.1 has no pings.
        let _ = rustix::net::sockopt::set_socket_keepalive(&stream, true);
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
        let ends_with_place = over.clone().drop_guard();
        // One task for each place at most. It ends with its place: callers that leave at once and come again would leave any number of
        // tasks behind.
        let _ends = tokio::spawn(async move {
            let _ = tokio::time::timeout(NOBODYS_CONNECTION_TIME_LIMIT, over.cancelled()).await;
            over.cancel();
        });
        Ok(NobodysPlace {
            _ends_with_place: ends_with_place,
            _of_address: of_address,
            _of_all: of_all,
        })
    }
}

/// Of a connection without a certificate, until it ends.
#[derive(Debug)]
struct NobodysPlace {
    _ends_with_place: DropGuard,
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

/// Whose connections are counted together: a host with IPv6 has a network of addresses (RFC 4291: 64 bits).
pub fn network_of(address: IpAddr) -> IpAddr {
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::FutureExt as _;
    use tokio::net::TcpListener;
    use tokio::time::Instant;

    use super::*;
    use crate::serve::refusals::ACCEPT_PAUSE;

    #[tokio::test]
    async fn an_accept_that_fails_is_tried_again_after_a_pause_and_the_next_caller_is_served() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _caller = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let mut caller = Some(listener.accept().await.unwrap().0);
        let (start, errors) = (Instant::now(), AtomicUsize::new(0));
        let streams = futures::stream::poll_fn(|_| {
            if start.elapsed() < 3 * ACCEPT_PAUSE {
                errors.fetch_add(1, Ordering::Relaxed);
                return Poll::Ready(Some(Err(io::Error::from_raw_os_error(libc::EMFILE))));
            }
            caller
                .take()
                .map_or(Poll::Pending, |stream| Poll::Ready(Some(Ok(stream))))
        });
        let mut incoming = Box::pin(incoming(streams, Identity::none(), CancellationToken::new()));
        let first = incoming.next().await.unwrap();
        assert!(first.is_ok(), "{first:?}");
        let errors = errors.load(Ordering::Relaxed);
        assert!((1..=3).contains(&errors), "{errors} errors in the time of 3 pauses");
    }

    #[tokio::test]
    async fn a_connection_without_a_certificate_leaves_no_timer_behind() {
        let door = Door {
            identity: Identity::none(),
            over: CancellationToken::new(),
            greeted: ByAddress::of(1),
            nobodies: ByAddress::of(1),
            places: Arc::new(Semaphore::new(1)),
            refusals: Refusals::of("a connection is refused"),
            failures: FailedAccepts::default(),
        };
        let over = door.over.child_token();
        let place = door.nobodys_place(Ipv4Addr::LOCALHOST.into(), over.clone()).unwrap();
        assert!(!over.is_cancelled(), "the connection is open");
        assert!(
            door.nobodys_place(Ipv4Addr::LOCALHOST.into(), door.over.child_token())
                .is_err()
        );
        drop(place);
        // The timer waits for this.
        assert!(over.is_cancelled());
        assert!(!door.over.is_cancelled(), "other connections go on");
    }

    #[tokio::test]
    async fn a_caller_that_gave_up_delays_nobody() {
        let gone = [io::ErrorKind::ConnectionAborted, io::ErrorKind::ConnectionReset];
        let streams = futures::stream::iter(gone.map(|kind| Err(kind.into())));
        let mut incoming = Box::pin(incoming(streams, Identity::none(), CancellationToken::new()));
        let next = incoming.next().now_or_never();
        assert!(matches!(next, Some(None)), "it does not wait: {next:?}");
    }
}
