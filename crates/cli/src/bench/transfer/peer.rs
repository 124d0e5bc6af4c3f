//! The other process: a decode node's end of each transport, a pool to copy into, and a socket that reads a stream and
//! drops it.

use std::io::{Read as _, Write as _};
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use anyhow::Context;
use async_trait::async_trait;
use clap::Args;
use engine::{KvBacking, KvMemory};
use identity::{Authority, Identity, PeerRole, TlsConfig, in_days};
use kv_transfer::choice::TransportKind;
use kv_transfer::receiver::{Arrived, HandoffSink, ImportError, ReceiveEnd, Receiver, TransferRefusal};
use kv_transfer::span::Span;
use kv_transfer::{DirectOffer, DirectSecret, ReceivingEnd, Serving, shm, transports};
use node::KvPool;
use serde::{Deserialize, Serialize};
use service_runtime::freed_memory::{self, FreedMemory};
use service_runtime::health::Health;
use service_runtime::serve::{self, Calls, Ops};
use service_runtime::shutdown::Shutdown;
use serving_core::ids::{BlockId, NodeId, TransferId};
use serving_core::kv::reservation::Reservation;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, Command};

use super::memory::{self, Payload};
use crate::exit::Exit;
use crate::terminal::say;

/// The variable in which the other process gets the secret.
const SECRET_VARIABLE: &str = "BATON_SHM_DIRECT_SECRET";
/// iperf3's default.
pub(super) const STREAM_CHUNK_BYTES: usize = 128 << 10;

/// The arguments of the hidden verb that is the other process.
#[derive(Clone, Debug, Args)]
pub struct PeerArgs {
    #[command(flatten)]
    payload: Payload,
    /// Folder of the certificates of both processes.
    #[arg(long)]
    certificates: PathBuf,
}

/// The first line of the other process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Addresses {
    /// Its pool, as a path that this user's processes can open.
    pub pool: String,
    pub staged: String,
    /// As `staged`, for callers with a certificate.
    pub encrypted: String,
    pub direct: String,
    pub direct_unchecked: String,
    /// The address that takes a byte and answers with a digest of the pool.
    pub control: String,
    /// The same for the memcpy, so that each end has a connection of its own.
    pub memcpy: String,
    /// The address that takes a length and that many bytes, and answers with a byte.
    pub stream: String,
}

/// The other process, as this process sees it. It ends when this value is dropped.
#[derive(Debug)]
pub(super) struct Peer {
    pub addresses: Addresses,
    pub secret: DirectSecret,
    pub certificates: Certificates,
    control: tokio::net::TcpStream,
    _child: Child,
}

impl Peer {
    pub async fn start(payload: Payload) -> anyhow::Result<Self> {
        let text = format!("{:032x}", rand::random::<u128>());
        let certificates = Certificates::make()?;
        let executable = std::env::current_exe().context("cannot find this program's own file")?;
        let mut child = Command::new(executable)
            .arg("bench-transfer-peer")
            .args([
                format!("--blocks={}", payload.blocks),
                format!("--layers={}", payload.layers),
            ])
            .arg(format!("--kv-heads={}", payload.kv_heads))
            .arg("--certificates")
            .arg(certificates.0.path())
            .env(SECRET_VARIABLE, &text)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start the other process")?;
        let said = child.stdout.take().context("the other process has no stdout")?;
        let first = BufReader::new(said).lines().next_line().await?;
        let first = first.context("the other process ended before it listened; its last words are above")?;
        let addresses: Addresses = serde_json::from_str(&first).context("the other process said something else")?;
        Ok(Self {
            secret: text.parse()?,
            certificates,
            control: tokio::net::TcpStream::connect(&addresses.control).await?,
            addresses,
            _child: child,
        })
    }

    /// The digest of the bytes that it has.
    pub async fn digest(&mut self) -> anyhow::Result<u64> {
        self.control.write_u8(1).await?;
        Ok(self.control.read_u64().await?)
    }
}

/// Certificates for the two processes, in a folder that goes with this value.
#[derive(Debug)]
pub(super) struct Certificates(tempfile::TempDir);

impl Certificates {
    fn make() -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("no room for certificates")?;
        let authority = Authority::create(folder.path(), "bench")?;
        for process in ["prefill/prefill-0", "decode/decode-0"] {
            authority.issue(&process.parse()?, in_days(1))?;
        }
        Ok(Self(folder))
    }

    pub fn identity(&self, role: PeerRole) -> anyhow::Result<Identity> {
        identity_of(self.0.path(), role)
    }
}

fn identity_of(folder: &Path, role: PeerRole) -> anyhow::Result<Identity> {
    let name = format!("{role}-0");
    let tls = TlsConfig {
        tls_cert: Some(folder.join(format!("{name}.crt"))),
        tls_key: Some(folder.join(format!("{name}.key"))),
        tls_ca: Some(folder.join("ca.crt")),
        insecure: false,
    };
    Ok(Identity::open(&tls, role, &name)?)
}

/// The life of the other process: until its stdin ends.
pub fn run(args: &PeerArgs) -> anyhow::Result<Exit> {
    freed_memory::set(FreedMemory::Kept);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(serve(args.payload, identity_of(&args.certificates, PeerRole::Decode)?))?;
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    Ok(Exit::Ok)
}

