//! The transports, and what a node makes of them: its pairs, or the ends at which it receives.

pub mod grpc;
#[cfg(test)]
mod memory;
pub mod shm;

use std::sync::{Arc, LazyLock};

use crate::choice::{Fallbacks, TransportKind};
use crate::link::{KvTransport, ReceivingEnd, Serving};
use crate::pairs::{PairConfig, PairTransport, Ways};
use crate::receiver::Receiver;
use crate::trust::DirectWish;

/// Makes a node's transport. It may write trusted peers' pools in place, if it can and the node wishes it.
type Make = fn(Option<&DirectWish>) -> Arc<dyn KvTransport>;

/// Every transport, best first. A new one is a folder here, and a line.
const REGISTERED: &[Make] = &[
    shm::transport,
    grpc::transport,
    #[cfg(test)]
    memory::transport,
];

static KINDS: LazyLock<Vec<TransportKind>> = LazyLock::new(|| made(None).map(|transport| transport.kind()).collect());

fn made(direct: Option<&DirectWish>) -> impl Iterator<Item = Arc<dyn KvTransport>> {
    REGISTERED.iter().map(move |make| make(direct))
}

/// A node's setting names transports by these.
impl clap::ValueEnum for TransportKind {
    fn value_variants<'a>() -> &'a [Self] {
        &KINDS
    }

    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        Some(clap::builder::PossibleValue::new(self.name()))
    }
}

/// Every label of a pair: the transports and their modes.
pub fn kinds() -> Vec<TransportKind> {
    let fallbacks = made(None).flat_map(|transport| transport.fallbacks().iter().map(|(kind, _)| *kind));
    let mut kinds: Vec<TransportKind> = fallbacks.chain(KINDS.iter().copied()).collect();
    let mut seen = std::collections::BTreeSet::new();
    kinds.retain(|kind| seen.insert(*kind));
    kinds
}

/// Every reason of every transport, at zero.
impl Default for Fallbacks {
    fn default() -> Self {
        let reasons = |(kind, reasons): &(TransportKind, &'static [&'static str])| {
            let kind = *kind;
            reasons.iter().map(move |reason| (kind, *reason))
        };
        Self::of(made(None).flat_map(|transport| transport.fallbacks().iter().flat_map(reasons)))
    }
}

/// A prefill node's pairs.
pub fn pairs(config: PairConfig) -> PairTransport {
    let all: Vec<Arc<dyn KvTransport>> = made(config.direct.as_ref()).collect();
    let of_kind = |kind: &TransportKind| all.iter().find(|transport| transport.kind() == *kind).cloned();
    let best_first = config.transports.iter().filter_map(of_kind).collect();
    let meeting = grpc::transport(None);
    PairTransport::new(config, Ways { meeting, best_first })
}

/// A decode node's ends of the transports that it is told to use. One that cannot be served is left out: pairs use others.
pub fn serve(receiver: &Arc<Receiver>, kinds: &[TransportKind], end: &ReceivingEnd) -> Vec<Serving> {
    let served = made(None).filter(|transport| kinds.contains(&transport.kind()));
    let served = served.filter_map(|transport| {
        let served = transport.serve(receiver, end);
        let transport = transport.kind().name();
        served
            .inspect_err(|error| tracing::warn!(transport, %error, "cannot be served; pairs use other transports"))
            .ok()?
    });
    served.collect()
}
