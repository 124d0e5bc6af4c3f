//! Pairs that nobody uses for a while, and pairs that go without a better transport for a while.

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::choice::Fallback;
use crate::conformance::{
    CommitAnswer, LAYER_BYTES, Pattern, Recorder, Served, compatibility, empty_ticket, eventually, node, start, within,
};
use crate::link::{Dial, Link, NoLink};
use crate::receiver::Receiver;
use crate::transport::AbortReason;
use crate::{ReceivingEnd, grpc, shm, test_process, transports};

/// A decode node that shares memory.
async fn decode_node(sink: Arc<Recorder>) -> Served {
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
    let served = decode_node(Recorder::new(CommitAnswer::Accept)).await;
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

#[test]
fn a_reason_is_news_until_it_is_told_and_when_it_changes() {
    let mut last = better::LastReasons::default();
    let mut is_news = |kind, reason| last.is_news(kind, reason);
    assert!(is_news(shm::KIND, "refused") && !is_news(shm::KIND, "refused"));
    assert!(is_news(grpc::KIND, "refused"), "another transport");
    assert!(is_news(shm::KIND, "io") && is_news(shm::KIND, "refused"));
}

/// A transport that is refused at the first two dials.
#[derive(Debug)]
struct RefusedTwice {
    inner: Arc<dyn KvTransport>,
    dials: Arc<AtomicU32>,
}

#[async_trait]
impl KvTransport for RefusedTwice {
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }

    async fn connect(&self, dial: &Dial<'_>) -> Result<Link, NoLink> {
        if self.dials.fetch_add(1, Ordering::Relaxed) > 1 {
            return self.inner.connect(dial).await;
        }
        Err(refused(self.kind()))
    }
}

fn refused(wanted: TransportKind) -> NoLink {
    NoLink::Way(Fallback {
        wanted,
        reason: "refused",
        detail: "the test refuses it".to_owned(),
        may_pass: true,
    })
}

/// A transport that is refused at the first dial, and panics at the second.
#[derive(Debug)]
struct PanicsLater {
    inner: Arc<dyn KvTransport>,
    dials: AtomicU32,
}

#[async_trait]
impl KvTransport for PanicsLater {
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }

    async fn connect(&self, dial: &Dial<'_>) -> Result<Link, NoLink> {
        match self.dials.fetch_add(1, Ordering::Relaxed) {
            0 => Err(refused(self.kind())),
            1 => panic!("a bug of a transport"),
            _ => self.inner.connect(dial).await,
        }
    }
}

/// Pairs by shared memory, as `other` makes it, or else by gRPC. The better one is tried again soon.
fn with_another_best(
    prefill: &NodeId,
    other: impl FnOnce(Arc<dyn KvTransport>) -> Arc<dyn KvTransport>,
) -> PairTransport {
    let config = PairConfig {
        better_after: Duration::from_millis(100),
        ..PairConfig::new(prefill.clone(), compatibility(1)).over(vec![shm::KIND, grpc::KIND])
    };
    let usual = transports::pairs(config.clone());
    let ways = &usual.shared.ways;
    let [shared_memory, streams] = &ways.best_first[..] else {
        panic!("{ways:?}");
    };
    let ways = Ways {
        meeting: ways.meeting.clone(),
        best_first: vec![other(shared_memory.clone()), streams.clone()],
    };
    PairTransport::new(config, ways)
}

#[tokio::test]
async fn a_pair_whose_keeper_panics_is_lost_and_dialled_again() {
    let sink = Recorder::new(CommitAnswer::Accept);
    let served = decode_node(sink.clone()).await;
    let prefill = node("prefill-0", 11);
    let transport = with_another_best(&prefill, |inner| {
        let dials = AtomicU32::new(0);
        Arc::new(PanicsLater { inner, dials })
    });
    let ticket = empty_ticket(node("decode-0", 22), &served.address);
    sink.reserve(ticket.transfer, &prefill, &ticket);
    let begun = transport.begin(start(&ticket, Arc::new(Pattern)));
    let mut transfer = within("begin", begun).await.unwrap();
    let lost = within("the transfer is told", transfer.acked()).await;
    assert!(
        matches!(
            lost,
            Err(TransferError::PairLost {
                fault: PairFault::Broken(_),
                ..
            })
        ),
        "{lost:?}"
    );
    let pair = transport.pairs.lock().unwrap().values().next().unwrap().clone();
    assert!(matches!(*pair.state.borrow(), PairState::Unusable(_)));
    let health = transport.health();
    let is_usable = || health.borrow().iter().all(|pair| pair.unusable_reason.is_none());
    assert!(!is_usable());
    eventually("it is usable again", is_usable).await;
}

#[tokio::test]
async fn a_pair_takes_a_better_transport_later_and_cuts_no_transfer_for_it() {
    let sink = Recorder::new(CommitAnswer::Accept);
    let served = decode_node(sink.clone()).await;
    let (prefill, decode) = (node("prefill-0", 11), node("decode-0", 22));
    let dials: Arc<AtomicU32> = Arc::default();
    let transport = with_another_best(&prefill, |inner| {
        let dials = dials.clone();
        Arc::new(RefusedTwice { inner, dials })
    });
    let ticket = empty_ticket(decode, &served.address);
    sink.reserve(ticket.transfer, &prefill, &ticket);
    let begun = transport.begin(start(&ticket, Arc::new(Pattern)));
    let mut transfer = within("begin", begun).await.unwrap();
    assert_eq!(transfer.transport(), grpc::KIND);
    let health = transport.health();
    let carries = |kind: TransportKind| {
        let pairs = health.borrow();
        pairs.iter().any(|pair| pair.transport.as_deref() == Some(kind.name()))
    };
    eventually("the better one is dialled again", || dials.load(Ordering::Relaxed) > 2).await;
    // Longer than a stream without transfers would go on.
    let cut = tokio::time::timeout(3 * better::QUIET, transfer.acked()).await;
    assert!(cut.is_err() && carries(grpc::KIND), "a transfer is under way");
    within("abort", transfer.abort(AbortReason::Cancelled)).await;
    eventually("the better one carries the pair", || carries(shm::KIND)).await;
    let next = empty_ticket(node("decode-0", 22), &served.address);
    sink.reserve(next.transfer, &prefill, &next);
    let begun = within("begin again", transport.begin(start(&next, Arc::new(Pattern)))).await;
    assert_eq!(begun.unwrap().transport(), shm::KIND);
    let fallbacks = transport.fallbacks();
    let retries: Vec<_> = fallbacks.retries().filter(|(.., count)| *count > 0).collect();
    assert_eq!(retries, [(shm::KIND, "failed", 1), (shm::KIND, "taken", 1)]);
}
