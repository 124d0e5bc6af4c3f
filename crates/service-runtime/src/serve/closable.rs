//! A connection that can be ended from outside the task that serves it.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::{Connected, TcpConnectInfo};

/// Every read and write fails once the token is cancelled, and a waiting one wakes up.
#[derive(Debug)]
pub(super) struct Closable {
    stream: TcpStream,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Closable {
    pub fn new(stream: TcpStream, closed: CancellationToken) -> Self {
        Self {
            stream,
            closed: Box::pin(closed.cancelled_owned()),
        }
    }

    fn while_open<T>(
        &mut self,
        context: &mut Context<'_>,
        poll: impl FnOnce(Pin<&mut TcpStream>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        match self.closed.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into())),
            Poll::Pending => poll(Pin::new(&mut self.stream), context),
        }
    }
}

impl Connected for Closable {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Closable {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.while_open(context, |stream, context| stream.poll_read(context, into))
    }
}

impl AsyncWrite for Closable {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.while_open(context, |stream, context| stream.poll_write(context, bytes))
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.while_open(context, |stream, context| stream.poll_write_vectored(context, slices))
    }
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.while_open(context, |stream, context| stream.poll_flush(context))
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_read_that_waits_ends_with_the_token() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let over = CancellationToken::new();
        let mut closable = Closable::new(listener.accept().await.unwrap().0, over.clone());
        peer.write_all(b"x").await.unwrap();
        assert_eq!(closable.read_u8().await.unwrap(), b'x');
        let waiting = tokio::spawn(async move { closable.read_u8().await });
        tokio::task::yield_now().await;
        over.cancel();
        assert_eq!(
            waiting.await.unwrap().unwrap_err().kind(),
            io::ErrorKind::ConnectionAborted
        );
    }
}
