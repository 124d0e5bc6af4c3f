//! The stream of one client connection: it notes when bytes came and went, and ends writes that nobody reads.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

/// The moments of a connection that requests are measured by. HTTP/1.1 has one request at a time on a connection.
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
    /// The request has been read. The next byte belongs to the next request.
    pub fn forget_first_read(&self) {
        self.first_read.store(0, Ordering::Relaxed);
    }
    /// Notes from now on when the socket next takes bytes.
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

/// A client that has bytes waiting must take this many in each [`READ_WINDOW`]: 128 bytes a second, which is a slow reader
/// of one stream of tokens. A client that takes less is gone, is stuck, or wants to hold its place and its buffer for ever.
const READ_FLOOR_BYTES: usize = 128 * 30;
const READ_WINDOW: Duration = Duration::from_secs(30);
/// A client that has kept up for this long begins anew.
const CAUGHT_UP_AFTER: Duration = Duration::from_secs(5);
/// Bytes that may wait for all clients together. Above this sum a client that has been behind for [`BEHIND_MAX`] is cut
/// off.
const BUFFERED_BYTES_MAX: usize = 64 << 20;
const BEHIND_MAX: Duration = Duration::from_secs(1);

/// Bytes of answers that wait for their clients, over all connections.
#[derive(Clone, Debug, Default)]
pub struct ResponseBuffers(Arc<AtomicUsize>);

/// A client that does not take its bytes: since when bytes wait, how many wait, and how many it has taken meanwhile.
#[derive(Debug)]
struct Behind {
    since: Instant,
    pending_at: Instant,
    taken_bytes: usize,
    waiting_bytes: usize,
    window_ends: Pin<Box<Sleep>>,
}

/// A request that came over TLS has it among its extensions.
#[derive(Clone, Copy, Debug)]
pub struct Encrypted;

/// Whether the server has begun to close what the drain has left of its connections. Each request has it among its extensions,
/// because one that is broken off then was not left by its client.
#[derive(Clone, Debug, Default)]
pub struct Cut(Arc<AtomicBool>);

