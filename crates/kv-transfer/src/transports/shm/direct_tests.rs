//! What only the direct mode can get wrong: whom it trusts, and when a block may be given to somebody else.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serving_core::ids::*;
use serving_core::node::Ticket;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::net::UnixStream;
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::ShmConfig;
use super::connect::Messages;
use super::socket::{self, Ask, Grant, Welcome};
use super::tests::{Served, config, fallback, peer, prefill, ring, ticket};
use crate::conformance::*;
use crate::pairs::{PairConfig, PairTransport};
use crate::receiver::ReceiveEnd;
use crate::span::SpanMut;
use crate::transport::*;
use crate::trust::Prover;
use crate::{DirectOffer, DirectSecret, DirectWish, shm, transports};

fn secret(text: &str) -> DirectSecret {
    text.parse().unwrap()
}

fn wish() -> DirectWish {
    DirectWish {
        secret: secret("one up"),
        layers: LAYERS,
        layer_bytes: LAYER_BYTES as u32,
    }
}

fn trusting() -> PairConfig {
    config().writing_in_place(Some(wish()))
}

async fn served(has_checksums: bool) -> Served {
    Served::made(|sink| {
        Some(ShmConfig {
            direct: Some(DirectOffer {
                secret: secret("one up"),
                pool: sink.clone(),
                has_checksums,
            }),
            ..ring()
        })
    })
    .await
}

#[tokio::test]
async fn only_nodes_that_hold_one_secret_write_in_place_and_the_others_stage() {
    let both = served(true).await;
    let transport = transports::pairs(trusting());
    assert_eq!(both.carried_by(&transport, 1).await, shm::DIRECT);
    assert_eq!(fallback(&transport, "secret"), 0);
    let health = transport.health().borrow().clone();
    assert_eq!(health[0].transport.as_deref(), Some("shm-direct"));

    let without = transports::pairs(config());
    assert_eq!(both.carried_by(&without, 2).await, shm::KIND);
    assert_eq!(fallback(&without, "secret"), 0, "it was not wanted");

    let other = DirectWish {
        secret: secret("another up"),
        ..wish()
    };
    let transport = transports::pairs(config().writing_in_place(Some(other)));
    assert_eq!(both.carried_by(&transport, 3).await, shm::KIND);
    assert_eq!(fallback(&transport, "secret"), 1);

    let other_blocks = DirectWish {
        layers: LAYERS + 1,
        ..wish()
    };
    let transport = transports::pairs(config().writing_in_place(Some(other_blocks)));
    assert_eq!(both.carried_by(&transport, 4).await, shm::KIND);
    assert_eq!(fallback(&transport, "geometry"), 1);

    let staged_only = Served::new(Some(ring())).await;
    let transport = transports::pairs(trusting());
    assert_eq!(staged_only.carried_by(&transport, 1).await, shm::KIND);
    assert_eq!(fallback(&transport, "not_offered"), 1);
}

#[tokio::test]
async fn without_checksums_the_bytes_are_in_place_all_the_same() {
    let served = served(false).await;
    let transport = transports::pairs(trusting());
    assert_eq!(served.carried_by(&transport, 1).await, shm::DIRECT);
    assert_eq!(served.sink.in_pool(BlockId(100)), whole(BlockId(0)));
    assert_eq!(served.sink.written(), 0, "nobody looked at them");
}

/// The hazard of a mapped transport: the ticket has expired, its blocks are somebody else's, and the sender does not know.
#[tokio::test]
async fn a_sender_whose_ticket_is_good_no_more_stores_nothing() {
    let served = served(true).await;
    let transport = transports::pairs(trusting());
    let expired = ticket(1, 4, &served.address);
    let begin = start(&expired, Arc::new(Pattern));
    let mut transfer = within("begin", transport.begin(begin)).await.unwrap();
    assert_eq!(transfer.transport(), shm::DIRECT);
    let pushed = within("push", transfer.push(nth(0))).await.unwrap_err();
    assert_eq!(pushed.name(), "unknown_transfer", "{pushed}");
    for (block, _) in &expired.blocks {
        assert!(
            served.sink.in_pool(*block).iter().all(|byte| *byte == 0),
            "block {block}"
        );
    }
}

#[tokio::test]
async fn a_pair_that_closes_says_goodbye_and_its_blocks_are_free() {
    let served = served(true).await;
    let transport = transports::pairs(trusting());
    let ticket = served.reserved(1, 4);
    let transfer = begun(&transport, &ticket, Arc::new(Pattern)).await;
    transport.keep_pairs(Vec::new());
    eventually("it ends though this process lives", || {
        served.sink.ends() == [(ticket.transfer, ReceiveEnd::PairLost)]
    })
    .await;
    assert_eq!(
        mapped_pools(),
        1,
        "the sender's mapping is gone while it still holds the transfer"
    );
    drop(transfer);
}

