// Owns the matrix product for few rows (decode): tiles of 16 rows and 32 columns, so that a step of one row still keeps every
// multiprocessor busy with reading weights. It is no other method than gemm.cu: the same sums in the same order
// (gemm_tile.cuh), so a row has the same bits by either.
#include "gemm_tile.cuh"

using Tile = GemmTile<16, 32, 1>;

KERNEL __launch_bounds__(GEMM_THREADS) gemv_bf16(const u16* x, const u16* w, const float* bias, u16* out, u32 rows,
                                                 u32 columns, u32 depth) {
  Tile::run<Out::Bf16>(x, w, bias, out, rows, columns, depth);
}
KERNEL __launch_bounds__(GEMM_THREADS) gemv_f32(const u16* x, const u16* w, const float* bias, float* out, u32 rows,
                                                u32 columns, u32 depth) {
  Tile::run<Out::F32>(x, w, bias, out, rows, columns, depth);
}
// out += the product: the residual stream.
KERNEL __launch_bounds__(GEMM_THREADS) gemv_f32_add(const u16* x, const u16* w, const float* bias, float* out, u32 rows,
                                                    u32 columns, u32 depth) {
  Tile::run<Out::F32Add>(x, w, bias, out, rows, columns, depth);
}
