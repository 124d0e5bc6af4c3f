//! What only shared memory can get wrong: who is behind the socket, what the ring is, what a peer writes into it when.

use std::os::fd::{AsFd as _, OwnedFd};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::{SinkExt as _, StreamExt as _};
use identity::Identity;
use prost::Message as _;
use proto::messages::{KvBlockFrame, KvFrame, KvReply, LastFrame, StagedBlock, StagedFrame, StagedReply};
use proto::v1;
use rustix::fs::MemfdFlags;
use serving_core::ids::*;
use serving_core::node::{PairHealth, Ticket};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::process::{Child, Command};
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::codec::{Framed, LengthDelimitedCodec};

use super::receiver::ShmServing;
use super::ring::{MEMFD_NAME, ReceiveRing, RingShape, SendRing, Slot};
use super::socket::{self, Ask, Grant, ShmOffer, Welcome};
use super::{Shm, ShmConfig, ShmFault, serve};
use crate::choice::TransportKind;
use crate::conformance::*;
use crate::link::budget::Budget;
use crate::link::{Dial, LinkReply, Place as _};
use crate::pairs::{PairConfig, PairTransport, Ways};
use crate::receiver::{ReceiveEnd, Receiver};
use crate::span::checksum;
use crate::test_process;
use crate::transport::*;
use crate::transports::Means;
use crate::{grpc, shm, transports};

pub(super) fn prefill() -> NodeId {
    node("prefill-0", 11)
}

fn decode() -> NodeId {
    node("decode-0", 22)
}

pub(super) fn config() -> PairConfig {
    PairConfig::new(prefill(), compatibility(1)).over(vec![shm::KIND, grpc::KIND])
}

pub(super) fn peer(address: &str) -> PairPeer {
    PairPeer {
        node: decode(),
        address: address.to_owned(),
        compatibility: compatibility(1),
    }
}

