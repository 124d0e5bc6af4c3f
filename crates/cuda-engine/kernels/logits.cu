// Owns the way to and from the LM head: the rows whose logits are wanted, and the cap of logits (Gemma 2).
#include "primitives.cuh"

// out[i] = x[rows[i]]. `columns` is a multiple of 4.
KERNEL __launch_bounds__(256) gather_rows(const float* x, const u32* rows, float* out, u32 columns) {
  const u64 from = (u64)rows[blockIdx.x] * columns, to = (u64)blockIdx.x * columns;
  for (u32 at = threadIdx.x * 4; at < columns; at += 256 * 4) *(Four*)(out + to + at) = *(const Four*)(x + from + at);
}

// In place. Grid: parts of 256 logits.
KERNEL __launch_bounds__(256) cap_logits(float* logits, u64 count, float cap) {
  const u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
  if (at < count) logits[at] = capped(logits[at], cap);
}
