// Owns the draw of tokens from rows of logits, with the bits of the host's definition (crates/engine/src/sample/mod.rs).
//
// That definition needs nothing that a device cannot repeat: its `exp` is written out in f32 operations without fusing
// (crates/engine/src/math.rs), and weights are integers, whose sums no order can change. Log-probabilities are not made here:
// rows that ask for them go to the host.
//
// The host sorts; here nothing is sorted. "The token at which the summed weights pass a target, best first" is found digit by
// digit of the logit's bits: sixteen sums for each of eight digits. Tokens of equal logits have equal weights, so a division
// tells which of them it is, lowest id first.
#include "primitives.cuh"

constexpr u32 WARPS = 16, THREADS = WARPS * 32;
constexpr u32 DIGIT_BITS = 4, DIGITS = 1 << DIGIT_BITS;
constexpr u32 KEY_BITS = 32, ID_BITS = 24;  // A vocabulary has at most 2^23 tokens.
constexpr u32 LAST_ID = (1u << ID_BITS) - 1;
constexpr float BEST_WEIGHT = 1099511627776.f;  // 2^40, of the most likely token.
constexpr u32 USABLE = 0xffffffffu;             // A row status that is no token.

// What one logits row is changed by before a draw. Tokens of its edits are distinct.
struct Adjustment {
  u32 first_edit, edits;
  float repetition, frequency, presence;
};
struct Edit {
  u32 token;
  float bias;
  u32 flags, outputs;  // `outputs`: times that the token is among the outputs.
};
constexpr u32 HAS_BIAS = 1, IS_MASKED = 2, IS_REPEATED = 4;

struct Draw {
  u64 seed;
  u32 choice, output_index, logits_row, top_k;  // top_k 0: all.
  float temperature, top_p, min_p;
};
struct Drawn {
  u32 token, status;
};
constexpr u32 DRAWN = 0, NOT_FINITE = 1, NOTHING_LEFT = 2;

struct Scratch {
  u64 bins[DIGITS * THREADS];  // [digit][thread]: each thread adds to its own column, so no atomics are needed.
  u64 totals[DIGITS];
  u64 partial[WARPS];
};

struct Sum {
  DEV u64 operator()(u64 a, u64 b) const { return a + b; }
};
struct Largest {
  DEV u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};
template <class Join> DEV u64 reduce(u64 value, u64* partial, Join join) {
  for (int mask = 16; mask > 0; mask /= 2) value = join(value, shuffle_xor(value, mask));
  sync_block();  // A thread may still read an earlier result.
  if (lane_id() == 0) partial[warp_id()] = value;
  sync_block();
  u64 result = partial[0];
  for (u32 warp = 1; warp < WARPS; warp++) result = join(result, partial[warp]);
  return result;
}
// The sum of `weight_of(id)` over a row.
template <class Weight> DEV u64 sum_of_row(u32 vocab, u64* partial, Weight weight_of) {
  u64 sum = 0;
  for (u32 id = threadIdx.x; id < vocab; id += THREADS) sum += weight_of(id);
  return reduce(sum, partial, Sum());
}

// Where the sum over falling keys passes a target, and what of the target is left within that key.
struct Found {
  u32 key;
  u64 left;
};
template <u32 BITS, class Key, class Weight>
DEV Found descend(u32 vocab, u64 target, Scratch& scratch, Key key_of, Weight weight_of) {
  Found found = {0, target};
  for (u32 shift = BITS; shift > 0;) {
    shift -= DIGIT_BITS;
    for (u32 digit = 0; digit < DIGITS; digit++) scratch.bins[digit * THREADS + threadIdx.x] = 0;
    for (u32 id = threadIdx.x; id < vocab; id += THREADS) {
      const u32 key = key_of(id) >> shift;
      // The first digit has nothing before it.
      if (key >> DIGIT_BITS == found.key) scratch.bins[key % DIGITS * THREADS + threadIdx.x] += weight_of(id);
    }
    sync_block();
    // A warp adds up one digit.
    u64 sum = 0;
    for (u32 i = lane_id(); i < THREADS; i += 32) sum += scratch.bins[warp_id() * THREADS + i];
    for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    if (lane_id() == 0) scratch.totals[warp_id()] = sum;
    sync_block();
    u32 digit = DIGITS - 1;
    for (; digit > 0 && found.left >= scratch.totals[digit]; digit--) found.left -= scratch.totals[digit];
    found.key = found.key << DIGIT_BITS | digit;
  }
  return found;
}
static_assert(WARPS == DIGITS, "a warp adds up one digit");

