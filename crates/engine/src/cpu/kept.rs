//! Packed weights that outlive the engine that packed them, and the memory that several processes have them in.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use super::packing::LoadProgress;
use super::shared_weights::{NotShared, SharedWeights};
use super::weights::Weights;
use crate::{EngineError, Numerics};

/// The weights that were loaded last. A node that changes its role opens its next engine with them. Clones share them. The
/// default holds none.
#[derive(Clone, Default)]
pub struct KeptWeights {
    slot: Arc<Mutex<Slot>>,
    shared: Option<SharedWeights>,
    watch: Option<Arc<Watch>>,
}

type Watch = dyn Fn(LoadProgress) + Send + Sync;

#[derive(Default)]
struct Slot {
    kept: Option<Kept>,
    not_shared: Option<NotShared>,
}

struct Kept {
    identity: WeightsIdentity,
    weights: Arc<Weights>,
}

/// Everything on which the packed bytes depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WeightsIdentity {
    /// The hash of the file's content.
    pub sha256: [u8; 32],
    pub numerics: Numerics,
}

/// Where the weights are to be packed.
pub(super) struct Destination<'a> {
    pub shared: Option<&'a SharedWeights>,
    pub not_shared: &'a mut Option<NotShared>,
}

impl KeptWeights {
    /// The same, packed into the memory at `path` or taken from there (see [`crate::WeightsFile`]). If that is not possible,
    /// they are packed for this process alone.
    pub fn shared_at(self, path: Option<&Path>) -> Self {
        Self {
            shared: path.map(SharedWeights::at),
            ..self
        }
    }

    /// The same; `watch` is called after each packed matrix.
    pub fn watched(self, watch: impl Fn(LoadProgress) + Send + Sync + 'static) -> Self {
        Self {
            watch: Some(Arc::new(watch)),
            ..self
        }
    }

    /// For an engine that keeps no weights here: calls `watch`.
    pub fn report(&self, progress: LoadProgress) {
        if let Some(watch) = &self.watch {
            watch(progress);
        }
    }

    /// Whether the next engine packs weights into memory of its own.
    pub(crate) fn is_private_and_empty(&self) -> bool {
        self.shared.is_none() && self.slot.lock().unwrap_or_else(PoisonError::into_inner).kept.is_none()
    }

    /// Why the last weights were packed for this process alone although they were to be shared. Tells it once.
    pub fn take_not_shared(&self) -> Option<NotShared> {
        self.slot
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .not_shared
            .take()
    }

    /// The kept weights, when they are the same; else loaded ones, which are then kept. Other callers wait meanwhile. `identity`
    /// is not called before it is needed.
    ///
    /// # Errors
    /// The error of `load`. Nothing is kept then.
    pub(super) fn get_or_load(
        &self,
        identity: impl Fn() -> WeightsIdentity,
        load: impl FnOnce(Destination<'_>) -> Result<Weights, EngineError>,
    ) -> Result<Arc<Weights>, EngineError> {
        let mut slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = slot.kept.as_ref().filter(|kept| kept.identity == identity()) {
            return Ok(kept.weights.clone());
        }
        // Two models at the same time may be more than the machine has memory for.
        slot.kept = None;
        let weights = load(Destination {
            shared: self.shared.as_ref(),
            not_shared: &mut slot.not_shared,
        });
        let weights = Arc::new(weights?);
        slot.kept = Some(Kept {
            identity: identity(),
            weights: weights.clone(),
        });
        Ok(weights)
    }
}

impl std::fmt::Debug for KeptWeights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeptWeights").finish_non_exhaustive()
    }
}
