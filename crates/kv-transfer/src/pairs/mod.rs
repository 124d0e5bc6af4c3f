//! A prefill node's pairs, and the transfers on them. There is one pair per decode node, over the best transport that both nodes have.

mod better;
mod copies;
mod pair;
mod pair_stream;
mod transfer;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use identity::Identity;
use proto::messages::{Hello, KvShard, PROTOCOL_VERSION};
use serving_core::compatibility::Compatibility;
use serving_core::ids::NodeId;
use serving_core::node::{PairHealth, Ticket};
use tokio::sync::watch;

use self::pair::{Pair, PairState, Shared};
use self::pair_stream::PairStream;
use self::transfer::PairTransfer;
use crate::choice::{Fallbacks, TransportKind};
use crate::link::KvTransport;
use crate::link::budget::Budget;
use crate::transport::{PairFault, PairPeer, SendTransfer, TransferError, TransferStart, Transport};
use crate::trust::{DeviceEnd, DirectWish};

/// Pairs that tickets may open beyond the kept ones, until the coordinator's list comes.
const PAIRS_MAX: usize = 1024;

/// Longer than the pauses of a cluster that is used: opening a link again takes a few milliseconds, and the first transfer finds
/// a ring whose pages the system has not given yet.
const PAIR_IDLE_MAX: Duration = Duration::from_secs(300);

/// A try takes milliseconds where the peer answers. A minute of gRPC is little beside the life of a pair.
const BETTER_AFTER: Duration = Duration::from_secs(60);

#[derive(Clone, Debug)]
pub struct PairConfig {
    pub me: NodeId,
    pub compatibility: Compatibility,
    /// The part of each block that this process holds.
    pub(crate) shard: KvShard,
    /// The transports that may be used, best first. Pairs meet over gRPC even when gRPC may carry no KV.
    pub transports: Vec<TransportKind>,
    /// The secret for writing the pools of decode nodes in place, where memory is shared and they hold the same secret.
    pub direct: Option<DirectWish>,
    /// The CUDA device that has this node's KV.
    pub device: Option<DeviceEnd>,
    /// Who this node is to its peers.
    pub identity: Identity,
    /// KV bytes that are queued or being written in this node's memory, over all pairs.
    pub in_flight_bytes_max: u64,
    /// A pair that has bytes to move and moves fewer than the floor during this time is torn down.
    pub stall_window: Duration,
    pub floor_bytes_per_second: u64,
    /// How long `begin` waits for a pair that is connecting.
    pub connect_wait: Duration,
    /// A pair that carries nothing for so long gives back the memory that it holds for its link (a ring, a mapped pool). Both
    /// nodes stay in touch by the stream over which they met, so the pair's health stays true. The next transfer opens the
    /// link again and waits for that.
    pub idle_max: Duration,
    /// A pair that goes without a better transport, for a reason that may pass, tries it again after so long, and again.
    pub better_after: Duration,
    #[cfg(test)]
    pub(crate) tap: crate::conformance::Tapping,
}

impl PairConfig {
    /// 32 MiB in flight is 2.5 ms of a 100 Gb/s link and a few prompts of a small model. 1 MiB/s is a hundredth of the
    /// slowest network over which it is worth splitting.
    pub fn new(me: NodeId, compatibility: Compatibility) -> Self {
        Self {
            me,
            compatibility,
            shard: KvShard::WHOLE,
            transports: Vec::new(),
            direct: None,
            device: None,
            identity: Identity::none(),
            in_flight_bytes_max: 32 << 20,
            stall_window: Duration::from_secs(4),
            floor_bytes_per_second: 1 << 20,
            connect_wait: Duration::from_secs(1),
            idle_max: PAIR_IDLE_MAX,
            better_after: BETTER_AFTER,
            #[cfg(test)]
            tap: Default::default(),
        }
    }

    /// With these transports, best first.
    #[must_use]
    pub fn over(self, transports: Vec<TransportKind>) -> Self {
        Self { transports, ..self }
    }

    /// With the pools of trusted peers written in place, if that is wanted.
    #[must_use]
    pub fn writing_in_place(self, direct: Option<DirectWish>) -> Self {
        Self { direct, ..self }
    }

    /// With this certificate, if there is one.
    #[must_use]
    pub fn known_as(self, identity: Identity) -> Self {
        Self { identity, ..self }
    }

    /// With KV on a CUDA device, if it is there.
    #[must_use]
    pub fn on_device(self, device: Option<DeviceEnd>) -> Self {
        Self { device, ..self }
    }

