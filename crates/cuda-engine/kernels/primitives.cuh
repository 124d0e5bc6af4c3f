// Owns every instruction that the kernels write themselves: conversions, copies to shared memory, tensor core products.
// No kernel has `asm` of its own. Only features of sm_80 are used, so one source serves every later GPU, and the tests'
// PTX interpreter knows each instruction. No header is included: NVRTC needs no folder of headers at run time.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEV __device__ __forceinline__
#define KERNEL extern "C" __global__ void
// All shared memory is dynamic: the launch states its size, and the host's table of kernels is the one place that knows it.
#define SHARED_MEMORY(name) extern __shared__ __align__(128) u8 name[]

// A row of a padded batch has this sequence number: it belongs to nobody, and nothing is stored for it.
constexpr u32 PADDING_ROW = 0xffffffffu;
// Below every score that a model can have, and far from the end of f32, so that differences stay finite.
constexpr float LOWEST_SCORE = -1e30f;
constexpr float LOG2_E = 1.4426950408889634f;

// Sixteen bytes: the widest load and store.
struct alignas(16) Eight { u16 v[8]; };
struct alignas(16) Four { float v[4]; };
struct alignas(16) Words { u32 v[4]; };
struct alignas(8) Turn { float cosine, sine; };

DEV u32 lane_id() { return threadIdx.x % 32; }
DEV u32 warp_id() { return threadIdx.x / 32; }

// Functions and no macros: an argument with a shuffle inside must be evaluated once.
DEV float larger(float a, float b) { return a > b ? a : b; }
DEV u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

DEV float from_bf16(u16 h) { return __uint_as_float((u32)h << 16); }
DEV u16 to_bf16(float f) {
  u16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
// The first value is in the low half: memory order.
DEV u32 pack_bf16(float first, float second) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
  return r;
}
DEV float from_f16(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}

DEV float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float reciprocal_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// cap * tanh(x / cap). An infinite power gives cap, a vanishing one -cap.
DEV float capped(float x, float cap) {
  const float power = power_of_two(x * reciprocal(cap) * (2.f * LOG2_E));
  return (1.f - 2.f * reciprocal(1.f + power)) * cap;
}

DEV float shuffle_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
DEV u32 shuffle_xor(u32 v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
DEV u64 shuffle_xor(u64 v, int mask) {
  const u32 low = __shfl_xor_sync(0xffffffffu, (u32)v, mask);
  const u32 high = __shfl_xor_sync(0xffffffffu, (u32)(v >> 32), mask);
  return (u64)high << 32 | low;
}
DEV void sync_warp() { __syncwarp(); }
DEV void sync_block() { __syncthreads(); }

// The sum over a warp, the same bits in every lane.
DEV float sum_of_warp(float v) {
  for (int mask = 16; mask > 0; mask /= 2) v += shuffle_xor(v, mask);
  return v;
}
// The sum over a block of `WARPS` warps, in a fixed order, the same bits in every thread. `partial` has a place for each warp.
template <int WARPS> DEV float sum_of_block(float v, float* partial) {
  v = sum_of_warp(v);
  sync_block();  // A thread may still read what an earlier sum left in `partial`.
  if (lane_id() == 0) partial[warp_id()] = v;
  sync_block();
  float sum = 0.f;
  for (int warp = 0; warp < WARPS; warp++) sum += partial[warp];
  return sum;
}

DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// Four 8x8 matrices of 16-bit values. Lane i gives the address of row i % 8 of matrix i / 8.
DEV void load_matrices(u32 r[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
DEV void load_matrices_transposed(u32 r[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
// c += a * b: 16 rows, 8 columns, 16 products deep.
DEV void multiply_add(float c[4], const u32 a[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Copies 16 bytes to shared memory in the background, or zeros when they are not real.
DEV void copy_async(void* to, const void* from, bool is_real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(shared_address(to)), "l"(from), "r"(is_real ? 16 : 0) : "memory");
}
DEV void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `PENDING` groups of copies of this thread are under way.
template <int PENDING> DEV void wait_for_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

// The place of a 16-byte chunk in a tile of shared memory. A row's chunks change places by the row's number, so the eight
// rows that one matrix load reads lie in different banks.
template <int ROW_BYTES> DEV u32 swizzled(u32 row, u32 chunk) {
  static_assert(ROW_BYTES % 128 == 0, "eight chunks change places");
  return row * ROW_BYTES + (chunk ^ (row & 7)) * 16;
}
