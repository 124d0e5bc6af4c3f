//! The sender's end of a pair by CUDA IPC: socket, secret, the peer's pool, hello. The frames then go as those of shared memory.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use prost::Message as _;
use tokio::net::UnixStream;

use super::CudaIpc;
use super::fault::IpcFault;
use super::here;
use super::opened::Opened;
use super::pool::{Mapping, PeerPool};
use super::socket::{IpcGrant, IpcOffer};
use crate::device::{DeviceKv, IPC_HANDLE_BYTES};
use crate::link::{Dial, Link};
use crate::transports::shm::ShmFault;
use crate::transports::shm::connect::{Messages, Way};
use crate::transports::shm::pool::PoolTerms;
use crate::transports::shm::socket::{self, Ask, Welcome};
use crate::trust::{DirectWish, Prover, Word32};

/// For the grant of a pool, and then for its opening: on another device the driver connects the two devices, which can take a
/// second. A peer that does not answer is not waited for longer, because the pair has other transports.
const CONNECT_TIME_LIMIT: Duration = Duration::from_secs(4);

/// Opens the pool of a decode node that offers it, or returns why not.
pub(super) async fn connect(dial: &Dial<'_>, ipc: &CudaIpc) -> Result<Link, IpcFault> {
    let device = &ipc.device.as_ref().ok_or(IpcFault::NoDevice)?.kv;
    let offer = dial.offer.ok_or(IpcFault::Disabled)?;
    let wish = ipc.direct.as_ref().ok_or(IpcFault::NoSecret)?;
    let offer = IpcOffer::decode(offer).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    offer.check()?;
    let connected = tokio::time::timeout(CONNECT_TIME_LIMIT, async {
        let connected = UnixStream::connect(socket::path(&offer.socket)).await;
        let stream = connected.map_err(ShmFault::Unreachable)?;
        socket::check_user(&stream, ipc.uid)?;
        let granted = ask(&stream, wish).await?;
        Ok::<_, IpcFault>((granted, Messages::on(stream)))
    });
    let (granted, mut messages) = connected.await.map_err(|_| ShmFault::TimeOut)??;
    let opened = tokio::time::timeout(CONNECT_TIME_LIMIT, async {
        let pool = open(device, &offer, granted).await?;
        let hello = messages.say_hello(dial.hello.clone()).await?;
        Ok::<_, IpcFault>((pool, hello))
    });
    let opened = opened.await.unwrap_or_else(|_| Err(ShmFault::TimeOut.into()));
    let (pool, hello) = match opened {
        Ok(opened) => opened,
        Err(fault) => {
            // The decode node would wait for the exit of this process. A pool that opens later is closed at once.
            messages.say_goodbye().await;
            return Err(fault);
        }
    };
    let way = Way {
        carrier: Arc::new(pool.clone()),
        in_place: Some(pool),
        lesser_because: None,
    };
    Ok(messages.link(hello, way))
}

/// Proves that this node holds the secret, and takes what the decode node grants.
async fn ask(stream: &UnixStream, wish: &DirectWish) -> Result<(PoolTerms, Vec<u8>), IpcFault> {
    let (welcome, _) = socket::heard(stream).await?;
    let theirs: Word32 = match welcome {
        Welcome::Ask(nonce) => nonce,
        Welcome::OtherUser => return Err(ShmFault::Refused("this process runs as another user").into()),
        Welcome::TooManyPairs => return Err(ShmFault::Refused("its pool is open in as many nodes as it may").into()),
    };
    let ours: Word32 = rand::random();
    let nonces = [&theirs, &ours];
    let ask = Ask::Direct {
        nonce: ours,
        proof: wish.secret.proof(Prover::Sender, nonces),
        layers: wish.layers,
        layer_bytes: wish.layer_bytes,
    };
    socket::say(stream, &ask, None).await?;
    let (grant, _) = socket::heard(stream).await?;
    let (terms, handle, proof) = match grant {
        IpcGrant::Pool { terms, handle, proof } => (terms, handle, proof),
        IpcGrant::Denied(why) => return Err(IpcFault::Denied(why)),
    };
    if !wish.secret.is_proof(&proof, Prover::Receiver, nonces) {
        return Err(ShmFault::Refused("it passed its pool without holding the secret").into());
    }
    if (terms.shape.layers, terms.shape.layer_bytes) != (wish.layers, wish.layer_bytes) {
        return Err(ShmFault::Refused("it passed a pool of other blocks").into());
    }
    Ok((terms, handle))
}

async fn open(
    device: &Arc<DeviceKv>,
    offer: &IpcOffer,
    (terms, handle): (PoolTerms, Vec<u8>),
) -> Result<Arc<PeerPool>, IpcFault> {
    let handle: Result<[u8; IPC_HANDLE_BYTES], _> = handle.try_into();
    let handle = handle.map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    let (device, key, here) = (device.clone(), offer.key(), here::find(&offer.socket));
    let opening = tokio::task::spawn_blocking(move || {
        let mapping = match here {
            Some(kv) => Mapping::here(kv),
            None => {
                let of = key.device.clone();
                let opened = Opened::of(&device, key, handle);
                Mapping::opened(opened.map_err(|fault| IpcFault::Import { device: of, fault })?)
            }
        };
        PeerPool::new(&device, terms, mapping)
    });
    // It does not panic, so the runtime is ending.
    opening.await.map_err(|_| ShmFault::TimeOut)?
}
