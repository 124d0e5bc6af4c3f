//! What only CUDA IPC can get wrong: the pools of other processes, whom it trusts, and copies that do not end.

use std::ops::Range;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use serving_core::ids::*;
use serving_core::node::Ticket;

use super::conformance_tests::{CudaIpc, config, sending};
use super::opened::open_count;
use super::pool::{Mapping, PeerPool};
use crate::DirectWish;
use crate::conformance::false_cuda::pool;
use crate::conformance::*;
use crate::device::DeviceFault;
use crate::link::Dial;
use crate::link::budget::Budget;
use crate::pairs::{PairConfig, PairTransport};
use crate::receiver::{PoolShape, ReceiveEnd, Receiver};
use crate::span::{DeviceAddress, Lending, Lent, SpanMut};
use crate::test_process::Process;
use crate::transport::*;
use crate::transports;
use crate::transports::Means;
use crate::transports::shm::in_place::{Writing, WrittenInPlace as _};
use crate::transports::shm::pool::PoolTerms;

/// Set in the process that a test starts: what it is to do.
const IN_CHILD: &str = "KV_TRANSFER_TEST_CUDA_IPC_CHILD";

fn prefill() -> NodeId {
    node("prefill-0", 11)
}

fn decode() -> NodeId {
    node("decode-0", 22)
}

fn ticket(transfer: u128, blocks: u32, address: &str) -> Ticket {
    let blocks = (0..blocks).map(|i| (BlockId(transfer as u32 * 50 + i), Generation(i)));
    let blocks: Vec<_> = blocks.collect();
    Ticket {
        transfer: TransferId(transfer),
        decode_node: decode(),
        decode_address: address.to_owned(),
        total_bytes: (blocks.len() * BLOCK_BYTES) as u64,
        blocks,
        prefix_blocks: 0,
        expires_in: Duration::from_secs(10),
    }
}

/// A decode node's end.
struct DecodeEnd {
    sink: Arc<Recorder>,
    served: Served,
}

impl DecodeEnd {
    async fn new() -> Self {
        let sink = Recorder::of((MemoryKind::Cuda, CommitAnswer::Accept));
        let receiver = Receiver::new(decode(), compatibility(1), sink.clone());
        let served = CudaIpc.serve(receiver, sink.clone(), "").await;
        Self { sink, served }
    }

    fn reserved(&self, transfer: u128, blocks: u32) -> Ticket {
        let ticket = ticket(transfer, blocks, &self.served.address);
        self.sink.reserve(ticket.transfer, &prefill(), &ticket);
        ticket
    }
}

fn pairs() -> PairTransport {
    transports::pairs(sending(PairConfig::new(prefill(), compatibility(1))))
}

async fn send(transport: &PairTransport, ticket: &Ticket) -> Result<TransferReport, TransferError> {
    let begin = start(ticket, Arc::new(CudaSource::shared()));
    let mut transfer = within("begin", transport.begin(begin)).await?;
    for i in 0..ticket.blocks.len() as u32 {
        within("push", transfer.push(nth(i))).await?;
    }
    within("last", transfer.last(first_tokens())).await?;
    within("acked", transfer.acked()).await
}