// Rises with the logit; the two zeros are equal.
DEV u32 key_of_logit(float logit) {
  const u32 bits = __float_as_uint(logit);
  return bits == 0x80000000u ? bits : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEV float logit_of_key(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// `exp` of crates/engine/src/math.rs, operation by operation.
DEV float exact_exp(float x) {
  const float round = 12582912.f;
  const float below = x > 88.f ? 88.f : x, clamped = below < -87.f ? -87.f : below;
  const float shifted = __fadd_rn(__fmul_rn(clamped, LOG2_E), round);
  const float n = __fsub_rn(shifted, round);
  const float r = __fsub_rn(__fsub_rn(clamped, __fmul_rn(n, 355.f / 512.f)), __fmul_rn(n, -2.1219444e-4f));
  float p = 1.f / 720.f;
  p = __fadd_rn(__fmul_rn(p, r), 1.f / 120.f);
  p = __fadd_rn(__fmul_rn(p, r), 1.f / 24.f);
  p = __fadd_rn(__fmul_rn(p, r), 1.f / 6.f);
  p = __fadd_rn(__fmul_rn(p, r), 0.5f);
  const float y = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), r), 1.f);
  const float scale = __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);
  return x < -87.f ? 0.f : __fmul_rn(y, scale);
}

struct Weigh {
  float best, temperature;
  u64 bar;  // Of min-p: what weighs less has no weight at all.
  DEV u64 weight(float logit) const {
    const u64 w = (u64)__fmul_rn(exact_exp(__fdiv_rn(__fsub_rn(logit, best), temperature)), BEST_WEIGHT);
    return w >= bar ? w : 0;
  }
};
DEV u64 min_p_bar(float min_p) {
  const float p = min_p < 0.f ? 0.f : min_p > 1.f ? 1.f : min_p;
  return (u64)((double)p * 1099511627776.0);
}
DEV u64 probability_bar(float top_p, u64 total) {
  const u64 bar = (u64)__dmul_rn((double)(top_p < 0.f ? 0.f : top_p), (double)total);
  return bar < 1 ? 1 : bar > total ? total : bar;
}

