//! The transports, and what a node builds from them: a prefill node its pairs, a decode node the ends at which it receives.

pub(crate) mod cuda_ipc;
pub mod grpc;
#[cfg(test)]
mod memory;
pub(crate) mod nccl;
pub mod shm;

use std::sync::{Arc, LazyLock};

use crate::choice::{Fallbacks, TransportKind};
use crate::link::{KvTransport, ReceivingEnd, Serving};
use crate::pairs::{PairConfig, PairTransport, Ways};
use crate::receiver::Receiver;
use crate::trust::{DeviceEnd, DirectWish};

/// What a node's transports may use.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Means<'a> {
    /// Trusted peers' pools may be written in place.
    pub direct: Option<&'a DirectWish>,
    /// The device that has the node's KV.
    pub device: Option<&'a DeviceEnd>,
}

/// Makes a node's transport. It looks for no library: that waits for the first peer.
type Make = fn(&Means<'_>) -> Arc<dyn KvTransport>;

/// Every transport, best first. A new one is a folder here, and a line.
const REGISTERED: &[Make] = &[
    cuda_ipc::transport,
    nccl::transport,
    shm::transport,
    grpc::transport,
    #[cfg(test)]
    memory::transport,
];

static KINDS: LazyLock<Vec<TransportKind>> = LazyLock::new(|| known().map(|transport| transport.kind()).collect());

fn made(means: Means<'_>) -> impl Iterator<Item = Arc<dyn KvTransport>> {
    REGISTERED.iter().map(move |make| make(&means))
}

/// For their names alone.
fn known() -> impl Iterator<Item = Arc<dyn KvTransport>> {
    made(Means::default())
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
    let fallbacks = known().flat_map(|transport| transport.fallbacks().iter().map(|(kind, _)| *kind));
    let mut kinds: Vec<TransportKind> = fallbacks.chain(KINDS.iter().copied()).collect();
    let mut seen = std::collections::BTreeSet::new();
    kinds.retain(|kind| seen.insert(*kind));
    kinds
}

/// Every reason of every transport, and every end of a later try of those that are tried again, at zero.
impl Default for Fallbacks {
    fn default() -> Self {
        let reasons = |(kind, reasons): &(TransportKind, &'static [&'static str])| {
            let kind = *kind;
            reasons.iter().map(move |reason| (kind, *reason))
        };
        let known_reasons = known().flat_map(|transport| transport.fallbacks().iter().flat_map(reasons));
        let retried = known().filter(|transport| !transport.fallbacks().is_empty() && transport.proves_its_links());
        Self::of(known_reasons, retried.map(|transport| transport.kind()))
    }
}

/// Whether a node that is told to use these may let others write its KV memory in place, if it holds a secret.
pub fn write_in_place(kinds: &[TransportKind]) -> bool {
    kinds.contains(&shm::KIND) || kinds.contains(&cuda_ipc::KIND)
}

/// A prefill node's pairs.
pub fn pairs(config: PairConfig) -> PairTransport {
    let means = Means {
        direct: config.direct.as_ref(),
        device: config.device.as_ref(),
    };
    let all: Vec<Arc<dyn KvTransport>> = made(means).collect();
    let of_kind = |kind: &TransportKind| all.iter().find(|transport| transport.kind() == *kind).cloned();
    let best_first = config.transports.iter().filter_map(of_kind).collect();
    let meeting = grpc::transport(&means);
    PairTransport::new(config, Ways { meeting, best_first })
}

/// A decode node's ends of the transports that it is told to use. One that cannot be served is left out: pairs use others.
pub fn serve(receiver: &Arc<Receiver>, kinds: &[TransportKind], end: &ReceivingEnd) -> Vec<Serving> {
    serve_with((receiver, end), kinds, Means::default())
}

/// The same for a node whose KV is on a CUDA device.
pub fn serve_on_device(
    receiver: &Arc<Receiver>,
    kinds: &[TransportKind],
    (end, device): (&ReceivingEnd, &DeviceEnd),
) -> Vec<Serving> {
    let means = Means {
        device: Some(device),
        ..Means::default()
    };
    serve_with((receiver, end), kinds, means)
}

fn serve_with(
    (receiver, end): (&Arc<Receiver>, &ReceivingEnd),
    kinds: &[TransportKind],
    means: Means<'_>,
) -> Vec<Serving> {
    let served = made(means).filter(|transport| kinds.contains(&transport.kind()));
    let served = served.filter_map(|transport| {
        let served = transport.serve(receiver, end);
        let transport = transport.kind().name();
        served
            .inspect_err(|error| tracing::warn!(transport, %error, "cannot be served; pairs use other transports"))
            .ok()?
    });
    served.collect()
}
