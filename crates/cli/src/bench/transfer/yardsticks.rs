//! The yardsticks for the transports: one copy between two processes, and one TCP stream between them.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use engine::KvMemory;
use kv_transfer::receiver::PoolShape;
use kv_transfer::shm::Yardstick;
use serving_core::ids::BlockId;
use tokio::process::Command;
use workload::statistics::Samples;

use super::memory::Payload;
use super::peer::{Peer, STREAM_CHUNK_BYTES};

/// iperf3 averages over this long.
const IPERF3_SECONDS: u32 = 1;
const IPERF3_TIME_LIMIT: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub(super) struct Yardsticks {
    source: Arc<KvMemory>,
    payload: Payload,
    pool: Arc<Yardstick>,
    control: Arc<Mutex<TcpStream>>,
    stream: Arc<Mutex<TcpStream>>,
}

impl Yardsticks {
    pub fn open(source: Arc<KvMemory>, payload: Payload, peer: &Peer) -> anyhow::Result<Self> {
        let pool = std::fs::File::options()
            .read(true)
            .write(true)
            .open(&peer.addresses.pool);
        let pool = OwnedFd::from(pool.context("cannot open the other process's pool")?);
        let shape = PoolShape {
            blocks: payload.blocks,
            layers: payload.layers,
            layer_bytes: u32::try_from(payload.geometry().layer_bytes())?,
        };
        let connect = |address: &str| -> anyhow::Result<_> {
            let stream = TcpStream::connect(address)?;
            stream.set_nodelay(true)?;
            Ok(Arc::new(Mutex::new(stream)))
        };
        Ok(Self {
            source,
            payload,
            pool: Arc::new(Yardstick::map(&pool, shape)?),
            control: connect(&peer.addresses.memcpy)?,
            stream: connect(&peer.addresses.stream)?,
        })
    }

    /// One thread copies block after block into the other process's memory. Then it sends a byte and waits for one.
    pub async fn memcpy(&self) -> anyhow::Result<(Duration, u64)> {
        let this = self.clone();
        tokio::task::spawn_blocking(move || {
            let mut control = this.control.lock().unwrap_or_else(PoisonError::into_inner);
            let started = Instant::now();
            let mut moved = 0;
            for block in (0..this.payload.blocks).map(BlockId) {
                let copied = this.source.read_layers(block, 0..this.payload.layers, |bytes| {
                    moved += bytes.len() as u64;
                    this.pool.copy(block, bytes)
                })?;
                copied.context("the other pool has no such block")?;
            }
            control.write_all(&[0])?;
            control.read_exact(&mut [0; 8])?;
            Ok((started.elapsed(), moved))
        })
        .await?
    }

    /// Sends the same blocks through a socket, in pieces of the size that iperf3 writes, until the other side has read all.
    pub async fn tcp_stream(&self) -> anyhow::Result<(Duration, u64)> {
        let this = self.clone();
        tokio::task::spawn_blocking(move || {
            let mut stream = this.stream.lock().unwrap_or_else(PoisonError::into_inner);
            let started = Instant::now();
            let mut moved = 0;
            stream.write_all(&this.payload.bytes().to_be_bytes())?;
            for block in (0..this.payload.blocks).map(BlockId) {
                this.source.read_layers(block, 0..this.payload.layers, |bytes| {
                    moved += bytes.len() as u64;
                    bytes
                        .chunks(STREAM_CHUNK_BYTES)
                        .try_for_each(|chunk| stream.write_all(chunk))
                })??;
            }
            stream.read_exact(&mut [0; 1])?;
            Ok((started.elapsed(), moved))
        })
        .await?
    }
}

/// The real iperf3, run from time to time between the rounds, so that it meets the same load of the machine.
#[derive(Debug, Default)]
pub(super) struct Iperf3 {
    rates: Vec<f64>,
    failed: Option<String>,
}

impl Iperf3 {
    /// Runs one stream for [`IPERF3_SECONDS`]. Does nothing once it has failed.
    pub async fn run(&mut self) {
        if self.failed.is_some() {
            return;
        }
        match tokio::time::timeout(IPERF3_TIME_LIMIT, iperf3_once()).await {
            Ok(Ok(rate)) => self.rates.push(rate),
            Ok(Err(error)) if is_not_there(&error) => self.failed = Some("iperf3 is not installed".to_owned()),
            Ok(Err(error)) => self.failed = Some(format!("iperf3 failed ({error:#})")),
            Err(_) => self.failed = Some("iperf3 did not end in time".to_owned()),
        }
    }

    /// The median in bytes a second and its n, or the reason why there is no figure.
    pub fn rate(self) -> Result<(f64, usize), String> {
        if let Some(failed) = self.failed {
            return Err(failed);
        }
        let rates = Samples::new(self.rates);
        let median = rates.percentile(50.0).ok_or("iperf3 did not run")?;
        Ok((median, rates.count()))
    }
}

fn is_not_there(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::NotFound)
}

async fn iperf3_once() -> anyhow::Result<f64> {
    // This port is free at this moment. iperf3 cannot pick one itself.
    let port = std::net::TcpListener::bind("127.0.0.1:0")?
        .local_addr()?
        .port()
        .to_string();
    let mut server = Command::new("iperf3")
        .args(["-s", "-1", "-B", "127.0.0.1", "-p", &port])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let deadline = Instant::now() + IPERF3_TIME_LIMIT;
    // Its exit status says nothing: it is also 0 when the server does not listen yet.
    let rate = loop {
        let client = Command::new("iperf3")
            .args(["-c", "127.0.0.1", "-p", &port, "-J", "-t", &IPERF3_SECONDS.to_string()])
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .output()
            .await?;
        let said: serde_json::Value = serde_json::from_slice(&client.stdout)?;
        let bits = said["end"]["sum_received"]["bits_per_second"].as_f64();
        if let Some(bits) = bits {
            break bits / 8.0;
        }
        ensure!(Instant::now() < deadline, "it said no rate");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    server.wait().await?;
    Ok(rate)
}
