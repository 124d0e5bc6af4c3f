//! Better transports than the one that carries a pair: this node prefers them, and they failed for a reason that may pass. A pair
//! tries them again beside its stream.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proto::messages::TransportOffer;
use thiserror::Error;

use super::pair_stream::PairStream;
use crate::choice::{Fallback, RetryEnd, TransportKind};
use crate::link::{KvTransport, NoLink};
use crate::transport::PairFault;

/// How long a new link waits for a moment in which no transfer is under way on the pair's stream. A pair that is never quiet
/// keeps its transport.
const QUIET_WAIT: Duration = Duration::from_secs(5);
const QUIET_LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// So long no transfer was under way. The last frames, such as an abort, have left by then.
pub(super) const QUIET: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Better {
    /// Best first.
    pub ways: Vec<Arc<dyn KvTransport>>,
    /// Of the decode node, when the two met.
    offers: Vec<TransportOffer>,
}

impl Better {
    /// None yet.
    pub fn of(offers: &[TransportOffer]) -> Self {
        Self {
            ways: Vec::new(),
            offers: offers.to_vec(),
        }
    }

    pub fn offer(&self, kind: TransportKind) -> Option<&[u8]> {
        let mut offers = self.offers.iter();
        let offer = offers.find(|offer| offer.transport == kind.name());
        offer.map(|offer| &offer.offer[..])
    }

    /// The pair goes without this one.
    pub fn note(&mut self, way: &Arc<dyn KvTransport>, why: &Fallback) {
        if why.may_pass && way.proves_its_links() {
            self.ways.push(way.clone());
        }
    }
}

/// Why a pair goes on without a better transport that it has tried again.
#[derive(Debug, Error)]
pub(super) enum StillWithout {
    #[error("{0}")]
    Way(Fallback),
    #[error("{0}")]
    Pair(PairFault),
    #[error("transfers followed each other on the pair's stream for {} s", QUIET_WAIT.as_secs())]
    NeverQuiet,
}

impl StillWithout {
    pub fn reason(&self) -> &'static str {
        match self {
            StillWithout::Way(fallback) => fallback.reason,
            StillWithout::Pair(fault) => fault.name(),
            StillWithout::NeverQuiet => self.end().name(),
        }
    }

    pub fn end(&self) -> RetryEnd {
        match self {
            StillWithout::Way(_) | StillWithout::Pair(_) => RetryEnd::Failed,
            StillWithout::NeverQuiet => RetryEnd::NeverQuiet,
        }
    }
}

impl From<NoLink> for StillWithout {
    fn from(no_link: NoLink) -> Self {
        match no_link {
            NoLink::Way(fallback) => StillWithout::Way(fallback),
            NoLink::Pair(fault) => StillWithout::Pair(fault),
        }
    }
}

/// The reason of the last try of each better transport. A reason is told when it changes, and not each minute.
#[derive(Debug, Default)]
pub(super) struct LastReasons(BTreeMap<TransportKind, &'static str>);

impl LastReasons {
    pub fn is_news(&mut self, kind: TransportKind, reason: &'static str) -> bool {
        self.0.insert(kind, reason) != Some(reason)
    }
}

/// Closes the stream in a moment in which no transfer is under way on it. False: no such moment came, and the stream goes on.
pub(super) async fn closed_when_quiet(live: &PairStream) -> bool {
    let closing = async {
        while !live.close_if_idle(QUIET, Instant::now()) {
            tokio::time::sleep(QUIET_LOOK_INTERVAL).await;
        }
    };
    tokio::time::timeout(QUIET_WAIT, closing).await.is_ok()
}
