//! Any bytes as a message on the socket of a pair: the checks of `kv_transfer::testing`.

use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use prost::Message as _;
use rustix::fs::MemfdFlags;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::pool::SendPool;
use super::ring::{SEALS, SendRing};
use super::socket::{Ask, Grant, ShmOffer, Welcome, from_bytes, to_bytes};

/// Of the memory that a decode node passes here.
const MEMORY_BYTES: u64 = 1 << 16;

pub(crate) fn check(bytes: &[u8]) {
    round_trip::<Welcome>(bytes);
    round_trip::<Ask>(bytes);
    if let Ok(offer) = ShmOffer::decode(bytes) {
        let _ = super::socket::path(&offer.socket);
    }
    match round_trip::<Grant>(bytes) {
        Some(Grant::Ring(shape, _)) => {
            let mapped = SendRing::map(memory(), shape);
            assert!(mapped.is_err() || shape.bytes() == MEMORY_BYTES);
        }
        Some(Grant::Pool(terms, _)) => {
            let mapped = SendPool::map(memory(), terms);
            assert!(mapped.is_err() || terms.shape.bytes() == Some(MEMORY_BYTES as usize));
        }
        Some(Grant::NoMemory) | None => {}
    }
}

pub(in crate::transports) fn round_trip<M: Serialize + DeserializeOwned + PartialEq + Debug>(
    bytes: &[u8],
) -> Option<M> {
    let message: M = from_bytes(bytes)?;
    let again = to_bytes(&message).expect("what was read can be written");
    assert_eq!(from_bytes::<M>(&again).as_ref(), Some(&message));
    Some(message)
}

fn memory() -> &'static OwnedFd {
    static MEMORY: OnceLock<OwnedFd> = OnceLock::new();
    MEMORY.get_or_init(|| {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = rustix::fs::memfd_create("baton-hostile", flags).expect("memory");
        rustix::fs::ftruncate(&memory, MEMORY_BYTES).expect("has a size");
        rustix::fs::fcntl_add_seals(&memory, SEALS).expect("is sealed");
        memory
    })
}
