//! The KV cache of one node: one allocation of equal blocks, shared by the engine's thread and the handoff's tasks. The bytes
//! are on the host or on a device (`kv_store.rs`).
//!
//! Layout, also the wire layout (PROTOCOL rule 14), little endian:
//! `[block][layer][K | V][kv head][token of the block][head dim]`. So a block is contiguous over all layers, one
//! (block, layer) is contiguous, and one head's keys of a block are a `block_tokens x head_dim` matrix.
//!
//! **Access to a block** is decided by a claim (`kv_claims.rs`): any number of readers or one writer. A step claims
//! what it reads and writes before it starts, and releases the claims when it has completed. An export claims as reader, an import as
//! writer. A conflict is [`KvAccessError::Busy`], never a wait and never a data race. This file does not decide which block
//! belongs to which sequence (`serving_core::kv` does).
//!
//! **Shareable memory** may be mapped by other processes (PROTOCOL rule 11, the direct mode). They do not use claim words:
//! a prefill node stores into the blocks that a reservation gave it. This does not race with anything here. A block that is
//! reserved, in transfer or in quarantine is in no sequence's table, so no step touches it, and the handoff reads it only
//! after the writer has said that the bytes are in place. The writer is trusted to write no other block.

use std::ops::Range;
use std::os::fd::BorrowedFd;

use serving_core::ids::BlockId;
use thiserror::Error;
use xxhash_rust::xxh3::Xxh3;

use crate::kv_claims::{Access, Claims};
use crate::kv_geometry::{BLOCK_TOKENS_MAX, KvGeometry, TILE_TOKENS};
use crate::kv_store::{DeviceError, DeviceMemory, DevicePool, KvStore};
use crate::memory::HugeMemory;

/// Why the memory could not be made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum KvMemoryError {
    #[error("the KV geometry {0:?} has a zero or an absurd dimension; check the model file")]
    BadGeometry(KvGeometry),
    #[error(
        "a KV block of {block_tokens} tokens is not supported: it must be a multiple of {TILE_TOKENS}, at most {BLOCK_TOKENS_MAX}; change --block-size"
    )]
    BadBlockSize { block_tokens: u32 },
    #[error("a KV memory needs at least one block; raise --kv-cache-memory")]
    NoBlocks,
    #[error("the system refused {bytes} bytes of KV memory; lower --kv-cache-memory")]
    OutOfMemory { bytes: usize },
    #[error(
        "the system gave no {bytes} bytes of shareable memory: {error}; start the node without `shm_direct_secret`"
    )]
    NotShareable { bytes: usize, error: String },
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Why a block could not be accessed. Nothing was read or written.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum KvAccessError {
    /// A step or a transfer is using the block: retry after the current step. Or the accounting gave a block to two owners.
    #[error("KV block {block} is in use by a step or a transfer; retry after the step")]
    Busy { block: BlockId },
    #[error("KV block {block} does not exist: this node has {block_count}")]
    NoSuchBlock { block: BlockId, block_count: u32 },
    #[error("layers {}..{} are not within the model's {layer_count}", .layers.start, .layers.end)]
    NoSuchLayers { layers: Range<u32>, layer_count: u32 },
    #[error("a buffer of {got} bytes was given where {expected} belong")]
    WrongLength { expected: usize, got: usize },
    #[error("{valid_tokens} tokens do not fit a block of {block_tokens}")]
    TooManyTokens { valid_tokens: u32, block_tokens: u32 },
    /// A kernel of the host asked for memory of a device: a bug.
    #[error("the KV blocks are in a device's memory, which the host cannot address")]
    NotOnHost,
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// The owner of the memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvBacking {
    /// Memory of this process alone.
    #[default]
    Private,
    /// Memory in a memfd, for trusted processes of this host.
    Shareable,
}

/// Whether a device has done with bytes that were lent to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LentBytes {
    Back,
    /// The device may still use them, and nobody knows until when. Nobody else gets the block any more.
    Kept,
}

/// The memory itself. The module's documentation describes layout and sharing.
pub struct KvMemory {
    geometry: KvGeometry,
    /// Every access goes through the claims, which allow several readers or one writer per block.
    store: KvStore,
    claims: Claims,
}

impl std::fmt::Debug for KvMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvMemory")
            .field("geometry", &self.geometry)
            .field("block_count", &self.block_count())
            .finish_non_exhaustive()
    }
}

impl KvMemory {
    /// One zeroed allocation, asking for huge pages.
    pub fn new(geometry: KvGeometry, block_count: u32) -> Result<Self, KvMemoryError> {
        Self::backed(geometry, block_count, KvBacking::Private)
    }

    /// The same, for this process alone or shareable.
    pub fn backed(geometry: KvGeometry, block_count: u32, backing: KvBacking) -> Result<Self, KvMemoryError> {
        let bytes = pool_bytes(&geometry, block_count)?;
        let memory = match backing {
            KvBacking::Private => HugeMemory::zeroed(bytes).ok_or(KvMemoryError::OutOfMemory { bytes })?,
            KvBacking::Shareable => HugeMemory::shareable(bytes).map_err(|error| KvMemoryError::NotShareable {
                bytes,
                error: error.to_string(),
            })?,
        };
        Ok(Self {
            geometry,
            store: KvStore::Host(memory),
            claims: Claims::new(block_count),
        })
    }

