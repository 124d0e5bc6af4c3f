// Owns causal attention for chunks of prompts over the paged KV: flash style, with a prefix, GQA, a window and a cap of scores.
//
// A block takes up to 64 query rows of one sequence in one head and walks over 64 keys at a time. The walk begins at a
// multiple of 64 and a key that a row does not see adds exactly nothing to it, if its
// value is finite. So a row's bits depend neither on the other
// rows nor on where a chunk begins.
#include "paged.cuh"

constexpr int ROWS = 64, KEYS = 64, THREADS = 128;
constexpr int ROW_BYTES = KV_ROW_BYTES;
constexpr int CHUNKS = ROW_BYTES / 16;  // 16-byte chunks of a row.
constexpr int DEPTH_STEPS = HEAD_DIM / 16;

// Query rows of one sequence that a block takes together, at most ROWS.
struct alignas(16) RowTile { u32 first_row, rows, sequence, first_position; };

struct Masks {
  u32 keys;    // Keys of the sequence that the tile's last row sees.
  u32 window;  // A row sees this many keys, its own included. 0: all.
  DEV bool sees(u32 position, u32 key) const {
    return key <= position && key < keys && (window == 0 || key + window > position);
  }
};

struct Softmax {
  float largest[2], sum[2];  // Of rows lane / 4 and lane / 4 + 8 of the warp's 16; the sum is this lane's part.
};

// KEYS keys and values from `first` on, zeros behind the last one. A value that was never written could be no number, and
// zero times it is not zero.
DEV void load_keys(u8* keys, u8* values, const Pool& pool, u32 sequence, u32 kv_head, u32 kv_heads, u32 first, u32 end) {
  for (u32 i = threadIdx.x; i < KEYS * CHUNKS; i += THREADS) {
    const u32 row = i / CHUNKS, chunk = i % CHUNKS, key = first + row;
    const bool is_real = key < end;
    const u8* from = is_real ? pool.keys(sequence, key, kv_head) + chunk * 16 : pool.start;
    copy_async(keys + swizzled<ROW_BYTES>(row, chunk), from, is_real);
    copy_async(values + swizzled<ROW_BYTES>(row, chunk), from + (is_real ? pool.values_offset(kv_heads) : 0), is_real);
  }
}

DEV void load_queries(u8* to, const u16* queries, const RowTile& tile, u32 head, u32 heads) {
  for (u32 i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
    const u32 row = i / CHUNKS, chunk = i % CHUNKS;
    const bool is_real = row < tile.rows;
    const u64 at = is_real ? ((u64)(tile.first_row + row) * heads + head) * HEAD_DIM + chunk * 8 : 0;
    copy_async(to + swizzled<ROW_BYTES>(row, chunk), queries + at, is_real);
  }
}

// scores = queries * keys, for the warp's 16 rows.
DEV void multiply_keys(float scores[KEYS / 8][4], const u32 queries[DEPTH_STEPS][4], const u8* keys) {
  const u32 lane = lane_id();
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) scores[n][i] = 0.f;
#pragma unroll
  for (int step = 0; step < DEPTH_STEPS; step++) {
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++) {
      u32 b[4];
      const u32 row = n * 16 + lane % 8 + lane / 16 * 8;
      load_matrices(b, keys + swizzled<ROW_BYTES>(row, step * 2 + lane / 8 % 2));
      multiply_add(scores[n * 2], queries[step], b[0], b[1]);
      multiply_add(scores[n * 2 + 1], queries[step], b[2], b[3]);
    }
  }
}

// Makes scores powers of two below their largest, and rescales what was summed before. `position`: of the warp's first row.
DEV void fold(float scores[KEYS / 8][4], float out[HEAD_DIM / 8][4], Softmax& state, const Masks& masks, u32 position,
              u32 first_key, float scale, float cap) {
  const u32 lane = lane_id();
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 key = first_key + n * 8 + lane % 4 * 2 + i % 2, row = position + lane / 4 + i / 2 * 8;
      float score = scores[n][i] * scale;
      if (cap > 0.f) score = capped(score, cap);
      scores[n][i] = masks.sees(row, key) ? score * LOG2_E : LOWEST_SCORE;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float largest = state.largest[half];
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) largest = larger(largest, larger(scores[n][half * 2], scores[n][half * 2 + 1]));
    largest = larger(largest, shuffle_xor(largest, 1));
    largest = larger(largest, shuffle_xor(largest, 2));
    const float keep = power_of_two(state.largest[half] - largest);
    state.largest[half] = largest;
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
      for (int i = half * 2; i < half * 2 + 2; i++) {
        // Of a row that has seen no key yet, each score is the largest one.
        const float weight = scores[n][i] == LOWEST_SCORE ? 0.f : power_of_two(scores[n][i] - largest);
        scores[n][i] = weight;
        sum += weight;
      }
    }
    state.sum[half] = state.sum[half] * keep + sum;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++) {
      out[n][half * 2] *= keep;
      out[n][half * 2 + 1] *= keep;
    }
  }
}

