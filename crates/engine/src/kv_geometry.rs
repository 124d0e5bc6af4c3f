//! The shape of the KV cache. Two nodes must have the same shape before one may use the other's bytes.

use crate::KvMemoryError;

/// How one KV value is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// IEEE half; the default.
    F16,
    /// The upper half of an f32: engines on a GPU.
    Bf16,
    /// For the exact numerics.
    F32,
}

impl KvDtype {
    pub fn bytes(self) -> usize {
        match self {
            KvDtype::F16 | KvDtype::Bf16 => 2,
            KvDtype::F32 => 4,
        }
    }
    /// The name in compatibility hashes and logs.
    pub fn name(self) -> &'static str {
        match self {
            KvDtype::F16 => "f16",
            KvDtype::Bf16 => "bf16",
            KvDtype::F32 => "f32",
        }
    }
}

/// Shape of the KV cache. Two nodes exchange KV only if their shapes are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvGeometry {
    pub layer_count: u32,
    pub kv_head_count: u32,
    pub head_dim: u32,
    /// Tokens per block: see [`check_block_tokens`].
    pub block_tokens: u32,
    pub dtype: KvDtype,
}

/// Tokens per block unless a node is told otherwise.
pub const BLOCK_TOKENS: u32 = 16;
/// The attention tile of the CPU engine (`cpu/kernels/attend/mod.rs`). A block holds a whole number of tiles.
pub const TILE_TOKENS: u32 = 16;
/// Larger blocks only waste memory at the ends of sequences. Serving systems offer 256 at most.
pub const BLOCK_TOKENS_MAX: u32 = 256;

/// Refuses a block size that no engine here has code for.
///
/// # Errors
/// [`KvMemoryError::BadBlockSize`].
pub fn check_block_tokens(block_tokens: u32) -> Result<(), KvMemoryError> {
    match block_tokens.is_multiple_of(TILE_TOKENS) && (TILE_TOKENS..=BLOCK_TOKENS_MAX).contains(&block_tokens) {
        true => Ok(()),
        false => Err(KvMemoryError::BadBlockSize { block_tokens }),
    }
}

impl KvGeometry {
    /// Bytes of one block over all layers.
    pub fn block_bytes(&self) -> usize {
        self.layer_bytes() * self.layer_count as usize
    }
    /// Bytes of one (block, layer): K and V of all heads.
    pub fn layer_bytes(&self) -> usize {
        2 * self.kv_head_count as usize * self.head_bytes()
    }
    /// Bytes of one token over all layers.
    pub fn token_bytes(&self) -> usize {
        2 * self.layer_count as usize * self.kv_head_count as usize * self.row_bytes()
    }
    /// Bytes of one (block, layer, K or V, head): the wire unit.
    pub fn head_bytes(&self) -> usize {
        self.block_tokens as usize * self.row_bytes()
    }
    /// Bytes of one token in one (layer, K or V, head).
    pub fn row_bytes(&self) -> usize {
        self.head_dim as usize * self.dtype.bytes()
    }
    /// How many blocks hold `tokens` tokens.
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_tokens.max(1))
    }

    /// [`Self::block_bytes`] with every overflow checked, because the numbers may come from a file.
    pub(crate) fn checked_block_bytes(&self) -> Option<usize> {
        let factors = [
            self.layer_count,
            2,
            self.kv_head_count,
            self.block_tokens,
            self.head_dim,
        ];
        let mut bytes = self.dtype.bytes();
        for factor in factors {
            bytes = bytes.checked_mul(factor as usize)?;
        }
        (bytes > 0).then_some(bytes)
    }
}