pub(super) fn ticket(transfer: u128, blocks: u32, address: &str) -> Ticket {
    let blocks = (0..blocks)
        .map(|i| (BlockId(transfer as u32 * 100 + i), Generation(i + 5)))
        .collect::<Vec<_>>();
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

/// A decode node's end, and the address of its gRPC port.
pub(super) struct Served {
    pub sink: Arc<Recorder>,
    pub receiver: Arc<Receiver>,
    pub serving: Option<ShmServing>,
    pub address: String,
}

impl Served {
    pub async fn new(shm: Option<ShmConfig>) -> Self {
        Self::made(|_| shm).await
    }

    pub async fn made(shm: impl FnOnce(&Arc<Recorder>) -> Option<ShmConfig>) -> Self {
        let sink = Recorder::new(CommitAnswer::Accept);
        let receiver = Receiver::new(decode(), compatibility(1), sink.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let mut routes = tonic::service::RoutesBuilder::default();
        crate::grpc::add_to_routes(&mut routes, receiver.clone());
        let server = tonic::transport::Server::builder().add_routes(test_process::in_plain_text(routes));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        let serving = shm(&sink).map(|shm| serve(&receiver, shm).unwrap());
        Self {
            sink,
            receiver,
            serving,
            address,
        }
    }

    pub fn offer(&self) -> ShmOffer {
        let offers = self.receiver.hello_reply(None).offers;
        assert_eq!(offers[0].transport, "shm");
        ShmOffer::decode(&offers[0].offer[..]).unwrap()
    }

    pub fn reserved(&self, transfer: u128, blocks: u32) -> Ticket {
        let ticket = ticket(transfer, blocks, &self.address);
        self.sink.reserve(ticket.transfer, &prefill(), &ticket);
        ticket
    }

    /// One transfer of one block through `transport`; what carried it.
    pub async fn carried_by(&self, transport: &PairTransport, id: u128) -> TransportKind {
        let ticket = self.reserved(id, 1);
        let begin = start(&ticket, Arc::new(Pattern));
        let mut transfer = within("begin", transport.begin(begin)).await.unwrap();
        let block = PushedBlock {
            ticket_index: 0,
            block: BlockId(0),
        };
        transfer.push(block).await.unwrap();
        transfer.last(first_tokens()).await.unwrap();
        within("acked", transfer.acked()).await.unwrap();
        transfer.transport()
    }
}

pub(super) fn ring() -> ShmConfig {
    ShmConfig {
        ring_bytes: 8 * BLOCK_BYTES as u64,
        slot_bytes: BLOCK_BYTES as u32,
        ..ShmConfig::new(0)
    }
}

pub(super) fn fallback(transport: &PairTransport, reason: &str) -> u64 {
    let fallbacks = transport.fallbacks();
    let total: u64 = fallbacks.totals().map(|(_, _, total)| total).sum();
    let of_reason: u64 = fallbacks
        .totals()
        .filter(|(_, name, _)| *name == reason)
        .map(|(_, _, total)| total)
        .sum();
    assert_eq!(total, of_reason, "{:?}", fallbacks.totals().collect::<Vec<_>>());
    total
}

/// Its only pair is usable, over gRPC.
fn usable(health: &[PairHealth]) -> bool {
    matches!(health, [pair] if pair.unusable_reason.is_none() && pair.transport.as_deref() == Some("grpc"))
}

#[tokio::test]
async fn a_pair_takes_shared_memory_when_both_have_it_and_grpc_when_not() {
    let shared = Served::new(Some(ring())).await;
    let transport = transports::pairs(config());
    assert_eq!(shared.carried_by(&transport, 1).await, shm::KIND);
    assert_eq!(fallback(&transport, "disabled"), 0);
    let only_grpc = transports::pairs(PairConfig {
        transports: vec![grpc::KIND],
        ..config()
    });
    assert_eq!(shared.carried_by(&only_grpc, 2).await, grpc::KIND);
    assert_eq!(fallback(&only_grpc, "disabled"), 0, "shared memory was not wanted");
    let grpc_first = transports::pairs(PairConfig {
        transports: vec![grpc::KIND, shm::KIND],
        ..config()
    });
    assert_eq!(shared.carried_by(&grpc_first, 3).await, grpc::KIND);

    let unshared = Served::new(None).await;
    let transport = transports::pairs(config());
    assert_eq!(unshared.carried_by(&transport, 1).await, grpc::KIND);
    assert_eq!(fallback(&transport, "disabled"), 1);
    assert!(usable(&transport.health().borrow()));
}

#[tokio::test]
async fn without_grpc_in_its_list_a_pair_that_cannot_share_memory_is_unusable() {
    let served = Served::new(None).await;
    let transport = transports::pairs(PairConfig {
        transports: vec![shm::KIND],
        ..config()
    });
    transport.keep_pairs(vec![peer(&served.address)]);
    let health = transport.health();
    eventually("it says so", || {
        let reason = |pair: &PairHealth| pair.unusable_reason.as_deref() == Some("no_transport");
        health.borrow().iter().any(reason)
    })
    .await;
}

/// The decode node has room for one sender, and the room may come free at any time.
#[tokio::test]
async fn without_grpc_in_its_list_a_pair_waits_for_memory_that_may_come_free() {
    let served = Served::new(Some(ShmConfig { pairs_max: 1, ..ring() })).await;
    let first = transports::pairs(config());
    assert_eq!(served.carried_by(&first, 1).await, shm::KIND);
    let second = transports::pairs(PairConfig {
        transports: vec![shm::KIND],
        connect_wait: Duration::from_secs(8),
        ..config()
    });
    second.keep_pairs(vec![peer(&served.address)]);
    let health = second.health();
    eventually("it has no transport", || {
        let reason = |pair: &PairHealth| pair.unusable_reason.as_deref() == Some("no_transport");
        health.borrow().iter().any(reason)
    })
    .await;
    let ticket = served.reserved(2, 1);
    let begun = second.begin(start(&ticket, Arc::new(Pattern)));
    tokio::pin!(begun);
    let early = tokio::time::timeout(Duration::from_millis(100), &mut begun).await;
    assert!(early.is_err(), "{early:?}");
    drop(first);
    let transfer = within("begin", begun).await.unwrap();
    assert_eq!(transfer.transport(), shm::KIND);
}

#[tokio::test]
async fn another_user_gets_no_memory_from_either_side_and_the_pair_uses_grpc() {
    let other = ring().uid + 1;
    let served = Served::new(Some(ShmConfig { uid: other, ..ring() })).await;
    let transport = transports::pairs(config());
    assert_eq!(served.carried_by(&transport, 1).await, grpc::KIND);
    assert_eq!(fallback(&transport, "refused"), 1);
    assert!(usable(&transport.health().borrow()));

    let served = Served::new(Some(ring())).await;
    let direct = None;
    let ways = Ways {
        meeting: grpc::transport(&Means::default()),
        best_first: vec![Arc::new(Shm { uid: other, direct }), grpc::transport(&Means::default())],
    };
    let transport = PairTransport::new(config(), ways);
    assert_eq!(served.carried_by(&transport, 1).await, grpc::KIND);
    assert_eq!(fallback(&transport, "uid"), 1);
}

#[tokio::test]
async fn one_sender_too_many_uses_grpc() {
    let served = Served::new(Some(ShmConfig { pairs_max: 1, ..ring() })).await;
    let first = transports::pairs(config());
    assert_eq!(served.carried_by(&first, 1).await, shm::KIND);
    let second = transports::pairs(config());
    assert_eq!(served.carried_by(&second, 2).await, grpc::KIND);
    assert_eq!(fallback(&second, "refused"), 1);
}

/// Four slots: the first pair gets half of them, the second one the rest, the third one none.
#[tokio::test]
async fn rings_share_one_budget_and_a_pair_without_a_ring_uses_grpc() {
    let rings_bytes_max = 4 * BLOCK_BYTES as u64;
    let served = Served::new(Some(ShmConfig {
        rings_bytes_max,
        ..ring()
    }))
    .await;
    let pairs: Vec<PairTransport> = (0..3).map(|_| transports::pairs(config())).collect();
    for (id, kind) in [(0, shm::KIND), (1, shm::KIND), (2, grpc::KIND)] {
        assert_eq!(served.carried_by(&pairs[id], id as u128).await, kind);
    }
    assert_eq!(fallback(&pairs[2], "refused"), 1);
    assert_eq!(mapped_rings(), 4, "two at each end");
    drop(pairs);
    eventually("the rings are gone", || mapped_rings() == 0).await;
    let next = transports::pairs(config());
    assert_eq!(served.carried_by(&next, 3).await, shm::KIND);
}

#[tokio::test]
async fn a_layer_that_no_slot_takes_ends_the_transfer_by_name() {
    let slot_bytes = LAYER_BYTES as u32 - 1;
    let served = Served::new(Some(ShmConfig { slot_bytes, ..ring() })).await;
    let transport = transports::pairs(config());
    let ticket = served.reserved(1, 1);
    let mut transfer = begun(&transport, &ticket).await;
    let error = within("the transfer ends", transfer.acked()).await.unwrap_err();
    assert_eq!(error.name(), "layer_too_large", "{error}");
    assert_eq!(served.sink.written(), 0);
}

#[tokio::test]
async fn an_idle_pair_gives_its_ring_back_and_has_one_again_when_it_is_used() {
    let served = Served::new(Some(ring())).await;
    let transport = transports::pairs(PairConfig {
        idle_max: Duration::from_millis(50),
        stall_window: Duration::from_millis(40),
        ..config()
    });
    let health = transport.health();
    for round in 0..3 {
        assert_eq!(served.carried_by(&transport, round).await, shm::KIND);
        eventually("its ring is gone", || mapped_rings() == 0).await;
        let health = health.borrow();
        let [pair] = &health[..] else { panic!("{health:?}") };
        assert_eq!((&pair.unusable_reason, pair.transport.as_deref()), (&None, Some("shm")));
    }
    assert_eq!(fallback(&transport, "refused"), 0);
    // A transfer under way keeps the ring, however long it takes.
    let ticket = served.reserved(9, 4);
    let mut transfer = begun(&transport, &ticket).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(mapped_rings(), 2);
    transfer.push(nth(1)).await.unwrap();
    drop(transfer);
    // The stream over which the nodes stay in touch tells when the peer is gone.
    eventually("its ring is gone", || mapped_rings() == 0).await;
    served.receiver.close();
    eventually("the pair is unusable", || health.borrow()[0].unusable_reason.is_some()).await;
}

#[tokio::test]
async fn an_offer_from_elsewhere_is_not_taken() {
    let served = Served::new(Some(ring())).await;
    let offer = served.offer();
    let elsewhere = ShmOffer {
        boot_id: "00000000-0000-0000-0000-000000000000".to_owned(),
        ..offer.clone()
    };
    let nowhere = ShmOffer {
        socket: "baton-kv-nobody".to_owned(),
        ..offer
    };
    for (offer, name) in [(elsewhere, "not_same_host"), (nowhere, "unreachable")] {
        let fault = connect(&offer.encode_to_vec(), &served.address).await.err().unwrap();
        assert_eq!(fault.name(), name, "{fault}");
    }
    let fault = connect(b"no offer", &served.address).await.err().unwrap();
    assert_eq!(fault.name(), "io", "{fault}");
}

/// A sender that takes an offer.
async fn connect(offer: &[u8], address: &str) -> Result<crate::link::Link, ShmFault> {
    let peer = peer(address);
    let dial = Dial {
        peer: &peer,
        hello: config().hello(&peer),
        offer: Some(offer),
        budget: &Budget::of(0),
        identity: &Identity::none(),
    };
    let shm = Shm {
        uid: ring().uid,
        direct: None,
    };
    super::connect::connect(&dial, &shm).await
}

/// A decode node that the test plays: what its socket says to the first that comes.
async fn played(play: impl AsyncFnOnce(UnixStream) + Send + 'static) -> Result<Result<LinkReply, PairFault>, ShmFault> {
    let name = format!("baton-kv-test-{:032x}", rand::random::<u128>());
    let listener = UnixListener::bind(socket::path(&name)).unwrap();
    let offer = ShmOffer {
        boot_id: socket::boot_id().unwrap(),
        socket: name,
    };
    let playing = async {
        let (stream, _) = listener.accept().await.unwrap();
        play(stream).await;
    };
    let sending = async {
        let mut link = connect(&offer.encode_to_vec(), "").await?;
        Ok(link.replies.next().await.unwrap())
    };
    // The play may outlast the sender: it ends with it.
    tokio::pin!(sending, playing);
    within("the sender's end", async {
        tokio::select! {
            result = &mut sending => result,
            () = &mut playing => sending.await,
        }
    })
    .await
}

/// What a decode node says up to the ring.
async fn pass(stream: &UnixStream, shape: RingShape, memory: Option<&OwnedFd>) {
    socket::say(stream, &Welcome::Ask([1; 32]), None).await.unwrap();
    let (ask, _) = socket::heard::<Ask>(stream).await.unwrap();
    assert_eq!(ask, Ask::Staged);
    let memory = memory.map(OwnedFd::as_fd);
    socket::say(stream, &Grant::Ring(shape, None), memory).await.unwrap();
}

#[tokio::test]
async fn a_decode_node_cannot_pass_memory_that_changes_its_size() {
    let shape = RingShape {
        slots: 2,
        slot_bytes: 4096,
    };
    let fault = played(async move |stream| {
        let memory = rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&memory, shape.bytes()).unwrap();
        pass(&stream, shape, Some(&memory)).await;
    });
    assert_eq!(fault.await.unwrap_err().name(), "seals");
    let fault = played(async move |stream| {
        let (_, memory) = ReceiveRing::create(shape).unwrap();
        let larger = RingShape { slots: 3, ..shape };
        pass(&stream, larger, Some(&memory)).await;
    });
    assert_eq!(fault.await.unwrap_err().name(), "geometry");
    let fault = played(async move |stream| {
        pass(&stream, shape, None).await;
    });
    assert_eq!(fault.await.unwrap_err().name(), "io");
    let fault = played(async |mut stream: UnixStream| stream.write_all(b"HTTP/1.1 400 Bad Request").await.unwrap());
    assert_eq!(fault.await.unwrap_err().name(), "io");
}

#[tokio::test]
async fn a_slot_that_was_not_lent_cannot_come_back() {
    let broken = played(async |stream| {
        let shape = RingShape {
            slots: 2,
            slot_bytes: 4096,
        };
        let (_ring, memory) = ReceiveRing::create(shape).unwrap();
        pass(&stream, shape, Some(&memory)).await;
        let mut stream = Framed::new(stream, socket::codec());
        stream.next().await.unwrap().unwrap();
        let hello = KvReply::Hello(proto::messages::HelloReply {
            node: decode(),
            refused: None,
            offers: Vec::new(),
        });
        for reply in [StagedReply::Reply(hello), StagedReply::ReturnedSlot(1)] {
            let bytes: Bytes = v1::StagedReply::from(reply).encode_to_vec().into();
            stream.send(bytes).await.unwrap();
        }
        // Stays open until the sender goes.
        let _ = stream.next().await;
    });
    let reply = broken.await.unwrap();
    assert!(matches!(reply, Err(PairFault::Broken(_))), "{reply:?}");
}

#[tokio::test]
async fn a_decode_node_that_says_nothing_is_not_waited_for() {
    let silent = played(async |_stream| std::future::pending().await);
    assert_eq!(silent.await.unwrap_err().name(), "time_out");
}

/// A sender that writes what it likes when it likes.
struct Raw {
    stream: Framed<UnixStream, LengthDelimitedCodec>,
    ring: Arc<SendRing>,
}

impl Raw {
    async fn silent(served: &Served) -> Self {
        let stream = UnixStream::connect(socket::path(&served.offer().socket)).await.unwrap();
        let (welcome, _) = within("the welcome", socket::heard(&stream)).await.unwrap();
        assert!(matches!(welcome, Welcome::Ask(_)), "{welcome:?}");
        socket::say(&stream, &Ask::Staged, None).await.unwrap();
        let (grant, memory) = within("the ring", socket::heard(&stream)).await.unwrap();
        let Grant::Ring(shape, None) = grant else {
            panic!("{grant:?}");
        };
        Self {
            stream: Framed::new(stream, socket::codec()),
            ring: SendRing::map(&memory.unwrap(), shape).unwrap(),
        }
    }

    async fn greeted(served: &Served) -> Self {
        let mut raw = Self::silent(served).await;
        let hello = KvFrame::Hello(config().hello(&peer("")));
        raw.send(StagedFrame::Control(hello)).await;
        assert!(matches!(raw.reply().await, Some(StagedReply::Reply(KvReply::Hello(_)))));
        raw
    }

    async fn send(&mut self, frame: StagedFrame) {
        let bytes: Bytes = v1::StagedFrame::from(frame).encode_to_vec().into();
        self.stream.send(bytes).await.unwrap();
    }

    async fn reply(&mut self) -> Option<StagedReply> {
        let bytes: BytesMut = within("a reply", self.stream.next()).await?.ok()?;
        Some(v1::StagedReply::decode(bytes).unwrap().try_into().unwrap())
    }

    /// A good block, in a slot of its own.
    async fn block(&self, ticket: &Ticket, index: u32) -> (StagedBlock, Slot) {
        let data = whole(BlockId(index));
        let mut slot = self.ring.slot().await;
        slot.bytes(BLOCK_BYTES).copy_from_slice(&data);
        let (block, generation) = ticket.blocks[index as usize];
        let header = KvBlockFrame {
            transfer: ticket.transfer,
            sequence_no: index,
            ticket_index: index,
            block,
            generation,
            layer_begin: 0,
            layer_end: LAYERS,
            checksum: checksum(&data),
            data: Bytes::new(),
        };
        let staged = StagedBlock {
            header,
            slot: slot.index(),
            data_bytes: BLOCK_BYTES as u32,
        };
        (staged, slot)
    }

    fn last(ticket: &Ticket) -> StagedFrame {
        let count = ticket.blocks.len() as u32;
        let key = key(ticket.transfer);
        StagedFrame::Control(KvFrame::Last(LastFrame {
            transfer: ticket.transfer,
            request: key.request,
            attempt: key.attempt,
            block_count: count,
            frame_count: count,
            first_tokens: first_tokens(),
            traceparent: None,
            cached_tokens: None,
        }))
    }
}

#[tokio::test]
async fn a_sender_that_says_nothing_loses_its_ring() {
    let shm = ShmConfig {
        pairs_max: 1,
        hello_wait: Duration::from_millis(100),
        ..ring()
    };
    let served = Served::new(Some(shm)).await;
    let mut raw = Raw::silent(&served).await;
    assert_eq!(raw.reply().await, None);
    drop(raw);
    eventually("the ring is gone", || mapped_rings() == 0).await;
    let transport = transports::pairs(config());
    assert_eq!(served.carried_by(&transport, 1).await, shm::KIND);
}

#[tokio::test]
async fn a_sender_that_reads_no_replies_is_given_up() {
    let served = Served::new(Some(ring())).await;
    let mut raw = Raw::greeted(&served).await;
    let ticket = served.reserved(1, 2);
    let (block, _slot) = raw.block(&ticket, 0).await;
    raw.send(StagedFrame::Block(block)).await;
    let abort = KvFrame::Abort {
        transfer: TransferId(77),
        reason: "x".repeat(200),
    };
    let bytes: Bytes = v1::StagedFrame::from(StagedFrame::Control(abort))
        .encode_to_vec()
        .into();
    within("the socket closes", async {
        while raw.stream.send(bytes.clone()).await.is_ok() {}
    })
    .await;
    eventually("its transfer ends", || {
        served.sink.ends() == [(ticket.transfer, ReceiveEnd::PairLost)]
    })
    .await;
}

#[tokio::test]
async fn a_slot_or_a_length_outside_the_ring_ends_the_pair() {
    let served = Served::new(Some(ring())).await;
    type Change = fn(&mut StagedBlock);
    let changes: [Change; 4] = [
        |block| block.slot = 8,
        |block| block.slot = u32::MAX,
        |block| block.data_bytes += 1,
        |block| block.data_bytes = u32::MAX,
    ];
    for (n, change) in changes.into_iter().enumerate() {
        let mut raw = Raw::greeted(&served).await;
        let ticket = served.reserved(n as u128 + 1, 2);
        let begin = KvFrame::Begin {
            transfer: ticket.transfer,
        };
        raw.send(StagedFrame::Control(begin)).await;
        let (mut block, _slot) = raw.block(&ticket, 0).await;
        change(&mut block);
        raw.send(StagedFrame::Block(block)).await;
        assert_eq!(raw.reply().await, None);
        eventually("its transfer ends", || {
            served.sink.ends().contains(&(ticket.transfer, ReceiveEnd::PairLost))
        })
        .await;
    }
    assert_eq!(served.sink.written(), 0);
}

#[tokio::test]
async fn bytes_that_change_after_their_header_was_sent_are_refused() {
    let served = Served::new(Some(ring())).await;
    let mut raw = Raw::greeted(&served).await;
    let ticket = served.reserved(1, 2);
    // The first block stands at the gate while the second one, announced with a good checksum, is changed behind it.
    served.sink.is_gated.store(true, Ordering::Relaxed);
    let (first, _first_slot) = raw.block(&ticket, 0).await;
    let (second, mut second_slot) = raw.block(&ticket, 1).await;
    raw.send(StagedFrame::Block(first)).await;
    raw.send(StagedFrame::Block(second)).await;
    second_slot.bytes(BLOCK_BYTES)[BLOCK_BYTES - 1] ^= 1;
    served.sink.is_gated.store(false, Ordering::Relaxed);
    assert!(matches!(raw.reply().await, Some(StagedReply::ReturnedSlot(_))));
    let refused = raw.reply().await;
    assert!(
        matches!(&refused, Some(StagedReply::Reply(KvReply::Refused { reason, .. })) if reason == "checksum"),
        "{refused:?}"
    );
    assert!(served.sink.has_whole(ticket.blocks[0].0, BlockId(0)));
    assert_eq!(served.sink.written(), 1);
}

/// What is imported is what was summed, however the sender's other threads write meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_that_keeps_writing_gets_no_bad_byte_committed() {
    let served = Served::new(Some(ring())).await;
    let mut raw = Raw::greeted(&served).await;
    let (mut committed, mut refused) = (0, 0);
    for transfer in 1..=300 {
        let ticket = served.reserved(transfer, 1);
        let (block, mut slot) = raw.block(&ticket, 0).await;
        let is_over = Arc::new(AtomicBool::new(false));
        let scribbling = {
            let is_over = is_over.clone();
            std::thread::spawn(move || {
                let good = slot.bytes(BLOCK_BYTES)[9000];
                while !is_over.load(Ordering::Relaxed) {
                    for byte in [!good, good] {
                        slot.bytes(BLOCK_BYTES)[9000] = byte;
                        std::hint::black_box(&mut slot);
                    }
                }
            })
        };
        raw.send(StagedFrame::Block(block)).await;
        raw.send(Raw::last(&ticket)).await;
        loop {
            match raw.reply().await.unwrap() {
                StagedReply::ReturnedSlot(_) => {}
                StagedReply::Reply(KvReply::Ack { .. }) => {
                    committed += 1;
                    assert!(
                        served.sink.has_whole(ticket.blocks[0].0, BlockId(0)),
                        "transfer {transfer}"
                    );
                    break;
                }
                // The last frame of a transfer that was refused is refused once more.
                StagedReply::Reply(KvReply::Refused { reason, .. }) if reason == "unknown_transfer" => break,
                StagedReply::Reply(KvReply::Refused { .. }) => refused += 1,
                other @ (StagedReply::Reply(_) | StagedReply::Begun(_)) => panic!("{other:?}"),
            }
        }
        is_over.store(true, Ordering::Relaxed);
        scribbling.join().unwrap();
    }
    assert_eq!(committed + refused, 300);
    assert_eq!(served.sink.commit_count(), committed);
}