fn of_this_file(test: &str) -> String {
    format!("transports::cuda_ipc::tests::{test}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_process_copies_its_blocks_into_the_pool() {
    if let Ok(address) = std::env::var(IN_CHILD) {
        // A transport that is gone closes the pool.
        let transport = pairs();
        let report = send(&transport, &ticket(1, 4, &address)).await.unwrap();
        println!("acked {} bytes, {} open", report.kv_bytes, open_count());
        return;
    }
    let node = DecodeEnd::new().await;
    let ticket = node.reserved(1, 4);
    let test = of_this_file("another_process_copies_its_blocks_into_the_pool");
    let mut sender = Process::start(&test, &[(IN_CHILD, &node.served.address)]);
    let said = sender.says("acked").await;
    assert_eq!(said, format!("{} bytes, 1 open", ticket.total_bytes));
    for (i, (block, _)) in ticket.blocks.iter().enumerate() {
        assert!(node.sink.has_whole(*block, BlockId(i as u32)), "block {i}");
    }
}

/// Both ways: the memory of a dead process is closed, and a copy to it is an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pool_of_a_killed_decode_node_is_closed_at_once() {
    if std::env::var(IN_CHILD).is_ok() {
        let node = DecodeEnd::new().await;
        node.reserved(1, 4);
        println!("serving {}", node.served.address);
        return std::future::pending().await;
    }
    let test = of_this_file("the_pool_of_a_killed_decode_node_is_closed_at_once");
    let mut node = Process::start(&test, &[(IN_CHILD, "")]);
    let address = node.says("serving").await;
    let transport = pairs();
    let begin = start(&ticket(1, 4, &address), Arc::new(CudaSource::shared()));
    let mut transfer = within("begin", transport.begin(begin)).await.unwrap();
    within("push", transfer.push(nth(0))).await.unwrap();
    let before = open_count();
    node.kill().await;
    let error = within("the transfer ends", transfer.acked()).await.unwrap_err();
    assert!(matches!(error, TransferError::PairLost { .. }), "{error:?}");
    eventually("the pool is closed, though the transfer is still held", || {
        open_count() < before
    })
    .await;
    assert!(transfer.push(nth(1)).await.is_err());
    assert_eq!(CudaSource::shared().kv().kept(), 0);
}

/// Lends its second block and never ends the copy.
#[derive(Debug)]
struct HalfWay(CudaSource);

