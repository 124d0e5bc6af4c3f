// Owns the matrix product of gemm.cu and gemv.cu: out[row][column] = sum over k of x[row][k] * w[column][k], bf16 in, f32 sums.
//
// The order of a sum, for both and for every number of rows: one f32 accumulator, 16 products at a time by the same tensor
// core instruction, k rising. Columns of zeros behind the end add nothing. So an output has the same bits in a batch of one
// row and in a batch of thousands. A product on the plain cores could not keep that promise: how a tensor core rounds within
// its 16 products is not published.
#pragma once
#include "primitives.cuh"

constexpr int DEPTH = 64;        // Columns of x in a stage: rows of 128 bytes in shared memory.
constexpr int CHUNKS = DEPTH / 8;  // 16-byte chunks of such a row.
constexpr int STAGES = 3;
constexpr int GEMM_THREADS = 128;

enum class Out { Bf16, F32, F32Add };
struct alignas(8) Pair { float first, second; };

// A block of four warps computes ROWS x COLUMNS outputs; WARPS_DOWN of its warps share the rows, the others the columns.
template <int ROWS, int COLUMNS, int WARPS_DOWN> struct GemmTile {
  static constexpr int WARPS_ACROSS = 4 / WARPS_DOWN;
  static constexpr int WARP_ROWS = ROWS / WARPS_DOWN, WARP_COLUMNS = COLUMNS / WARPS_ACROSS;
  static constexpr int DOWN = WARP_ROWS / 16, ACROSS = WARP_COLUMNS / 8;
  static constexpr int ROW_BYTES = DEPTH * 2;
  static constexpr int STAGE_BYTES = (ROWS + COLUMNS) * ROW_BYTES;

  // `count` rows of a matrix from `first` on, `DEPTH` columns from `k0` on. What lies outside becomes zero.
  template <int COUNT> static DEV void load_rows(u8* to, const u16* from, u32 first, u32 rows, u32 k0, u32 depth) {
    for (u32 i = threadIdx.x; i < COUNT * CHUNKS; i += GEMM_THREADS) {
      const u32 row = i / CHUNKS, chunk = i % CHUNKS, k = k0 + chunk * 8;
      const bool is_real = first + row < rows && k < depth;
      copy_async(to + swizzled<ROW_BYTES>(row, chunk), from + (is_real ? (u64)(first + row) * depth + k : 0), is_real);
    }
  }

  // The products of one stage.
  static DEV void multiply_stage(float sums[DOWN][ACROSS][4], const u8* x, const u8* w) {
    const u32 lane = lane_id(), down = warp_id() / WARPS_ACROSS * WARP_ROWS, across = warp_id() % WARPS_ACROSS * WARP_COLUMNS;
#pragma unroll
    for (int step = 0; step < DEPTH / 32; step++) {
      // Two times 16 columns of x at once: with a single block of 8 outputs across, one load brings both.
      u32 a[2][DOWN][4], b[2][ACROSS][2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < DOWN; i++) {
          const u32 chunk = step * 4 + half * 2 + lane / 16;
          load_matrices(a[half][i], x + swizzled<ROW_BYTES>(down + i * 16 + lane % 16, chunk));
        }
      }
#pragma unroll
      for (int i = 0; i < ACROSS; i++) {
        u32 r[4];
        load_matrices(r, w + swizzled<ROW_BYTES>(across + i * 8 + lane % 8, step * 4 + lane / 8));
        b[0][i][0] = r[0];
        b[0][i][1] = r[1];
        b[1][i][0] = r[2];
        b[1][i][1] = r[3];
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < DOWN; i++) {
#pragma unroll
          for (int j = 0; j < ACROSS; j++) multiply_add(sums[i][j], a[half][i], b[half][j][0], b[half][j][1]);
        }
      }
    }
  }

  // Two outputs side by side, of which the second may be behind the last column. In an odd number of columns (a vocabulary)
  // the pairs of every second row are not aligned.
  template <Out OUT> static DEV void store(void* out, u64 at, float first, float second, u32 count, bool is_aligned) {
    if constexpr (OUT == Out::Bf16) {
      *(u32*)((u16*)out + at) = pack_bf16(first, second);
    } else {
      float* to = (float*)out + at;
      if (is_aligned) {
        Pair pair = {first, second};
        if constexpr (OUT == Out::F32Add) {
          const Pair old = *(const Pair*)to;
          pair = {old.first + first, old.second + second};
        }
        *(Pair*)to = pair;
      } else {
        to[0] = OUT == Out::F32Add ? to[0] + first : first;
        if (count > 1) to[1] = OUT == Out::F32Add ? to[1] + second : second;
      }
    }
  }

  // Grid: tiles of rows, tiles of columns. `depth` is a multiple of 8, `columns` is even for bf16. `bias` may be missing.
  template <Out OUT>
  static DEV void run(const u16* x, const u16* w, const float* bias, void* out, u32 rows, u32 columns, u32 depth) {
    SHARED_MEMORY(shared);
    const u32 row0 = blockIdx.x * ROWS, column0 = blockIdx.y * COLUMNS, steps = (depth + DEPTH - 1) / DEPTH;
    const auto load = [&](u32 step) {
      u8* stage = shared + step % STAGES * STAGE_BYTES;
      load_rows<ROWS>(stage, x, row0, rows, step * DEPTH, depth);
      load_rows<COLUMNS>(stage + ROWS * ROW_BYTES, w, column0, columns, step * DEPTH, depth);
    };
    float sums[DOWN][ACROSS][4];
#pragma unroll
    for (int i = 0; i < DOWN; i++)
#pragma unroll
      for (int j = 0; j < ACROSS; j++)
#pragma unroll
        for (int k = 0; k < 4; k++) sums[i][j][k] = 0.f;
    for (u32 step = 0; step < STAGES - 1; step++) {
      if (step < steps) load(step);
      commit_copies();
    }
    for (u32 step = 0; step < steps; step++) {
      // This thread's copies of the stage are there; behind the barrier everybody's are, and nobody reads the stage before,
      // which is filled anew.
      wait_for_copies<STAGES - 2>();
      sync_block();
      if (step + STAGES - 1 < steps) load(step + STAGES - 1);
      commit_copies();
      const u8* stage = shared + step % STAGES * STAGE_BYTES;
      multiply_stage(sums, stage, stage + ROWS * ROW_BYTES);
    }
    const u32 down = row0 + warp_id() / WARPS_ACROSS * WARP_ROWS + lane_id() / 4;
    const u32 across = column0 + warp_id() % WARPS_ACROSS * WARP_COLUMNS + lane_id() % 4 * 2;
#pragma unroll
    for (int j = 0; j < ACROSS; j++) {
      const u32 column = across + j * 8;
      if (column >= columns) continue;
      const u32 count = smaller(columns - column, 2);
      const float bias0 = bias ? bias[column] : 0.f, bias1 = bias && count > 1 ? bias[column + 1] : 0.f;
#pragma unroll
      for (int i = 0; i < DOWN; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const u32 row = down + i * 16 + half * 8;
          const float first = sums[i][j][half * 2] + bias0, second = sums[i][j][half * 2 + 1] + bias1;
          if (row < rows) store<OUT>(out, (u64)row * columns + column, first, second, count, columns % 2 == 0);
        }
      }
    }
  }
};
