//! The process that may write this node's blocks in place: its exit can be watched.

use std::io;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

/// The process behind a socket, even after it is gone.
#[derive(Debug)]
pub(in crate::transports) struct PeerProcess(AsyncFd<OwnedFd>);

impl PeerProcess {
    /// The process that made the connection. Its number may have been given to another process meanwhile. Only a process
    /// that still speaks on the socket afterwards is the right one.
    pub fn behind(socket: &UnixStream) -> io::Result<Self> {
        let pid = socket.peer_cred()?.pid().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        let process = rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK)?;
        // SAFETY: an `OwnedFd` is the same open descriptor for as long as it lives, and it lives inside the `AsyncFd`.
        let watched = unsafe { AsyncFd::register_with_interest(process, Interest::READABLE) };
        Ok(Self(watched.map_err(io::Error::from)?))
    }

    /// Waits for its exit. Then every thread and every mapping of it is gone.
    pub async fn exited(&self) {
        if self.0.readable().await.is_err() {
            // The runtime is ending, and this process with it.
            std::future::pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_exit_of_the_process_behind_a_socket_is_noticed() {
        let name = format!("baton-kv-test-{:032x}", rand::random::<u128>());
        let listener = tokio::net::UnixListener::bind(super::super::socket::path(&name)).unwrap();
        let stream = UnixStream::connect(super::super::socket::path(&name)).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        let myself = PeerProcess::behind(&accepted).unwrap();
        drop(stream);
        let limit = std::time::Duration::from_millis(50);
        let gone = tokio::time::timeout(limit, myself.exited()).await;
        assert!(gone.is_err(), "this process runs, whatever its socket does");
    }
}
