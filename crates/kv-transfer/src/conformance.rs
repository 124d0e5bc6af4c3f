//! The suite that every transport must pass, against a receiver that records everything. A transport brings a [`Harness`]
//! and calls `conformance_tests!`. A tap puts faults into its frames.

pub(crate) mod false_cuda;
mod memory;
mod recorder;
mod tap;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use proto::messages::{KvBlockFrame, KvFrame, PROTOCOL_VERSION};
use serving_core::compatibility::{Compatibility, CompatibilityFacts, CompatibilityHash};
use serving_core::ids::*;
use serving_core::node::Ticket;
use serving_core::request::{AttemptKey, TokenEvent};

use crate::choice::TransportKind;
use crate::pairs::{PairConfig, PairTransport};
use crate::receiver::{ReceiveEnd, Receiver, TransferRefusal};
use crate::span::SpanMut;
use crate::transport::*;
use crate::transports;

pub(crate) use false_cuda::CudaSource;
use memory::DeviceSource;
pub(crate) use memory::{MemoryKind, Pattern, whole};
pub(crate) use recorder::{CommitAnswer, Recorder};
pub(crate) use tap::Tapping;

pub(crate) const LAYERS: u32 = 3;
pub(crate) const LAYER_BYTES: usize = 4096;
pub(crate) const BLOCK_BYTES: usize = LAYERS as usize * LAYER_BYTES;
/// Every condition of these tests must hold within this time.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a transport must bring to be tested.
#[async_trait]
pub(crate) trait Harness: Send + Sync {
    /// The transport that carries the frames. No pair may fall back to another one.
    fn kind(&self) -> TransportKind;
    /// Serves `receiver` at `address`, as tickets carry it; empty lets the harness choose. `sink` is the receiver's.
    async fn serve(&self, receiver: Arc<Receiver>, sink: Arc<Recorder>, address: &str) -> Served;
    /// The sender's configuration, over this transport alone.
    fn config(&self, config: PairConfig) -> PairConfig;
    /// The memory of the KV at both ends.
    fn memory(&self) -> MemoryKind {
        MemoryKind::Host
    }
}

/// The same transport between nodes whose KV lies in another kind of memory, by way of the host.
pub(crate) struct On<H>(pub MemoryKind, pub H);

#[async_trait]
impl<H: Harness> Harness for On<H> {
    fn kind(&self) -> TransportKind {
        self.1.kind()
    }
    async fn serve(&self, receiver: Arc<Receiver>, sink: Arc<Recorder>, address: &str) -> Served {
        self.1.serve(receiver, sink, address).await
    }
    fn config(&self, config: PairConfig) -> PairConfig {
        self.1.config(config)
    }
    fn memory(&self) -> MemoryKind {
        self.0
    }
}

pub(crate) struct Served {
    pub address: String,
    /// Kills the receiver's process, as far as the transport can tell.
    pub kill: Box<dyn FnOnce() + Send>,
}

pub(crate) fn node(name: &str, epoch: u64) -> NodeId {
    NodeId {
        name: NodeName::new(name),
        epoch: NodeEpoch(epoch),
    }
}

/// A ticket for no block.
pub(crate) fn empty_ticket(decode_node: NodeId, decode_address: &str) -> Ticket {
    Ticket {
        transfer: TransferId(1),
        decode_node,
        decode_address: decode_address.to_owned(),
        total_bytes: 0,
        blocks: Vec::new(),
        prefix_blocks: 0,
        expires_in: Duration::from_secs(10),
    }
}

/// Nodes with another byte have blocks of as many tokens, and another hash.
pub(crate) fn compatibility(byte: u8) -> Compatibility {
    let facts = CompatibilityFacts {
        weights_sha256: [0; 32],
        tokenizer_sha256: [0; 32],
        numerics_id: "test/1".to_owned(),
        kv_dtype: "f16".to_owned(),
        block_tokens: byte.into(),
        layer_count: LAYERS,
        kv_head_count: 1,
        head_dim: 1,
        vocab_size: 1,
        context_length: 1,
        rope_base: 1.0,
        rank_count: 1,
        protocol_version: PROTOCOL_VERSION,
    };
    Compatibility {
        hash: CompatibilityHash([byte; 32]),
        facts: Some(Box::new(facts)),
    }
}

pub(crate) fn key(transfer: TransferId) -> AttemptKey {
    AttemptKey {
        request: RequestId(transfer.0 + 1000),
        attempt: Attempt(2),
    }
}

