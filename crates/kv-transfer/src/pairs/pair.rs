//! One pair: it connects, shakes hands, chooses its transport, and reconnects for ever.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt as _, StreamExt as _};
use proto::messages::HelloRefusedReason;
use rand::Rng as _;
use serving_core::compatibility::Incompatibility;
use serving_core::node::PairHealth;
use tokio::sync::{Notify, OnceCell, watch};
use tokio_util::sync::CancellationToken;

use super::PairConfig;
use super::Ways;
use super::better::{Better, LastReasons, StillWithout, closed_when_quiet};
use super::pair_stream::{Carried, PairStream, carry};
use crate::choice::{Fallback, Fallbacks, RetryEnd};
use crate::link::budget::Budget;
use crate::link::{Dial, KvTransport, Link, NoLink};
use crate::transport::{PairFault, PairPeer};

const BACK_OFF_FIRST: Duration = Duration::from_millis(50);
const BACK_OFF_MAX: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
pub(super) enum PairState {
    Usable(Arc<PairStream>),
    /// In touch, without a link. [`Pair::wanted`] opens one.
    Idle,
    Unusable(PairFault),
}

/// What all pairs of one node share.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    pub config: Arc<PairConfig>,
    pub ways: Arc<Ways>,
    pub budget: Arc<Budget>,
    pub health: watch::Sender<Vec<PairHealth>>,
    pub fallbacks: Arc<Fallbacks>,
}

/// One pair and the task that keeps it, until `close`.
#[derive(Debug)]
pub(super) struct Pair {
    pub peer: PairPeer,
    shared: Shared,
    pub state: watch::Sender<PairState>,
    /// A transfer wants the link of an idle pair.
    pub wanted: Notify,
    /// The coordinator's list says that the peer has another hash. The peer is asked once, because an older version is
    /// refused with both versions.
    incompatible: OnceCell<PairFault>,
    closed: CancellationToken,
}

impl Pair {
    pub fn open(peer: PairPeer, shared: &Shared) -> Arc<Self> {
        let pair = Arc::new(Self {
            peer,
            shared: shared.clone(),
            state: watch::Sender::new(PairState::Unusable(PairFault::Connecting)),
            wanted: Notify::new(),
            incompatible: OnceCell::new(),
            closed: CancellationToken::new(),
        });
        pair.tell(Err(&PairFault::Connecting));
        tokio::spawn(pair.clone().keep_on());
        pair
    }

    /// Idempotent. A closed pair no longer reports its health.
    pub fn close(&self) {
        if !self.closed.is_cancelled() {
            self.closed.cancel();
            let health = &self.shared.health;
            health.send_modify(|pairs| pairs.retain(|pair| pair.decode_node != self.peer.node));
        }
    }

    /// Keeps the pair until it is closed, also after a panic of its keeper.
    async fn keep_on(self: Arc<Self>) {
        while self.panics(self.clone().keep()).await {
            tokio::select! {
                () = tokio::time::sleep(BACK_OFF_MAX) => {}
                () = self.closed.cancelled() => {}
            }
        }
    }

    /// True when the keeper has panicked. Its last word may be that the pair is usable, and its transfers would wait for their whole hold
    /// time. So the pair is lost then.
    async fn panics(&self, keeper: impl Future<Output = ()> + Send + 'static) -> bool {
        let Err(error) = tokio::spawn(keeper).await else {
            return false;
        };
        if !error.is_panic() {
            return false;
        }
        let peer = &self.peer.node;
        tracing::error!(%peer, %error, "the keeper of a pair has panicked: its transfers fail, and it is dialled again; this is a bug in baton");
        self.lose(&PairFault::Broken("its keeper on this node has panicked".to_owned()));
        true
    }

