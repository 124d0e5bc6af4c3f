//! The Unix socket of a pair: its name, who is behind it, and the greeting that passes the ring.

use std::ffi::OsString;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use proto::messages::STAGED_MESSAGE_BYTES_MAX;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio_util::codec::LengthDelimitedCodec;

use super::ring::RingShape;
use crate::choice::ShmFault;

/// Says that the other side speaks this protocol, in this version.
const MAGIC: u32 = u32::from_be_bytes(*b"KVR1");
const GREETING_BYTES: usize = 16;

/// What the receiver says first: a ring is passed with `Accepted`, with nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    Accepted(RingShape),
    OtherUser,
    TooManyPairs,
    NoMemory,
}

impl Greeting {
    fn encode(self) -> [u8; GREETING_BYTES] {
        let (verdict, shape) = match self {
            Greeting::Accepted(shape) => (0, shape),
            Greeting::OtherUser => (1, RingShape::default()),
            Greeting::TooManyPairs => (2, RingShape::default()),
            Greeting::NoMemory => (3, RingShape::default()),
        };
        let words: [u32; 4] = [MAGIC, verdict, shape.slots, shape.slot_bytes];
        let mut bytes = [0; GREETING_BYTES];
        for (word, place) in words.iter().zip(bytes.chunks_exact_mut(4)) {
            place.copy_from_slice(&word.to_be_bytes());
        }
        bytes
    }

    fn decode(bytes: [u8; GREETING_BYTES]) -> Option<Self> {
        let word = |at: usize| u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let shape = RingShape {
            slots: word(8),
            slot_bytes: word(12),
        };
        match (word(0), word(4)) {
            (MAGIC, 0) => Some(Greeting::Accepted(shape)),
            (MAGIC, 1) => Some(Greeting::OtherUser),
            (MAGIC, 2) => Some(Greeting::TooManyPairs),
            (MAGIC, 3) => Some(Greeting::NoMemory),
            _ => None,
        }
    }
}

/// The zero byte in front makes it a name of the abstract namespace: no file, gone with its last holder. Names are drawn at
/// random so that no life of a node takes another one's; they are no secret (`/proc/net/unix`).
pub(super) fn path(name: &str) -> PathBuf {
    let mut path = OsString::from("\0");
    path.push(name);
    path.into()
}

/// The kernel's name of this boot: equal in two processes only if they run on one kernel.
pub(super) fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?
        .trim()
        .to_owned())
}

/// The user behind the other end must be the one this side runs as.
pub(super) fn check_user(socket: &UnixStream, ours: u32) -> Result<(), ShmFault> {
    let theirs = socket.peer_cred()?.uid();
    if theirs == ours {
        return Ok(());
    }
    Err(ShmFault::Uid { ours, theirs })
}

/// Messages behind their length; a longer one ends the stream before a byte of it is stored.
pub(super) fn codec() -> LengthDelimitedCodec {
    LengthDelimitedCodec::builder()
        .max_frame_length(STAGED_MESSAGE_BYTES_MAX)
        .new_codec()
}

/// Sends the greeting, with the ring's memory where there is one.
pub(super) async fn greet(socket: &UnixStream, greeting: Greeting, memory: Option<&OwnedFd>) -> io::Result<()> {
    let bytes = greeting.encode();
    let send = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut passed = SendAncillaryBuffer::new(&mut space);
        let descriptors: Vec<BorrowedFd<'_>> = memory.iter().map(|memory| memory.as_fd()).collect();
        if !descriptors.is_empty() {
            passed.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        let sent = rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut passed, SendFlags::NOSIGNAL)?;
        Ok(sent)
    };
    // A fresh socket has room for 16 bytes: all or nothing.
    match socket.async_io(Interest::WRITABLE, send).await? {
        GREETING_BYTES => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Takes the greeting and at most one descriptor; what else was passed is closed.
pub(super) async fn greeted(socket: &UnixStream) -> io::Result<(Greeting, Option<OwnedFd>)> {
    let mut bytes = [0; GREETING_BYTES];
    let receive = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut passed = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut bytes)];
        let received = rustix::net::recvmsg(socket, &mut into, &mut passed, RecvFlags::CMSG_CLOEXEC)?;
        let mut memory = None;
        for message in passed.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                memory = descriptors.into_iter().next();
            }
        }
        Ok((received.bytes, memory))
    };
    let (received, memory) = socket.async_io(Interest::READABLE, receive).await?;
    let greeting = (received == GREETING_BYTES).then(|| Greeting::decode(bytes)).flatten();
    let greeting = greeting.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
    Ok((greeting, memory))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_survives_and_nothing_else_is_one() {
        let shape = RingShape {
            slots: 64,
            slot_bytes: 1 << 19,
        };
        for greeting in [
            Greeting::Accepted(shape),
            Greeting::OtherUser,
            Greeting::TooManyPairs,
            Greeting::NoMemory,
        ] {
            assert_eq!(Greeting::decode(greeting.encode()), Some(greeting));
            for at in 0..8 {
                let mut bytes = greeting.encode();
                bytes[at] ^= 0x80;
                assert_eq!(Greeting::decode(bytes), None, "byte {at}");
            }
        }
    }

    #[tokio::test]
    async fn bytes_that_are_no_greeting_are_an_error_and_never_a_panic() {
        for sent in [
            &b""[..],
            b"K",
            b"HTTP/1.1 400 Bad",
            b"KVR1\0\0\0\x09\0\0\0\x01\0\0\0\x01",
        ] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let mut written = 0;
            while written < sent.len() {
                theirs.writable().await.unwrap();
                written += theirs.try_write(&sent[written..]).unwrap_or(0);
            }
            drop(theirs);
            assert!(greeted(&ours).await.is_err(), "{sent:?}");
        }
    }
}
