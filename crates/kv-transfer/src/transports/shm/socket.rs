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
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio_util::codec::LengthDelimitedCodec;

use super::fault::{DirectFault, ShmFault};
use super::pool::PoolTerms;
use super::ring::RingShape;
use crate::receiver::PoolShape;
use crate::trust::Word32;

/// Shows that the other side speaks this protocol in this version.
const MAGIC: u32 = u32::from_be_bytes(*b"KVR2");

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

/// A message before the first frame: a fixed number of 32-bit numbers, followed by 32 bytes.
pub(super) trait Fixed: Sized {
    const NUMBERS: usize;
    const BYTES: usize = 4 * (1 + Self::NUMBERS) + 32;
    fn encode(&self) -> (Vec<u32>, Word32);
    fn decode(numbers: &[u32], word: Word32) -> Option<Self>;
}

/// The receiver's first message, once it knows whose process came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Welcome {
    /// Its nonce.
    Ask(Word32),
    OtherUser,
    TooManyPairs,
}

impl Fixed for Welcome {
    const NUMBERS: usize = 1;
    fn encode(&self) -> (Vec<u32>, Word32) {
        match self {
            Welcome::Ask(nonce) => (vec![0], *nonce),
            Welcome::OtherUser => (vec![1], [0; 32]),
            Welcome::TooManyPairs => (vec![2], [0; 32]),
        }
    }
    fn decode(numbers: &[u32], word: Word32) -> Option<Self> {
        match numbers {
            [0] => Some(Welcome::Ask(word)),
            [1] => Some(Welcome::OtherUser),
            [2] => Some(Welcome::TooManyPairs),
            _ => None,
        }
    }
}

/// The mode that the sender wants, sent once it knows whose process listens. It contains the sender's nonce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    Staged,
    Direct {
        nonce: Word32,
        proof: Word32,
        /// The shape of its own blocks.
        layers: u32,
        layer_bytes: u32,
    },
}

impl Fixed for Ask {
    const NUMBERS: usize = 11;
    fn encode(&self) -> (Vec<u32>, Word32) {
        match self {
            Ask::Staged => (vec![0; Self::NUMBERS], [0; 32]),
            Ask::Direct {
                nonce,
                proof,
                layers,
                layer_bytes,
            } => {
                let nonce = nonce.as_chunks::<4>().0.iter().map(|bytes| u32::from_be_bytes(*bytes));
                ([1, *layers, *layer_bytes].into_iter().chain(nonce).collect(), *proof)
            }
        }
    }
    fn decode(numbers: &[u32], proof: Word32) -> Option<Self> {
        match numbers {
            [0, ..] => Some(Ask::Staged),
            [1, layers, layer_bytes, words @ ..] => {
                let mut nonce = [0; 32];
                for (place, word) in nonce.as_chunks_mut::<4>().0.iter_mut().zip(words) {
                    *place = word.to_be_bytes();
                }
                Some(Ask::Direct {
                    nonce,
                    proof,
                    layers: *layers,
                    layer_bytes: *layer_bytes,
                })
            }
            _ => None,
        }
    }
}

/// The sender's answer. Memory is passed with it unless there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grant {
    /// Why it is not the pool, if the pool was asked for.
    Ring(RingShape, Option<DirectFault>),
    /// With the receiver's own proof.
    Pool(PoolTerms, Word32),
    NoMemory,
}

impl Grant {
    const FAULTS: [Option<DirectFault>; 5] = [
        None,
        Some(DirectFault::NotOffered),
        Some(DirectFault::Secret),
        Some(DirectFault::Geometry),
        Some(DirectFault::Unwatched),
    ];
}

