//! The receiver's end: one socket for senders of this host, and a task for each that may write the pool.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use identity::Caller;
use prost::Message as _;
use proto::messages::TransportOffer;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::KIND;
use super::fault::{IpcDenial, IpcFault};
use super::here::{self, OfferedHere};
use super::socket::{IpcGrant, IpcOffer};
use crate::device::{DeviceKv, IPC_HANDLE_BYTES};
use crate::receiver::{IncomingPair, Offered, Receiver, WrittenPool};
use crate::transports::shm::peer_process::PeerProcess;
use crate::transports::shm::pool::PoolTerms;
use crate::transports::shm::receiver::{Granted, ServedPair};
use crate::transports::shm::socket::{self, Ask};
use crate::transports::shm::welcome::{Asked, challenge};
use crate::trust::{DeviceEnd, DirectSecret, Prover, Word32};

/// The pause after a failed accept (no descriptors left, for example).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a decode node gives to CUDA IPC.
#[derive(Clone, Debug)]
pub(super) struct IpcConfig {
    pub secret: DirectSecret,
    pub pool: Arc<dyn WrittenPool>,
    pub kv: Arc<DeviceKv>,
    pub handle: [u8; IPC_HANDLE_BYTES],
    pub has_checksums: bool,
    /// Frames that a sender may have under way.
    pub frames_in_flight: u32,
    /// Largest run of KV bytes in one frame. A copy of 8 MiB takes 20 us between devices of one board, and twenty times as long
    /// as its launch: larger frames gain nothing.
    pub frame_bytes_max: u32,
    /// Senders at the same time. Further senders are refused and use another transport.
    pub pairs_max: usize,
    /// A sender that has the pool must say hello within this time. Opening the pool is a part of it.
    pub hello_wait: Duration,
    /// This process as its peers see it.
    pub uid: u32,
}

impl IpcConfig {
    /// # Errors
    /// The node holds no secret, or its driver exports no pool.
    pub fn of(device: &DeviceEnd, uid: u32) -> io::Result<Self> {
        let place = device.in_place.clone().ok_or_else(|| {
            let why = "this node holds no `shm_direct_secret`, and only nodes that hold the same open its pool";
            io::Error::new(io::ErrorKind::PermissionDenied, why)
        })?;
        Ok(Self {
            secret: place.secret,
            pool: place.pool,
            kv: device.kv.clone(),
            handle: device.kv.export().map_err(io::Error::other)?,
            has_checksums: device.has_checksums,
            frames_in_flight: 32,
            frame_bytes_max: 8 << 20,
            pairs_max: 64,
            hello_wait: Duration::from_secs(5),
            uid,
        })
    }
}

/// The pool can be opened while this value lives. Dropping it ends every pair that uses it.
#[derive(Debug)]
pub(super) struct IpcServing {
    _offered: Offered,
    _here: OfferedHere,
    _stop: DropGuard,
}

/// Offers the pool to senders of this host. Needs a Tokio runtime around it.
///
/// # Errors
/// The system gives no socket, or does not say which boot it is.
pub(super) fn serve(receiver: &Arc<Receiver>, config: IpcConfig) -> io::Result<IpcServing> {
    let offer = IpcOffer::of(config.kv.uuid())?;
    let listener = UnixListener::bind(socket::path(&offer.socket))?;
    let here = here::offer(&offer.socket, config.kv.clone());
    let offered = receiver.offer(TransportOffer {
        transport: KIND.name().to_owned(),
        offer: offer.encode_to_vec().into(),
    });
    let stop = CancellationToken::new();
    let accepting = accept(listener, receiver.clone(), Arc::new(config));
    // Senders close the pool before the node frees it, if they are told early.
    let accepting = receiver.closed.clone().run_until_cancelled_owned(accepting);
    tokio::spawn(stop.clone().run_until_cancelled_owned(accepting));
    Ok(IpcServing {
        _offered: offered,
        _here: here,
        _stop: stop.drop_guard(),
    })
}

/// Never ends by itself. The pairs' tasks go on when it is dropped, until `pairs` ends them.
async fn accept(listener: UnixListener, receiver: Arc<Receiver>, config: Arc<IpcConfig>) {
    let room = Arc::new(Semaphore::new(config.pairs_max));
    let pairs = CancellationToken::new();
    let _ends_with_this = pairs.clone().drop_guard();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a sender that wants to open the pool");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let permit = room.clone().try_acquire_owned().ok();
        let (receiver, config, stop) = (receiver.clone(), config.clone(), pairs.clone());
        let opener = receiver.opened();
        // A task of its own, because it must outlive the connection until the sender can write no more.
        tokio::spawn(async move {
            let granted = match welcome(&stream, &config, permit.is_none()).await {
                Ok(Some(granted)) => granted,
                Ok(None) => return,
                Err(fault) => {
                    tracing::warn!(%fault, "a sender does not get the pool");
                    return;
                }
            };
            // It has proved that it holds the secret of this host's nodes.
            let pair = IncomingPair::new(&receiver, KIND, Caller::PlainText);
            let pair = ServedPair::in_place(stream, pair, granted);
            if let Err(end) = pair.serve(stop, config.hello_wait).await {
                tracing::warn!(%end, "a sender that writes the pool is given up");
            }
            drop((permit, opener));
        });
    }
}

/// The pool, for a process of the same user that holds the secret.
async fn welcome(stream: &UnixStream, config: &IpcConfig, is_one_too_many: bool) -> Result<Option<Granted>, IpcFault> {
    let asked = challenge(stream, (config.uid, config.hello_wait), is_one_too_many).await?;
    let Some(Asked { ask, nonce, process }) = asked else {
        return Ok(None);
    };
    match grant((&ask, &nonce), process, config) {
        Ok((granted, grant)) => {
            socket::say(stream, &grant, None).await?;
            Ok(Some(granted))
        }
        Err(denial) => {
            socket::say(stream, &IpcGrant::Denied(denial), None).await?;
            Err(IpcFault::Denied(denial))
        }
    }
}

fn grant(
    (ask, ours): (&Ask, &Word32),
    process: io::Result<PeerProcess>,
    config: &IpcConfig,
) -> Result<(Granted, IpcGrant), IpcDenial> {
    let Ask::Direct {
        nonce: theirs,
        proof,
        layers,
        layer_bytes,
    } = ask
    else {
        return Err(IpcDenial::Secret);
    };
    let nonces = [ours, theirs];
    if !config.secret.is_proof(proof, Prover::Sender, nonces) {
        return Err(IpcDenial::Secret);
    }
    let shape = config.pool.shape();
    if (shape.layers, shape.layer_bytes) != (*layers, *layer_bytes) {
        return Err(IpcDenial::Geometry);
    }
    let writer = process.map_err(|error| {
        tracing::warn!(%error, "cannot watch a sender's process");
        IpcDenial::Unwatched
    })?;
    let terms = PoolTerms {
        shape,
        frames_in_flight: config.frames_in_flight,
        frame_bytes_max: config.frame_bytes_max,
        has_checksums: config.has_checksums,
    };
    let granted = Granted {
        pool: config.pool.clone(),
        has_checksums: config.has_checksums,
        writer,
    };
    let grant = IpcGrant::Pool {
        terms,
        handle: config.handle.to_vec(),
        proof: config.secret.proof(Prover::Receiver, nonces),
    };
    Ok((granted, grant))
}