#[tokio::test]
async fn a_decode_node_that_stops_serving_waits_for_the_goodbye() {
    let mut served = served(true).await;
    let transport = transports::pairs(trusting());
    let ticket = served.reserved(1, 4);
    let mut transfer = begun(&transport, &ticket, Arc::new(Pattern)).await;
    served.serving = None;
    eventually("it ends", || {
        served.sink.ends() == [(ticket.transfer, ReceiveEnd::PairLost)]
    })
    .await;
    assert!(within("the sender knows", transfer.acked()).await.is_err());
    assert_eq!(mapped_pools(), 1, "the sink's own");
}

/// The pools mapped by this process; the recording sink maps its own.
fn mapped_pools() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("t-pool")).count()
}

fn open_pools() -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let names = links.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    names.filter(|name| name.to_string_lossy().contains("t-pool")).count()
}

async fn begun(transport: &PairTransport, ticket: &Ticket, source: Arc<dyn KvSource>) -> Box<dyn SendTransfer> {
    let begin = start(ticket, source);
    let mut transfer = within("begin", transport.begin(begin)).await.unwrap();
    assert_eq!(transfer.transport(), shm::DIRECT);
    transfer.push(nth(0)).await.unwrap();
    transfer
}

/// The second block's store stands in its middle until the test says a word on stdin.
#[derive(Debug)]
struct HalfWay;

impl KvSource for HalfWay {
    fn layer_count(&self) -> u32 {
        LAYERS
    }
    fn layer_bytes(&self) -> usize {
        LAYER_BYTES
    }
    fn export(&self, block: BlockId, layers: Range<u32>, out: SpanMut<'_>) -> Result<(), SourceError> {
        if block == BlockId(0) {
            return Pattern.export(block, layers, out);
        }
        let (first, second) = out.host().unwrap().split_at_mut(LAYER_BYTES);
        first.fill(0xaa);
        println!("half way");
        let mut word = String::new();
        let _ = std::io::stdin().read_line(&mut word);
        second.fill(0xbb);
        println!("stored");
        Ok(())
    }
}

/// Set in the process that a test starts to stop it or kill it: the address of the decode node.
const IN_CHILD: &str = "KV_TRANSFER_TEST_DIRECT_CHILD";

/// A prefill node in a process of its own that pushes two blocks and stands in the middle of the second.
struct Sender {
    child: Child,
    stdin: ChildStdin,
    said: Lines<BufReader<ChildStdout>>,
}

impl Sender {
    async fn half_way(test: &str, served: &Served) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--nocapture",
                "--exact",
                &format!("transports::shm::direct_tests::{test}"),
            ])
            .env(IN_CHILD, &served.address)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stdout.take().unwrap()).lines();
        let stdin = child.stdin.take().unwrap();
        let mut sender = Self { child, stdin, said };
        sender.says("half way").await;
        sender
    }

    async fn says(&mut self, word: &str) {
        within(word, async {
            while !self.said.next_line().await.unwrap().expect("it lives").contains(word) {}
        })
        .await;
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().unwrap() as i32).unwrap();
        kill_process(pid, signal).unwrap();
    }
}

/// In the child: pushes until it is killed.
async fn push_half_way(address: &str) {
    let transport = transports::pairs(trusting());
    let ticket = ticket(1, 2, address);
    let mut transfer = begun(&transport, &ticket, Arc::new(HalfWay)).await;
    let _ = transfer.push(nth(1)).await;
    std::future::pending().await
}

/// Nothing ends, though the decode node works: another pair's transfer goes through meanwhile.
async fn still_in_quarantine(served: &Served, ids: Range<u128>) {
    let other = transports::pairs(trusting());
    for id in ids {
        assert_eq!(served.carried_by(&other, id).await, shm::DIRECT);
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(served.sink.ends(), []);
        assert!(
            served.receiver.abort(TransferId(1), "cancelled"),
            "`ended` is still to come"
        );
    }
}

#[tokio::test]
async fn the_blocks_of_a_stopped_sender_stay_in_quarantine_until_it_has_woken_and_stored() {
    if let Ok(address) = std::env::var(IN_CHILD) {
        return push_half_way(&address).await;
    }
    let served = served(true).await;
    let ticket = served.reserved(1, 2);
    let test = "the_blocks_of_a_stopped_sender_stay_in_quarantine_until_it_has_woken_and_stored";
    let mut sender = Sender::half_way(test, &served).await;
    sender.signal(Signal::STOP);
    assert!(served.receiver.abort(ticket.transfer, "cancelled"));
    still_in_quarantine(&served, 10..20).await;
    // Awake, told of the abort, and still in the middle of its store.
    sender.signal(Signal::CONT);
    still_in_quarantine(&served, 20..30).await;
    let target = ticket.blocks[1].0;
    assert_eq!(served.sink.in_pool(target)[LAYER_BYTES..], [0; 2 * LAYER_BYTES]);
    sender.stdin.write_all(b"go on\n").await.unwrap();
    sender.says("stored").await;
    eventually("it ends", || {
        served.sink.ends() == [(ticket.transfer, ReceiveEnd::AbortedHere("cancelled".to_owned()))]
    })
    .await;
    assert_eq!(
        served.sink.in_pool(target)[LAYER_BYTES..],
        [0xbb; 2 * LAYER_BYTES],
        "it did store late"
    );
    assert!(!served.receiver.abort(ticket.transfer, "cancelled"));
}

