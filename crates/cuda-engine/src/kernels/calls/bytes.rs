//! Calls of the kernels that move bytes: KV blocks, and weights from a file's types to bf16.

use model_files::gguf::GgmlType;

use super::{Call, CallError, in_range, multiple_of};
use crate::kernels::driver::DevicePtr;
use crate::kernels::table::KernelId;

/// Bytes that one block of threads copies in a turn.
const TURN_BYTES: u64 = 256 * 16;
/// Blocks of threads for one piece. More do not make a copy faster, because many pieces are copied at once.
const PARTS_MAX: u64 = 64;

/// Copies within the pool: pairs of u64 byte offsets, from and to.
#[derive(Clone, Copy, Debug)]
pub struct CopyBlocks {
    pub pool: DevicePtr,
    pub pairs: DevicePtr,
    pub count: u32,
    pub piece_bytes: u64,
}

impl CopyBlocks {
    /// # Errors
    /// [`CallError`].
    pub fn call(&self) -> Result<Call, CallError> {
        let grid = grid(KernelId::CopyBlocks, self.piece_bytes, self.count)?;
        Call::new(KernelId::CopyBlocks, grid)
            .pointer(self.pool)
            .pointer(self.pairs)
            .u64(self.piece_bytes)
            .checked()
    }
}

/// Equal pieces of the pool (blocks, or some layers of blocks), by their u64 byte offsets.
#[derive(Clone, Copy, Debug)]
pub struct Pieces {
    pub pool: DevicePtr,
    pub offsets: DevicePtr,
    pub count: u32,
    pub piece_bytes: u64,
}

impl Pieces {
    /// Packs the pieces side by side.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn gather(&self, out: DevicePtr) -> Result<Call, CallError> {
        self.begin(KernelId::GatherBlocks)?
            .pointer(out)
            .u64(self.piece_bytes)
            .checked()
    }

    /// The way back.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn scatter(&self, from: DevicePtr) -> Result<Call, CallError> {
        self.begin(KernelId::ScatterBlocks)?
            .pointer(from)
            .u64(self.piece_bytes)
            .checked()
    }

    /// # Errors
    /// [`CallError`].
    pub fn zero(&self) -> Result<Call, CallError> {
        self.begin(KernelId::ZeroBlocks)?.u64(self.piece_bytes).checked()
    }

    fn begin(&self, kernel: KernelId) -> Result<Call, CallError> {
        let call = Call::new(kernel, grid(kernel, self.piece_bytes, self.count)?);
        Ok(call.pointer(self.pool).pointer(self.offsets))
    }
}

fn grid(kernel: KernelId, piece_bytes: u64, count: u32) -> Result<[u32; 3], CallError> {
    multiple_of(kernel, ("bytes of a piece", piece_bytes), 16)?;
    Ok([count, piece_bytes.div_ceil(TURN_BYTES).min(PARTS_MAX) as u32, 1])
}

/// The hash that `KvMemory::block_hash` takes, of whole blocks or of their first tokens. A block without a valid token has
/// the hash of no bytes, which the host knows: it is not asked for here.
#[derive(Clone, Copy, Debug)]
pub struct HashBlocks {
    pub pool: DevicePtr,
    /// u64 byte offset of each block.
    pub offsets: DevicePtr,
    /// u32 for each block: 1 to the tokens of a block.
    pub valid_tokens: DevicePtr,
    /// u64 for each block.
    pub out: DevicePtr,
    pub count: u32,
    /// Of a block: layers x 2 x KV heads.
    pub slices: u32,
    pub block_tokens: u32,
    /// Of one token in one slice.
    pub row_bytes: u32,
}

impl HashBlocks {
    /// # Errors
    /// [`CallError`].
    pub fn call(&self) -> Result<Call, CallError> {
        let kernel = KernelId::HashBlocks;
        // Stripes of 64 bytes lie in one slice, and no message is so short that XXH3 has another method for it.
        multiple_of(kernel, ("bytes of a row", self.row_bytes.into()), 128)?;
        multiple_of(kernel, ("slices of a block", self.slices.into()), 2)?;
        let slice_bytes = u64::from(self.block_tokens) * u64::from(self.row_bytes);
        let block_bytes = slice_bytes.saturating_mul(self.slices.into());
        in_range(kernel, ("bytes of a block", block_bytes), u32::MAX.into())?;
        Call::new(kernel, [self.count, 1, 1])
            .pointer(self.pool)
            .pointer(self.offsets)
            .pointer(self.valid_tokens)
            .pointer(self.out)
            .u32(self.slices)
            .u32(slice_bytes as u32)
            .u32(self.row_bytes)
            .checked()
    }
}

/// From the bytes of a tensor to bf16.
#[derive(Clone, Copy, Debug)]
pub struct Dequantise {
    pub from: DevicePtr,
    pub out: DevicePtr,
    pub elements: u64,
}

impl Dequantise {
    /// The kernel of a type. `None`: the host makes bf16 of it.
    pub fn kernel(kind: GgmlType) -> Option<KernelId> {
        match kind {
            GgmlType::Q4_0 => Some(KernelId::DequantiseQ4_0),
            GgmlType::Q4_1 => Some(KernelId::DequantiseQ4_1),
            GgmlType::Q5_0 => Some(KernelId::DequantiseQ5_0),
            GgmlType::Q8_0 => Some(KernelId::DequantiseQ8_0),
            GgmlType::F16 => Some(KernelId::DequantiseF16),
            GgmlType::F32 => Some(KernelId::DequantiseF32),
            GgmlType::BF16 | GgmlType::Q5_1 | GgmlType::Q4_K | GgmlType::Q5_K | GgmlType::Q6_K => None,
        }
    }

    /// `None` when the host makes bf16 of the type.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn call(&self, kind: GgmlType) -> Result<Option<Call>, CallError> {
        let Some(kernel) = Self::kernel(kind) else {
            return Ok(None);
        };
        let in_block = kind.block_elements() as u64;
        multiple_of(kernel, ("values", self.elements), in_block)?;
        let units = self.elements / in_block;
        // Sixteen threads for a quantised block, one for a plain number.
        let threads = if in_block == 1 { units } else { units.saturating_mul(16) };
        let blocks = threads.div_ceil(256);
        in_range(kernel, ("blocks of threads", blocks), super::GRID_X_MAX.into())?;
        let call = Call::new(kernel, [blocks as u32, 1, 1])
            .pointer(self.from)
            .pointer(self.out)
            .u64(units);
        call.checked().map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_bytes_are_those_of_the_table() {
        let at = DevicePtr(4096);
        let pieces = Pieces {
            pool: at,
            offsets: at,
            count: 3,
            piece_bytes: 6_144,
        };
        assert_eq!(pieces.gather(at).unwrap().grid, [3, 2, 1]);
        assert!(pieces.scatter(at).is_ok() && pieces.zero().is_ok());
        for kind in GgmlType::ALL {
            let dequantise = Dequantise {
                from: at,
                out: at,
                elements: 512,
            };
            let call = dequantise.call(kind).unwrap();
            assert_eq!(call.map(|call| call.kernel), Dequantise::kernel(kind));
        }
        let hash = HashBlocks {
            pool: at,
            offsets: at,
            valid_tokens: at,
            out: at,
            count: 1,
            slices: 12,
            block_tokens: 16,
            row_bytes: 128,
        };
        assert!(hash.call().is_ok());
        assert!(HashBlocks { row_bytes: 96, ..hash }.call().is_err());
        assert!(
            HashBlocks {
                slices: 1 << 30,
                ..hash
            }
            .call()
            .is_err()
        );
    }
}
