// Owns attention for single rows (decode) over the paged KV: the keys of a row are cut into splits of a fixed length, a block
// for each split and KV head, and a second kernel combines the splits in order. GQA, a window and a cap of scores.
//
// The length of a split does not depend on the batch, so a row's bits do not either. They differ from those that
// prefill_attention.cu gives the same row: an engine that promises equal bits in both phases uses that kernel for all rows.
#include "paged.cuh"

// Query heads that share a KV head. It comes from the compiler's options.
static_assert(GROUP >= 1 && GROUP <= 8, "group sizes that the kernel has registers for");

constexpr int WARPS = 4, THREADS = WARPS * 32;
constexpr int LANES = HEAD_DIM / 8;   // Lanes that read one token, 16 bytes each.
constexpr int SLOTS = 32 / LANES;     // Tokens that a warp reads at once.
constexpr int UNROLL = 2;             // Times that, before it computes.
constexpr u32 STRIDE = WARPS * SLOTS * UNROLL;

// What a row sees, as the splits that it has.
struct Seen {
  u32 begin, end;  // Keys.
  DEV Seen(u32 position, u32 window) {
    end = position + 1;
    begin = window != 0 && end > window ? end - window : 0;
  }
  DEV u32 first_split(u32 split_tokens) const { return begin / split_tokens; }
  DEV u32 last_split(u32 split_tokens) const { return (end - 1) / split_tokens; }
};

struct State {
  float largest, sum, out[8];  // The lane's 8 values of the head.
};

DEV void fold_token(State& state, const float query[8], const Eight& key, const Eight& value, bool is_real, float cap) {
  float score = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) score += query[i] * from_bf16(key.v[i]);
#pragma unroll
  for (int mask = 1; mask < LANES; mask *= 2) score += shuffle_xor(score, mask);
  if (cap > 0.f) score = capped(score, cap);
  score = is_real ? score * LOG2_E : LOWEST_SCORE;
  const float largest = larger(state.largest, score), keep = power_of_two(state.largest - largest);
  const float weight = is_real ? power_of_two(score - largest) : 0.f;
  state.largest = largest;
  state.sum = state.sum * keep + weight;
#pragma unroll
  for (int i = 0; i < 8; i++) state.out[i] = state.out[i] * keep + weight * from_bf16(value.v[i]);
}

// The warp's slots become one, in every lane.
DEV void combine_slots(State& state) {
  float largest = state.largest;
#pragma unroll
  for (int mask = LANES; mask < 32; mask *= 2) largest = larger(largest, shuffle_xor(largest, mask));
  const float keep = power_of_two(state.largest - largest);
  state.largest = largest;
  state.sum *= keep;
#pragma unroll
  for (int mask = LANES; mask < 32; mask *= 2) state.sum += shuffle_xor(state.sum, mask);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    state.out[i] *= keep;
#pragma unroll
    for (int mask = LANES; mask < 32; mask *= 2) state.out[i] += shuffle_xor(state.out[i], mask);
  }
}