#[tokio::test]
async fn no_bytes_on_the_socket_harm_anybody_else() {
    use rand::{Rng as _, SeedableRng as _};
    let served = Served::new(Some(ring())).await;
    let transport = transports::pairs(config());
    assert_eq!(served.carried_by(&transport, 1).await, shm::KIND);
    let mut random = rand::rngs::StdRng::seed_from_u64(3);
    for round in 0..100 {
        let mut raw = match round % 2 {
            0 => Raw::silent(&served).await,
            _ => Raw::greeted(&served).await,
        };
        let length = random.random_range(0..2000);
        let mut bytes: Vec<u8> = (0..length).map(|_| random.random()).collect();
        if round % 4 < 2 {
            // Behind a good length: the message itself is what is wrong.
            bytes.splice(0..0, u32::try_from(length).unwrap().to_be_bytes());
        }
        let _ = raw.stream.get_mut().write_all(&bytes).await;
        raw.stream.get_mut().shutdown().await.unwrap();
        while raw.reply().await.is_some() {}
    }
    // A block before any hello, and a length that no message has.
    let mut raw = Raw::silent(&served).await;
    let ticket = served.reserved(2, 1);
    let (block, _slot) = raw.block(&ticket, 0).await;
    raw.send(StagedFrame::Block(block)).await;
    assert_eq!(raw.reply().await, None);
    let mut raw = Raw::greeted(&served).await;
    raw.stream.get_mut().write_all(&u32::MAX.to_be_bytes()).await.unwrap();
    assert_eq!(raw.reply().await, None);
    assert_eq!(served.carried_by(&transport, 3).await, shm::KIND);
    assert_eq!(served.sink.written(), 2);
}

