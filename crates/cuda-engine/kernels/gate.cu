// Owns the gated unit between the two halves of the feed-forward part: act(gate) * up, bf16 in and out.
#include "primitives.cuh"

// The factors of GELU's tanh form: 2 sqrt(2 / pi), and 0.044715 times that (crates/engine/src/numerics.rs).
constexpr float GELU_LINEAR = 1.595769f, GELU_CUBIC = 0.071354814f;

// Rows of `gate_up` are [gates, ups], each `columns` long, a multiple of 8. Grid: rows, parts of 2,048 columns.
template <bool IS_GELU> DEV void gate(const u16* gate_up, u16* out, u32 columns) {
  const u64 row = blockIdx.x;
  const u32 at = (blockIdx.y * 256 + threadIdx.x) * 8;
  if (at >= columns) return;
  const Eight gates = *(const Eight*)(gate_up + row * 2 * columns + at);
  const Eight ups = *(const Eight*)(gate_up + row * 2 * columns + columns + at);
  Words result;
  float values[8];
  for (int i = 0; i < 8; i++) {
    const float g = from_bf16(gates.v[i]);
    // 0.5 g (1 + tanh(z / 2)) is g / (1 + exp(-z)).
    const float z = IS_GELU ? (g * g * GELU_CUBIC + GELU_LINEAR) * g : g;
    values[i] = g * reciprocal(1.f + power_of_two(-LOG2_E * z)) * from_bf16(ups.v[i]);
  }
  for (int i = 0; i < 4; i++) result.v[i] = pack_bf16(values[2 * i], values[2 * i + 1]);
  *(Words*)(out + row * columns + at) = result;
}

KERNEL __launch_bounds__(256) gate_silu(const u16* gate_up, u16* out, u32 columns) { gate<false>(gate_up, out, columns); }
KERNEL __launch_bounds__(256) gate_gelu(const u16* gate_up, u16* out, u32 columns) { gate<true>(gate_up, out, columns); }