pub(crate) fn start(ticket: &Ticket, source: Arc<dyn KvSource>) -> TransferStart {
    TransferStart {
        ticket: ticket.clone(),
        key: key(ticket.transfer),
        source,
        traceparent: None,
        cached_tokens: 32,
    }
}

/// The sender's block `i` for place `i` of the ticket.
pub(crate) fn nth(i: u32) -> PushedBlock {
    to_place(i, i)
}

fn to_place(ticket_index: u32, block: u32) -> PushedBlock {
    let block = BlockId(block);
    PushedBlock { ticket_index, block }
}

/// Waits until `condition` holds.
pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !condition() {
        assert!(
            tokio::time::Instant::now() < deadline,
            "not within {PATIENCE:?}: {what}"
        );
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future)
        .await
        .unwrap_or_else(|_| panic!("not within {PATIENCE:?}: {what}"))
}

fn tap(change: impl FnMut(KvFrame) -> Vec<KvFrame> + Send + 'static) -> Tapping {
    Tapping(Some(Arc::new(Mutex::new(change))))
}

/// Changes the n-th KV frame.
fn change_block(n: usize, change: impl Fn(&mut KvBlockFrame) + Send + 'static) -> Tapping {
    let mut seen = 0;
    tap(move |mut frame| {
        if let KvFrame::Block(block) = &mut frame {
            if seen == n {
                change(block);
            }
            seen += 1;
        }
        vec![frame]
    })
}

/// One sender and one receiver.
struct Bench<'a> {
    harness: &'a dyn Harness,
    sink: Arc<Recorder>,
    receiver: Arc<Receiver>,
    served: Option<Served>,
    address: String,
    transport: PairTransport,
    prefill: NodeId,
    decode: NodeId,
}

struct Scenario {
    answer: CommitAnswer,
    tap: Tapping,
    stall_window: Duration,
}

impl Scenario {
    fn good() -> Self {
        Self {
            answer: CommitAnswer::Accept,
            tap: Tapping::default(),
            stall_window: Duration::from_secs(60),
        }
    }
    fn tapped(tap: Tapping) -> Self {
        Self { tap, ..Self::good() }
    }
    fn answering(answer: CommitAnswer) -> Self {
        Self { answer, ..Self::good() }
    }
}

impl<'a> Bench<'a> {
    async fn new(harness: &'a dyn Harness, plan: Scenario) -> Self {
        let (prefill, decode) = (node("prefill-0", 11), node("decode-0", 22));
        let sink = Recorder::of((harness.memory(), plan.answer));
        let receiver = Receiver::new(decode.clone(), compatibility(1), sink.clone());
        let served = harness.serve(receiver.clone(), sink.clone(), "").await;
        let transport = transports::pairs(harness.config(PairConfig {
            tap: plan.tap,
            stall_window: plan.stall_window,
            ..PairConfig::new(prefill.clone(), compatibility(1))
        }));
        let address = served.address.clone();
        Self {
            harness,
            sink,
            receiver,
            served: Some(served),
            address,
            transport,
            prefill,
            decode,
        }
    }

    fn ticket(&self, transfer: u128, blocks: u32) -> Ticket {
        let blocks = (0..blocks)
            .map(|i| (BlockId(transfer as u32 * 50 + i), Generation(i + 5)))
            .collect::<Vec<_>>();
        Ticket {
            transfer: TransferId(transfer),
            decode_node: self.decode.clone(),
            decode_address: self.address.clone(),
            total_bytes: (blocks.len() * BLOCK_BYTES) as u64,
            blocks,
            prefix_blocks: 0,
            expires_in: Duration::from_secs(10),
        }
    }

    /// A ticket with its reservation at the receiver.
    fn reserved(&self, transfer: u128, blocks: u32) -> Ticket {
        let ticket = self.ticket(transfer, blocks);
        self.sink.reserve(ticket.transfer, &self.prefill, &ticket);
        ticket
    }

    async fn begin(&self, ticket: &Ticket) -> Result<Box<dyn SendTransfer>, TransferError> {
        let source: Arc<dyn KvSource> = match self.harness.memory() {
            MemoryKind::Host => Arc::new(Pattern),
            MemoryKind::Device => Arc::new(DeviceSource::new()),
            MemoryKind::Cuda => Arc::new(CudaSource::shared()),
        };
        within("begin", self.transport.begin(start(ticket, source))).await
    }

