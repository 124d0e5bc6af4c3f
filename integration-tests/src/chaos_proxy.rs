//! A faulty network between two processes: a TCP proxy whose faults are switched on and off while bytes flow.
//!
//! Stands on the link from prefill to decode nodes (`--kv-advertise` names it), where the kernel here has no netem. Forward
//! is from whoever connects to the target; a fault is for both directions unless it says otherwise.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

/// One read, and the grain of every fault.
const CHUNK_BYTES: usize = 64 << 10;
/// Chunks on their way through one direction of one connection: 16 MiB, as a long fat link would hold.
const CHUNKS_IN_FLIGHT_MAX: usize = 256;
/// At a limited rate a chunk is a twentieth of a second.
const GRAINS_PER_SECOND: u64 = 20;
/// A chunk of at least this size carries KV, not HTTP/2's small talk.
const BULK_BYTES: usize = 2048;

/// What is wrong with the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Every byte comes this much later.
    Delay(Duration),
    /// No more bytes per second than this in each direction of each connection.
    Rate { bytes_per_second: u64 },
    /// Nothing passes, nobody is told; when it heals everything goes on.
    Blackhole,
    /// One bit in each of the next so many forward chunks of KV is turned.
    FlipBits { chunks: u64 },
    /// Connections end after so many more forward bytes, each with a FIN.
    CutAfter { bytes: u64 },
    /// The forward direction of every connection ends; backward stays open.
    HalfClose,
    /// Every connection is reset. New ones are fine.
    Reset,
}

/// One `inject`; the number tells a fault from the next one of the same kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Setting {
    number: u64,
    fault: Option<Fault>,
}

#[derive(Debug)]
struct Shared {
    setting: watch::Sender<Setting>,
    target: watch::Sender<Option<String>>,
    flipped: AtomicU64,
    forwarded: AtomicU64,
    random: Mutex<StdRng>,
}

/// Runs until it is dropped; its connections end with it.
#[derive(Debug)]
pub struct ChaosProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: tokio::task::AbortHandle,
}

impl Drop for ChaosProxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.inject(Fault::Reset);
    }
}

impl ChaosProxy {
    /// Listens on a free port of loopback; connections wait until there is a target. `seed` decides which bits flip.
    ///
    /// # Errors
    /// No port.
    pub async fn start(seed: u64) -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            setting: watch::channel(Setting::default()).0,
            target: watch::channel(None).0,
            flipped: AtomicU64::new(0),
            forwarded: AtomicU64::new(0),
            random: Mutex::new(StdRng::seed_from_u64(seed)),
        });
        let accepting = tokio::spawn(accept(listener, shared.clone())).abort_handle();
        Ok(Self {
            address,
            shared,
            accepting,
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where new connections go: a process that was started again has another port.
    pub fn set_target(&self, address: &str) {
        self.shared.target.send_replace(Some(address.to_owned()));
    }

    /// Replaces whatever was wrong before.
    pub fn inject(&self, fault: Fault) {
        self.set(Some(fault));
    }

    pub fn heal(&self) {
        self.set(None);
    }

    fn set(&self, fault: Option<Fault>) {
        self.shared.setting.send_modify(|setting| {
            setting.number += 1;
            setting.fault = fault;
        });
    }

    /// Chunks that left with a bit turned, since the start.
    pub fn flipped(&self) -> u64 {
        self.shared.flipped.load(Ordering::Relaxed)
    }

    /// Forward bytes since the start.
    pub fn forwarded_bytes(&self) -> u64 {
        self.shared.forwarded.load(Ordering::Relaxed)
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(connection(stream, shared.clone()));
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Forward,
    Backward,
}

/// How one direction of a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Its reader said FIN, which was passed on; the other direction may go on.
    Closed,
    /// Both directions end now.
    Cut,
    Reset,
}

async fn connection(near: TcpStream, shared: Arc<Shared>) {
    let mut target = shared.target.subscribe();
    let Ok(Some(address)) = target.wait_for(Option::is_some).await.map(|target| target.clone()) else {
        return;
    };
    let Ok(far) = TcpStream::connect(&address).await else {
        return reset(&near);
    };
    for stream in [&near, &far] {
        let _ = stream.set_nodelay(true);
    }
    let (Ok(near_handle), Ok(far_handle)) = (near.as_fd().try_clone_to_owned(), far.as_fd().try_clone_to_owned())
    else {
        return reset(&near);
    };
    // Halves that do not say FIN when they are dropped.
    let (near_reader, near_writer) = tokio::io::split(near);
    let (far_reader, far_writer) = tokio::io::split(far);
    let forward = pump(Direction::Forward, (near_reader, far_writer), shared.clone());
    let backward = pump(Direction::Backward, (far_reader, near_writer), shared);
    tokio::pin!(forward, backward);
    let end = tokio::select! {
        end = &mut forward => if end == End::Closed { backward.await } else { end },
        end = &mut backward => if end == End::Closed { forward.await } else { end },
    };
    if end == End::Reset {
        reset(&near_handle);
        reset(&far_handle);
    }
}

/// Closing it now sends RST instead of FIN.
fn reset(socket: &impl AsFd) {
    let _ = rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO));
}

type Halves = (ReadHalf<TcpStream>, WriteHalf<TcpStream>);