// Philox4x32-10 under a key made of seed and choice (crates/engine/src/sample/philox.rs).
DEV u64 random_bits(u64 seed, u32 choice, u32 output_index) {
  u64 z = seed + ((u64)choice + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  u32 c0 = output_index, c1 = 0, c2 = 0, c3 = 0, k0 = (u32)z, k1 = (u32)(z >> 32);
  for (int round = 0; round < 10; round++) {
    const u64 a = (u64)c0 * 0xd2511f53u, b = (u64)c2 * 0xcd9e8d57u;
    c0 = (u32)(b >> 32) ^ c1 ^ k0;
    c1 = (u32)b;
    c2 = (u32)(a >> 32) ^ c3 ^ k1;
    c3 = (u32)a;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return (u64)c1 << 32 | c0;
}

// Bias, mask, repetition, frequency and presence, in this order.
DEV float edited(float logit, const Edit& edit, const Adjustment& by) {
  if (edit.flags & HAS_BIAS) logit = __fadd_rn(logit, edit.bias);
  if (edit.flags & IS_MASKED) logit = __uint_as_float(0xff800000u);
  if (edit.flags & IS_REPEATED) logit = logit > 0.f ? __fdiv_rn(logit, by.repetition) : __fmul_rn(logit, by.repetition);
  if (edit.outputs > 0 && (by.frequency != 0.f || by.presence != 0.f))
    logit = __fsub_rn(logit, __fadd_rn(__fmul_rn(by.frequency, (float)edit.outputs), by.presence));
  return logit;
}

// Grid: rows of logits. status[row] becomes the first token without a usable logit, or USABLE; then the row is changed.
KERNEL __launch_bounds__(THREADS) prepare_logits(float* logits, const Adjustment* adjustments, const Edit* edits, u32* status,
                                                 u32 vocab) {
  SHARED_MEMORY(shared);
  float* row = logits + (u64)blockIdx.x * vocab;
  u64 last = 0;  // USABLE - token, so that the largest is the first token.
  for (u32 id = threadIdx.x; id < vocab; id += THREADS) {
    // No comparison holds for NaN.
    if (!(row[id] < __uint_as_float(0x7f800000u))) last = Largest()(last, USABLE - id);
  }
  last = reduce(last, (u64*)shared, Largest());
  if (threadIdx.x == 0) status[blockIdx.x] = USABLE - (u32)last;
  const Adjustment by = adjustments[blockIdx.x];
  for (u32 i = threadIdx.x; i < by.edits; i += THREADS) {
    const Edit edit = edits[by.first_edit + i];
    if (edit.token < vocab) row[edit.token] = edited(row[edit.token], edit, by);
  }
}

// The token that the random bits choose among all that may be drawn.
DEV u32 choose(const float* row, u32 vocab, const Draw& draw, const Weigh& weigh, Scratch& scratch) {
  const u64 random = random_bits(draw.seed, draw.choice, draw.output_index);
  const auto key = [&](u32 id) { return key_of_logit(row[id]); };
  const auto weight = [&](u32 id) { return weigh.weight(row[id]); };
  const auto id_key = [&](u32 id) { return LAST_ID - id; };
  const bool has_top_k = draw.top_k != 0 && draw.top_k < vocab, has_top_p = draw.top_p < 1.f;
  if (!has_top_k && !has_top_p) {
    // The host walks this case in the order of ids.
    const u64 total = sum_of_row(vocab, scratch.partial, weight);
    return LAST_ID - descend<ID_BITS>(vocab, __umul64hi(random, total), scratch, id_key, weight).key;
  }
  // Tokens above the limit are in, and `ties` tokens at it.
  u32 limit = 0;
  u64 ties = 0;
  const auto above = [&](u32 id) { return key_of_logit(row[id]) > limit ? weigh.weight(row[id]) : 0; };
  if (has_top_k) {
    const Found found = descend<KEY_BITS>(vocab, draw.top_k - 1, scratch, key, [](u32) { return (u64)1; });
    limit = found.key;
    ties = found.left + 1;
  }
  if (has_top_p) {
    u64 total = sum_of_row(vocab, scratch.partial, above);
    if (has_top_k) total += ties * weigh.weight(logit_of_key(limit));
    const Found found = descend<KEY_BITS>(vocab, probability_bar(draw.top_p, total) - 1, scratch, key, weight);
    limit = found.key;
    ties = found.left / weigh.weight(logit_of_key(limit)) + 1;
  }
  const u64 total = sum_of_row(vocab, scratch.partial, above) + ties * weigh.weight(logit_of_key(limit));
  // The target is below the total, so the walk ends before the limit does.
  const Found found = descend<KEY_BITS>(vocab, __umul64hi(random, total), scratch, key, weight);
  const u64 index = found.left / weigh.weight(logit_of_key(found.key));
  const auto is_tie = [&](u32 id) { return (u64)(key_of_logit(row[id]) == found.key); };
  return LAST_ID - descend<ID_BITS>(vocab, index, scratch, id_key, is_tie).key;
}

// Grid: draws. Several may look at one row of logits.
KERNEL __launch_bounds__(THREADS) draw_tokens(const float* logits, const u32* status, const Draw* draws, Drawn* drawn,
                                              u32 vocab) {
  SHARED_MEMORY(shared);
  Scratch& scratch = *(Scratch*)shared;
  const Draw draw = draws[blockIdx.x];
  const float* row = logits + (u64)draw.logits_row * vocab;
  const u32 row_status = status[draw.logits_row];
  Drawn result = {row_status, NOT_FINITE};
  if (row_status == USABLE) {
    // The largest logit; of equal ones the lowest id.
    u64 best = 0;
    for (u32 id = threadIdx.x; id < vocab; id += THREADS)
      best = Largest()(best, (u64)key_of_logit(row[id]) << 32 | (USABLE - id));
    const u32 best_id = USABLE - (u32)reduce(best, scratch.partial, Largest());
    const Weigh weigh = {row[best_id], draw.temperature, min_p_bar(draw.min_p)};
    result = {best_id, DRAWN};
    if (weigh.best == __uint_as_float(0xff800000u)) {
      result = {0, NOTHING_LEFT};
    } else if (draw.temperature > 0.f) {
      result.token = choose(row, vocab, draw, weigh, scratch);
    }
  }
  if (threadIdx.x == 0) drawn[blockIdx.x] = result;
}