    /// A whole transfer: local blocks 0.. to the ticket's places.
    async fn send(&self, ticket: &Ticket) -> Result<TransferReport, TransferError> {
        let mut transfer = self.begin(ticket).await?;
        for i in 0..ticket.blocks.len() as u32 {
            within("push", transfer.push(nth(i))).await?;
        }
        within("last", transfer.last(first_tokens())).await?;
        within("acked", transfer.acked()).await
    }

    /// Sends, and expects the receiver's refusal with this label and no commit.
    async fn refused(&self, ticket: &Ticket, label: &str) {
        let error = self.send(ticket).await.unwrap_err();
        assert_eq!(error.name(), label, "{error}");
        assert!(matches!(error, TransferError::Refused { .. }), "{error:?}");
        assert_eq!(self.sink.commit_count(), 0);
    }

    /// Waits for the health of its pair.
    async fn pair_is(&self, what: &str, is_so: impl Fn(Option<&str>) -> bool) {
        let health = self.transport.health();
        let is_so = || {
            health
                .borrow()
                .iter()
                .any(|pair| is_so(pair.unusable_reason.as_deref()))
        };
        eventually(what, is_so).await;
    }

    /// The receiver ends one transfer, in this way.
    async fn ends(&self, transfer: TransferId, end: ReceiveEnd) {
        eventually("it ends", || !self.sink.ends().is_empty()).await;
        assert_eq!(self.sink.ends(), [(transfer, end)]);
    }

    fn kill_receiver(&mut self) {
        (self.served.take().unwrap().kill)();
    }
}

