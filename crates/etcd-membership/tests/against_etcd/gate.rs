//! A TCP gate in front of etcd: cuts one client off while others go on, or holds its requests at a chosen moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Open,
    /// Nothing passes, connections stay: what a paused server or a silent network looks like.
    Frozen,
    /// Requests are held back once this many bytes of answers have passed on the connection.
    HoldRequestsAfter(usize),
}

#[derive(Clone)]
struct Shared {
    mode: watch::Sender<Mode>,
    connections: Arc<AtomicUsize>,
    /// Connections whose requests are being held.
    held: watch::Sender<usize>,
}

pub struct Gate {
    pub port: u16,
    shared: Shared,
    task: tokio::task::JoinHandle<()>,
}

impl Gate {
    pub async fn start(etcd_port: u16, mode: Mode) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("its number").port();
        let shared = Shared {
            mode: watch::channel(mode).0,
            connections: Arc::default(),
            held: watch::channel(0).0,
        };
        let of_task = shared.clone();
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(client, etcd_port, of_task.clone()));
            }
        });
        Self { port, shared, task }
    }

    pub fn address(&self) -> String {
        format!("etcd://127.0.0.1:{}/test", self.port)
    }

    pub fn set(&self, mode: Mode) {
        self.shared.mode.send_replace(mode);
    }

    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    pub fn held(&self) -> watch::Receiver<usize> {
        self.shared.held.subscribe()
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(client: TcpStream, etcd_port: u16, shared: Shared) {
    shared.connections.fetch_add(1, Ordering::Relaxed);
    let Ok(etcd) = TcpStream::connect(("127.0.0.1", etcd_port)).await else {
        return;
    };
    let (from_client, to_client) = client.into_split();
    let (from_etcd, to_etcd) = etcd.into_split();
    let (answered_in, answered) = watch::channel(0);
    tokio::spawn(carry_answers(from_etcd, to_client, shared.clone(), answered_in));
    carry_requests(from_client, to_etcd, shared, answered).await;
}

async fn carry_answers(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    shared: Shared,
    answered: watch::Sender<usize>,
) {
    let mut buffer = vec![0; 64 << 10];
    let mut mode = shared.mode.subscribe();
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        if mode.wait_for(|mode| *mode != Mode::Frozen).await.is_err() {
            return;
        }
        answered.send_modify(|sum| *sum += count);
        if to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}

async fn carry_requests(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    shared: Shared,
    answered: watch::Receiver<usize>,
) {
    let mut buffer = vec![0; 64 << 10];
    let mut mode = shared.mode.subscribe();
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        let passes = |mode: &Mode| match mode {
            Mode::Open => true,
            Mode::Frozen => false,
            Mode::HoldRequestsAfter(bytes) => *answered.borrow() < *bytes,
        };
        if !passes(&mode.borrow()) {
            shared.held.send_modify(|held| *held += 1);
        }
        if mode.wait_for(passes).await.is_err() || to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}
