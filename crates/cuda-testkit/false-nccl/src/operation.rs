//! Owns one send or receive: how far it is, and how it goes on over the socket. The bytes of a send follow their number, so that ranks
//! that do not agree on it are found: what the real library does then is not known.

use crate::socket::Socket;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Send = 0,
    Receive = 1,
}

const HEADER_BYTES: usize = 8;

/// One `ncclSend` or `ncclRecv`.
#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) direction: Direction,
    pub(crate) at: u64,
    pub(crate) bytes: usize,
    /// Among those of its direction, from 0.
    pub(crate) number: u64,
    /// The number of bytes, as it goes over the socket.
    header: [u8; HEADER_BYTES],
    /// Of the header and the bytes behind it.
    done: usize,
}

/// A kernel that has no driver yet.
pub(crate) struct Post {
    pub(crate) stream: u64,
    pub(crate) operations: Vec<Operation>,
}

/// Why an operation cannot go on.
pub(crate) enum Trouble {
    PeerIsGone,
    RanksDisagree,
}

impl Operation {
    pub(crate) fn new(direction: Direction, span: (u64, usize), number: u64) -> Self {
        let (at, bytes) = span;
        let header = match direction {
            Direction::Send => (bytes as u64).to_le_bytes(),
            Direction::Receive => [0; HEADER_BYTES],
        };
        Self {
            direction,
            at,
            bytes,
            number,
            header,
            done: 0,
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.done == HEADER_BYTES + self.bytes
    }

    /// Goes on as far as the socket lets it.
    pub(crate) fn step(&mut self, socket: &mut Socket) -> Result<(), Trouble> {
        while !self.is_over() {
            let moved = if self.done < HEADER_BYTES {
                let part = &mut self.header[self.done..];
                match self.direction {
                    Direction::Send => socket.send(part),
                    Direction::Receive => socket.receive(part),
                }
            } else {
                let done = self.done - HEADER_BYTES;
                let (at, left) = (self.at as usize + done, self.bytes - done);
                // SAFETY: the driver polls while it has opened the range that the kernel declared, `done` is within it, and
                // nothing else of the host uses it.
                let rest = unsafe { std::slice::from_raw_parts_mut(at as *mut u8, left) };
                match self.direction {
                    Direction::Send => socket.send(rest),
                    Direction::Receive => socket.receive(rest),
                }
            };
            match moved {
                Ok(0) => return Ok(()),
                Ok(count) => self.done += count,
                Err(_) => return Err(Trouble::PeerIsGone),
            }
            if self.done == HEADER_BYTES && u64::from_le_bytes(self.header) != self.bytes as u64 {
                return Err(Trouble::RanksDisagree);
            }
        }
        Ok(())
    }
}
