//! The blocks that are moved: two KV memories of one shape, one in each process.

use std::sync::Arc;

use clap::Args;
use engine::BLOCK_TOKENS;
use engine::{KvBacking, KvDtype, KvGeometry, KvMemory};
use serving_core::compatibility::CompatibilityHash;
use serving_core::ids::{Attempt, BlockId, Generation, NodeEpoch, NodeId, NodeName, RequestId, TransferId};
use serving_core::request::AttemptKey;

/// How much is moved at a time. The default is a prompt of 2,048 tokens of the default model.
#[derive(Clone, Copy, Debug, Args)]
pub struct Payload {
    /// Blocks of one transfer.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    pub blocks: u32,
    /// Layers of the model.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub layers: u32,
    /// KV heads of the model, of 64 values each.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub kv_heads: u32,
}

impl Payload {
    pub fn geometry(self) -> KvGeometry {
        KvGeometry {
            layer_count: self.layers,
            kv_head_count: self.kv_heads,
            head_dim: 64,
            block_tokens: BLOCK_TOKENS,
            dtype: KvDtype::F16,
        }
    }

    pub fn bytes(self) -> u64 {
        self.geometry().block_bytes() as u64 * u64::from(self.blocks)
    }
}

/// The sender's blocks. Each byte is written, because memory that was never touched is one shared page of zeros.
pub(super) fn source(payload: Payload) -> anyhow::Result<Arc<KvMemory>> {
    let memory = KvMemory::backed(payload.geometry(), payload.blocks, KvBacking::Private)?;
    for block in 0..payload.blocks {
        memory.write_layers(BlockId(block), 0..payload.layers, |bytes| {
            for (at, byte) in bytes.iter_mut().enumerate() {
                *byte = (at as u32)
                    .wrapping_mul(2_654_435_761)
                    .wrapping_add(block * 7)
                    .to_le_bytes()[2];
            }
        })?;
    }
    Ok(Arc::new(memory))
}

/// Changes every block, so that this round's bytes differ from those of the round before.
pub(super) fn stamp(memory: &KvMemory, stamp: u8) -> anyhow::Result<()> {
    for block in 0..memory.block_count() {
        memory.write_layers(BlockId(block), 0..1, |bytes| bytes[..64].fill(stamp))?;
    }
    Ok(())
}

/// The digest of every byte.
pub(super) fn digest(memory: &KvMemory) -> anyhow::Result<u64> {
    let mut digest = 0u64;
    for block in 0..memory.block_count() {
        let hash = memory.block_hash(BlockId(block), BLOCK_TOKENS)?;
        digest = digest.rotate_left(7) ^ hash;
    }
    Ok(digest)
}

/// Both processes run this program, so there is nothing to compare.
pub(super) const COMPATIBILITY: CompatibilityHash = CompatibilityHash([0; 32]);
pub(super) fn node(name: &str) -> NodeId {
    NodeId {
        name: NodeName::new(name),
        epoch: NodeEpoch(1),
    }
}

pub(super) fn key(transfer: TransferId) -> AttemptKey {
    AttemptKey {
        request: RequestId(transfer.0),
        attempt: Attempt(0),
    }
}

pub(super) fn blocks(payload: Payload) -> Vec<(BlockId, Generation)> {
    (0..payload.blocks)
        .map(|block| (BlockId(block), Generation(0)))
        .collect()
}