    /// Blocks in memory of a device, which `allocate` makes with the number of bytes that it is given.
    ///
    /// # Errors
    /// A geometry without meaning, or the error of `allocate`.
    pub fn on_device(
        geometry: KvGeometry,
        block_count: u32,
        allocate: impl FnOnce(usize) -> Result<Box<dyn DeviceMemory>, KvMemoryError>,
    ) -> Result<Self, KvMemoryError> {
        let memory = allocate(pool_bytes(&geometry, block_count)?)?;
        Ok(Self {
            geometry,
            store: KvStore::Device(memory),
            claims: Claims::new(block_count),
        })
    }

    pub fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    pub fn block_count(&self) -> u32 {
        self.claims.count()
    }

    /// For shareable memory: exactly the blocks, sealed against any change of size.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.store.descriptor()
    }

    /// Copies one block over all layers into `out` (`block_bytes` long).
    pub fn export_block(&self, block: BlockId, out: &mut [u8]) -> Result<(), KvAccessError> {
        self.export_layers(block, 0..self.geometry.layer_count, out)
    }

    /// Copies some layers of a block into `out` (`layer_bytes` for each).
    pub fn export_layers(&self, block: BlockId, layers: Range<u32>, out: &mut [u8]) -> Result<(), KvAccessError> {
        self.check_length(&layers, out.len())?;
        let range = self.layer_range(block, &layers)?;
        let _claim = self.claims.hold(block, Access::Read)?;
        // SAFETY: `range` is inside the block, whose reader claim keeps writers of this process away until `_claim` drops.
        // Another process that has mapped shareable memory stores only into blocks that it was given and that nobody asks
        // for here until it has said that they are complete (the module text).
        unsafe { self.store.export(range, out) }
    }

    /// Shows `read` the bytes of some layers of a block, without a copy when they are on the host. The block stays claimed for
    /// reading meanwhile.
    pub fn read_layers<R>(
        &self,
        block: BlockId,
        layers: Range<u32>,
        read: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, KvAccessError> {
        let range = self.layer_range(block, &layers)?;
        let _claim = self.claims.hold(block, Access::Read)?;
        // SAFETY: as in `export_layers`.
        unsafe { self.store.read(range, read) }
    }

    /// Overwrites one block over all layers.
    pub fn import_block(&self, block: BlockId, bytes: &[u8]) -> Result<(), KvAccessError> {
        self.import_layers(block, 0..self.geometry.layer_count, bytes)
    }

    /// Overwrites some layers of a block.
    pub fn import_layers(&self, block: BlockId, layers: Range<u32>, bytes: &[u8]) -> Result<(), KvAccessError> {
        self.check_length(&layers, bytes.len())?;
        let range = self.layer_range(block, &layers)?;
        let _claim = self.claims.hold(block, Access::Write)?;
        // SAFETY: `range` is inside the block, whose writer claim keeps everybody else of this process away until `_claim`
        // drops. Another process stores only into blocks that were given to it, which nobody writes here.
        unsafe { self.store.import(range, bytes) }
    }

    /// Lets `write` change the bytes of some layers of a block, in place when they are on the host. The block stays claimed for
    /// writing meanwhile.
    pub fn write_layers<R>(
        &self,
        block: BlockId,
        layers: Range<u32>,
        write: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, KvAccessError> {
        let range = self.layer_range(block, &layers)?;
        let _claim = self.claims.hold(block, Access::Write)?;
        // SAFETY: as in `import_layers`.
        unsafe { self.store.write(range, write) }
    }

    /// For transports that address a device's memory themselves. `None` on the host, and where only the engine can.
    pub fn device_pool(&self) -> Option<DevicePool> {
        self.store.device_pool()
    }

    /// Lends some layers of a block of a [`DevicePool`] to a copy on the device that reads them. `copy` gets their position from
    /// the pool's first byte and waits for the device. The block stays claimed for reading meanwhile.
    pub fn lend_to_reader<R>(
        &self,
        block: BlockId,
        layers: Range<u32>,
        copy: impl FnOnce(usize) -> (R, LentBytes),
    ) -> Result<R, KvAccessError> {
        self.lend((block, layers), Access::Read, copy)
    }

    /// The same for a copy that writes them. A copy of a block that nobody uses before it has settled (one that is reserved for
    /// a transfer) need not be waited for.
    pub fn lend_to_writer<R>(
        &self,
        block: BlockId,
        layers: Range<u32>,
        copy: impl FnOnce(usize) -> (R, LentBytes),
    ) -> Result<R, KvAccessError> {
        self.lend((block, layers), Access::Write, copy)
    }

    fn lend<R>(
        &self,
        (block, layers): (BlockId, Range<u32>),
        access: Access,
        copy: impl FnOnce(usize) -> (R, LentBytes),
    ) -> Result<R, KvAccessError> {
        let range = self.layer_range(block, &layers)?;
        let claim = self.claims.hold(block, access)?;
        let (result, lent) = copy(range.start);
        if lent == LentBytes::Kept {
            std::mem::forget(claim);
        }
        Ok(result)
    }

    /// Copies a whole block onto another: the fork of a partly filled last block.
    pub fn copy_block(&self, from: BlockId, to: BlockId) -> Result<(), KvAccessError> {
        let layers = 0..self.geometry.layer_count;
        let (source, target) = (self.layer_range(from, &layers)?, self.layer_range(to, &layers)?);
        // Copying a block onto itself ends as `Busy`, because it would be read and written at the same time.
        let _claims = (
            self.claims.hold(from, Access::Read)?,
            self.claims.hold(to, Access::Write)?,
        );
        // SAFETY: two different blocks, claimed as in `export_layers` and `import_layers`.
        unsafe { self.store.copy(source, target) }
    }

    /// XXH3-64 of the rows of the first `valid_tokens` tokens, in layout order. The rows after them are not looked at.
    pub fn block_hash(&self, block: BlockId, valid_tokens: u32) -> Result<u64, KvAccessError> {
        let block_tokens = self.geometry.block_tokens;
        if valid_tokens > block_tokens {
            return Err(KvAccessError::TooManyTokens {
                valid_tokens,
                block_tokens,
            });
        }
        self.read_layers(block, 0..self.geometry.layer_count, |bytes| {
            hash_rows(&self.geometry, bytes, valid_tokens)
        })
    }

    /// One hash for each block of a prompt of `prompt_tokens` tokens whose KV begins in the first of `blocks`. Blocks after
    /// the prompt's last token are left out.
    ///
    /// # Errors
    /// As [`block_hash`](Self::block_hash), of the first block that has no hash.
    pub fn prompt_hashes(&self, blocks: &[BlockId], prompt_tokens: u32) -> Result<Vec<u64>, KvAccessError> {
        let block_tokens = self.geometry.block_tokens;
        let first_tokens = (0..prompt_tokens).step_by(block_tokens as usize);
        let hash = |(block, first): (&BlockId, u32)| self.block_hash(*block, (prompt_tokens - first).min(block_tokens));
        blocks.iter().zip(first_tokens).map(hash).collect()
    }

    pub(crate) fn claims(&self) -> &Claims {
        &self.claims
    }

    /// Start of a block for kernels of the host, which hold a [`StepClaim`](crate::kv_claims::StepClaim) on it.
    pub(crate) fn host_pointer(&self, block: BlockId) -> Result<*mut u8, KvAccessError> {
        let offset = self.block_offset(block)?;
        let start = self.store.host_start().ok_or(KvAccessError::NotOnHost)?;
        // SAFETY: `block_offset` checked that the block lies within the allocation.
        Ok(unsafe { start.add(offset) })
    }

    fn check_length(&self, layers: &Range<u32>, got: usize) -> Result<(), KvAccessError> {
        let expected = self.geometry.layer_bytes() * layers.len();
        if got == expected {
            Ok(())
        } else {
            Err(KvAccessError::WrongLength { expected, got })
        }
    }

    /// Byte range within the allocation, checked.
    fn layer_range(&self, block: BlockId, layers: &Range<u32>) -> Result<Range<usize>, KvAccessError> {
        let layer_count = self.geometry.layer_count;
        if layers.start > layers.end || layers.end > layer_count {
            return Err(KvAccessError::NoSuchLayers {
                layers: layers.clone(),
                layer_count,
            });
        }
        let block_start = self.block_offset(block)?;
        let layer_bytes = self.geometry.layer_bytes();
        let start = block_start + layers.start as usize * layer_bytes;
        Ok(start..start + layers.len() * layer_bytes)
    }

    fn block_offset(&self, block: BlockId) -> Result<usize, KvAccessError> {
        if block.0 < self.block_count() {
            Ok(block.0 as usize * self.geometry.block_bytes())
        } else {
            Err(KvAccessError::NoSuchBlock {
                block,
                block_count: self.block_count(),
            })
        }
    }
}

/// Bytes of all blocks, every overflow checked.
fn pool_bytes(geometry: &KvGeometry, block_count: u32) -> Result<usize, KvMemoryError> {
    if block_count == 0 {
        return Err(KvMemoryError::NoBlocks);
    }
    let block_bytes = geometry
        .checked_block_bytes()
        .ok_or(KvMemoryError::BadGeometry(*geometry))?;
    block_bytes
        .checked_mul(block_count as usize)
        .ok_or(KvMemoryError::OutOfMemory { bytes: usize::MAX })
}

pub(crate) fn hash_rows(geometry: &KvGeometry, block: &[u8], valid_tokens: u32) -> u64 {
    let mut hasher = Xxh3::new();
    if valid_tokens == geometry.block_tokens {
        hasher.update(block);
    } else {
        let valid = valid_tokens as usize * geometry.row_bytes();
        for head in block.chunks_exact(geometry.head_bytes()) {
            hasher.update(&head[..valid]);
        }
    }
    hasher.digest()
}

#[cfg(test)]
#[path = "kv_memory_tests.rs"]
mod tests;
