// Owns what happens to KV blocks as bytes: copies within the pool, packing and unpacking for a transfer, zeros, and the hash
// that prefill and decode nodes compare (XXH3-64 as crates/engine/src/kv_memory.rs takes it; the method: Yann Collet, xxHash,
// doc/xxhash_spec.md).
#include "primitives.cuh"

constexpr u32 COPY_THREADS = 256;

// A piece is a run of bytes that lies together: a block, or some layers of one. All sizes are multiples of 16.
// Grid: pieces, parts, because the first axis alone may be longer than 65,535. The threads of a piece's parts take turns.
DEV void copy_piece(u8* to, const u8* from, u64 bytes) {
  const u64 step = (u64)gridDim.y * COPY_THREADS * 16;
  for (u64 at = ((u64)blockIdx.y * COPY_THREADS + threadIdx.x) * 16; at < bytes; at += step)
    *(Words*)(to + at) = *(const Words*)(from + at);
}
// Pairs of offsets, from and to. No piece is written twice or read where another one is written.
KERNEL __launch_bounds__(COPY_THREADS) copy_blocks(u8* pool, const u64* pairs, u64 bytes) {
  copy_piece(pool + pairs[blockIdx.x * 2 + 1], pool + pairs[blockIdx.x * 2], bytes);
}
KERNEL __launch_bounds__(COPY_THREADS) gather_blocks(const u8* pool, const u64* offsets, u8* out, u64 bytes) {
  copy_piece(out + (u64)blockIdx.x * bytes, pool + offsets[blockIdx.x], bytes);
}
KERNEL __launch_bounds__(COPY_THREADS) scatter_blocks(u8* pool, const u64* offsets, const u8* in, u64 bytes) {
  copy_piece(pool + offsets[blockIdx.x], in + (u64)blockIdx.x * bytes, bytes);
}
KERNEL __launch_bounds__(COPY_THREADS) zero_blocks(u8* pool, const u64* offsets, u64 bytes) {
  const u64 step = (u64)gridDim.y * COPY_THREADS * 16;
  const Words zero = {};
  for (u64 at = ((u64)blockIdx.y * COPY_THREADS + threadIdx.x) * 16; at < bytes; at += step)
    *(Words*)(pool + offsets[blockIdx.x] + at) = zero;
}

// The published secret of XXH3, as little endian words.
__constant__ u64 SECRET[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull};
constexpr u64 PRIME32_1 = 0x9e3779b1u, PRIME32_2 = 0x85ebca77u, PRIME32_3 = 0xc2b2ae3du;
constexpr u64 PRIME64_1 = 0x9e3779b185ebca87ull, PRIME64_2 = 0xc2b2ae3d27d4eb4full, PRIME64_3 = 0x165667b19e3779f9ull;
constexpr u64 PRIME64_4 = 0x85ebca77c2b2ae63ull, PRIME64_5 = 0x27d4eb2f165667c5ull;

constexpr u32 STRIPE = 64, STRIPES = 16;    // A chunk has 16 stripes of 64 bytes.
constexpr u32 HASH_WARPS = 8, CHUNKS_EACH = 4;  // Of a round.
constexpr u32 ROUND = HASH_WARPS * CHUNKS_EACH;
constexpr u32 LAST_STRIPE_SECRET = 121, MERGE_SECRET = 11;  // Bytes into the secret.

// Eight bytes of the secret from any byte on.
DEV u64 secret_at(u32 byte) {
  const u32 word = byte / 8, shift = byte % 8 * 8;
  return shift == 0 ? SECRET[word] : SECRET[word] >> shift | SECRET[word + 1] << (64 - shift);
}

// The bytes that are hashed: of each of the block's (layer, K or V, head) slices the rows of its valid tokens. These are a
// multiple of 128 bytes, so a stripe lies in one slice.
struct Message {
  const u8* block;
  u32 slice_bytes, valid_bytes, length;
  DEV u64 word(u32 stripe, u32 lane) const {
    const u32 at = stripe * STRIPE;
    return *(const u64*)(block + (u64)(at / valid_bytes) * slice_bytes + at % valid_bytes + lane * 8);
  }
};