#[tokio::test]
async fn a_sender_killed_in_mid_store_ends_its_transfer_and_leaves_nothing() {
    if let Ok(address) = std::env::var(IN_CHILD) {
        return push_half_way(&address).await;
    }
    let served = served(true).await;
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    // The pipes of the child, and what the runtime and the sink open once.
    let first = transports::pairs(trusting());
    assert_eq!(served.carried_by(&first, 5).await, shm::DIRECT);
    drop(first);
    eventually("the first pair is closed", || mapped_pools() == 1).await;
    for signal in [Signal::KILL, Signal::STOP] {
        let ended = served.sink.ends().len();
        let before = descriptors();
        let ticket = served.reserved(1, 2);
        let test = "a_sender_killed_in_mid_store_ends_its_transfer_and_leaves_nothing";
        let mut sender = Sender::half_way(test, &served).await;
        sender.signal(signal);
        if signal == Signal::STOP {
            assert!(served.receiver.abort(ticket.transfer, "cancelled"));
            sender.signal(Signal::KILL);
        }
        sender.child.wait().await.unwrap();
        eventually("its transfer ends", || served.sink.ends().len() == ended + 1).await;
        assert_eq!((mapped_pools(), open_pools()), (1, 1), "the sink's own");
        drop(sender);
        eventually("its socket and its process are let go of", || descriptors() <= before).await;
    }
}

/// A sender that takes the pool and says no hello yet.
async fn with_the_pool(served: &Served) -> (UnixStream, OwnedFd) {
    let stream = UnixStream::connect(socket::path(&served.offer().socket)).await.unwrap();
    let (welcome, _) = within("the welcome", socket::heard(&stream)).await.unwrap();
    let Welcome::Ask(theirs) = welcome else {
        panic!("{welcome:?}");
    };
    let (wish, ours) = (wish(), [7; 32]);
    let ask = Ask::Direct {
        nonce: ours,
        proof: wish.secret.proof(Prover::Sender, [&theirs, &ours]),
        layers: wish.layers,
        layer_bytes: wish.layer_bytes,
    };
    socket::say(&stream, &ask, None).await.unwrap();
    let (grant, memory) = within("the pool", socket::heard(&stream)).await.unwrap();
    assert!(matches!(grant, Grant::Pool(..)), "{grant:?}");
    (stream, memory.unwrap())
}

#[tokio::test]
async fn a_link_that_fails_while_it_is_made_is_let_go_of_while_its_sender_lives() {
    let served = served(true).await;
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    assert_eq!(served.sink.in_pool(BlockId(0)), [0; BLOCK_BYTES], "the pool is open");
    let before = descriptors();
    drop(with_the_pool(&served).await);
    eventually("without a hello", || descriptors() <= before).await;
    let (stream, memory) = with_the_pool(&served).await;
    let mut messages = Messages::on(stream);
    messages.say_hello(config().hello(&peer(""))).await.unwrap();
    drop((messages, memory));
    eventually("with a hello that was answered too late", || descriptors() <= before).await;
}

#[tokio::test]
async fn a_sender_unmaps_the_pool_of_a_killed_decode_node_at_once() {
    if std::env::var(IN_CHILD).is_ok() {
        let served = served(true).await;
        served.reserved(1, 4);
        println!("serving {}", served.address);
        return std::future::pending().await;
    }
    let mut node = Command::new(std::env::current_exe().unwrap())
        .args(["--nocapture", "--exact"])
        .arg("transports::shm::direct_tests::a_sender_unmaps_the_pool_of_a_killed_decode_node_at_once")
        .env(IN_CHILD, "")
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
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
    let transport = transports::pairs(trusting());
    let mut transfer = begun(&transport, &ticket(1, 4, &address), Arc::new(Pattern)).await;
    assert_eq!((mapped_pools(), open_pools()), (1, 0), "a mapping needs no descriptor");
    node.kill().await.unwrap();
    let error = within("the transfer ends", transfer.acked()).await.unwrap_err();
    assert!(matches!(error, TransferError::PairLost { .. }), "{error:?}");
    eventually("the pool is unmapped, though the transfer is still held", || {
        mapped_pools() == 0
    })
    .await;
    assert!(transfer.push(nth(1)).await.is_err());
}

#[tokio::test]
async fn an_abort_of_a_dropped_transfer_comes_after_its_store() {
    let served = served(true).await;
    let transport = transports::pairs(trusting());
    let ticket = served.reserved(1, 2);
    let gate = Arc::new(Gated::default());
    let begin = start(&ticket, gate.clone());
    let mut transfer = within("begin", transport.begin(begin)).await.unwrap();
    within("push", transfer.push(nth(0))).await.unwrap();
    eventually("it is being stored", || gate.running.load(Ordering::SeqCst) == 1).await;
    drop(transfer);
    still_in_quarantine(&served, 10..15).await;
    gate.is_open.store(true, Ordering::SeqCst);
    eventually("it ends", || served.sink.ends().len() == 1).await;
    assert_eq!(gate.running.load(Ordering::SeqCst), 0);
    assert_eq!(prefill(), config().me);
}
