//! Owns the connection of two ranks, over a Unix socket or TCP: it never waits but for the listener's peer, in small steps.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};

#[derive(Debug)]
pub(crate) enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

#[derive(Debug)]
pub(crate) enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Listener {
    /// `None`: nobody has come yet.
    pub(crate) fn accept(&self) -> io::Result<Option<Socket>> {
        let socket = match self {
            Listener::Unix(listener) => listener.accept().map(|(socket, _)| Socket::Unix(socket)),
            Listener::Tcp(listener) => listener.accept().map(|(socket, _)| Socket::Tcp(socket)),
        };
        match socket {
            Ok(socket) => socket.without_waits().map(Some),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Socket {
    pub(crate) fn without_waits(self) -> io::Result<Self> {
        match &self {
            Socket::Unix(socket) => socket.set_nonblocking(true)?,
            Socket::Tcp(socket) => {
                socket.set_nodelay(true)?;
                socket.set_nonblocking(true)?;
            }
        }
        Ok(self)
    }

    /// How many bytes it took; 0: none for now. An error: the peer is gone.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = match self {
            Socket::Unix(socket) => socket.write(bytes),
            Socket::Tcp(socket) => socket.write(bytes),
        };
        sent.or_else(later)
    }

    /// How many bytes came; 0: none for now. An error: the peer is gone.
    pub(crate) fn receive(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let received = match self {
            Socket::Unix(socket) => socket.read(bytes),
            Socket::Tcp(socket) => socket.read(bytes),
        };
        match received {
            Ok(0) if !bytes.is_empty() => Err(io::ErrorKind::UnexpectedEof.into()),
            other => other.or_else(later),
        }
    }
}

fn later(error: io::Error) -> io::Result<usize> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(0),
        _ => Err(error),
    }
}
