// Owns the addresses in the pool of KV blocks: [block][layer][K | V][kv head][token of the block][head dim], bf16. The layout
// is the wire layout (crates/engine/src/kv_memory.rs). Tokens of a block are a power of two: 16 to 256.
#pragma once
#include "primitives.cuh"

// HEAD_DIM comes from the compiler's options.
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "head sizes that the kernels have code for");
constexpr u32 KV_ROW_BYTES = HEAD_DIM * 2;

struct Pool {
  u8* start;
  u64 block_bytes;   // One block over all layers.
  u64 layer_offset;  // From a block's start to its layer.
  const u32* tables;  // [sequence][table_stride]
  u32 table_stride;
  u32 block_shift;  // A block has 1 << block_shift tokens.

  // The keys of a token in one head. Its values are `values_offset` behind.
  DEV u8* keys(u32 sequence, u32 position, u32 kv_head) const {
    const u64 block = tables[(u64)sequence * table_stride + (position >> block_shift)];
    const u32 token = position & ((1u << block_shift) - 1);
    return start + block * block_bytes + layer_offset + (u64)kv_head * head_bytes() + token * KV_ROW_BYTES;
  }
  DEV u64 head_bytes() const { return (u64)KV_ROW_BYTES << block_shift; }
  DEV u64 values_offset(u32 kv_heads) const { return head_bytes() * kv_heads; }
};