// What lane i of the eight lanes adds for a stripe: the product in its own accumulator, the word in its neighbour's.
struct Sums {
  u64 product, word;
  DEV void add(u64 data, u64 secret) {
    const u64 keyed = data ^ secret;
    product += (keyed & 0xffffffffull) * (keyed >> 32);
    word += data;
  }
};

// The sum over a chunk's stripes for lane i % 8: additions of integers, so their order is free. Four groups of eight lanes
// take turns with the stripes.
DEV u64 sum_of_chunk(const Message& message, u32 chunk, u32 stripes, const u64 secrets[STRIPES / 4]) {
  Sums sums = {0, 0};
#pragma unroll
  for (u32 turn = 0; turn < STRIPES / 4; turn++) {
    const u32 stripe = turn * 4 + lane_id() / 8;
    if (stripe < stripes) sums.add(message.word(chunk * STRIPES + stripe, lane_id() % 8), secrets[turn]);
  }
  u64 sum = sums.product + shuffle_xor(sums.word, 1);
  sum += shuffle_xor(sum, 8);
  sum += shuffle_xor(sum, 16);
  return sum;
}

DEV u64 folded_product(u64 a, u64 b) { return a * b ^ __umul64hi(a, b); }

// Grid: blocks. `valid[i]` is at least 1. The host checks that the bytes of a block fit u32, and that a row has a multiple of
// 128 bytes. So a message has at least 256 bytes, and XXH3's methods for short ones are not needed.
KERNEL __launch_bounds__(HASH_WARPS * 32) hash_blocks(const u8* pool, const u64* offsets, const u32* valid, u64* out,
                                                      u32 slices, u32 slice_bytes, u32 row_bytes) {
  SHARED_MEMORY(shared);
  u64* const sums = (u64*)shared;  // [chunk of the round][lane]
  const u32 valid_bytes = valid[blockIdx.x] * row_bytes;
  const Message message = {pool + offsets[blockIdx.x], slice_bytes, valid_bytes, slices * valid_bytes};
  // Chunks before the last byte's are followed by a scrambling; the last stripe of all is added once more, on its own.
  const u32 full = (message.length - 1) / (STRIPE * STRIPES);
  const u32 rest = (message.length - 1 - full * STRIPE * STRIPES) / STRIPE;
  const u32 lane = lane_id() % 8;
  u64 secrets[STRIPES / 4];
#pragma unroll
  for (u32 turn = 0; turn < STRIPES / 4; turn++) secrets[turn] = SECRET[turn * 4 + lane_id() / 8 + lane];
  const u64 scramble = SECRET[16 + lane];
  const u64 start[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
  u64 state = 0;
#pragma unroll
  for (u32 i = 0; i < 8; i++) state = lane == i ? start[i] : state;
  for (u32 first = 0; first <= full; first += ROUND) {
    for (u32 i = warp_id(); i < ROUND && first + i <= full; i += HASH_WARPS) {
      const u64 sum = sum_of_chunk(message, first + i, first + i < full ? STRIPES : rest, secrets);
      if (lane_id() < 8) sums[i * 8 + lane] = sum;
    }
    sync_block();
    if (warp_id() == 0) {
      for (u32 i = 0; i < ROUND && first + i <= full; i++) {
        state += sums[i * 8 + lane];
        if (first + i < full) state = (state ^ state >> 47 ^ scramble) * PRIME32_1;
      }
    }
    sync_block();
  }
  if (warp_id() != 0) return;
  Sums last = {0, 0};
  last.add(message.word(message.length / STRIPE - 1, lane), secret_at(LAST_STRIPE_SECRET + lane * 8));
  state += last.product + shuffle_xor(last.word, 1);
  // Lane pairs (0, 1), (2, 3).. are mixed; every lane takes part in the shuffles.
  const u64 keyed = state ^ secret_at(MERGE_SECRET + lane * 8);
  const u64 mixed = folded_product(keyed, shuffle_xor(keyed, 1));
  u64 total = mixed + shuffle_xor(mixed, 2);
  total += shuffle_xor(total, 4);
  total += (u64)message.length * PRIME64_1;
  total = (total ^ total >> 37) * 0x165667919e3779f9ull;
  if (lane_id() == 0) out[blockIdx.x] = total ^ total >> 32;
}
