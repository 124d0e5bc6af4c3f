//! Communicators whose peer is another process and dies: before it is made, while this process sends, and while it receives. Each
//! time the pair is lost in time, and the next communicator of this process works (TARGETS T26). And a first exchange that hangs.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serving_core::ids::*;
use serving_core::node::Ticket;

use super::conformance_tests::ByNccl;
use crate::conformance::*;
use crate::pairs::{PairConfig, PairTransport};
use crate::receiver::{ReceiveEnd, Receiver};
use crate::test_process::Process;
use crate::transport::*;
use crate::{grpc, transports};

/// Set in the process that a test starts: what it is to do.
const IN_CHILD: &str = "KV_TRANSFER_TEST_NCCL_CHILD";

fn prefill() -> NodeId {
    node("prefill-0", 11)
}

/// Each life of the decode node has another epoch.
fn ticket((transfer, blocks): (u128, u32), (address, epoch): (&str, u64)) -> Ticket {
    let blocks = (0..blocks).map(|i| (BlockId(transfer as u32 * 50 + i), Generation(i)));
    let blocks: Vec<_> = blocks.collect();
    Ticket {
        transfer: TransferId(transfer),
        decode_node: node("decode-0", epoch),
        decode_address: address.to_owned(),
        total_bytes: (blocks.len() * BLOCK_BYTES) as u64,
        blocks,
        prefix_blocks: 0,
        expires_in: Duration::from_secs(20),
    }
}

async fn decode_end(epoch: u64) -> (Arc<Recorder>, Served) {
    let sink = Recorder::of((MemoryKind::Cuda, CommitAnswer::Accept));
    let receiver = Receiver::new(node("decode-0", epoch), compatibility(1), sink.clone());
    let served = ByNccl.serve(receiver, sink.clone(), "").await;
    (sink, served)
}

fn pairs() -> PairTransport {
    let config = PairConfig {
        // The communicator is waited for in the transfer's pushes, so a begin waits for the control stream only.
        connect_wait: Duration::from_secs(5),
        ..PairConfig::new(prefill(), compatibility(1))
    };
    transports::pairs(ByNccl.config(config))
}

async fn send(transport: &PairTransport, ticket: &Ticket) -> Result<TransferReport, TransferError> {
    let begin = start(ticket, Arc::new(CudaSource::shared()));
    let mut transfer = within("begin", transport.begin(begin)).await?;
    for i in 0..ticket.blocks.len() as u32 {
        within("push", transfer.push(nth(i % 40))).await?;
    }
    within("last", transfer.last(first_tokens())).await?;
    within("acked", transfer.acked()).await
}

fn of_this_file(test: &str) -> String {
    format!("transports::nccl::tests::{test}")
}

/// A decode node in a process of its own. `epoch` is the value of the variable.
async fn serve_in_child(epoch: &str) {
    let epoch = epoch.parse().unwrap();
    let (sink, served) = decode_end(epoch).await;
    let good = ticket((1, 4), (&served.address, epoch));
    sink.reserve(good.transfer, &prefill(), &good);
    let large = ticket((2, 1_000), (&served.address, epoch));
    sink.reserve(large.transfer, &prefill(), &large);
    println!("serving {}", served.address);
    std::future::pending().await
}