// out += weights * values.
DEV void multiply_values(float out[HEAD_DIM / 8][4], const float weights[KEYS / 8][4], const u8* values) {
  const u32 lane = lane_id();
#pragma unroll
  for (int step = 0; step < KEYS / 16; step++) {
    const float* low = weights[step * 2];
    const float* high = weights[step * 2 + 1];
    const u32 a[4] = {pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]), pack_bf16(high[0], high[1]),
                      pack_bf16(high[2], high[3])};
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 16; n++) {
      u32 b[4];
      load_matrices_transposed(b, values + swizzled<ROW_BYTES>(step * 16 + lane % 16, n * 2 + lane / 16));
      multiply_add(out[n * 2], a, b[0], b[1]);
      multiply_add(out[n * 2 + 1], a, b[2], b[3]);
    }
  }
}

// Grid: tiles, query heads. `cap` 0: none.
KERNEL __launch_bounds__(THREADS) prefill_attention(const u16* queries, const RowTile* tiles, u16* out, u8* pool_start,
                                                    u64 block_bytes, u64 layer_offset, const u32* tables, u32 table_stride,
                                                    u32 block_shift, u32 heads, u32 kv_heads, u32 window, float scale,
                                                    float cap) {
  SHARED_MEMORY(shared);
  constexpr u32 KEY_BYTES = KEYS * ROW_BYTES, STAGE_BYTES = 2 * KEY_BYTES;
  u8* const stages = shared + ROWS * ROW_BYTES;
  const Pool pool = {pool_start, block_bytes, layer_offset, tables, table_stride, block_shift};
  const RowTile tile = tiles[blockIdx.x];
  // A place that no rows fill: nothing may be copied, because nobody would wait for it.
  if (tile.rows == 0) return;
  const u32 head = blockIdx.y, kv_head = head / (heads / kv_heads), lane = lane_id(), warp_row = warp_id() * 16;
  const Masks masks = {tile.first_position + tile.rows, window};
  const u32 first_seen = window != 0 && tile.first_position + 1 > window ? tile.first_position + 1 - window : 0;
  const u32 first_step = first_seen / KEYS, steps = (masks.keys + KEYS - 1) / KEYS;
  const auto load = [&](u32 step) {
    u8* stage = stages + step % 2 * STAGE_BYTES;
    load_keys(stage, stage + KEY_BYTES, pool, tile.sequence, kv_head, kv_heads, step * KEYS, masks.keys);
  };
  load_queries(shared, queries, tile, head, heads);
  load(first_step);
  commit_copies();
  u32 q[DEPTH_STEPS][4];
  float sums[HEAD_DIM / 8][4];
#pragma unroll
  for (int n = 0; n < HEAD_DIM / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) sums[n][i] = 0.f;
  Softmax state = {{LOWEST_SCORE, LOWEST_SCORE}, {0.f, 0.f}};
  for (u32 step = first_step; step < steps; step++) {
    sync_block();  // Nobody reads the other stage any more.
    if (step + 1 < steps) load(step + 1);
    commit_copies();
    wait_for_copies<1>();
    sync_block();
    if (step == first_step) {
#pragma unroll
      for (int i = 0; i < DEPTH_STEPS; i++)
        load_matrices(q[i], shared + swizzled<ROW_BYTES>(warp_row + lane % 16, i * 2 + lane / 16));
    }
    const u8* stage = stages + step % 2 * STAGE_BYTES;
    float scores[KEYS / 8][4];
    multiply_keys(scores, q, stage);
    fold(scores, sums, state, masks, tile.first_position + warp_row, step * KEYS, scale, cap);
    multiply_values(sums, scores, stage + KEY_BYTES);
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float sum = state.sum[half];
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    const float factor = reciprocal(sum);
    const u32 row = warp_row + lane / 4 + half * 8;
    if (row < tile.rows) {
      u32* to = (u32*)(out + ((u64)(tile.first_row + row) * heads + head) * HEAD_DIM);
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n++)
        to[n * 4 + lane % 4] = pack_bf16(sums[n][half * 2] * factor, sums[n][half * 2 + 1] * factor);
    }
  }
}