/// The pair's fault, by which the transfer ended.
fn lost(error: TransferError) -> PairFault {
    match error {
        TransferError::PairLost { fault, .. } => fault,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn first_tokens() -> Vec<TokenEvent> {
    let token = TokenEvent {
        choice: ChoiceIndex(0),
        index: OutputIndex(0),
        token: TokenId(77),
        logprobs: None,
        finish: None,
    };
    vec![token]
}

pub(crate) async fn a_transfer_lands_whole_and_is_acknowledged(harness: &dyn Harness) {
    let bench = Bench::new(harness, Scenario::good()).await;
    let ticket = bench.reserved(1, 4);
    let report = bench.send(&ticket).await.unwrap();
    assert_eq!(report.kv_bytes, ticket.total_bytes);
    for (i, (block, _)) in ticket.blocks.iter().enumerate() {
        assert!(bench.sink.has_whole(*block, BlockId(i as u32)));
    }
    let commits = bench.sink.commits.lock().unwrap();
    assert_eq!(commits.len(), 1);
    assert_eq!(commits[0].transport, harness.kind());
    assert_eq!(
        (commits[0].transfer, commits[0].key),
        (ticket.transfer, key(ticket.transfer))
    );
    assert_eq!(
        (commits[0].kv_bytes, commits[0].frames),
        (report.kv_bytes, report.frames)
    );
    assert_eq!(commits[0].first_tokens, first_tokens());
    assert_eq!(commits[0].cached_tokens, Some(32));
    assert_eq!(*bench.sink.began.lock().unwrap(), [ticket.transfer]);
    assert_eq!(bench.sink.progressed.lock().unwrap().len(), report.frames as usize);
    assert_eq!(bench.sink.ends(), []);
}

pub(crate) async fn blocks_may_come_in_any_order_and_none_is_a_transfer_too(harness: &dyn Harness) {
    let bench = Bench::new(harness, Scenario::good()).await;
    let ticket = bench.reserved(1, 3);
    let mut transfer = bench.begin(&ticket).await.unwrap();
    for i in [2, 0, 1] {
        transfer.push(to_place(i, i + 40)).await.unwrap();
    }
    transfer.last(first_tokens()).await.unwrap();
    within("acked", transfer.acked()).await.unwrap();
    assert!((0..3).all(|i| bench.sink.has_whole(ticket.blocks[i as usize].0, BlockId(i + 40))));
    let everything_cached = bench.reserved(2, 0);
    assert_eq!(bench.send(&everything_cached).await.unwrap().kv_bytes, 0);
}

pub(crate) async fn many_transfers_share_a_pair(harness: &dyn Harness) {
    let bench = Bench::new(harness, Scenario::good()).await;
    let tickets: Vec<Ticket> = (1..=20).map(|transfer| bench.reserved(transfer, 8)).collect();
    let reports = futures::future::join_all(tickets.iter().map(|ticket| bench.send(ticket))).await;
    for (ticket, report) in tickets.iter().zip(reports) {
        assert_eq!(report.unwrap().kv_bytes, ticket.total_bytes);
        assert!((0..8).all(|i| bench.sink.has_whole(ticket.blocks[i].0, BlockId(i as u32))));
    }
}

pub(crate) async fn a_repeated_frame_is_refused(harness: &dyn Harness) {
    let repeat = tap(|frame| match &frame {
        KvFrame::Block(block) if block.sequence_no == 1 => vec![frame.clone(), frame],
        _ => vec![frame],
    });
    let bench = Bench::new(harness, Scenario::tapped(repeat)).await;
    let ticket = bench.reserved(1, 4);
    bench.refused(&ticket, "sequence_gap").await;
    eventually("it ends", || bench.sink.ends().len() == 1).await;
}

pub(crate) async fn a_lost_frame_is_refused(harness: &dyn Harness) {
    let lose = tap(|frame| match &frame {
        KvFrame::Block(block) if block.sequence_no == 2 => Vec::new(),
        _ => vec![frame],
    });
    let bench = Bench::new(harness, Scenario::tapped(lose)).await;
    let ticket = bench.reserved(1, 4);
    bench.refused(&ticket, "sequence_gap").await;
    let lose_final = tap(|frame| match &frame {
        KvFrame::Block(block) if block.sequence_no == 3 => Vec::new(),
        _ => vec![frame],
    });
    let bench = Bench::new(harness, Scenario::tapped(lose_final)).await;
    let ticket = bench.reserved(1, 4);
    bench.refused(&ticket, "wrong_frame_count").await;
}

/// In place the sender has written it. But then it never counts as arrived.
pub(crate) async fn a_damaged_byte_is_refused_and_never_written(harness: &dyn Harness) {
    let flip = change_block(2, |block| {
        let mut data = block.data.to_vec();
        data[1234] ^= 0x10;
        block.data = data.into();
    });
    let bench = Bench::new(harness, Scenario::tapped(flip)).await;
    let ticket = bench.reserved(1, 4);
    bench.refused(&ticket, "checksum").await;
    let end = ReceiveEnd::Refused(TransferRefusal::Checksum { sequence_no: 2 });
    bench.ends(ticket.transfer, end).await;
    assert!(!bench.sink.has_any(ticket.blocks[2].0));
}

pub(crate) async fn frames_that_contradict_the_reservation_are_refused(harness: &dyn Harness) {
    type Change = fn(&mut KvBlockFrame);
    let cases: [(Change, &str); 6] = [
        (|block| block.generation.0 += 1, "stale_generation"),
        (|block| block.block.0 += 1, "wrong_block"),
        (|block| block.ticket_index = 4, "no_such_ticket_block"),
        (|block| block.layer_begin += 1, "wrong_layers"),
        (|block| block.layer_end += 1, "wrong_layers"),
        (|block| block.data = block.data.slice(1..), "wrong_size"),
    ];
    for (change, label) in cases {
        let bench = Bench::new(harness, Scenario::tapped(change_block(1, change))).await;
        let ticket = bench.reserved(1, 4);
        bench.refused(&ticket, label).await;
        assert!(bench.sink.written() <= 1);
    }
}

pub(crate) async fn counts_that_do_not_match_are_refused(harness: &dyn Harness) {
    let bench = Bench::new(harness, Scenario::good()).await;
    let ticket = bench.reserved(1, 4);
    let mut transfer = bench.begin(&ticket).await.unwrap();
    transfer.push(nth(0)).await.unwrap();
    transfer.last(first_tokens()).await.unwrap();
    let error = within("refusal", transfer.acked()).await.unwrap_err();
    assert_eq!(error.name(), "wrong_block_count");
    let beyond = to_place(4, 0);
    let ticket = bench.reserved(2, 4);
    let error = bench.begin(&ticket).await.unwrap().push(beyond).await.unwrap_err();
    assert_eq!(error.name(), "no_such_ticket_block");
    assert_eq!(bench.sink.commit_count(), 0);
}

pub(crate) async fn a_last_frame_for_another_request_is_refused(harness: &dyn Harness) {
    let rename = tap(|mut frame| {
        if let KvFrame::Last(last) = &mut frame {
            last.request.0 += 1;
        }
        vec![frame]
    });
    let bench = Bench::new(harness, Scenario::tapped(rename)).await;
    let ticket = bench.reserved(1, 2);
    bench.refused(&ticket, "wrong_request").await;
}

pub(crate) async fn a_ticket_is_good_for_one_transfer_of_one_node(harness: &dyn Harness) {
    let bench = Bench::new(harness, Scenario::good()).await;
    bench.refused(&bench.ticket(9, 2), "unknown_transfer").await;
    let ticket = bench.ticket(1, 2);
    bench.sink.reserve(ticket.transfer, &node("prefill-0", 99), &ticket);
    bench.refused(&ticket, "wrong_sender").await;
    let ticket = bench.reserved(2, 2);
    bench.send(&ticket).await.unwrap();
    let error = bench.send(&ticket).await.unwrap_err();
    assert_eq!(error.name(), "unknown_transfer");
    assert_eq!(bench.sink.commit_count(), 1);
}

pub(crate) async fn a_stale_epoch_gets_no_pair(harness: &dyn Harness) {
    let bench = Bench::new(harness, Scenario::good()).await;
    let mut ticket = bench.reserved(1, 2);
    ticket.decode_node.epoch = NodeEpoch(21);
    let error = bench.send(&ticket).await.unwrap_err();
    assert_eq!(error.name(), "stale_epoch");
    bench
        .pair_is("stale_epoch", |reason| reason == Some("stale_epoch"))
        .await;
    assert_eq!(bench.sink.written(), 0);
}

pub(crate) async fn an_incompatible_node_gets_no_pair(harness: &dyn Harness) {
    let bench = Bench::new(harness, Scenario::good()).await;
    let other = PairConfig::new(node("prefill-1", 1), compatibility(2));
    let other = transports::pairs(harness.config(other));
    let ticket = bench.reserved(1, 2);
    let begun = other.begin(start(&ticket, Arc::new(Pattern)));
    let error = within("begin", begun).await.unwrap_err();
    assert_eq!(error.name(), "incompatible");
    let words = "block_tokens is 1 on decode-0 and 2 on prefill-1";
    assert!(error.to_string().contains(words), "{error}");
    // The coordinator's list names it, so it is not even tried.
    let peer = PairPeer {
        node: bench.decode.clone(),
        address: bench.address.clone(),
        compatibility: compatibility(3),
    };
    bench.transport.keep_pairs(vec![peer]);
    let error = bench.send(&ticket).await.unwrap_err();
    let TransferError::NoPair { fault, .. } = error else {
        panic!("{error:?}");
    };
    let words = "block_tokens is 1 on prefill-0 and 3 on decode-0";
    assert_eq!(
        (fault.name(), fault.to_string().contains(words)),
        ("incompatible", true),
        "{fault}"
    );
}

pub(crate) async fn an_abort_ends_the_transfer_and_nothing_is_written_after(harness: &dyn Harness) {
    let bench = Bench::new(harness, Scenario::good()).await;
    let ticket = bench.reserved(1, 4);
    let mut transfer = bench.begin(&ticket).await.unwrap();
    transfer.push(nth(0)).await.unwrap();
    within("abort", transfer.abort(AbortReason::EndedAtFirstToken)).await;
    let end = ReceiveEnd::AbortedBySender("ended_at_first_token".to_owned());
    bench.ends(ticket.transfer, end).await;
    // The pair goes on.
    let next = bench.reserved(2, 2);
    bench.send(&next).await.unwrap();
    assert!(bench.sink.written() <= 3);
}

/// Where a sender writes a block in place, `ended` means that it has stopped; elsewhere no sender writes. In both cases the
/// next owner may have the block as soon as the transfer has ended.
pub(crate) async fn blocks_of_an_aborted_transfer_take_the_next_one_whole(harness: &dyn Harness) {
    let bench = Bench::new(harness, Scenario::good()).await;
    for round in 0..20 {
        let aborted = bench.reserved(2 * round + 1, 4);
        let mut transfer = bench.begin(&aborted).await.unwrap();
        for i in 0..3 {
            let block = nth(i);
            transfer.push(block).await.unwrap();
        }
        within("abort", transfer.abort(AbortReason::Cancelled)).await;
        eventually("the receiver is told", || bench.sink.ends().len() == round as usize + 1).await;
        let mut next = bench.ticket(2 * round + 2, 4);
        next.blocks = aborted
            .blocks
            .iter()
            .map(|(block, g)| (*block, Generation(g.0 + 1)))
            .collect();
        bench.sink.reserve(next.transfer, &bench.prefill, &next);
        let mut transfer = bench.begin(&next).await.unwrap();
        for i in 0..4 {
            let block = to_place(i, i + 50);
            transfer.push(block).await.unwrap();
        }
        transfer.last(first_tokens()).await.unwrap();
        within("acked", transfer.acked()).await.unwrap();
        for (i, (block, _)) in next.blocks.iter().enumerate() {
            assert!(bench.sink.has_whole(*block, BlockId(i as u32 + 50)), "round {round}");
        }
    }
}

/// A source whose exports wait at a gate.
#[derive(Debug, Default)]
pub(crate) struct Gated {
    pub(crate) is_open: AtomicBool,
    pub(crate) running: AtomicUsize,
}

impl KvSource for Gated {
    fn layer_count(&self) -> u32 {
        LAYERS
    }
    fn layer_bytes(&self) -> usize {
        LAYER_BYTES
    }
    fn export(&self, _: BlockId, _: Range<u32>, _: SpanMut<'_>) -> Result<(), SourceError> {
        self.running.fetch_add(1, Ordering::SeqCst);
        while !self.is_open.load(Ordering::SeqCst) {
            std::thread::park_timeout(Duration::from_millis(1));
        }
        self.running.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }
}

pub(crate) async fn an_abort_waits_for_the_running_read(harness: &dyn Harness) {
    let bench = Bench::new(harness, Scenario::good()).await;
    let ticket = bench.reserved(1, 4);
    let source = Arc::new(Gated::default());
    let begun = bench.transport.begin(start(&ticket, source.clone()));
    let mut transfer = within("begin", begun).await.unwrap();
    within("push", transfer.push(nth(0))).await.unwrap();
    eventually("it is being read", || source.running.load(Ordering::SeqCst) == 1).await;
    let mut aborting = tokio::spawn(transfer.abort(AbortReason::Cancelled));
    let early = tokio::time::timeout(Duration::from_millis(50), &mut aborting).await;
    assert!(early.is_err(), "the abort was done while the block was being read");
    source.is_open.store(true, Ordering::SeqCst);
    within("abort", aborting).await.unwrap();
    assert_eq!(source.running.load(Ordering::SeqCst), 0);
}

pub(crate) async fn a_dropped_transfer_is_an_aborted_one(harness: &dyn Harness) {
    let bench = Bench::new(harness, Scenario::good()).await;
    let ticket = bench.reserved(1, 4);
    let mut transfer = bench.begin(&ticket).await.unwrap();
    transfer.push(nth(0)).await.unwrap();
    drop(transfer);
    let end = ReceiveEnd::AbortedBySender("cancelled".to_owned());
    bench.ends(ticket.transfer, end).await;
}

pub(crate) async fn the_receiver_can_abort(harness: &dyn Harness) {
    let bench = Bench::new(harness, Scenario::good()).await;
    let ticket = bench.reserved(1, 4);
    assert!(
        !bench.receiver.abort(ticket.transfer, "cancelled"),
        "nothing has claimed it yet"
    );
    let mut transfer = bench.begin(&ticket).await.unwrap();
    transfer.push(nth(0)).await.unwrap();
    eventually("a block lands", || bench.sink.written() == 1).await;
    assert!(bench.receiver.abort(ticket.transfer, "cancelled"));
    let error = within("the sender is told", transfer.acked()).await.unwrap_err();
    assert!(
        matches!(&error, TransferError::AbortedByPeer { reason, .. } if reason == "cancelled"),
        "{error:?}"
    );
    assert!(transfer.push(nth(1)).await.is_err());
    let end = ReceiveEnd::AbortedHere("cancelled".to_owned());
    bench.ends(ticket.transfer, end).await;
    assert!(!bench.receiver.abort(ticket.transfer, "cancelled"));
    assert_eq!(bench.sink.written(), 1);
}

pub(crate) async fn an_abort_waits_for_the_running_write(harness: &dyn Harness) {
    let bench = Bench::new(harness, Scenario::good()).await;
    let ticket = bench.reserved(1, 4);
    bench.sink.is_gated.store(true, Ordering::Relaxed);
    let mut transfer = bench.begin(&ticket).await.unwrap();
    transfer.push(nth(0)).await.unwrap();
    eventually("claimed", || bench.receiver.abort(ticket.transfer, "cancelled")).await;
    // The import may have begun before the abort. Either it is complete before `ended`, or it never happens.
    bench.sink.is_gated.store(false, Ordering::Relaxed);
    eventually("ended", || !bench.sink.ends().is_empty()).await;
    let written = bench.sink.written();
    let _ = transfer.push(nth(1)).await;
    let next = bench.reserved(2, 1);
    bench.send(&next).await.unwrap();
    assert_eq!(bench.sink.written(), written + 1);
}

pub(crate) async fn a_refused_commit_reaches_the_sender(harness: &dyn Harness) {
    let bench = Bench::new(harness, Scenario::answering(CommitAnswer::Refuse)).await;
    let ticket = bench.reserved(1, 2);
    let error = bench.send(&ticket).await.unwrap_err();
    assert_eq!(error.name(), "cancelled");
    assert_eq!(bench.sink.ends(), [], "commit was called: no second end");
}

pub(crate) async fn a_commit_that_never_answers_holds_up_nobody_else(harness: &dyn Harness) {
    let bench = Bench::new(harness, Scenario::answering(CommitAnswer::Never)).await;
    let first = bench.reserved(1, 2);
    let mut transfer = bench.begin(&first).await.unwrap();
    for i in 0..2 {
        transfer.push(nth(i)).await.unwrap();
    }
    transfer.last(first_tokens()).await.unwrap();
    let second = bench.reserved(2, 2);
    let mut other = bench.begin(&second).await.unwrap();
    other.push(nth(0)).await.unwrap();
    eventually("the other transfer lands", || bench.sink.written() == 3).await;
    // The caller's hold deadline: it stops waiting and gives up.
    assert!(
        tokio::time::timeout(Duration::from_millis(20), transfer.acked())
            .await
            .is_err()
    );
    within("abort", transfer.abort(AbortReason::HoldExpired)).await;
}

pub(crate) async fn a_receiver_that_dies_ends_every_transfer(harness: &dyn Harness) {
    let mut bench = Bench::new(harness, Scenario::answering(CommitAnswer::Never)).await;
    let ticket = bench.reserved(1, 2);
    let mut waiting = bench.begin(&ticket).await.unwrap();
    for i in 0..2 {
        waiting.push(nth(i)).await.unwrap();
    }
    waiting.last(first_tokens()).await.unwrap();
    let other = bench.reserved(2, 2);
    let mut pushing = bench.begin(&other).await.unwrap();
    bench.kill_receiver();
    let waited = within("the waiting transfer ends", waiting.acked()).await.unwrap_err();
    assert_ne!(lost(waited), PairFault::Closed);
    let pushed = within("the pushing transfer ends", async {
        loop {
            if let Err(error) = pushing.push(nth(0)).await {
                return error;
            }
        }
    });
    assert_ne!(lost(pushed.await), PairFault::Closed);
    bench.pair_is("down", |reason| reason.is_some()).await;
}

pub(crate) async fn a_pair_comes_back_by_itself(harness: &dyn Harness) {
    let mut bench = Bench::new(harness, Scenario::good()).await;
    let ticket = bench.reserved(1, 1);
    bench.send(&ticket).await.unwrap();
    bench.kill_receiver();
    bench.pair_is("down", |reason| reason.is_some()).await;
    let again = bench
        .harness
        .serve(bench.receiver.clone(), bench.sink.clone(), &bench.address);
    bench.served = Some(again.await);
    bench.pair_is("up", |reason| reason.is_none()).await;
    let ticket = bench.reserved(2, 1);
    bench.send(&ticket).await.unwrap();
}

pub(crate) async fn a_sender_that_dies_ends_its_transfers_at_the_receiver(harness: &dyn Harness) {
    let bench = Bench::new(harness, Scenario::good()).await;
    let ticket = bench.reserved(1, 4);
    let mut transfer = bench.begin(&ticket).await.unwrap();
    transfer.push(nth(0)).await.unwrap();
    eventually("a block lands", || bench.sink.written() == 1).await;
    bench.transport.keep_pairs(Vec::new());
    bench.ends(ticket.transfer, ReceiveEnd::PairLost).await;
    let error = within("the sender knows too", transfer.acked()).await.unwrap_err();
    assert_eq!(lost(error), PairFault::Closed);
    assert!(bench.transport.health().borrow().is_empty());
}

pub(crate) async fn a_pair_that_does_not_move_is_torn_down(harness: &dyn Harness) {
    let plan = Scenario {
        stall_window: Duration::from_millis(300),
        ..Scenario::good()
    };
    let bench = Bench::new(harness, plan).await;
    bench.sink.is_gated.store(true, Ordering::Relaxed);
    let ticket = bench.reserved(1, 2_000);
    let mut transfer = bench.begin(&ticket).await.unwrap();
    let stalled = async {
        for i in 0..2_000 {
            if let Err(error) = transfer.push(nth(i)).await {
                return error;
            }
        }
        panic!("all pushed through a receiver that stands still")
    };
    let fault = lost(within("the stall is noticed", stalled).await);
    assert!(matches!(fault, PairFault::Stalled { .. }), "{fault:?}");
    bench.sink.is_gated.store(false, Ordering::Relaxed);
    eventually("the receiver ends it", || !bench.sink.ends().is_empty()).await;
}

/// Few enough blocks to be in flight at once, so that no push ever waits.
pub(crate) async fn a_stall_behind_the_last_block_is_noticed_too(harness: &dyn Harness) {
    let plan = Scenario {
        stall_window: Duration::from_millis(300),
        ..Scenario::good()
    };
    let bench = Bench::new(harness, plan).await;
    bench.sink.is_gated.store(true, Ordering::Relaxed);
    let ticket = bench.reserved(1, 40);
    let mut transfer = bench.begin(&ticket).await.unwrap();
    for i in 0..40 {
        within("push", transfer.push(nth(i))).await.unwrap();
    }
    let end = async {
        match transfer.last(first_tokens()).await {
            Ok(_) => transfer.acked().await.unwrap_err(),
            Err(error) => error,
        }
    };
    let fault = lost(within("the stall is noticed", end).await);
    assert!(matches!(fault, PairFault::Stalled { .. }), "{fault:?}");
    bench.sink.is_gated.store(false, Ordering::Relaxed);
}

/// Whatever one field of one frame says, the sender gets the true answer and no wrong byte is ever committed.
pub(crate) async fn no_change_to_a_frame_commits_wrong_bytes(harness: &dyn Harness) {
    use rand::{Rng as _, SeedableRng as _};
    for seed in 0..60 {
        let mut random = rand::rngs::StdRng::seed_from_u64(seed);
        let (at, field) = (random.random_range(0..4), random.random_range(0..9));
        let (bit, offset) = (random.random_range(0..32u32), random.random_range(0..BLOCK_BYTES));
        let change = change_block(at, move |block| match field {
            0 => block.transfer.0 ^= 1 << bit,
            1 => block.sequence_no ^= 1 << bit,
            2 => block.ticket_index ^= 1 << bit,
            3 => block.block.0 ^= 1 << bit,
            4 => block.generation.0 ^= 1 << bit,
            5 => block.layer_begin ^= 1 << bit,
            6 => block.layer_end ^= 1 << bit,
            7 => block.checksum ^= 1 << bit,
            _ => {
                let mut data = block.data.to_vec();
                data[offset] ^= 1 << (bit % 8);
                block.data = data.into();
            }
        });
        let bench = Bench::new(harness, Scenario::tapped(change)).await;
        let ticket = bench.reserved(1, 4);
        let sent = bench.send(&ticket).await;
        assert!(sent.is_err(), "seed {seed}: a changed field {field} was acknowledged");
        assert_eq!(bench.sink.commit_count(), 0, "seed {seed}");
    }
}

macro_rules! conformance_tests {
    ($harness:expr) => {
        $crate::conformance::conformance_tests!(@each $harness;
            a_transfer_lands_whole_and_is_acknowledged
            blocks_may_come_in_any_order_and_none_is_a_transfer_too
            many_transfers_share_a_pair
            a_repeated_frame_is_refused
            a_lost_frame_is_refused
            a_damaged_byte_is_refused_and_never_written
            frames_that_contradict_the_reservation_are_refused
            counts_that_do_not_match_are_refused
            a_last_frame_for_another_request_is_refused
            a_ticket_is_good_for_one_transfer_of_one_node
            a_stale_epoch_gets_no_pair
            an_incompatible_node_gets_no_pair
            an_abort_ends_the_transfer_and_nothing_is_written_after
            blocks_of_an_aborted_transfer_take_the_next_one_whole
            an_abort_waits_for_the_running_read
            a_dropped_transfer_is_an_aborted_one
            the_receiver_can_abort
            an_abort_waits_for_the_running_write
            a_refused_commit_reaches_the_sender
            a_commit_that_never_answers_holds_up_nobody_else
            a_receiver_that_dies_ends_every_transfer
            a_pair_comes_back_by_itself
            a_sender_that_dies_ends_its_transfers_at_the_receiver
            a_pair_that_does_not_move_is_torn_down
            a_stall_behind_the_last_block_is_noticed_too
            no_change_to_a_frame_commits_wrong_bytes
        );
    };
    (@each $harness:expr; $($test:ident)*) => { $(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $test() {
            $crate::conformance::$test(&$harness).await;
        }
    )* };
}
pub(crate) use conformance_tests;
