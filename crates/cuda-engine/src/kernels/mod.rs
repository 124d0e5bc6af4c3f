//! The kernels of the GPU engine: their sources, compilation, calls, and the checks that compare each with the host.
//!
//! Never does: a forward pass, memory of the engine, a decision which kernel a step needs.
//! Promise of every kernel: a row's bits depend on its own inputs only. No block waits for another one, nothing is added
//! atomically, and each sum has a fixed order. `gemm_tile.cuh` says why one row and a thousand rows give equal sums, and
//! `decode_attention.cu` says where the two phases differ.
//! The numbers: bf16 weights, KV and inputs of matrices; f32 for the residual stream, projections of q, k and v, and logits;
//! f32 sums everywhere.
//! Read first: `table.rs` (what there is), `calls/mod.rs` (how one is called), `check/mod.rs`.

mod attention_shape;
pub mod cache;
pub mod calls;
pub mod check;
pub mod compile;
mod driver;
mod loaded;
mod reference;
pub mod resources;
mod shapes;
mod source;
mod table;

pub use attention_shape::{AttentionShape, HeadDim, UnsupportedShape};
pub use compile::{ImageForm, KernelError, Target};
pub use loaded::Kernels;
pub use source::{KernelFile, Unit, sources_sha256};
pub use table::KernelId;

/// Tokens of a split of decode attention. It must not depend on the batch, or a row's bits would. 256 tokens of one KV head
/// are 64 KiB at head size 64: long enough to hide a block's start, and a row of 8,192 tokens still has 32 blocks for each head.
pub const SPLIT_TOKENS: u32 = 256;
/// Query rows that a block of prefill attention takes together.
pub const TILE_ROWS: u32 = 64;
/// Up to so many rows go to the product's tile of 16 rows. The bits are the same either way.
pub const FEW_ROWS: u32 = 16;
/// The sequence number of a padding row (`primitives.cuh`).
pub const PADDING_ROW: u32 = u32::MAX;
