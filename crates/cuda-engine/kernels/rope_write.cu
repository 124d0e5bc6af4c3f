// Owns what happens to queries, keys and values between the projections and attention: the norm of single heads (Qwen 3,
// Gemma 3), RoPE, and the keys' and values' way into the pool. Angles are made once for each step and used by every layer.
#include "paged.cuh"

constexpr int WARPS = 4, PER_LANE = HEAD_DIM / 32;

// Sine and cosine for 0 <= x < 2^20, as crates/engine/src/math.rs has them: reduction to |r| <= pi / 4, then Taylor series.
DEV void sine_cosine(double x, double& sine, double& cosine) {
  // Adding and subtracting 1.5 * 2^52 rounds to an integer, whose low bits are then the low bits of the sum.
  const double round = 6755399441055744.0;
  const double shifted = __dadd_rn(__dmul_rn(x, 0.63661977236758138), round);
  const double n = __dadd_rn(shifted, -round);
  // pi / 2 in three parts of at most 33 significant bits: their products with n are exact.
  const double r = ((x - n * 1.5707963267341256) - n * 6.077100506303966e-11) - n * 2.0222662487959506e-21;
  const double z = r * r;
  double s = 1.0, c = 1.0;
#pragma unroll
  for (int k = 10; k > 0; k--) {
    s = 1.0 - s * z * (1.0 / (2.0 * k * (2.0 * k + 1.0)));
    c = 1.0 - c * z * (1.0 / (2.0 * k * (2.0 * k - 1.0)));
  }
  s *= r;
  const u32 quarter = (u32)__double_as_longlong(shifted) & 3;
  const double first = quarter & 1 ? c : s, second = quarter & 1 ? s : c;
  sine = quarter & 2 ? -first : first;
  cosine = quarter == 1 || quarter == 2 ? -second : second;
}

// angles[row][pair], for `count` = rows * pairs. `speeds` are the angles at position 1, with the model's scaling in them;
// `magnitude` multiplies both functions (1 but for scaling by factors).
KERNEL __launch_bounds__(128) rope_angles(const u32* row_position, const double* speeds, Turn* angles, u32 pairs, u32 count,
                                          float magnitude) {
  const u32 at = blockIdx.x * 128 + threadIdx.x;
  if (at >= count) return;
  double sine, cosine;
  sine_cosine((double)row_position[at / pairs] * speeds[at % pairs], sine, cosine);
  Turn turn;
  turn.cosine = (float)(cosine * (double)magnitude);
  turn.sine = (float)(sine * (double)magnitude);
  angles[at] = turn;
}

// Grid: rows, groups of four heads. A warp takes one head of one row: queries first, then keys, then values. `halves`: the
// pairs are (i, i + pairs), else (2i, 2i + 1). The norms' weights may be missing.
KERNEL __launch_bounds__(128) rope_write(const float* qkv, const float* query_norm, const float* key_norm, const Turn* angles,
                                         const u32* row_sequence, const u32* row_position, u16* queries, u8* pool,
                                         u64 block_bytes, u64 layer_offset, const u32* tables, u32 table_stride,
                                         u32 block_shift, u32 heads, u32 kv_heads, u32 pairs, u32 halves, float epsilon) {
  SHARED_MEMORY(shared);
  const u32 row = blockIdx.x, head = blockIdx.y * WARPS + warp_id(), lane = lane_id();
  const u32 sequence = row_sequence[row];
  // Whole warps leave, and no barrier of the block follows.
  if (head >= heads + 2 * kv_heads || sequence == PADDING_ROW) return;
  const bool is_query = head < heads, is_value = head >= heads + kv_heads;
  const float* from = qkv + ((u64)row * (heads + 2 * kv_heads) + head) * HEAD_DIM + lane * PER_LANE;
  float values[PER_LANE];
  for (int i = 0; i < PER_LANE; i++) values[i] = from[i];
  const float* weight = is_value ? nullptr : is_query ? query_norm : key_norm;
  if (weight) {
    float sum = 0.f;
    for (int i = 0; i < PER_LANE; i++) sum += values[i] * values[i];
    const float scale = reciprocal_root(sum_of_warp(sum) * (1.f / HEAD_DIM) + epsilon);
    for (int i = 0; i < PER_LANE; i++) values[i] = values[i] * scale * weight[lane * PER_LANE + i];
  }
  if (!is_value) {
    // The two values of a pair may be in different lanes.
    float* mine = (float*)shared + warp_id() * HEAD_DIM;
    for (int i = 0; i < PER_LANE; i++) mine[lane * PER_LANE + i] = values[i];
    sync_warp();
    for (u32 pair = lane; pair < pairs; pair += 32) {
      const u32 first = halves ? pair : 2 * pair, second = halves ? pair + pairs : 2 * pair + 1;
      const Turn turn = angles[(u64)row * pairs + pair];
      const float a = mine[first], b = mine[second];
      mine[first] = a * turn.cosine - b * turn.sine;
      mine[second] = a * turn.sine + b * turn.cosine;
    }
    sync_warp();
    for (int i = 0; i < PER_LANE; i++) values[i] = mine[lane * PER_LANE + i];
  }
  u32* to;
  if (is_query) {
    to = (u32*)(queries + ((u64)row * heads + head) * HEAD_DIM);
  } else {
    const Pool kv = {pool, block_bytes, layer_offset, tables, table_stride, block_shift};
    const u32 kv_head = is_value ? head - heads - kv_heads : head - heads;
    to = (u32*)(kv.keys(sequence, row_position[row], kv_head) + (is_value ? kv.values_offset(kv_heads) : 0));
  }
  for (int i = 0; i < PER_LANE; i += 2) to[(lane * PER_LANE + i) / 2] = pack_bf16(values[i], values[i + 1]);
}
