//! What a decode node gives to a process that came to its socket: nothing, a ring, or its pool.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use proto::messages::KvBlockFrame;
use tokio::net::UnixStream;
use tokio::sync::OwnedSemaphorePermit;

use super::config::{RingBudget, ShmConfig};
use super::fault::{DirectFault, ShmFault};
use super::peer_process::PeerProcess;
use super::pool::PoolTerms;
use super::ring::{ReceiveRing, RingShape};
use super::socket::{self, Ask, Grant, Welcome};
use crate::receiver::{FrameData, HandoffSink, TransferRefusal, WrittenPool, check};
use crate::span::checksum;
use crate::trust::{Prover, Word32};

/// How a sender's bytes come in.
#[derive(Debug)]
pub(super) enum Incoming {
    Ring {
        ring: Arc<ReceiveRing>,
        /// Its part of the node's budget.
        _room: OwnedSemaphorePermit,
    },
    Pool {
        pool: Arc<dyn WrittenPool>,
        has_checksums: bool,
        /// The process that can write the pool.
        writer: PeerProcess,
    },
}

/// Memory for a process of the same user, if there is room for one more.
pub(super) async fn welcome(
    stream: &UnixStream,
    (config, rings): (&ShmConfig, &RingBudget),
    is_one_too_many: bool,
) -> Result<Option<Incoming>, ShmFault> {
    let asked = challenge(stream, (config.uid, config.hello_wait), is_one_too_many).await?;
    let Some(Asked { ask, nonce, process }) = asked else {
        return Ok(None);
    };
    let staged = match direct((&ask, &nonce), process, config) {
        Ok((incoming, grant)) => {
            let memory = config.direct.as_ref().map(|offer| offer.pool.memory());
            socket::say(stream, &grant, memory).await?;
            return Ok(Some(incoming));
        }
        Err(fault) => fault,
    };
    let Some((shape, room)) = rings.take(config.shape()) else {
        socket::say(stream, &Grant::NoMemory, None).await?;
        return Ok(None);
    };
    let (ring, memory) = match ReceiveRing::create(shape) {
        Ok(created) => created,
        Err(fault) => {
            socket::say(stream, &Grant::NoMemory, None).await?;
            return Err(fault);
        }
    };
    socket::say(stream, &Grant::Ring(shape, staged), Some(memory.as_fd())).await?;
    Ok(Some(Incoming::Ring { ring, _room: room }))
}

/// What a process that came to a socket wants, and the nonce that its proof must be over.
pub(in crate::transports) struct Asked {
    pub ask: Ask,
    pub nonce: Word32,
    /// An error: the process cannot be watched.
    pub process: io::Result<PeerProcess>,
}

/// Asks a process of the same user what it wants. `None`: it was told that there is no room for it.
pub(in crate::transports) async fn challenge(
    stream: &UnixStream,
    (uid, hello_wait): (u32, Duration),
    is_one_too_many: bool,
) -> Result<Option<Asked>, ShmFault> {
    if let Err(fault) = socket::check_user(stream, uid) {
        socket::say(stream, &Welcome::OtherUser, None).await?;
        return Err(fault);
    }
    if is_one_too_many {
        socket::say(stream, &Welcome::TooManyPairs, None).await?;
        return Ok(None);
    }
    // Watched before the nonce is sent: the process that answers the nonce is the watched one.
    let process = PeerProcess::behind(stream);
    let nonce: Word32 = rand::random();
    socket::say(stream, &Welcome::Ask(nonce), None).await?;
    let asked = tokio::time::timeout(hello_wait, socket::heard(stream)).await;
    let (ask, _) = asked.map_err(|_| ShmFault::TimeOut)??;
    Ok(Some(Asked { ask, nonce, process }))
}

/// The pool, or why it is not given. There is no reason when the sender did not ask for it.
fn direct(
    (ask, ours): (&Ask, &Word32),
    process: io::Result<PeerProcess>,
    config: &ShmConfig,
) -> Result<(Incoming, Grant), Option<DirectFault>> {
    let Ask::Direct {
        nonce: theirs,
        proof,
        layers,
        layer_bytes,
    } = ask
    else {
        return Err(None);
    };
    let nonces = [ours, theirs];
    let offer = config.direct.as_ref().ok_or(DirectFault::NotOffered)?;
    if !offer.secret.is_proof(proof, Prover::Sender, nonces) {
        return Err(Some(DirectFault::Secret));
    }
    let shape = offer.pool.shape();
    if (shape.layers, shape.layer_bytes) != (*layers, *layer_bytes) {
        return Err(Some(DirectFault::Geometry));
    }
    let RingShape { slots, slot_bytes } = config.shape();
    let terms = PoolTerms {
        shape,
        frames_in_flight: slots,
        frame_bytes_max: slot_bytes,
        has_checksums: offer.has_checksums,
    };
    let grant = Grant::Pool(terms, offer.secret.proof(Prover::Receiver, nonces));
    let incoming = Incoming::Pool {
        pool: offer.pool.clone(),
        has_checksums: offer.has_checksums,
        writer: process.map_err(|error| {
            tracing::warn!(%error, "cannot watch a sender's process");
            DirectFault::Unwatched
        })?,
    };
    Ok((incoming, grant))
}

/// Bytes that the sender has written in place. The pool shows them when they must be summed.
#[derive(Debug)]
pub(super) struct Placed {
    pub summed: Option<Arc<dyn WrittenPool>>,
    pub bytes: u32,
}

impl FrameData for Placed {
    /// Nothing is copied.
    const INLINE_BYTES_MAX: usize = 512 << 10;
    const IS_IN_PLACE: bool = true;

    fn len(&self) -> usize {
        self.bytes as usize
    }

    fn asks_memory(&self) -> bool {
        self.summed.is_some()
    }

    fn land(self, frame: &KvBlockFrame, _: &dyn HandoffSink) -> Result<(), TransferRefusal> {
        let Some(pool) = self.summed else { return Ok(()) };
        let mut is_good = |bytes: &[u8]| checksum(bytes) == frame.checksum;
        let shown = pool.verify(frame.block, frame.layer_begin..frame.layer_end, &mut is_good);
        check(
            shown.map_err(|error| TransferRefusal::Import(error.to_string()))?,
            frame,
        )
    }
}
