//! The sender's end of a pair by CUDA IPC: socket, secret, the peer's pool, hello. The frames then go as those of shared memory.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use prost::Message as _;
use proto::messages::{Hello, HelloReply};
use tokio::net::UnixStream;
use tokio::sync::oneshot;

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
    let device = ipc.device.as_ref().ok_or(IpcFault::NoDevice)?.kv.clone();
    let offer = dial.offer.ok_or(IpcFault::Disabled)?;
    let wish = ipc.direct.clone().ok_or(IpcFault::NoSecret)?;
    let offer = IpcOffer::decode(offer).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    offer.check()?;
    let dialling = Dialling {
        offer,
        wish,
        device,
        uid: ipc.uid,
        hello: dial.hello.clone(),
    };
    // A task of its own. When this call is dropped, the task still ends what it has begun, and the link that nobody takes says
    // goodbye.
    let (linked, link) = oneshot::channel();
    tokio::spawn(async move { linked.send(dialling.link().await) });
    // The task does not panic, so the runtime is ending.
    link.await.map_err(|_| ShmFault::TimeOut)?
}

/// A dial that has found an offer of this host.
struct Dialling {
    offer: IpcOffer,
    wish: DirectWish,
    device: Arc<DeviceKv>,
    /// This process, as its peers see it.
    uid: u32,
    hello: Hello,
}

impl Dialling {
    /// From the socket to the link.
    async fn link(self) -> Result<Link, IpcFault> {
        let connected = UnixStream::connect(socket::path(&self.offer.socket));
        let connected = tokio::time::timeout(CONNECT_TIME_LIMIT, connected).await;
        let stream = connected.map_err(|_| ShmFault::TimeOut)?;
        let stream = stream.map_err(ShmFault::Unreachable)?;
        socket::check_user(&stream, self.uid)?;
        let mut messages = Messages::on(stream);
        let (pool, hello) = match self.open(&mut messages).await {
            Ok(opened) => opened,
            Err(fault) => {
                // A decode node that has granted its pool would wait for the exit of this process. A pool that opens later is
                // closed at once.
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

    /// The pool, and the decode node's answer to the hello.
    async fn open(&self, messages: &mut Messages) -> Result<(Arc<PeerPool>, HelloReply), IpcFault> {
        let granted = tokio::time::timeout(CONNECT_TIME_LIMIT, ask(messages.socket(), &self.wish)).await;
        let granted = granted.map_err(|_| ShmFault::TimeOut)??;
        let opened = tokio::time::timeout(CONNECT_TIME_LIMIT, async {
            let pool = open(&self.device, &self.offer, granted).await?;
            let hello = messages.say_hello(self.hello.clone()).await?;
            Ok::<_, IpcFault>((pool, hello))
        });
        opened.await.map_err(|_| ShmFault::TimeOut)?
    }
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