/// The next life of the decode node gets a whole transfer from the same process.
async fn the_next_one_works(test: &str, (transport, epoch): (&PairTransport, u64)) {
    let mut next = Process::start(test, &[(IN_CHILD, &epoch.to_string())]);
    let address = next.says("serving").await;
    let ticket = ticket((1, 4), (&address, epoch));
    assert_eq!(send(transport, &ticket).await.unwrap().kv_bytes, ticket.total_bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_whose_communicator_is_never_made_is_given_up_and_the_next_one_works() {
    if let Ok(epoch) = std::env::var(IN_CHILD) {
        return serve_in_child(&epoch).await;
    }
    let test = of_this_file("a_peer_whose_communicator_is_never_made_is_given_up_and_the_next_one_works");
    let mut hung = Process::start(&test, &[(IN_CHILD, "1"), ("FALSE_NCCL_HANG", "init")]);
    let address = hung.says("serving").await;
    let (transport, begun) = (pairs(), Instant::now());
    let begin = start(&ticket((1, 4), (&address, 1)), Arc::new(CudaSource::shared()));
    let mut transfer = within("begin", transport.begin(begin)).await.unwrap();
    let error = within("the pair is lost", transfer.acked()).await.unwrap_err();
    let limit = false_cuda::limits().communicator_wait + Duration::from_secs(1);
    assert!(begun.elapsed() <= limit, "after {:?}", begun.elapsed());
    assert!(error.to_string().contains("NCCL_SOCKET_IFNAME"), "{error}");
    // It is not tried at once again: a pair that may would take its next transport.
    let error = send(&transport, &ticket((1, 4), (&address, 1))).await.unwrap_err();
    assert!(["no_transport", "connecting"].contains(&error.name()), "{error}");
    the_next_one_works(&test, (&transport, 2)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_killed_in_an_exchange_is_noticed_and_the_next_one_works() {
    if let Ok(epoch) = std::env::var(IN_CHILD) {
        return serve_in_child(&epoch).await;
    }
    let test = of_this_file("a_receiver_killed_in_an_exchange_is_noticed_and_the_next_one_works");
    let mut killed = Process::start(&test, &[(IN_CHILD, "1")]);
    let address = killed.says("serving").await;
    let transport = pairs();
    let large = ticket((2, 1_000), (&address, 1));
    let mut transfer = within("begin", transport.begin(start(&large, Arc::new(CudaSource::shared()))))
        .await
        .unwrap();
    // The communicator is there, and more is on its way than one exchange takes.
    for i in 0..100 {
        within("push", transfer.push(nth(i))).await.unwrap();
    }
    killed.kill().await;
    let begun = Instant::now();
    let error = within("the pair is lost", transfer.acked()).await.unwrap_err();
    assert!(matches!(error, TransferError::PairLost { .. }), "{error:?}");
    let limit = false_cuda::limits().group_wait + Duration::from_secs(1);
    assert!(begun.elapsed() <= limit, "after {:?}", begun.elapsed());
    the_next_one_works(&test, (&transport, 2)).await;
    assert_eq!(CudaSource::shared().kv().kept(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_killed_in_an_exchange_ends_its_transfer_and_the_next_one_works() {
    if let Ok(address) = std::env::var(IN_CHILD) {
        let large = ticket((2, 1_000), (&address, 1));
        let begin = start(&large, Arc::new(CudaSource::shared()));
        let transport = pairs();
        let mut transfer = within("begin", transport.begin(begin)).await.unwrap();
        for i in 0..100 {
            within("push", transfer.push(nth(i))).await.unwrap();
        }
        println!("half way");
        return std::future::pending().await;
    }
    let (sink, served) = decode_end(1).await;
    let large = ticket((2, 1_000), (&served.address, 1));
    sink.reserve(large.transfer, &prefill(), &large);
    let test = of_this_file("a_sender_killed_in_an_exchange_ends_its_transfer_and_the_next_one_works");
    let mut sender = Process::start(&test, &[(IN_CHILD, &served.address)]);
    sender.says("half way").await;
    sender.kill().await;
    eventually("it ends", || sink.ends() == [(large.transfer, ReceiveEnd::PairLost)]).await;
    let next = ticket((1, 4), (&served.address, 1));
    sink.reserve(next.transfer, &prefill(), &next);
    assert_eq!(send(&pairs(), &next).await.unwrap().kv_bytes, next.total_bytes);
}

/// The pair's own watch ends the pair before the exchange is late. The pair must take its next transport all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_exchange_that_stalls_makes_the_pair_take_its_next_transport() {
    let (sink, served) = decode_end(1).await;
    let config = ByNccl.config(PairConfig {
        connect_wait: Duration::from_secs(5),
        stall_window: Duration::from_millis(300),
        ..PairConfig::new(prefill(), compatibility(1))
    });
    let transport = transports::pairs(config.over(vec![super::KIND, grpc::KIND]));
    let first = ticket((1, 40), (&served.address, 1));
    sink.reserve(first.transfer, &prefill(), &first);
    sink.is_gated.store(true, Ordering::Relaxed);
    let error = send(&transport, &first).await.unwrap_err();
    let is_stalled = matches!(
        &error,
        TransferError::PairLost {
            fault: PairFault::Stalled { .. },
            ..
        }
    );
    assert!(is_stalled, "{error:?}");
    sink.is_gated.store(false, Ordering::Relaxed);
    let next = ticket((2, 4), (&served.address, 1));
    sink.reserve(next.transfer, &prefill(), &next);
    let begin = start(&next, Arc::new(CudaSource::shared()));
    let mut transfer = within("begin", transport.begin(begin)).await.unwrap();
    assert_eq!(transfer.transport(), grpc::KIND);
    for i in 0..4 {
        within("push", transfer.push(nth(i))).await.unwrap();
    }
    within("last", transfer.last(first_tokens())).await.unwrap();
    within("acked", transfer.acked()).await.unwrap();
}
