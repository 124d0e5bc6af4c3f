//! Packed weights that outlive the engine that packed them. A node that changes its role opens its next engine with them.

use std::sync::{Arc, Mutex, PoisonError};

use super::weights::Weights;
use crate::{EngineError, Numerics};

/// The weights that were loaded last. Clones share them. The default holds none.
#[derive(Clone, Default)]
pub struct KeptWeights(Arc<Mutex<Option<Kept>>>);

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

impl KeptWeights {
    /// The kept weights, when they are the same; else loaded ones, which are then kept. Other callers wait meanwhile.
    ///
    /// # Errors
    /// The error of `load`. Nothing is kept then.
    pub(super) fn get_or_load(
        &self,
        identity: WeightsIdentity,
        load: impl FnOnce() -> Result<Weights, EngineError>,
    ) -> Result<Arc<Weights>, EngineError> {
        let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = slot.as_ref().filter(|kept| kept.identity == identity) {
            return Ok(kept.weights.clone());
        }
        // Two models at the same time may be more than the machine has memory for.
        *slot = None;
        let weights = Arc::new(load()?);
        *slot = Some(Kept {
            identity,
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