    async fn keep(self: Arc<Self>) {
        let mut back_off = BACK_OFF_FIRST;
        let mut told: Option<PairFault> = None;
        loop {
            let fault = tokio::select! {
                fault = self.one_stream() => fault,
                () = self.closed.cancelled() => PairFault::Closed,
            };
            let (peer, address) = (&self.peer.node, &self.peer.address);
            if self.lose(&fault) {
                back_off = BACK_OFF_FIRST;
                told = None;
                match fault {
                    PairFault::Closed => tracing::info!(%peer, address, %fault, "a pair is closed"),
                    _ => tracing::warn!(%peer, address, %fault, "lost a pair; dialling again"),
                }
            } else if fault.is_lasting() && told.as_ref() != Some(&fault) {
                // Logged once: it is tried for ever, and only a new start of one of the nodes changes it.
                tracing::warn!(%peer, address, reason = fault.name(), %fault, "this pair is never used; start both nodes alike");
                told = Some(fault);
            } else if back_off >= BACK_OFF_MAX && told.is_none() {
                // Once, and late: a node that has just started is out of reach for a moment.
                tracing::warn!(%peer, address, %fault, "no connection to a decode node yet; dialling on");
                told = Some(fault);
            } else {
                tracing::debug!(%peer, %fault, "no pair yet");
            }
            if self.closed.is_cancelled() {
                return;
            }
            let pause = back_off.mul_f64(rand::rng().random_range(0.5..1.0));
            back_off = (back_off * 2).min(BACK_OFF_MAX);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.closed.cancelled() => {}
            }
        }
    }

    /// One connection from its start to its end.
    async fn one_stream(&self) -> PairFault {
        let Err(fault) = self.one_life().await;
        fault
    }

    /// Links while the pair is used, and the stream over which the nodes met while it is not.
    async fn one_life(&self) -> Result<Infallible, PairFault> {
        loop {
            let mut met = self.meet().await?;
            if matches!(*self.state.borrow(), PairState::Idle) {
                self.is_wanted(&mut met).await?;
            }
            let (mut link, mut better) = self.best_link(met).await?;
            while let Some(next) = self.carry_over(link, &mut better).await? {
                link = next;
            }
            self.rest();
        }
    }

    /// Carries transfers over a link. `Some`: a better link carries them from now on. `None`: the pair is idle.
    async fn carry_over(&self, link: Link, better: &mut Better) -> Result<Option<Link>, PairFault> {
        let peer = &self.peer.node;
        let (live, replies) = PairStream::new(peer.clone(), link);
        self.state.send_replace(PairState::Usable(live.clone()));
        let transport = live.carrier.kind().name();
        self.tell(Ok(transport));
        tracing::info!(%peer, address = %self.peer.address, transport, "pair is up");
        let found = tokio::select! {
            carried = carry(&live, replies, &self.shared.config) => match carried {
                Carried::Over(fault) => Err(fault),
                Carried::Idle => Ok(None),
            },
            found = self.better_link(&live, better) => Ok(Some(found)),
        };
        let Some((at, next)) = found? else {
            tracing::info!(%peer, transport, "a pair is idle and gives its memory back");
            return Ok(None);
        };
        better.ways.truncate(at);
        tracing::info!(%peer, transport, "a pair leaves a transport for a better one");
        Ok(Some(next))
    }

    /// Tries the better transports now and then, best first, while the pair's stream goes on. Ends with the link of one and its
    /// place among them, in a moment in which no transfer is under way. The stream takes none any more then.
    async fn better_link(&self, live: &PairStream, better: &Better) -> (usize, Link) {
        if better.ways.is_empty() {
            return std::future::pending().await;
        }
        let (fallbacks, mut last) = (&self.shared.fallbacks, LastReasons::default());
        loop {
            tokio::time::sleep(self.shared.config.better_after).await;
            for (at, way) in better.ways.iter().enumerate() {
                let wanted = way.kind();
                let tried = self.try_again(live, &**way, better.offer(wanted)).await;
                let still_without = match tried {
                    Ok(link) => {
                        fallbacks.count_retry(wanted, RetryEnd::Taken);
                        link.lesser_because.iter().for_each(|fallback| self.without(fallback));
                        return (at, self.tapped(link));
                    }
                    Err(still_without) => still_without,
                };
                fallbacks.count_retry(wanted, still_without.end());
                let (wanted_name, reason) = (wanted.name(), still_without.reason());
                if last.is_news(wanted, reason) {
                    tracing::info!(
                        peer = %self.peer.node, wanted = wanted_name, reason, fault = %still_without,
                        "a pair has tried a better transport again and goes on without it; told again when the reason changes"
                    );
                }
                if matches!(still_without, StillWithout::NeverQuiet) {
                    break;
                }
            }
        }
    }

    /// One try of a better transport. With its link the pair's stream takes no transfer any more.
    async fn try_again(
        &self,
        live: &PairStream,
        way: &dyn KvTransport,
        offer: Option<&[u8]>,
    ) -> Result<Link, StillWithout> {
        let link = way.connect(&self.dial(offer)).await?;
        if closed_when_quiet(live).await {
            return Ok(link);
        }
        link.outbox.over.cancel();
        Err(StillWithout::NeverQuiet)
    }

    /// A wish from the last time that the pair was idle would open it again at once, for nobody. Only an idle pair is wished for,
    /// so no wish is lost.
    fn rest(&self) {
        let _ = self.wanted.notified().now_or_never();
        self.state.send_replace(PairState::Idle);
    }

    /// Waits for a transfer that wants the pair.
    async fn is_wanted(&self, met: &mut Link) -> Result<(), PairFault> {
        tokio::select! {
            () = self.wanted.notified() => Ok(()),
            reply = met.replies.next() => match reply {
                Some(Err(fault)) => Err(fault),
                Some(Ok(_)) | None => Err(PairFault::Broken("the decode node ended the stream".to_owned())),
            },
        }
    }

    fn dial<'a>(&'a self, offer: Option<&'a [u8]>) -> Dial<'a> {
        Dial {
            peer: &self.peer,
            hello: self.shared.config.hello(&self.peer),
            offer,
            budget: &self.shared.budget,
            identity: &self.shared.config.identity,
        }
    }

    async fn meet(&self) -> Result<Link, PairFault> {
        let Shared { config, ways, .. } = &self.shared;
        let met = async {
            let met = ways.meeting.connect(&self.dial(None)).await;
            met.map_err(|fault| match fault {
                NoLink::Pair(fault) => fault,
                NoLink::Way(fallback) => no_transport(fallback),
            })
        };
        let (mine, peer) = ((&config.me.name, &config.compatibility), &self.peer);
        let Some(why) = Incompatibility::between(mine, (&peer.node.name, &peer.compatibility)) else {
            return met.await;
        };
        let asked = self.incompatible.get_or_init(async || match met.await {
            Err(
                fault @ PairFault::Refused {
                    reason: HelloRefusedReason::ProtocolVersion,
                    ..
                },
            ) => fault,
            _ => PairFault::Incompatible(why),
        });
        Err(asked.await.clone())
    }

    /// The best way that both nodes know, in this node's order, and what may be better later.
    async fn best_link(&self, met: Link) -> Result<(Link, Better), PairFault> {
        let ways = &self.shared.ways;
        let mut better = Better::of(&met.hello.offers);
        let mut missing: Option<Fallback> = None;
        for way in &ways.best_first {
            if way.kind() == ways.meeting.kind() {
                return Ok((self.tapped(met), better));
            }
            let connected = way.connect(&self.dial(better.offer(way.kind()))).await;
            match connected {
                Ok(link) => {
                    link.lesser_because.iter().for_each(|fallback| self.without(fallback));
                    met.outbox.over.cancel();
                    return Ok((self.tapped(link), better));
                }
                Err(NoLink::Way(fallback)) => {
                    self.without(&fallback);
                    better.note(way, &fallback);
                    // A reason that may pass counts before those that last.
                    missing = missing.filter(|missing| missing.may_pass).or(Some(fallback));
                }
                Err(NoLink::Pair(fault)) => {
                    met.outbox.over.cancel();
                    return Err(fault);
                }
            }
        }
        met.outbox.over.cancel();
        let none = || PairFault::NoTransport {
            detail: "no transport is configured".to_owned(),
            may_pass: false,
        };
        Err(missing.map_or_else(none, no_transport))
    }

    fn without(&self, fallback: &Fallback) {
        self.shared.fallbacks.count(fallback);
        let (wanted, reason) = (fallback.wanted.name(), fallback.reason);
        tracing::info!(peer = %self.peer.node, wanted, reason, fault = %fallback, "a pair goes without a transport");
    }

    #[cfg(test)]
    fn tapped(&self, link: Link) -> Link {
        self.shared.config.tap.on(link)
    }

    #[cfg(not(test))]
    fn tapped(&self, link: Link) -> Link {
        link
    }

    /// True when a usable stream was lost.
    fn lose(&self, fault: &PairFault) -> bool {
        let before = self.state.send_replace(PairState::Unusable(fault.clone()));
        self.tell(Err(fault));
        match before {
            PairState::Usable(live) => {
                live.close(fault.clone());
                true
            }
            PairState::Idle => true,
            PairState::Unusable(_) => false,
        }
    }

    /// The transport of the pair, or why there is none.
    fn tell(&self, state: Result<&'static str, &PairFault>) {
        let unusable_reason = state.err().map(|fault| fault.name().to_owned());
        let transport = state.ok().map(str::to_owned);
        self.shared.health.send_if_modified(|pairs| {
            if self.closed.is_cancelled() {
                return false;
            }
            let next = PairHealth {
                decode_node: self.peer.node.clone(),
                unusable_reason,
                transport,
            };
            match pairs.iter_mut().find(|pair| pair.decode_node == self.peer.node) {
                Some(pair) if *pair == next => false,
                Some(pair) => {
                    *pair = next;
                    true
                }
                None => {
                    pairs.push(next);
                    pairs.sort_by(|a, b| a.decode_node.cmp(&b.decode_node));
                    true
                }
            }
        });
    }
}

fn no_transport(fallback: Fallback) -> PairFault {
    PairFault::NoTransport {
        detail: fallback.detail,
        may_pass: fallback.may_pass,
    }
}
