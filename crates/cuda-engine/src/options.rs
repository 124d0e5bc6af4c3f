//! How a model is run on a device. There is no default, because each value is a decision of the node's configuration.

use engine::{EngineLimits, LoadProgress};

/// Which sums a step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The fastest kernel for each shape. The last bits of a row depend on the sizes of its step.
    Fast,
    /// The own products and one kernel of attention for all rows: equal bits in both phases, in any batch and chunk.
    Invariant,
}

impl Mode {
    /// Part of the compatibility hash. It does not name the GPU's generation, so unlike GPUs are a pair. The number after the
    /// slash changes with any change of the definition in `kernels/`.
    pub fn numerics_id(self) -> &'static str {
        match self {
            Mode::Fast => "cuda-bf16/1",
            Mode::Invariant => "cuda-bf16-invariant/1",
        }
    }
}

/// Who computes the products of [`Mode::Fast`]. [`Mode::Invariant`] has its own ones always.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductChoice {
    /// The faster one for each shape, by a measurement at the opening. The own one where there is no cuBLASLt. On the false
    /// driver, which knows no speed, it is `Library`.
    Measured,
    /// The own kernels.
    Own,
    /// cuBLASLt wherever it computes the shape.
    Library,
}

/// How much memory KV gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvRoom {
    /// As many blocks as fit, at least one.
    Bytes(u64),
    /// What weights and buffers leave of the free memory, less a reserve for the driver.
    Rest,
}

pub struct CudaOptions<'a> {
    /// The device's number among the visible ones: the N of `cuda:N`.
    pub ordinal: u32,
    pub mode: Mode,
    pub products: ProductChoice,
    pub limits: EngineLimits,
    /// Tokens of a KV block: 16, 32, 64, 128 or 256.
    pub block_tokens: u32,
    pub kv: KvRoom,
    /// Called after each matrix that is on the device.
    pub progress: Option<&'a mut dyn FnMut(LoadProgress)>,
}

impl std::fmt::Debug for CudaOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaOptions")
            .field("ordinal", &self.ordinal)
            .field("mode", &self.mode)
            .field("products", &self.products)
            .field("limits", &self.limits)
            .field("kv", &self.kv)
            .finish_non_exhaustive()
    }
}