/// What is due to be written, and when; `None` is the end of the direction, which is passed on as FIN.
type Due = (Instant, Option<Vec<u8>>);

/// Reads, damages and delays beside the writing, so that a delay is not a rate.
async fn pump(direction: Direction, (mut reader, mut writer): Halves, shared: Arc<Shared>) -> End {
    let (chunks, due) = mpsc::channel::<Due>(CHUNKS_IN_FLIGHT_MAX);
    {
        let reading = read(direction, (&mut reader, chunks), &shared);
        let writing = write(&mut writer, due);
        tokio::pin!(reading, writing);
        tokio::select! {
            biased;
            end = &mut reading => match end {
                // At once: nothing that waits goes out, and above all no FIN.
                End::Reset => End::Reset,
                end => if writing.await.is_ok() { end } else { End::Reset },
            },
            _ = &mut writing => End::Reset,
        }
    }
}

async fn write(writer: &mut WriteHalf<TcpStream>, mut due: mpsc::Receiver<Due>) -> std::io::Result<()> {
    while let Some((at, chunk)) = due.recv().await {
        sleep_until(at).await;
        match chunk {
            Some(chunk) => writer.write_all(&chunk).await?,
            None => return writer.shutdown().await,
        }
    }
    Ok(())
}

async fn read(
    direction: Direction,
    (reader, chunks): (&mut ReadHalf<TcpStream>, mpsc::Sender<Due>),
    shared: &Shared,
) -> End {
    let mut settings = shared.setting.subscribe();
    // What was wrong before this connection came and is over at once does not concern it.
    let mut now = *settings.borrow_and_update();
    let mut left_until_cut = cut_after(now.fault, direction);
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let read = tokio::select! {
            biased;
            changed = settings.changed() => {
                if changed.is_err() {
                    return End::Reset;
                }
                now = *settings.borrow_and_update();
                left_until_cut = cut_after(now.fault, direction);
                match (now.fault, direction) {
                    (Some(Fault::Reset), _) => return End::Reset,
                    (Some(Fault::HalfClose), Direction::Forward) => return closed(&chunks, now).await,
                    _ => continue,
                }
            }
            () = chunks.closed() => return End::Reset,
            read = reader.read(&mut buffer[..grain(now.fault, left_until_cut)]), if now.fault != Some(Fault::Blackhole) => read,
        };
        let length = match read {
            Ok(0) => return closed(&chunks, now).await,
            Ok(length) => length,
            Err(_) => return End::Reset,
        };
        let mut chunk = buffer[..length].to_vec();
        if direction == Direction::Forward {
            shared.forwarded.fetch_add(length as u64, Ordering::Relaxed);
            damage(&mut chunk, now, shared);
        }
        if chunks.send((due_at(now.fault), Some(chunk))).await.is_err() {
            return End::Reset;
        }
        if let Some(Fault::Rate { bytes_per_second }) = now.fault {
            tokio::time::sleep(Duration::from_secs_f64(length as f64 / bytes_per_second.max(1) as f64)).await;
        }
        if let Some(left) = &mut left_until_cut {
            *left = left.saturating_sub(length as u64);
            if *left == 0 {
                return End::Cut;
            }
        }
    }
}

/// The direction's reader has said FIN, or is to: it is passed on behind what still waits.
async fn closed(chunks: &mpsc::Sender<Due>, now: Setting) -> End {
    match chunks.send((due_at(now.fault), None)).await {
        Ok(()) => End::Closed,
        Err(_) => End::Reset,
    }
}

fn due_at(fault: Option<Fault>) -> Instant {
    match fault {
        Some(Fault::Delay(delay)) => Instant::now() + delay,
        _ => Instant::now(),
    }
}

/// Most bytes of the next read.
fn grain(fault: Option<Fault>, left_until_cut: Option<u64>) -> usize {
    let most = match fault {
        Some(Fault::Rate { bytes_per_second }) => bytes_per_second / GRAINS_PER_SECOND,
        _ => left_until_cut.unwrap_or(u64::MAX),
    };
    most.clamp(1, CHUNK_BYTES as u64) as usize
}

fn cut_after(fault: Option<Fault>, direction: Direction) -> Option<u64> {
    match (fault, direction) {
        (Some(Fault::CutAfter { bytes }), Direction::Forward) => Some(bytes),
        _ => None,
    }
}

/// Turns one bit while flips are due.
fn damage(chunk: &mut [u8], now: Setting, shared: &Shared) {
    if !matches!(now.fault, Some(Fault::FlipBits { .. })) || chunk.len() < BULK_BYTES {
        return;
    }
    let mut is_due = false;
    shared.setting.send_if_modified(|setting| {
        if let Some(Fault::FlipBits { chunks }) = &mut setting.fault
            && setting.number == now.number
            && *chunks > 0
        {
            *chunks -= 1;
            is_due = true;
        }
        false
    });
    if !is_due {
        return;
    }
    let mut random = shared.random.lock().unwrap_or_else(PoisonError::into_inner);
    let at = random.random_range(0..chunk.len());
    chunk[at] ^= 1 << random.random_range(0..8);
    shared.flipped.fetch_add(1, Ordering::Relaxed);
}

#[cfg(test)]
#[path = "chaos_proxy_tests.rs"]
mod tests;