    /// The first message of this node on a stream.
    pub(crate) fn hello(&self, peer: &PairPeer) -> Hello {
        Hello {
            from: self.me.clone(),
            to: peer.node.clone(),
            protocol_version: PROTOCOL_VERSION,
            compatibility: self.compatibility.clone(),
            shard: self.shard.clone(),
        }
    }
}

/// The transports of a node's pairs.
#[derive(Debug)]
pub(crate) struct Ways {
    /// Needs no offer: its link carries the pair when no better one is found, and is given up when one is.
    pub meeting: Arc<dyn KvTransport>,
    /// Best first. The meeting transport is among them if it may carry KV.
    pub best_first: Vec<Arc<dyn KvTransport>>,
}

/// Keeps a pair per decode node, over the transport on which the two agree. Needs a Tokio runtime around it.
#[derive(Debug)]
pub struct PairTransport {
    shared: Shared,
    pairs: Mutex<BTreeMap<NodeId, Arc<Pair>>>,
}

impl PairTransport {
    pub(crate) fn new(config: PairConfig, ways: Ways) -> Self {
        Self {
            shared: Shared {
                budget: Budget::of(config.in_flight_bytes_max),
                config: Arc::new(config),
                ways: Arc::new(ways),
                health: watch::channel(Vec::new()).0,
                fallbacks: Arc::default(),
            },
            pairs: Mutex::default(),
        }
    }

    /// How often a pair went without shared memory that this node would have used.
    pub fn fallbacks(&self) -> Arc<Fallbacks> {
        self.shared.fallbacks.clone()
    }

    /// The pair that a ticket names. It is opened now if the coordinator's list has not come yet.
    fn pair_of(&self, ticket: &Ticket) -> Result<Arc<Pair>, PairFault> {
        let mut pairs = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pair) = pairs.get(&ticket.decode_node) {
            return Ok(pair.clone());
        }
        if pairs.len() >= PAIRS_MAX {
            return Err(PairFault::Closed);
        }
        let peer = PairPeer {
            node: ticket.decode_node.clone(),
            address: ticket.decode_address.clone(),
            // Unknown here. The decode node compares it with the hello.
            compatibility: self.shared.config.compatibility.clone(),
        };
        let pair = Pair::open(peer, &self.shared);
        pairs.insert(ticket.decode_node.clone(), pair.clone());
        Ok(pair)
    }

    async fn live(&self, ticket: &Ticket) -> Result<Arc<PairStream>, PairFault> {
        let pair = self.pair_of(ticket)?;
        let mut state = pair.state.subscribe();
        let settled = state.wait_for(|state| match state {
            PairState::Usable(_) => true,
            PairState::Idle => {
                pair.wanted.notify_one();
                false
            }
            PairState::Unusable(fault) => fault.is_lasting() || *fault == PairFault::Closed,
        });
        // The state decides, however the wait ended.
        let _ = tokio::time::timeout(self.shared.config.connect_wait, settled).await;
        match &*pair.state.borrow() {
            PairState::Usable(live) => Ok(live.clone()),
            PairState::Idle => Err(PairFault::Connecting),
            PairState::Unusable(fault) => Err(fault.clone()),
        }
    }
}

impl Drop for PairTransport {
    fn drop(&mut self) {
        self.keep_pairs(Vec::new());
    }
}

#[async_trait]
impl Transport for PairTransport {
    fn keep_pairs(&self, peers: Vec<PairPeer>) {
        let mut pairs = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        pairs.retain(|node, pair| {
            let is_kept = peers
                .iter()
                .any(|peer| peer.node == *node && peer.address == pair.peer.address);
            if !is_kept {
                pair.close();
            }
            is_kept
        });
        for peer in peers {
            if !pairs.contains_key(&peer.node) {
                pairs.insert(peer.node.clone(), Pair::open(peer, &self.shared));
            }
        }
    }

    fn health(&self) -> watch::Receiver<Vec<PairHealth>> {
        self.shared.health.subscribe()
    }

    async fn begin(&self, start: TransferStart) -> Result<Box<dyn SendTransfer>, TransferError> {
        let node = start.ticket.decode_node.clone();
        loop {
            let live = match self.live(&start.ticket).await {
                Ok(live) => live,
                Err(fault) => return Err(TransferError::NoPair { node, fault }),
            };
            match PairTransfer::begin(live, start.clone()).await {
                // It was closed as idle a moment ago. Its keeper says so next.
                Err(TransferError::PairLost {
                    fault: PairFault::Connecting,
                    ..
                }) => tokio::task::yield_now().await,
                begun => return Ok(Box::new(begun?)),
            }
        }
    }
}

#[cfg(test)]
mod tests;
