// Owns the matrix product for many rows: tiles of 64 rows and 128 columns. gemm_tile.cuh has the order of the sums.
#include "gemm_tile.cuh"

using Tile = GemmTile<64, 128, 2>;

KERNEL __launch_bounds__(GEMM_THREADS) gemm_bf16(const u16* x, const u16* w, const float* bias, u16* out, u32 rows,
                                                 u32 columns, u32 depth) {
  Tile::run<Out::Bf16>(x, w, bias, out, rows, columns, depth);
}
KERNEL __launch_bounds__(GEMM_THREADS) gemm_f32(const u16* x, const u16* w, const float* bias, float* out, u32 rows,
                                                u32 columns, u32 depth) {
  Tile::run<Out::F32>(x, w, bias, out, rows, columns, depth);
}
// out += the product: the residual stream.
KERNEL __launch_bounds__(GEMM_THREADS) gemm_f32_add(const u16* x, const u16* w, const float* bias, float* out, u32 rows,
                                                    u32 columns, u32 depth) {
  Tile::run<Out::F32Add>(x, w, bias, out, rows, columns, depth);
}
