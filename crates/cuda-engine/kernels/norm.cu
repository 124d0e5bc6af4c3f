// Owns the RMS norms of whole rows: from the f32 residual stream to the bf16 input of a matrix. Norms of single heads are in
// rope_write.cu, where the heads are read anyway. A block computes one row, so no other row can change its sums.
#include "primitives.cuh"

constexpr int WARPS = 8, THREADS = WARPS * 32, STEP = THREADS * 4;

DEV float scale_of(float sum_of_squares, u32 columns, float epsilon) {
  return reciprocal_root(sum_of_squares / (float)columns + epsilon);
}
DEV float square_sum(const Four& x) {
  float sum = 0.f;
  for (int i = 0; i < 4; i++) sum += x.v[i] * x.v[i];
  return sum;
}
// out = bf16(x * scale * weight)
DEV void write_normed(const float* x, const float* weight, u16* out, u32 columns, float scale) {
  for (u32 at = threadIdx.x * 4; at < columns; at += STEP) {
    const Four v = *(const Four*)(x + at), w = *(const Four*)(weight + at);
    u32* to = (u32*)(out + at);
    to[0] = pack_bf16(v.v[0] * scale * w.v[0], v.v[1] * scale * w.v[1]);
    to[1] = pack_bf16(v.v[2] * scale * w.v[2], v.v[3] * scale * w.v[3]);
  }
}

// `columns` is a multiple of 4.
KERNEL __launch_bounds__(THREADS) rms_norm(const float* x, const float* weight, u16* out, u32 columns, float epsilon) {
  SHARED_MEMORY(shared);
  const u64 start = (u64)blockIdx.x * columns;
  float sum = 0.f;
  for (u32 at = threadIdx.x * 4; at < columns; at += STEP) sum += square_sum(*(const Four*)(x + start + at));
  sum = sum_of_block<WARPS>(sum, (float*)shared);
  write_normed(x + start, weight, out + start, columns, scale_of(sum, columns, epsilon));
}

// stream += branch, or the normed branch when `branch_weight` is there (Gemma 2 and 3); then out = norm(stream).
KERNEL __launch_bounds__(THREADS) add_rms_norm(float* stream, const float* branch, const float* branch_weight,
                                               const float* weight, u16* out, u32 columns, float epsilon) {
  SHARED_MEMORY(shared);
  const u64 start = (u64)blockIdx.x * columns;
  float branch_scale = 1.f;
  if (branch_weight) {
    float sum = 0.f;
    for (u32 at = threadIdx.x * 4; at < columns; at += STEP) sum += square_sum(*(const Four*)(branch + start + at));
    branch_scale = scale_of(sum_of_block<WARPS>(sum, (float*)shared), columns, epsilon);
  }
  float sum = 0.f;
  for (u32 at = threadIdx.x * 4; at < columns; at += STEP) {
    Four added = *(const Four*)(branch + start + at), total = *(const Four*)(stream + start + at);
    for (int i = 0; i < 4; i++) {
      if (branch_weight) added.v[i] = added.v[i] * branch_scale * branch_weight[at + i];
      total.v[i] += added.v[i];
    }
    *(Four*)(stream + start + at) = total;
    sum += square_sum(total);
  }
  sum = sum_of_block<WARPS>(sum, (float*)shared);
  // Each thread reads back only what it has written itself.
  write_normed(stream + start, weight, out + start, columns, scale_of(sum, columns, epsilon));
}
