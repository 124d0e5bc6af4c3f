//! One client connection's stream: when its bytes came and went, and an end to writes that nobody reads.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

/// The moments of a connection that requests are measured by. HTTP/1.1 has one request at a time on it.
#[derive(Debug)]
pub struct ConnectionTimes {
    opened_at: Instant,
    /// Nanoseconds after `opened_at`, plus one; 0 while nothing was read.
    first_read: AtomicU64,
    is_write_awaited: AtomicBool,
    awaited_write: AtomicU64,
}

impl ConnectionTimes {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            opened_at: Instant::now(),
            first_read: AtomicU64::new(0),
            is_write_awaited: AtomicBool::new(false),
            awaited_write: AtomicU64::new(0),
        })
    }

    /// When the first byte since `forget_first_read` was read.
    pub fn first_read(&self) -> Option<Instant> {
        self.instant(&self.first_read)
    }
    /// The request is read: the next byte belongs to the next one.
    pub fn forget_first_read(&self) {
        self.first_read.store(0, Ordering::Relaxed);
    }
    /// From now on: note when the socket next takes bytes.
    pub fn await_write(&self) {
        self.awaited_write.store(0, Ordering::Relaxed);
        self.is_write_awaited.store(true, Ordering::Relaxed);
    }
    /// When the socket first took bytes after `await_write`.
    pub fn awaited_write(&self) -> Option<Instant> {
        self.instant(&self.awaited_write)
    }

    fn instant(&self, cell: &AtomicU64) -> Option<Instant> {
        let stamp = cell.load(Ordering::Relaxed);
        (stamp > 0).then(|| self.opened_at + Duration::from_nanos(stamp - 1))
    }
    fn now(&self) -> u64 {
        u64::try_from(self.opened_at.elapsed().as_nanos())
            .unwrap_or(u64::MAX - 1)
            .saturating_add(1)
    }
    fn noted_read(&self) {
        if self.first_read.load(Ordering::Relaxed) == 0 {
            self.first_read.store(self.now(), Ordering::Relaxed);
        }
    }
    fn noted_write(&self) {
        if self.is_write_awaited.swap(false, Ordering::Relaxed) {
            self.awaited_write.store(self.now(), Ordering::Relaxed);
        }
    }
}

/// A TCP stream that stamps its reads and writes and fails a write nobody takes for `write_stall_max`: the connection
/// then ends, and with it the request (a reader that stopped reading holds KV blocks).
#[derive(Debug)]
pub struct TimedStream {
    stream: TcpStream,
    times: Arc<ConnectionTimes>,
    write_stall_max: Duration,
    stall: Option<Pin<Box<Sleep>>>,
}

impl TimedStream {
    pub fn new(stream: TcpStream, write_stall_max: Duration) -> Self {
        Self {
            stream,
            times: ConnectionTimes::new(),
            write_stall_max,
            stall: None,
        }
    }
    pub fn times(&self) -> Arc<ConnectionTimes> {
        self.times.clone()
    }

    fn watch_write<T>(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.stall = None;
            return result;
        }
        let limit = self.write_stall_max;
        let stall = self.stall.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        if stall.as_mut().poll(cx).is_ready() {
            let message = format!("the client read nothing for {} ms", limit.as_millis());
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, message)));
        }
        Poll::Pending
    }
}

impl AsyncRead for TimedStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let result = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if buffer.filled().len() > before {
            self.times.noted_read();
        }
        result
    }
}

impl AsyncWrite for TimedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if matches!(result, Poll::Ready(Ok(_))) {
            self.times.noted_write();
        }
        self.watch_write(cx, result)
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        if matches!(result, Poll::Ready(Ok(_))) {
            self.times.noted_write();
        }
        self.watch_write(cx, result)
    }
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_flush(cx);
        self.watch_write(cx, result)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
