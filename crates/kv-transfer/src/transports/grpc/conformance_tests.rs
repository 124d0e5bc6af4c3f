//! gRPC through the conformance suite: each receiver in a runtime of its own, killed like a process.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use proto::messages::KvShard;
use serving_core::ids::{BlockId, Generation, TransferId};
use serving_core::node::Ticket;

use super::add_to_routes;
use crate::choice::TransportKind;
use crate::conformance::*;
use crate::pairs::PairConfig;
use crate::receiver::Receiver;
use crate::transport::{AbortReason, Transport};
use crate::{grpc, test_process, transports};

struct Grpc;

#[async_trait]
impl Harness for Grpc {
    fn kind(&self) -> TransportKind {
        grpc::KIND
    }

    async fn serve(&self, receiver: Arc<Receiver>, _: Arc<Recorder>, address: &str) -> Served {
        test_process::serve(address, move || {
            let mut routes = tonic::service::RoutesBuilder::default();
            add_to_routes(&mut routes, receiver);
            // Small windows, so that a receiver that stands still is felt by the sender at once.
            let server = tonic::transport::Server::builder()
                .initial_stream_window_size(256 << 10)
                .initial_connection_window_size(256 << 10)
                .add_routes(test_process::in_plain_text(routes));
            (server, ())
        })
        .await
    }

    fn config(&self, config: PairConfig) -> PairConfig {
        PairConfig {
            transports: vec![grpc::KIND],
            in_flight_bytes_max: 1 << 20,
            ..config
        }
    }
}

conformance_tests!(Grpc);

/// The stalled pair takes all that pairs share. The other one goes on with the frame of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pair_that_stands_still_holds_the_budget_and_another_pair_goes_on() {
    const BLOCKS: u32 = 200;
    let transport = transports::pairs(PairConfig {
        // The least that a budget has: five frames.
        in_flight_bytes_max: 0,
        stall_window: Duration::from_secs(60),
        ..PairConfig::new(node("prefill-0", 11), compatibility(1)).over(vec![super::KIND])
    });
    let mut served = Vec::new();
    let mut peers = Vec::new();
    for name in ["decode-0", "decode-1"] {
        let (id, sink) = (node(name, 22), Recorder::new(CommitAnswer::Accept));
        let receiver = Receiver::new(id.clone(), compatibility(1), sink.clone());
        let at = Grpc.serve(receiver, sink.clone(), "").await;
        let blocks = (0..BLOCKS).map(|i| (BlockId(i), Generation(i))).collect();
        let ticket = Ticket {
            transfer: TransferId(1),
            decode_node: id,
            decode_address: at.address.clone(),
            total_bytes: u64::from(BLOCKS) * BLOCK_BYTES as u64,
            blocks,
            prefix_blocks: 0,
            expires_in: Duration::from_secs(10),
        };
        sink.reserve(ticket.transfer, &node("prefill-0", 11), &ticket);
        served.push(at);
        peers.push((ticket, sink));
    }
    let begin = async |ticket: &Ticket| {
        let begin = start(ticket, Arc::new(Pattern));
        within("begin", transport.begin(begin)).await.unwrap()
    };
    let [(still, still_sink), (other, other_sink)] = &peers[..] else {
        panic!("two peers");
    };
    still_sink.is_gated.store(true, Ordering::Relaxed);
    let mut waiting = begin(still).await;
    let mut pushed = 0;
    while tokio::time::timeout(Duration::from_millis(200), waiting.push(nth(pushed)))
        .await
        .is_ok()
    {
        pushed += 1;
        assert!(pushed < BLOCKS, "nothing limits a pair that stands still");
    }
    let mut going = begin(other).await;
    for i in 0..BLOCKS {
        within("a push of the other pair", going.push(nth(i))).await.unwrap();
    }
    within("last", going.last(first_tokens())).await.unwrap();
    within("acked", going.acked()).await.unwrap();
    assert_eq!((other_sink.written(), other_sink.commit_count()), (BLOCKS as usize, 1));
    assert_eq!(still_sink.commit_count(), 0);
    // The push that was dropped has queued nothing.
    still_sink.is_gated.store(false, Ordering::Relaxed);
    within("abort", waiting.abort(AbortReason::Cancelled)).await;
    eventually("the first transfer ends", || still_sink.ends().len() == 1).await;
}

/// A node that holds another part of each block is refused by name, with both parts.
#[tokio::test]
async fn a_node_with_another_part_of_each_block_gets_no_pair() {
    let (decode, sink) = (node("decode-0", 22), Recorder::new(CommitAnswer::Accept));
    let receiver = Receiver::new(decode.clone(), compatibility(1), sink.clone());
    let served = Grpc.serve(receiver, sink, "").await;
    let transport = transports::pairs(PairConfig {
        shard: KvShard {
            rank: 1,
            rank_count: 2,
            heads: Some(4..8),
        },
        ..PairConfig::new(node("prefill-0", 11), compatibility(1)).over(vec![super::KIND])
    });
    let ticket = empty_ticket(decode, &served.address);
    let begin = transport.begin(start(&ticket, Arc::new(Pattern)));
    let error = within("begin", begin).await.unwrap_err();
    assert_eq!(error.name(), "shard");
    let said = error.to_string();
    assert!(said.contains(&KvShard::WHOLE.to_string()), "{said}");
    assert!(said.contains("rank 1 of 2 with KV heads 4 to 8"), "{said}");
}

mod on_device {
    use crate::conformance::{MemoryKind, On};

    crate::conformance::conformance_tests!(On(MemoryKind::Device, super::Grpc));
}

mod on_cuda {
    use crate::conformance::{MemoryKind, On};

    crate::conformance::conformance_tests!(On(MemoryKind::Cuda, super::Grpc));
}