async fn serve(payload: Payload, identity: Identity) -> anyhow::Result<()> {
    let memory = KvMemory::backed(payload.geometry(), payload.blocks, KvBacking::Shareable)?;
    let memory = Arc::new(memory);
    let descriptor = memory.descriptor().context("the pool is not shareable")?.as_raw_fd();
    let secret: DirectSecret = std::env::var(SECRET_VARIABLE)?.parse()?;
    let direct = |has_checksums| -> anyhow::Result<DirectOffer> {
        Ok(DirectOffer {
            secret: secret.clone(),
            pool: Arc::new(KvPool::of(&memory).context("the pool is not shareable")?),
            has_checksums,
        })
    };
    let mut kept = Vec::new();
    let mut addresses = Vec::new();
    let plain = Identity::none;
    for (offer, identity) in [
        (None, plain()),
        (None, identity),
        (Some(direct(true)?), plain()),
        (Some(direct(false)?), plain()),
    ] {
        let (address, serving) = serve_node((&memory, payload), offer, identity).await?;
        addresses.push(address);
        kept.push(serving);
    }
    let mut addresses = addresses.into_iter();
    let mut next = || addresses.next().context("four nodes are served");
    let said = Addresses {
        pool: format!("/proc/{}/fd/{descriptor}", std::process::id()),
        staged: next()?,
        encrypted: next()?,
        direct: next()?,
        direct_unchecked: next()?,
        control: answer_control(memory.clone())?,
        memcpy: answer_control(memory.clone())?,
        stream: swallow_streams()?,
    };
    crate::stdout::print(&format!("{}\n", serde_json::to_string(&said)?))?;
    let mut stdin = tokio::io::stdin();
    let mut rest = [0; 64];
    while stdin.read(&mut rest).await? > 0 {}
    Ok(())
}

/// One decode node's end, on a port of its own and with a node's own server settings.
async fn serve_node(
    (memory, payload): (&Arc<KvMemory>, Payload),
    direct: Option<DirectOffer>,
    identity: Identity,
) -> anyhow::Result<(String, Vec<Serving>)> {
    let sink = Arc::new(Sink {
        memory: memory.clone(),
        payload,
    });
    let receiver = Receiver::new(memory::node("decode-0"), memory::COMPATIBILITY.into(), sink);
    let layer_bytes = payload.geometry().layer_bytes();
    let serving = transports::serve(&receiver, &[shm::KIND], &ReceivingEnd { layer_bytes, direct });
    let (listener, address) = serve::bind("127.0.0.1:0").await?;
    let ops = Ops {
        role: "bench",
        name: "decode-0".to_owned(),
        version: crate::version::VERSION,
        health: Health::new("a measurement"),
        metrics: Arc::default(),
        ledger: None,
        guard: Default::default(),
    };
    let calls = Calls::from(kv_transfer::grpc::routes(receiver)).known_as(identity);
    tokio::spawn(serve::serve_node(listener, calls, ops, Shutdown::new()));
    Ok((address.to_string(), serving))
}

/// Gives each transfer every block.
#[derive(Debug)]
struct Sink {
    memory: Arc<KvMemory>,
    payload: Payload,
}

#[async_trait]
impl HandoffSink for Sink {
    fn claim(&self, transfer: TransferId, sender: &NodeId) -> Result<Reservation, TransferRefusal> {
        Ok(Reservation {
            transfer,
            key: memory::key(transfer),
            sender: sender.clone(),
            blocks: memory::blocks(self.payload),
            layer_count: self.payload.layers,
            layer_bytes: self.payload.geometry().layer_bytes(),
        })
    }
    fn began(&self, _: TransferId) {}
    fn progressed(&self, _: TransferId) {}
    fn import(&self, block: BlockId, layers: Range<u32>, data: Span<'_>) -> Result<(), ImportError> {
        let copy = || -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
            Ok(self.memory.import_layers(block, layers, data.host()?)?)
        };
        copy().map_err(|source| ImportError { block, source })
    }
    async fn commit(&self, _: Arrived) -> Result<(), TransferRefusal> {
        Ok(())
    }
    fn ended(&self, transfer: TransferId, _: TransportKind, end: ReceiveEnd) {
        say!("transfer {transfer} ended: {end}");
    }
}

/// A thread that lasts as long as the process.
fn listening(
    mut serve: impl FnMut(std::net::TcpStream) -> anyhow::Result<()> + Send + 'static,
) -> anyhow::Result<String> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?.to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = stream.set_nodelay(true);
            // It ends when the other side ends.
            let _ = serve(stream);
        }
    });
    Ok(address)
}

fn answer_control(memory: Arc<KvMemory>) -> anyhow::Result<String> {
    listening(move |mut stream| {
        let mut asked = [0; 1];
        loop {
            stream.read_exact(&mut asked)?;
            let answer = match asked {
                // The memcpy is complete. The connection waited for nothing else.
                [0] => 0,
                _ => memory::digest(&memory)?,
            };
            stream.write_all(&answer.to_be_bytes())?;
        }
    })
}

fn swallow_streams() -> anyhow::Result<String> {
    listening(|mut stream| {
        let mut chunk = vec![0; STREAM_CHUNK_BYTES];
        loop {
            let mut length = [0; 8];
            stream.read_exact(&mut length)?;
            let mut left = u64::from_be_bytes(length);
            while left > 0 {
                let most = chunk.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                let read = stream.read(&mut chunk[..most])?;
                anyhow::ensure!(read > 0, "the stream ended early");
                left -= read as u64;
            }
            stream.write_all(&[1])?;
        }
    })
}
