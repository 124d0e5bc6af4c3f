//! Any bytes on a connection to the coordinator's port: they are answered or the connection ends, and the next one is served.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use coordinator::api::{HttpPort, serve_http};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket};

use super::{PATIENCE, with_edge};

const CONNECTIONS_MAX: usize = 64;
/// Turns of the runtime without a byte after which the server is taken to wait for more.
const QUIET_TURNS: usize = 40;
const ANSWER_BYTES_MAX: usize = 4 << 20;

thread_local! {
    static ADDRESS: SocketAddr = with_edge(|edge| {
        edge.runtime.block_on(async {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
            let address = listener.local_addr().expect("its address");
            let router = edge.router.clone();
            let port = HttpPort {
                listener,
                connections_max: CONNECTIONS_MAX,
                certificate: None,
            };
            let serving = serve_http(port, router, std::future::pending(), Duration::ZERO);
            tokio::spawn(serving);
            address
        })
    });
}

pub(crate) fn check(data: &[u8]) {
    let address = ADDRESS.with(|address| *address);
    with_edge(|edge| {
        edge.says(b"hello");
        let answered = async { tokio::time::timeout(PATIENCE, talk(address, data)).await };
        let heard = edge.runtime.block_on(answered).expect("the connection ends in time");
        if !heard.is_empty() {
            assert!(heard.starts_with(b"HTTP/1."), "{:?}", String::from_utf8_lossy(&heard));
        }
    });
}

/// Says the bytes, listens until there is nothing more to hear, says that this is all, and listens to the end.
async fn talk(address: SocketAddr, data: &[u8]) -> Vec<u8> {
    let socket = TcpSocket::new_v4().expect("a socket");
    let mut stream = socket.connect(address).await.expect("the server takes connections");
    let mut heard = Vec::new();
    // The server may close the connection before it has read everything.
    let mut is_open = stream.write_all(data).await.is_ok();
    let mut quiet = 0;
    let mut buffer = [0; 4096];
    while is_open && quiet < QUIET_TURNS {
        match stream.try_read(&mut buffer) {
            Ok(0) => is_open = false,
            Ok(count) => {
                heard.extend_from_slice(&buffer[..count]);
                quiet = 0;
                // Events of the cluster have no end of their own.
                is_open = heard.len() < ANSWER_BYTES_MAX;
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                quiet += 1;
                tokio::task::yield_now().await;
            }
            Err(_) => is_open = false,
        }
    }
    if stream.shutdown().await.is_ok() {
        // A reset is an end, too.
        let _ = stream.read_to_end(&mut heard).await;
    }
    heard
}
