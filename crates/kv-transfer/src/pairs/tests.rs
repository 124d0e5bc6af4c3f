//! Pairs that nobody uses for a while.

use super::*;
use crate::conformance::{CommitAnswer, LAYER_BYTES, Recorder, Served, compatibility, node, within};
use crate::receiver::Receiver;
use crate::{ReceivingEnd, grpc, shm, test_process, transports};

/// A decode node that shares memory.
async fn decode_node() -> Served {
    let sink = Recorder::new(CommitAnswer::Accept);
    let receiver = Receiver::new(node("decode-0", 22), compatibility(1), sink);
    test_process::serve("", move || {
        let mut routes = tonic::service::RoutesBuilder::default();
        grpc::add_to_routes(&mut routes, receiver.clone());
        let end = ReceivingEnd {
            layer_bytes: LAYER_BYTES,
            direct: None,
        };
        let serving = transports::serve(&receiver, &[shm::KIND], &end);
        let server = tonic::transport::Server::builder().add_routes(test_process::in_plain_text(routes));
        (server, serving)
    })
    .await
}

#[tokio::test]
async fn a_wish_that_was_granted_long_ago_does_not_open_an_idle_pair() {
    let served = decode_node().await;
    let transport = transports::pairs(PairConfig {
        idle_max: Duration::from_millis(50),
        stall_window: Duration::from_millis(40),
        ..PairConfig::new(node("prefill-0", 11), compatibility(1)).over(vec![shm::KIND])
    });
    transport.keep_pairs(vec![PairPeer {
        node: node("decode-0", 22),
        address: served.address.clone(),
        compatibility: compatibility(1),
    }]);
    let pair = transport.pairs.lock().unwrap().values().next().unwrap().clone();
    let mut state = pair.state.subscribe();
    let usable = state.wait_for(|state| matches!(state, PairState::Usable(_)));
    drop(within("it is usable", usable).await.unwrap());
    // Of a second transfer that found the pair idle, when the first one had opened it already.
    pair.wanted.notify_one();
    let idle = state.wait_for(|state| matches!(state, PairState::Idle));
    drop(within("it is idle", idle).await.unwrap());
    let opened = state.wait_for(|state| matches!(state, PairState::Usable(_)));
    let opened = tokio::time::timeout(Duration::from_millis(300), opened).await;
    assert!(opened.is_err(), "a link was opened for nobody");
}
