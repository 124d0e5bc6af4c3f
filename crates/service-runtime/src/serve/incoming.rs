//! Takes connections. Where this process has a certificate, each caller is greeted before its first call.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt as _};
use identity::{Caller, Connection, Identity};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;

use super::closable::Closable;

/// A greeting is two round trips and a millisecond of computing.
const GREETING_TIME_LIMIT: Duration = Duration::from_secs(5);
/// Callers that are greeted at the same time. Those beyond wait in the listener's queue, so that callers who say nothing delay the
/// others by [`GREETING_TIME_LIMIT`] at most for each so many of them.
const GREETED_AT_ONCE: usize = 256;
/// A caller that tries again and again fills no log.
const TOLD_EVERY: Duration = Duration::from_secs(10);

/// A connection, and who is at its other end. tonic gives [`Caller`] to each request of it.
#[derive(Debug)]
pub(super) struct Accepted {
    connection: Connection<Closable>,
    caller: Caller,
}

pub(super) fn incoming(
    listener: TcpListener,
    identity: Identity,
    over: CancellationToken,
) -> impl Stream<Item = io::Result<Accepted>> {
    let refusals = Arc::new(Refusals::default());
    let greet = move |stream: io::Result<TcpStream>| {
        let (identity, over, refusals) = (identity.clone(), over.clone(), refusals.clone());
        async move {
            let stream = match stream {
                Ok(stream) => stream,
                Err(error) => return Some(Err(error)),
            };
            let _ = stream.set_nodelay(true);
            let from = stream.peer_addr().ok();
            let accepting = identity.accept(Closable::new(stream, over));
            let why = match tokio::time::timeout(GREETING_TIME_LIMIT, accepting).await {
                Ok(Ok((connection, caller))) => return Some(Ok(Accepted { connection, caller })),
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("no greeting within {} s", GREETING_TIME_LIMIT.as_secs()),
            };
            refusals.tell(from, &why);
            None
        }
    };
    let greeted = TcpListenerStream::new(listener).map(greet);
    greeted.buffer_unordered(GREETED_AT_ONCE).filter_map(std::future::ready)
}

/// Callers that were turned away.
#[derive(Debug, Default)]
struct Refusals(Mutex<Told>);

#[derive(Debug, Default)]
struct Told {
    at: Option<Instant>,
    since: u64,
}

impl Refusals {
    fn tell(&self, from: Option<SocketAddr>, why: &str) {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        told.since += 1;
        if told.at.is_some_and(|at| at.elapsed() < TOLD_EVERY) {
            return;
        }
        let from = from.map(|from| from.to_string()).unwrap_or_default();
        tracing::warn!(from, why, count = told.since, "a connection is refused");
        *told = Told {
            at: Some(Instant::now()),
            since: 0,
        };
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