impl KvSource for HalfWay {
    fn layer_count(&self) -> u32 {
        LAYERS
    }
    fn layer_bytes(&self) -> usize {
        LAYER_BYTES
    }
    fn export(&self, block: BlockId, layers: Range<u32>, out: SpanMut<'_>) -> Result<(), SourceError> {
        self.0.export(block, layers, out)
    }
    fn lend(
        &self,
        block: BlockId,
        layers: Range<u32>,
        copy: &mut dyn FnMut(DeviceAddress) -> Lent,
    ) -> Result<Lending, SourceError> {
        if block == BlockId(1) {
            println!("half way");
            loop {
                std::thread::park();
            }
        }
        self.0.lend(block, layers, copy)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_killed_in_the_middle_ends_its_transfer_when_it_is_gone() {
    if let Ok(address) = std::env::var(IN_CHILD) {
        let transport = pairs();
        let begin = start(&ticket(1, 2, &address), Arc::new(HalfWay(CudaSource::shared())));
        let mut transfer = within("begin", transport.begin(begin)).await.unwrap();
        transfer.push(nth(0)).await.unwrap();
        transfer.push(nth(1)).await.unwrap();
        return std::future::pending().await;
    }
    let node = DecodeEnd::new().await;
    let ticket = node.reserved(1, 2);
    let test = of_this_file("a_sender_killed_in_the_middle_ends_its_transfer_when_it_is_gone");
    let mut sender = Process::start(&test, &[(IN_CHILD, &node.served.address)]);
    sender.says("half way").await;
    assert_eq!(node.sink.ends(), []);
    sender.kill().await;
    eventually("it ends", || {
        node.sink.ends() == [(ticket.transfer, ReceiveEnd::PairLost)]
    })
    .await;
    // The blocks are free: the next sender takes them.
    let next = node.reserved(2, 2);
    send(&pairs(), &next).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_nodes_that_hold_one_secret_open_a_pool() {
    let node = DecodeEnd::new().await;
    let fallback = |transport: &PairTransport, reason: &str| {
        let fallbacks = transport.fallbacks();
        let found = fallbacks
            .totals()
            .find(|(kind, name, _)| *kind == super::KIND && *name == reason);
        found.map(|(.., count)| count)
    };
    let config = || sending(PairConfig::new(prefill(), compatibility(1)));
    let wish = |secret: &str, layers| DirectWish {
        secret: secret.parse().unwrap(),
        layers,
        layer_bytes: LAYER_BYTES as u32,
    };
    let cases = [
        (config().writing_in_place(None), "no_secret"),
        (config().writing_in_place(Some(wish("another up", LAYERS))), "secret"),
        (
            config().writing_in_place(Some(wish("of this test", LAYERS + 1))),
            "geometry",
        ),
        (config().on_device(None), "no_device"),
    ];
    for (id, (config, reason)) in (1..).zip(cases) {
        let transport = transports::pairs(config);
        let error = send(&transport, &node.reserved(id, 1)).await.unwrap_err();
        assert_eq!(error.name(), "no_transport", "{error}");
        assert!(fallback(&transport, reason) >= Some(1), "{reason}");
    }
}

/// A pair that is closed drops its dial wherever that stands. The decode node may not wait for this process's exit then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dial_that_is_dropped_half_way_leaves_the_pool() {
    let sink = Recorder::of((MemoryKind::Cuda, CommitAnswer::Accept));
    let receiver = Receiver::new(decode(), compatibility(1), sink.clone());
    let _serving = super::serve::serve(&receiver, config(&sink, true)).unwrap();
    let config = sending(PairConfig::new(prefill(), compatibility(1)));
    let transport = super::transport(&Means {
        direct: config.direct.as_ref(),
        device: config.device.as_ref(),
    });
    let peer = PairPeer {
        node: decode(),
        address: String::new(),
        compatibility: compatibility(1),
    };
    let (offers, budget) = (receiver.hello_reply(None).offers, Budget::of(0));
    let dial = Dial {
        peer: &peer,
        hello: config.hello(&peer),
        offer: offers.first().map(|offer| &offer.offer[..]),
        budget: &budget,
        identity: &config.identity,
    };
    // Dropped after each of its steps, until it needs no further one.
    for steps in 1.. {
        let (mut connecting, mut left) = (transport.connect(&dial), steps);
        let connected = std::future::poll_fn(|context| {
            left -= 1;
            match connecting.as_mut().poll(context) {
                Poll::Ready(connected) => Poll::Ready(Some(connected)),
                Poll::Pending if left == 0 => Poll::Ready(None),
                Poll::Pending => Poll::Pending,
            }
        });
        match within("a step", connected).await {
            Some(Ok(_)) => break,
            Some(Err(fault)) => panic!("{fault:?}"),
            None => {}
        }
    }
    within("no sender has the pool open", receiver.is_left()).await;
}

/// The decode node is told nothing, and the mapping stays.
#[tokio::test]
async fn a_copy_that_does_not_end_keeps_the_pool_for_good() {
    let (ours, theirs) = (pool(1), pool(1));
    let terms = PoolTerms {
        shape: PoolShape {
            blocks: 1,
            layers: LAYERS,
            layer_bytes: LAYER_BYTES as u32,
        },
        frames_in_flight: 2,
        frame_bytes_max: BLOCK_BYTES as u32,
        has_checksums: false,
    };
    let peer = PeerPool::new(&ours, terms, Mapping::here(theirs.clone())).unwrap();
    assert_eq!(peer.writing(), Writing::Over);
    let waited = Duration::from_secs(4);
    peer.note_end(&Err(DeviceFault::Late { waited }));
    assert_eq!((peer.writing(), peer.end()), (Writing::MayGoOn, Writing::MayGoOn));
    assert_eq!(ours.kept(), 1);
    drop(peer);
    assert_eq!(Arc::strong_count(&theirs), 2, "the memory lives as long as the process");
    let good = PeerPool::new(&ours, terms, Mapping::here(theirs.clone())).unwrap();
    assert_eq!(good.end(), Writing::Over);
    assert_eq!((ours.kept(), Arc::strong_count(&theirs)), (1, 2));
}
