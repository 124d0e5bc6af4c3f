//! What a fault does to bytes, through real sockets.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

/// Longest wait for what must come; what must not come is waited for much shorter.
const PATIENCE: Duration = Duration::from_secs(10);
const NOTHING_FOR: Duration = Duration::from_millis(200);

/// A proxy before a server that sends back what it gets, and a connection through it.
async fn rig() -> (ChaosProxy, TcpStream) {
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = server.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = server.accept().await {
            tokio::spawn(async move {
                let (mut reader, mut writer) = stream.split();
                // Ends when either side does: that is what the tests look at.
                let _ = tokio::io::copy(&mut reader, &mut writer).await;
                let _ = writer.shutdown().await;
            });
        }
    });
    let proxy = ChaosProxy::start(7).await.unwrap();
    proxy.set_target(&address);
    let client = TcpStream::connect(proxy.address()).await.unwrap();
    (proxy, client)
}

async fn echo(client: &mut TcpStream, bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    client.write_all(bytes).await?;
    let mut back = vec![0; bytes.len()];
    tokio::time::timeout(PATIENCE, client.read_exact(&mut back)).await??;
    Ok(back)
}

#[tokio::test]
async fn without_a_fault_every_byte_passes_in_order() {
    let (proxy, mut client) = rig().await;
    let bytes: Vec<u8> = (0..300_000u32).map(|i| (i % 251) as u8).collect();
    let (mut reader, mut writer) = client.split();
    let mut back = vec![0; bytes.len()];
    let (sent, got) = tokio::join!(writer.write_all(&bytes), reader.read_exact(&mut back));
    sent.unwrap();
    got.unwrap();
    assert_eq!(back, bytes);
    assert_eq!(proxy.forwarded_bytes(), bytes.len() as u64);
}

#[tokio::test]
async fn a_delay_comes_twice_in_a_round_trip() {
    let (proxy, mut client) = rig().await;
    echo(&mut client, b"connect").await.unwrap();
    proxy.inject(Fault::Delay(Duration::from_millis(30)));
    let started = Instant::now();
    assert_eq!(echo(&mut client, b"slow").await.unwrap(), b"slow");
    assert!(started.elapsed() >= Duration::from_millis(60));
}

#[tokio::test]
async fn a_rate_is_kept() {
    let (proxy, mut client) = rig().await;
    echo(&mut client, b"connect").await.unwrap();
    proxy.inject(Fault::Rate {
        bytes_per_second: 20_000,
    });
    let started = Instant::now();
    echo(&mut client, &[1; 4_000]).await.unwrap();
    assert!(
        started.elapsed() >= Duration::from_millis(150),
        "{:?}",
        started.elapsed()
    );
}

#[tokio::test]
async fn a_blackhole_holds_everything_back_and_loses_nothing() {
    let (proxy, mut client) = rig().await;
    echo(&mut client, b"connect").await.unwrap();
    proxy.inject(Fault::Blackhole);
    client.write_all(b"lost?").await.unwrap();
    let mut back = [0; 5];
    let nothing = tokio::time::timeout(NOTHING_FOR, client.read_exact(&mut back)).await;
    assert!(nothing.is_err(), "{nothing:?}");
    proxy.heal();
    tokio::time::timeout(PATIENCE, client.read_exact(&mut back))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(&back, b"lost?");
}

#[tokio::test]
async fn as_many_chunks_as_were_asked_for_have_one_bit_turned_each() {
    let (proxy, mut client) = rig().await;
    echo(&mut client, b"connect").await.unwrap();
    proxy.inject(Fault::FlipBits { chunks: 1 });
    assert_eq!(echo(&mut client, b"small talk").await.unwrap(), b"small talk");
    let sent = vec![0u8; 8_192];
    let mut turned = 0;
    for _ in 0..3 {
        let back = echo(&mut client, &sent).await.unwrap();
        turned += back.iter().map(|byte| byte.count_ones()).sum::<u32>();
    }
    assert_eq!((turned, proxy.flipped()), (1, 1));
}

#[tokio::test]
async fn a_cut_ends_the_connection_after_its_bytes() {
    let (proxy, mut client) = rig().await;
    echo(&mut client, b"connect").await.unwrap();
    proxy.inject(Fault::CutAfter { bytes: 3 });
    let cut = echo(&mut client, b"abcdef").await;
    assert!(cut.is_err(), "{cut:?}");
}

#[tokio::test]
async fn a_reset_is_an_error_and_the_next_connection_is_fine() {
    let (proxy, mut client) = rig().await;
    echo(&mut client, b"connect").await.unwrap();
    proxy.inject(Fault::Reset);
    let mut byte = [0; 1];
    let reset = tokio::time::timeout(PATIENCE, client.read(&mut byte)).await.unwrap();
    assert_eq!(reset.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    let mut next = TcpStream::connect(proxy.address()).await.unwrap();
    assert_eq!(echo(&mut next, b"fine").await.unwrap(), b"fine");
}

#[tokio::test]
async fn a_half_close_ends_one_direction_only() {
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = ChaosProxy::start(7).await.unwrap();
    proxy.set_target(&server.local_addr().unwrap().to_string());
    let mut client = TcpStream::connect(proxy.address()).await.unwrap();
    let (mut far, _) = server.accept().await.unwrap();
    client.write_all(b"x").await.unwrap();
    let mut byte = [0; 1];
    far.read_exact(&mut byte).await.unwrap();
    proxy.inject(Fault::HalfClose);
    let end = tokio::time::timeout(PATIENCE, far.read(&mut byte)).await.unwrap();
    assert_eq!(end.unwrap(), 0, "the forward direction has ended");
    far.write_all(b"y").await.unwrap();
    tokio::time::timeout(PATIENCE, client.read_exact(&mut byte))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(&byte, b"y", "the backward direction goes on");
}