impl Fixed for Grant {
    const NUMBERS: usize = 7;
    fn encode(&self) -> (Vec<u32>, Word32) {
        let mut numbers = vec![0; Self::NUMBERS];
        let mut word = [0; 32];
        match self {
            Grant::Ring(shape, fault) => {
                let fault = Self::FAULTS.iter().position(|known| known == fault).unwrap_or(0);
                numbers[1..4].copy_from_slice(&[shape.slots, shape.slot_bytes, fault as u32]);
            }
            Grant::Pool(terms, proof) => {
                let PoolTerms { shape, .. } = terms;
                numbers = vec![
                    1,
                    terms.frames_in_flight,
                    terms.frame_bytes_max,
                    shape.blocks,
                    shape.layers,
                    shape.layer_bytes,
                    u32::from(terms.has_checksums),
                ];
                word = *proof;
            }
            Grant::NoMemory => numbers[0] = 2,
        }
        (numbers, word)
    }
    fn decode(numbers: &[u32], word: Word32) -> Option<Self> {
        match *numbers {
            [0, slots, slot_bytes, fault, ..] => {
                let fault = *Self::FAULTS.get(fault as usize)?;
                Some(Grant::Ring(RingShape { slots, slot_bytes }, fault))
            }
            [
                1,
                frames_in_flight,
                frame_bytes_max,
                blocks,
                layers,
                layer_bytes,
                has_checksums,
            ] => {
                let shape = PoolShape {
                    blocks,
                    layers,
                    layer_bytes,
                };
                let terms = PoolTerms {
                    shape,
                    frames_in_flight,
                    frame_bytes_max,
                    has_checksums: has_checksums != 0,
                };
                Some(Grant::Pool(terms, word))
            }
            [2, ..] => Some(Grant::NoMemory),
            _ => None,
        }
    }
}

fn to_bytes<M: Fixed>(message: &M) -> Vec<u8> {
    let (numbers, word) = message.encode();
    let numbers = std::iter::once(MAGIC).chain(numbers);
    numbers.flat_map(u32::to_be_bytes).chain(word).collect()
}

fn from_bytes<M: Fixed>(bytes: &[u8]) -> Option<M> {
    let (numbers, word) = bytes.split_at_checked(4 * (1 + M::NUMBERS))?;
    let numbers: Vec<u32> = numbers
        .as_chunks::<4>()
        .0
        .iter()
        .map(|number| u32::from_be_bytes(*number))
        .collect();
    match numbers.split_first() {
        Some((&MAGIC, numbers)) => M::decode(numbers, word.try_into().ok()?),
        _ => None,
    }
}

/// The zero byte in front makes it a name of the abstract namespace: there is no file, and the name is gone with its last
/// holder. Names are random, so that no life of a node takes the name of another one. They are no secret
/// (`/proc/net/unix`).
pub(super) fn path(name: &str) -> PathBuf {
    let mut path = OsString::from("\0");
    path.push(name);
    path.into()
}

/// The kernel's name of this boot. It is equal in two processes only if they run on one kernel.
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

/// Messages with their length in front. A longer one ends the stream before a byte of it is stored.
pub(super) fn codec() -> LengthDelimitedCodec {
    LengthDelimitedCodec::builder()
        .max_frame_length(STAGED_MESSAGE_BYTES_MAX)
        .new_codec()
}

/// Sends a message, with memory if there is some.
pub(super) async fn say(socket: &UnixStream, message: &impl Fixed, memory: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let bytes = to_bytes(message);
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
pub(super) async fn heard<M: Fixed>(socket: &UnixStream) -> io::Result<(M, Option<OwnedFd>)> {
    let mut bytes = vec![0; M::BYTES];
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
    let message = (received == M::BYTES).then(|| from_bytes(&bytes)).flatten();
    let message = message.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
    Ok((message, memory))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn survives<M: Fixed + PartialEq + std::fmt::Debug>(messages: &[M]) {
        for message in messages {
            let mut bytes = to_bytes(message);
            assert_eq!(bytes.len(), M::BYTES);
            assert_eq!(from_bytes::<M>(&bytes).as_ref(), Some(message));
            for at in 0..8 {
                bytes[at] ^= 0x80;
                assert_eq!(from_bytes::<M>(&bytes), None, "byte {at}");
                bytes[at] ^= 0x80;
            }
            assert_eq!(from_bytes::<M>(&bytes[1..]), None);
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
        let rings = Grant::FAULTS.map(|fault| Grant::Ring(shape, fault));
        survives(&rings);
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
