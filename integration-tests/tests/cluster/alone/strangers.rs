//! Strangers at a port that wants certificates: what they may hold, and that others are served meanwhile.

use std::time::Duration;

use futures::future::join_all;
use identity::in_days;
use integration_tests::cluster::TestCluster;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::TcpStream;

use crate::identity::hostile::{Answer, Shown, call, connect_from, greet};
use crate::identity::{SEEN_WITHIN, authority, process, with_certificates};

/// How many of these connections the other end closes within this time.
async fn closed<S: AsyncRead + Unpin>(connections: &mut [S], within: Duration) -> usize {
    let look = |connection| async move {
        let mut byte = [0; 1];
        let read = tokio::time::timeout(within, AsyncReadExt::read(connection, &mut byte));
        // Nothing is said on an open one.
        usize::from(
            read.await
                .is_ok_and(|read| read.is_err() || read.is_ok_and(|count| count == 0)),
        )
    };
    join_all(connections.iter_mut().map(look)).await.into_iter().sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_who_say_nothing_or_are_nobody_keep_nobody_else_out() {
    let folder = tempfile::tempdir().expect("a folder");
    let authority = authority(folder.path());
    let cluster = TestCluster::start_with(with_certificates(folder.path()))
        .await
        .expect("a cluster");
    let address = cluster.cluster.node_addresses()["decode-0"].clone();
    let coordinator = Shown::Certificate(
        authority
            .issue(&process("coordinator/x"), in_days(1))
            .expect("a certificate"),
    );
    let is_taken = || async { call(&address, "/baton.v1.DecodeService/Open", &coordinator).await == Answer::Taken };
    // One host may have 64 callers at once that have not said who they are, for two seconds.
    let silent = (0..100).map(|_| connect_from("127.0.0.2", &address));
    let silent = join_all(silent).await.into_iter();
    let mut silent: Vec<TcpStream> = silent.map(|dialled| dialled.expect("it connects")).collect();
    assert!(is_taken().await, "while others say nothing");
    assert_eq!(closed(&mut silent, Duration::from_millis(200)).await, 36);
    // Probes have no certificate. One host may have 16 such connections, for ten seconds.
    let mut nobodies = Vec::new();
    for _ in 0..20 {
        let stream = connect_from("127.0.0.3", &address).await.expect("it connects");
        nobodies.push(greet(stream, None).await.expect("it is greeted"));
    }
    assert_eq!(closed(&mut nobodies, Duration::from_millis(500)).await, 4);
    assert!(is_taken().await, "while nobody has many connections");
    assert_eq!(
        call(&address, "/ready", &Shown::Nothing).await,
        Answer::Taken,
        "a probe of another host"
    );
    assert_eq!(closed(&mut nobodies, Duration::from_secs(20)).await, 20);
    cluster.cluster.stop(SEEN_WITHIN).await;
}
