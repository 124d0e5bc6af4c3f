//! The Unix socket of a pair: its name, the user behind it, and the messages before the first frame.

use std::ffi::OsString;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;

use proto::messages::STAGED_MESSAGE_BYTES_MAX;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio_util::codec::LengthDelimitedCodec;

use super::fault::{DirectFault, ShmFault};
use super::pool::PoolTerms;
use super::ring::RingShape;
use crate::trust::Word32;

/// Shows that the other side speaks this protocol in this version.
const MAGIC: [u8; 4] = *b"KVR3";

/// What a decode node says about its shared memory in the answer to a hello.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct ShmOffer {
    /// The kernel's boot id. It is equal on the same host only.
    #[prost(string, tag = "1")]
    pub boot_id: String,
    /// Name of an abstract Unix socket of the same network namespace, drawn at random at every start.
    #[prost(string, tag = "2")]
    pub socket: String,
}

/// The receiver's first message, once it knows whose process came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::transports) enum Welcome {
    /// Its nonce.
    Ask(Word32),
    OtherUser,
    TooManyPairs,
}

/// The mode that the sender wants, sent once it knows whose process listens. It contains the sender's nonce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::transports) enum Ask {
    Staged,
    Direct {
        nonce: Word32,
        proof: Word32,
        /// The shape of its own blocks.
        layers: u32,
        layer_bytes: u32,
    },
}

/// The sender's answer. Memory is passed with it unless there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Grant {
    /// Why it is not the pool, if the pool was asked for.
    Ring(RingShape, Option<DirectFault>),
    /// With the receiver's own proof.
    Pool(PoolTerms, Word32),
    NoMemory,
}

/// More than any message before the first frame has.
const GREETING_BYTES_MAX: usize = 256;

pub(super) fn to_bytes<M: Serialize>(message: &M) -> io::Result<Vec<u8>> {
    postcard::to_allocvec(&(MAGIC, message)).map_err(io::Error::other)
}

/// The whole of `bytes`.
pub(super) fn from_bytes<M: DeserializeOwned>(bytes: &[u8]) -> Option<M> {
    match postcard::take_from_bytes(bytes) {
        Ok(((MAGIC, message), [])) => Some(message),
        _ => None,
    }
}

/// The zero byte in front makes it a name of the abstract namespace: there is no file, and the name is gone with its last
/// holder. Names are random, so that no life of a node takes the name of another one. They are no secret
/// (`/proc/net/unix`).
pub(in crate::transports) fn path(name: &str) -> PathBuf {
    let mut path = OsString::from("\0");
    path.push(name);
    path.into()
}

/// The kernel's name of this boot. It is equal in two processes only if they run on one kernel.
pub(in crate::transports) fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?
        .trim()
        .to_owned())
}

/// The user behind the other end must be the one this side runs as.
pub(in crate::transports) fn check_user(socket: &UnixStream, ours: u32) -> Result<(), ShmFault> {
    let theirs = socket.peer_cred()?.uid();
    if theirs == ours {
        return Ok(());
    }
    Err(ShmFault::Uid { ours, theirs })
}

/// Messages with their length in front. A longer one ends the stream before a byte of it is stored.
pub(super) fn codec() -> LengthDelimitedCodec {
    LengthDelimitedCodec::builder()
        .max_frame_length(STAGED_MESSAGE_BYTES_MAX)
        .new_codec()
}

/// Sends a message, with memory if there is some.
pub(in crate::transports) async fn say(
    socket: &UnixStream,
    message: &impl Serialize,
    memory: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let bytes = to_bytes(message)?;
    let send = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut passed = SendAncillaryBuffer::new(&mut space);
        let descriptors: Vec<BorrowedFd<'_>> = memory.into_iter().collect();
        if !descriptors.is_empty() {
            passed.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        let sent = rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut passed, SendFlags::NOSIGNAL)?;
        Ok(sent)
    };
    // A fresh socket has room for a hundred bytes, so all is sent or nothing.
    match socket.async_io(Interest::WRITABLE, send).await? {
        sent if sent == bytes.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Takes a message and at most one descriptor. Any other descriptor is closed.
pub(in crate::transports) async fn heard<M: DeserializeOwned>(socket: &UnixStream) -> io::Result<(M, Option<OwnedFd>)> {
    let mut bytes = [0; GREETING_BYTES_MAX];
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
    let message = bytes.get(..received).and_then(from_bytes);
    let message = message.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
    Ok((message, memory))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::receiver::PoolShape;

    fn survives<M: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(messages: &[M]) {
        for message in messages {
            let mut bytes = to_bytes(message).unwrap();
            assert!(bytes.len() <= GREETING_BYTES_MAX / 2);
            assert_eq!(from_bytes::<M>(&bytes).as_ref(), Some(message));
            // The magic number, and which message it is.
            for bit in (0..4 * 8).chain([4 * 8 + 6, 4 * 8 + 7]) {
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(from_bytes::<M>(&bytes), None, "bit {bit}");
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            for end in 0..bytes.len() {
                assert_eq!(from_bytes::<M>(&bytes[..end]), None, "{end} bytes");
            }
            assert_eq!(from_bytes::<M>(&bytes[1..]), None);
            bytes.push(0);
            assert_eq!(from_bytes::<M>(&bytes), None, "a byte too many");
        }
    }

    #[test]
    fn a_message_survives_and_nothing_else_is_one() {
        let shape = RingShape {
            slots: 64,
            slot_bytes: 1 << 19,
        };
        let terms = PoolTerms {
            shape: PoolShape {
                blocks: 5,
                layers: 6,
                layer_bytes: 7,
            },
            frames_in_flight: 8,
            frame_bytes_max: 9,
            has_checksums: true,
        };
        survives(&[Welcome::Ask([3; 32]), Welcome::OtherUser, Welcome::TooManyPairs]);
        let nonce = std::array::from_fn(|at| at as u8);
        let direct = Ask::Direct {
            nonce,
            proof: [9; 32],
            layers: 30,
            layer_bytes: 12_288,
        };
        survives(&[Ask::Staged, direct]);
        let faults = [None, Some(DirectFault::NotOffered), Some(DirectFault::Unwatched)];
        survives(&faults.map(|fault| Grant::Ring(shape, fault)));
        survives(&[Grant::Pool(terms, [4; 32]), Grant::NoMemory]);
    }

    #[tokio::test]
    async fn bytes_that_are_no_greeting_are_an_error_and_never_a_panic() {
        for sent in [
            &b""[..],
            b"K",
            b"HTTP/1.1 400 Bad",
            b"KVR2\0\0\0\x09\0\0\0\x01\0\0\0\x01",
        ] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let mut written = 0;
            while written < sent.len() {
                theirs.writable().await.unwrap();
                written += theirs.try_write(&sent[written..]).unwrap_or(0);
            }
            drop(theirs);
            assert!(heard::<Welcome>(&ours).await.is_err(), "{sent:?}");
        }
    }
}