// Grid: splits, KV heads, decode rows. `rows[i]` is the step's row of decode row i. Results of a split:
// part_out[decode row][head][split][HEAD_DIM] and part_state[..][split] = (largest, sum). Splits that a row does not have are
// neither written here nor read by the second kernel. `cap` 0: none; `window` 0: none.
KERNEL __launch_bounds__(THREADS) decode_attention(const u16* queries, const u32* rows, const u32* row_sequence,
                                                   const u32* row_position, u8* pool_start, u64 block_bytes, u64 layer_offset,
                                                   const u32* tables, u32 table_stride, u32 block_shift, float* part_out,
                                                   float* part_state, u32 kv_heads, u32 split_tokens, u32 window, float scale,
                                                   float cap) {
  SHARED_MEMORY(shared);
  const u32 split = blockIdx.x, kv_head = blockIdx.y, row = rows[blockIdx.z], sequence = row_sequence[row];
  if (sequence == PADDING_ROW) return;
  const Seen seen(row_position[row], window);
  if (split < seen.first_split(split_tokens) || split > seen.last_split(split_tokens)) return;
  const Pool pool = {pool_start, block_bytes, layer_offset, tables, table_stride, block_shift};
  const u64 values_offset = pool.values_offset(kv_heads);
  const u32 warp = warp_id(), lane = lane_id(), part = lane % LANES, slot = lane / LANES, heads = kv_heads * GROUP;
  const u32 begin = split * split_tokens > seen.begin ? split * split_tokens : seen.begin;
  const u32 end = smaller(seen.end, (split + 1) * split_tokens);
  float query[GROUP][8];
  State states[GROUP];
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
    const Eight q = *(const Eight*)(queries + ((u64)row * heads + kv_head * GROUP + g) * HEAD_DIM + part * 8);
    states[g].largest = LOWEST_SCORE;
    states[g].sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      query[g][i] = from_bf16(q.v[i]) * scale;
      states[g].out[i] = 0.f;
    }
  }
  for (u32 base = begin + warp * SLOTS * UNROLL; base < end; base += STRIDE) {
    Eight key[UNROLL], value[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const u32 token = base + u * SLOTS + slot;
      key[u] = {};
      value[u] = {};
      if (token < end) {
        const u8* from = pool.keys(sequence, token, kv_head) + part * 16;
        key[u] = *(const Eight*)from;
        value[u] = *(const Eight*)(from + values_offset);
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const bool is_real = base + u * SLOTS + slot < end;
#pragma unroll
      for (int g = 0; g < GROUP; g++) fold_token(states[g], query[g], key[u], value[u], is_real, cap);
    }
  }
  // The warps meet in shared memory.
  float* const warp_out = (float*)shared;                       // [warp][GROUP][HEAD_DIM]
  float* const warp_state = warp_out + WARPS * GROUP * HEAD_DIM;  // [warp][GROUP][largest, sum]
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
    combine_slots(states[g]);
    const u32 at = warp * GROUP + g;
    if (slot == 0) {
#pragma unroll
      for (int i = 0; i < 8; i++) warp_out[at * HEAD_DIM + part * 8 + i] = states[g].out[i];
    }
    if (lane == 0) {
      warp_state[at * 2] = states[g].largest;
      warp_state[at * 2 + 1] = states[g].sum;
    }
  }
  sync_block();
  for (u32 i = threadIdx.x; i < GROUP * HEAD_DIM; i += THREADS) {
    const u32 g = i / HEAD_DIM, d = i % HEAD_DIM;
    float largest = LOWEST_SCORE, sum = 0.f, out = 0.f;
    for (u32 w = 0; w < WARPS; w++) largest = larger(largest, warp_state[(w * GROUP + g) * 2]);
    for (u32 w = 0; w < WARPS; w++) {
      const float keep = power_of_two(warp_state[(w * GROUP + g) * 2] - largest);
      sum += warp_state[(w * GROUP + g) * 2 + 1] * keep;
      out += warp_out[(w * GROUP + g) * HEAD_DIM + d] * keep;
    }
    const u64 at = ((u64)blockIdx.z * heads + kv_head * GROUP + g) * gridDim.x + split;
    part_out[at * HEAD_DIM + d] = out;
    if (d == 0) {
      part_state[at * 2] = largest;
      part_state[at * 2 + 1] = sum;
    }
  }
}

// Grid: query heads, decode rows. `splits` is the first kernel's grid. A padding row becomes zeros.
KERNEL __launch_bounds__(HEAD_DIM) decode_combine(const float* part_out, const float* part_state, const u32* rows,
                                                  const u32* row_sequence, const u32* row_position, u16* out, u32 splits,
                                                  u32 split_tokens, u32 window) {
  const u32 row = rows[blockIdx.y], d = threadIdx.x;
  const u64 from = ((u64)blockIdx.y * gridDim.x + blockIdx.x) * splits;
  float largest = LOWEST_SCORE, sum = 0.f, total = 0.f;
  if (row_sequence[row] != PADDING_ROW) {
    const Seen seen(row_position[row], window);
    const u32 first = seen.first_split(split_tokens), last = seen.last_split(split_tokens);
    for (u32 split = first; split <= last; split++) largest = larger(largest, part_state[(from + split) * 2]);
    for (u32 split = first; split <= last; split++) {
      const float keep = power_of_two(part_state[(from + split) * 2] - largest);
      sum += part_state[(from + split) * 2 + 1] * keep;
      total += part_out[(from + split) * HEAD_DIM + d] * keep;
    }
  }
  // A row sees itself at least, so its sum is no less than about one. A sum that is no number stays one, and the draw says so.
  const bool is_row = row_sequence[row] != PADDING_ROW;
  out[((u64)row * gridDim.x + blockIdx.x) * HEAD_DIM + d] = is_row ? to_bf16(total * reciprocal(sum)) : (u16)0;
}