impl Cut {
    pub fn begin(&self) {
        self.0.store(true, Ordering::Release);
    }
    pub fn has_begun(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// A TCP stream that stamps its reads and writes. It fails when its client reads too slowly. Then the connection ends, and
/// with it the request, because a reader that stopped reading holds KV blocks.
#[derive(Debug)]
pub struct TimedStream {
    stream: TcpStream,
    times: Arc<ConnectionTimes>,
    buffers: ResponseBuffers,
    read_window: Duration,
    /// What may wait above, where this stream does not see it.
    hidden_bytes: usize,
    behind: Option<Behind>,
}

impl TimedStream {
    pub fn new(stream: TcpStream, buffers: ResponseBuffers) -> Self {
        Self {
            stream,
            times: ConnectionTimes::new(),
            buffers,
            read_window: READ_WINDOW,
            hidden_bytes: 0,
            behind: None,
        }
    }
    /// Below TLS, which takes some bytes of a buffer of this size: while a write waits, the whole buffer counts.
    pub fn below(mut self, hidden_bytes: usize) -> Self {
        self.hidden_bytes = hidden_bytes;
        self
    }
    pub fn times(&self) -> Arc<ConnectionTimes> {
        self.times.clone()
    }

    /// Waits for the first byte and leaves it there. `None`: the client has closed.
    pub async fn first_byte(&self) -> io::Result<Option<u8>> {
        let mut first = [0];
        let seen = self.stream.peek(&mut first).await?;
        Ok(first.first().copied().filter(|_| seen > 0))
    }

    /// Judges a write of `offered` bytes by its result.
    fn watch_write(
        &mut self,
        cx: &mut Context<'_>,
        offered: usize,
        result: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        match &result {
            Poll::Ready(Ok(taken)) => {
                self.times.noted_write();
                self.took(*taken);
                result
            }
            Poll::Ready(Err(_)) => result,
            Poll::Pending => match self.falls_behind(cx, offered + self.hidden_bytes) {
                Some(error) => Poll::Ready(Err(error)),
                None => Poll::Pending,
            },
        }
    }

    fn took(&mut self, bytes: usize) {
        let Some(behind) = &mut self.behind else {
            return;
        };
        if behind.pending_at.elapsed() >= CAUGHT_UP_AFTER && behind.waiting_bytes == 0 {
            self.caught_up();
            return;
        }
        behind.taken_bytes += bytes;
        let waited = std::mem::take(&mut behind.waiting_bytes);
        self.buffers.0.fetch_sub(waited, Ordering::Relaxed);
    }

    fn caught_up(&mut self) {
        if let Some(behind) = self.behind.take() {
            self.buffers.0.fetch_sub(behind.waiting_bytes, Ordering::Relaxed);
        }
    }

    fn falls_behind(&mut self, cx: &mut Context<'_>, offered: usize) -> Option<io::Error> {
        let (now, window) = (Instant::now(), self.read_window);
        let behind = self.behind.get_or_insert_with(|| Behind {
            since: now,
            pending_at: now,
            taken_bytes: 0,
            waiting_bytes: 0,
            window_ends: Box::pin(tokio::time::sleep(window)),
        });
        behind.pending_at = now;
        let before = std::mem::replace(&mut behind.waiting_bytes, offered);
        self.buffers.0.fetch_sub(before, Ordering::Relaxed);
        let all = self.buffers.0.fetch_add(offered, Ordering::Relaxed) + offered;
        if all > BUFFERED_BYTES_MAX && behind.since.elapsed() >= BEHIND_MAX {
            return Some(too_slow(
                "the buffers of all answers are full, and this client is behind",
            ));
        }
        while behind.window_ends.as_mut().poll(cx).is_ready() {
            if behind.taken_bytes < READ_FLOOR_BYTES {
                return Some(too_slow("the client reads too slowly"));
            }
            behind.taken_bytes = 0;
            behind.window_ends = Box::pin(tokio::time::sleep(window));
        }
        None
    }
}

fn too_slow(words: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, words)
}

impl Drop for TimedStream {
    fn drop(&mut self) {
        self.caught_up();
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
        self.watch_write(cx, bytes.len(), result)
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        let offered = slices.iter().map(|slice| slice.len()).sum();
        self.watch_write(cx, offered, result)
    }
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    async fn pair(buffers: &ResponseBuffers) -> (TimedStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let client = TcpStream::connect(address).await.expect("connects");
        let (served, _) = listener.accept().await.expect("accepts");
        (TimedStream::new(served, buffers.clone()), client)
    }

    /// More than the kernel's buffers take.
    fn answer() -> Vec<u8> {
        vec![b'x'; 32 << 20]
    }

    #[tokio::test]
    async fn who_reads_nothing_or_a_byte_now_and_then_is_cut_off() {
        for reads in [false, true] {
            let buffers = ResponseBuffers::default();
            let (served, mut client) = pair(&buffers).await;
            let mut served = served.below(1 << 20);
            served.read_window = Duration::from_millis(200);
            let reader = tokio::spawn(async move {
                loop {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    if reads && client.read_u8().await.is_err() {
                        return;
                    }
                }
            });
            let written = served.write_all(&answer()).await;
            assert_eq!(written.map_err(|error| error.kind()), Err(io::ErrorKind::TimedOut));
            assert!(buffers.0.load(Ordering::Relaxed) > 1 << 20, "what waits above counts");
            drop(served);
            assert_eq!(buffers.0.load(Ordering::Relaxed), 0, "what waited is given back");
            reader.abort();
        }
    }

    #[tokio::test]
    async fn who_reads_gets_everything() {
        let buffers = ResponseBuffers::default();
        let (mut served, mut client) = pair(&buffers).await;
        let reader = tokio::spawn(async move {
            let mut all = Vec::new();
            client.read_to_end(&mut all).await.map(|_| all.len())
        });
        served.write_all(&answer()).await.expect("is taken");
        drop(served);
        let read = reader.await.expect("ends").expect("reads");
        assert_eq!((read, buffers.0.load(Ordering::Relaxed)), (answer().len(), 0));
    }
}
