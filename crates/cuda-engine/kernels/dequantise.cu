// Owns the way of quantised weights to bf16 at load: the f32 value that crates/model-files/src/gguf/dequantise.rs defines,
// then rounded to nearest even. K-quants, Q5_1 and BF16 come from the host as bf16.
#include "primitives.cuh"

// Neither a product nor a sum is fused: the host's arithmetic has two roundings.
DEV float scaled(float d, float quant) { return __fmul_rn(d, quant); }
DEV float scaled_plus(float d, float quant, float minimum) { return __fadd_rn(__fmul_rn(d, quant), minimum); }

// Quantised blocks have 32 values and an even number of bytes, so halves are aligned and words are not.
DEV float half_at(const u8* bytes) { return from_f16(*(const u16*)bytes); }
DEV u32 word_at(const u8* bytes) { return *(const u16*)bytes | (u32)*(const u16*)(bytes + 2) << 16; }

// 16 threads for each block of 32 values: thread i has byte i of the nibbles, values i and i + 16.
struct Half {
  u64 block;
  u32 i;
  bool is_real;
  DEV explicit Half(u64 blocks) {
    const u64 thread = (u64)blockIdx.x * 256 + threadIdx.x;
    block = thread / 16;
    i = thread % 16;
    is_real = block < blocks;
  }
  DEV void store(u16* out, float low, float high) const {
    out[block * 32 + i] = to_bf16(low);
    out[block * 32 + 16 + i] = to_bf16(high);
  }
};

// f16 scale, 16 bytes of nibbles.
KERNEL __launch_bounds__(256) dequantise_q4_0(const u8* in, u16* out, u64 blocks) {
  const Half half(blocks);
  if (!half.is_real) return;
  const u8* block = in + half.block * 18;
  const float d = half_at(block);
  const u32 byte = block[2 + half.i];
  half.store(out, scaled(d, (float)(byte & 15) - 8.f), scaled(d, (float)(byte >> 4) - 8.f));
}

// f16 scale, f16 minimum, 16 bytes of nibbles.
KERNEL __launch_bounds__(256) dequantise_q4_1(const u8* in, u16* out, u64 blocks) {
  const Half half(blocks);
  if (!half.is_real) return;
  const u8* block = in + half.block * 20;
  const float d = half_at(block), minimum = half_at(block + 2);
  const u32 byte = block[4 + half.i];
  half.store(out, scaled_plus(d, (float)(byte & 15), minimum), scaled_plus(d, (float)(byte >> 4), minimum));
}

// f16 scale, a word with the fifth bits, 16 bytes of nibbles.
KERNEL __launch_bounds__(256) dequantise_q5_0(const u8* in, u16* out, u64 blocks) {
  const Half half(blocks);
  if (!half.is_real) return;
  const u8* block = in + half.block * 22;
  const float d = half_at(block);
  const u32 fifths = word_at(block + 2), byte = block[6 + half.i];
  const u32 low = (byte & 15) | (fifths >> half.i & 1) << 4;
  const u32 high = byte >> 4 | (fifths >> (half.i + 16) & 1) << 4;
  half.store(out, scaled(d, (float)low - 16.f), scaled(d, (float)high - 16.f));
}

// f16 scale, 32 signed bytes.
KERNEL __launch_bounds__(256) dequantise_q8_0(const u8* in, u16* out, u64 blocks) {
  const Half half(blocks);
  if (!half.is_real) return;
  const u8* block = in + half.block * 34;
  const float d = half_at(block);
  const signed char low = (signed char)block[2 + half.i], high = (signed char)block[18 + half.i];
  half.store(out, scaled(d, (float)low), scaled(d, (float)high));
}

KERNEL __launch_bounds__(256) dequantise_f16(const u16* in, u16* out, u64 values) {
  const u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
  if (at < values) out[at] = to_bf16(from_f16(in[at]));
}

KERNEL __launch_bounds__(256) dequantise_f32(const float* in, u16* out, u64 values) {
  const u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
  if (at < values) out[at] = to_bf16(in[at]);
}
