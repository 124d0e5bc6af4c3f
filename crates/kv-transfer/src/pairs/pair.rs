//! One pair: it connects, shakes hands, chooses its transport, and reconnects for ever.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng as _;
use serving_core::node::PairHealth;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::PairConfig;
use super::pair_stream::{Link, PairStream, carry};
use crate::choice::{Fallbacks, ShmFault, TransportKind};
use crate::transport::{PairFault, PairPeer};
use crate::{grpc, shm};

const BACK_OFF_FIRST: Duration = Duration::from_millis(50);
const BACK_OFF_MAX: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
pub(super) enum PairState {
    Usable(Arc<PairStream>),
    Unusable(PairFault),
}

/// What all pairs of one node share.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    pub config: Arc<PairConfig>,
    pub health: watch::Sender<Vec<PairHealth>>,
    pub fallbacks: Arc<Fallbacks>,
}

/// A kept pair; dropping the last handle does not close it, `close` does.
#[derive(Debug)]
pub(super) struct Pair {
    pub peer: PairPeer,
    pub state: watch::Receiver<PairState>,
    health: watch::Sender<Vec<PairHealth>>,
    closed: CancellationToken,
}

impl Pair {
    pub fn open(peer: PairPeer, shared: &Shared) -> Self {
        let Shared {
            config,
            health,
            fallbacks,
        } = shared.clone();
        let (state_in, state) = watch::channel(PairState::Unusable(PairFault::Connecting));
        let closed = CancellationToken::new();
        let keeper = Keeper {
            peer: peer.clone(),
            config,
            state: state_in,
            health: health.clone(),
            fallbacks,
            closed: closed.clone(),
        };
        keeper.tell(Err(&PairFault::Connecting));
        tokio::spawn(keeper.keep());
        Self {
            peer,
            state,
            health,
            closed,
        }
    }

    /// Idempotent. A closed pair no longer reports its health.
    pub fn close(&self) {
        if !self.closed.is_cancelled() {
            self.closed.cancel();
            self.health
                .send_modify(|pairs| pairs.retain(|pair| pair.decode_node != self.peer.node));
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.close();
    }
}

/// The task behind a pair.
#[derive(Debug)]
struct Keeper {
    peer: PairPeer,
    config: Arc<PairConfig>,
    state: watch::Sender<PairState>,
    health: watch::Sender<Vec<PairHealth>>,
    fallbacks: Arc<Fallbacks>,
    closed: CancellationToken,
}

impl Keeper {
    async fn keep(self) {
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
        match self.connect().await {
            Ok(link) => {
                self.state.send_replace(PairState::Usable(link.live.clone()));
                let transport = link.live.lane.kind().name();
                self.tell(Ok(transport));
                tracing::info!(peer = %self.peer.node, address = %self.peer.address, transport, "pair is up");
                carry(link, &self.config).await
            }
            Err(fault) => fault,
        }
    }

    /// The best way that both nodes know, in this node's order. They meet over gRPC. The gRPC stream is given up when
    /// another way is found, and is the fallback when none is.
    async fn connect(&self) -> Result<Link, PairFault> {
        if self.peer.compatibility != self.config.compatibility {
            return Err(PairFault::Incompatible);
        }
        let (link, hello) = grpc::connect(&self.peer, &self.config).await?;
        let mut unshared: Option<ShmFault> = None;
        for transport in &self.config.transports {
            match transport {
                TransportKind::Grpc => {
                    if let Some(fault) = &unshared {
                        let peer = &self.peer.node;
                        tracing::info!(%peer, reason = fault.name(), %fault, "no shared memory with a peer");
                    }
                    return Ok(link);
                }
                TransportKind::Shm | TransportKind::ShmDirect => {
                    match shm::connect(&self.peer, hello.shared_memory.as_ref(), &self.config).await {
                        Ok((shared, staged)) => {
                            if let Some(fault) = staged {
                                let peer = &self.peer.node;
                                self.fallbacks.count_staged(fault);
                                tracing::info!(%peer, reason = fault.name(), %fault, "a peer's pool is not written in place");
                            }
                            link.live.close(PairFault::Closed);
                            return Ok(shared);
                        }
                        Err(fault) => {
                            self.fallbacks.count(&fault);
                            unshared = Some(fault);
                        }
                    }
                }
            }
        }
        let reason = unshared.map_or_else(|| "no transport is configured".to_owned(), |fault| fault.to_string());
        link.live.close(PairFault::Closed);
        Err(PairFault::NoTransport(reason))
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
            PairState::Unusable(_) => false,
        }
    }

    /// The transport of the pair, or why there is none.
    fn tell(&self, state: Result<&'static str, &PairFault>) {
        let unusable_reason = state.err().map(|fault| fault.name().to_owned());
        let transport = state.ok().map(str::to_owned);
        self.health.send_if_modified(|pairs| {
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
