//! Fills the memory of the weights: in parallel, and once for all processes that were given the same memory.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use sha2::{Digest as _, Sha256};

use super::pool::Pool;
use super::shared_weights::{NotShared, SharedWeights, WeightsId};
use crate::EngineError;
use crate::memory::{FixedMemory, HugeMemory};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes of packed weights.
    pub done_bytes: u64,
    pub total_bytes: u64,
}

/// One matrix of the weights, before its bytes are there.
pub(super) struct PlannedMatrix<'a> {
    pub bytes: Range<usize>,
    pub panel_bytes: usize,
    /// Everything on which the order of its bytes depends.
    pub layout: String,
    /// Fills the panel of this index, which holds zeros.
    pub pack: Box<PackPanel<'a>>,
}

/// Called with the panel's index and its bytes, from any thread.
type PackPanel<'a> = dyn Fn(usize, &mut [u8]) + Sync + 'a;

/// How the weights are to be packed.
pub(super) struct Packing<'a> {
    pub pool: &'a mut Pool,
    /// Memory of several processes, if there is one.
    pub shared: Option<&'a SharedWeights>,
    /// Why the weights were not shared is left here.
    pub not_shared: &'a mut Option<NotShared>,
    /// The hash of the model's content. It may be computed while others pack.
    pub content: &'a dyn Fn() -> [u8; 32],
    /// Called after each packed matrix.
    pub progress: &'a mut dyn FnMut(LoadProgress),
}

impl Packing<'_> {
    /// The packed bytes of all matrices, `total` in number.
    ///
    /// # Errors
    /// The system has no memory for them.
    pub(super) fn run(&mut self, total: usize, matrices: &[PlannedMatrix<'_>]) -> Result<FixedMemory, EngineError> {
        if let Some(shared) = self.shared {
            let (layout, content) = (layout_hash(total, matrices), self.content);
            let id = move || WeightsId {
                content: content(),
                layout,
            };
            match shared.take_or_fill(total, &id, |memory| self.fill(memory, matrices)) {
                Ok(memory) => return Ok(memory),
                Err(why) => *self.not_shared = Some(why),
            }
        }
        let mut memory = HugeMemory::zeroed(total).ok_or(EngineError::OutOfMemory { bytes: total })?;
        self.fill(memory.bytes_mut(), matrices);
        Ok(memory.fixed())
    }

    /// `memory` holds zeros.
    fn fill(&mut self, memory: &mut [u8], matrices: &[PlannedMatrix<'_>]) {
        let total_bytes = memory.len() as u64;
        for matrix in matrices {
            let panels = memory[matrix.bytes.clone()].chunks_exact_mut(matrix.panel_bytes);
            // Each tile takes its own lock once: the locks only show the compiler that no two tiles have the same panel.
            let panels: Vec<Mutex<&mut [u8]>> = panels.map(Mutex::new).collect();
            self.pool.parallel(panels.len(), &|index, _thread| {
                let mut panel = panels[index].lock().unwrap_or_else(PoisonError::into_inner);
                (matrix.pack)(index, &mut panel);
            });
            (self.progress)(LoadProgress {
                done_bytes: matrix.bytes.end as u64,
                total_bytes,
            });
        }
    }
}

/// Two processes have the same hash exactly when the same file gives them the same bytes.
fn layout_hash(total: usize, matrices: &[PlannedMatrix<'_>]) -> [u8; 32] {
    /// To be raised when the bytes of a format change.
    const FORMAT: &str = "baton packed weights 1";
    let mut hasher = Sha256::new();
    let mut add = |text: &str| {
        hasher.update((text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    add(FORMAT);
    add(env!("CARGO_PKG_VERSION"));
    add(&total.to_string());
    for matrix in matrices {
        add(&matrix.layout);
        add(&format!("{:?} {}", matrix.bytes, matrix.panel_bytes));
    }
    hasher.finalize().into()
}
