// Owns the first rows of the residual stream: rows of the embedding matrix, as f32, scaled in families that scale them.
#include "primitives.cuh"

// A block for each row. `columns` is a multiple of 8.
KERNEL __launch_bounds__(256) embed(const u32* tokens, const u16* table, float* out, u32 columns, float scale) {
  const u64 row = blockIdx.x;
  const u16* from = table + (u64)tokens[row] * columns;
  float* to = out + row * columns;
  for (u32 at = threadIdx.x * 8; at < columns; at += 256 * 8) {
    const Eight values = *(const Eight*)(from + at);
    Four low, high;
    for (int i = 0; i < 4; i++) {
      low.v[i] = from_bf16(values.v[i]) * scale;
      high.v[i] = from_bf16(values.v[i + 4]) * scale;
    }
    *(Four*)(to + at) = low;
    *(Four*)(to + at + 4) = high;
  }
}