/// Names of files where shared memory is usually left behind.
fn left_on_disk() -> Vec<String> {
    let names = ["/dev/shm", "/tmp"].into_iter().flat_map(std::fs::read_dir).flatten();
    let names = names
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains("baton-kv")).collect()
}

fn mapped_rings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains(MEMFD_NAME)).count()
}

fn open_rings() -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let names = links.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    names.filter(|name| name.to_string_lossy().contains(MEMFD_NAME)).count()
}

/// Needs a process of its own, as nextest gives it.
#[tokio::test]
async fn a_closed_pair_leaves_no_memory_no_descriptor_and_no_file() {
    let mut served = Served::new(Some(ring())).await;
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    for round in 0..3 {
        let transport = transports::pairs(config());
        assert_eq!(served.carried_by(&transport, 1 + round).await, shm::KIND);
        assert_eq!(mapped_rings(), 2, "once at each end");
        assert_eq!(open_rings(), 0, "a mapping needs no descriptor");
        assert_eq!(left_on_disk(), Vec::<String>::new());
        transport.keep_pairs(Vec::new());
        eventually("the ring is gone", || mapped_rings() == 0).await;
        drop(transport);
        eventually("the sockets are closed", || descriptors() <= before).await;
    }
    // The receiver's end alone goes.
    let transport = transports::pairs(config());
    assert_eq!(served.carried_by(&transport, 9).await, shm::KIND);
    let offer = served.offer();
    served.serving = None;
    eventually("the ring is gone", || mapped_rings() == 0).await;
    let gone = UnixStream::connect(socket::path(&offer.socket)).await;
    assert!(gone.is_err(), "somebody listens");
    assert_eq!(served.carried_by(&transport, 10).await, grpc::KIND);
    assert_eq!(fallback(&transport, "disabled"), 1);
}

/// Set in the process that a test starts to kill it: the address of the decode node it pushes to, or nothing.
const TO_BE_KILLED: &str = "KV_TRANSFER_TEST_TO_BE_KILLED";

/// The named test once more, in a process of its own that sees `TO_BE_KILLED`.
fn start_to_kill(test: &str, address: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--nocapture", "--exact", &format!("transports::shm::tests::{test}")])
        .env(TO_BE_KILLED, address)
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

async fn begun(transport: &PairTransport, ticket: &Ticket) -> Box<dyn SendTransfer> {
    let begin = start(ticket, Arc::new(Pattern));
    let mut transfer = within("begin", transport.begin(begin)).await.unwrap();
    assert_eq!(transfer.transport(), shm::KIND);
    let block = PushedBlock {
        ticket_index: 0,
        block: BlockId(0),
    };
    transfer.push(block).await.unwrap();
    transfer
}

#[tokio::test]
async fn a_sender_killed_in_mid_transfer_leaves_nothing_and_its_blocks_are_free() {
    if let Ok(address) = std::env::var(TO_BE_KILLED) {
        let transport = transports::pairs(config());
        let _transfer = begun(&transport, &ticket(1, 4, &address)).await;
        return std::future::pending().await;
    }
    let served = Served::new(Some(ring())).await;
    let first = served.reserved(1, 4);
    let test = "a_sender_killed_in_mid_transfer_leaves_nothing_and_its_blocks_are_free";
    let mut sender = start_to_kill(test, &served.address);
    eventually("a block of the other process lands", || served.sink.written() == 1).await;
    assert_eq!(mapped_rings(), 1);
    sender.kill().await.unwrap();
    eventually("its transfer ends", || {
        served.sink.ends() == [(first.transfer, ReceiveEnd::PairLost)]
    })
    .await;
    eventually("the ring is gone", || mapped_rings() == 0).await;
    assert_eq!((open_rings(), left_on_disk()), (0, Vec::new()));
    let next = transports::pairs(config());
    assert_eq!(served.carried_by(&next, 2).await, shm::KIND);
}

#[tokio::test]
async fn a_decode_node_killed_in_mid_transfer_ends_it_and_leaves_nothing() {
    if std::env::var(TO_BE_KILLED).is_ok() {
        let served = Served::new(Some(ring())).await;
        served.reserved(1, 4);
        println!("serving {}", served.address);
        return std::future::pending().await;
    }
    let mut node = start_to_kill("a_decode_node_killed_in_mid_transfer_ends_it_and_leaves_nothing", "");
    let mut said = BufReader::new(node.stdout.take().unwrap()).lines();
    let address = within("its address", async {
        loop {
            let line = said.next_line().await.unwrap().expect("it says where it serves");
            if let Some((_, address)) = line.split_once("serving ") {
                return address.to_owned();
            }
        }
    })
    .await;
    let transport = transports::pairs(config());
    let mut transfer = begun(&transport, &ticket(1, 4, &address)).await;
    node.kill().await.unwrap();
    let error = within("the transfer ends", transfer.acked()).await.unwrap_err();
    assert!(matches!(error, TransferError::PairLost { .. }), "{error:?}");
    drop(transfer);
    eventually("the ring is gone", || mapped_rings() == 0).await;
    assert_eq!((open_rings(), left_on_disk()), (0, Vec::new()));
}
