// The three inner loops, written once over an instruction set `Isa`: products of rows with transposed keys, the
// online softmax, and weights times values. Up to 6 (row, head) pairs at a time, all sums in registers.
// Like tile.hpp: included between a source file's pragmas, all of it in an anonymous namespace.
#pragma once

#include "attention_math.hpp"

namespace longgraft::attention {
namespace {

template <Dtype dtype>
constexpr int kBytes = dtype == Dtype::f32 ? 4 : 2;

template <int kCount>
struct Registers {
  static constexpr int count = kCount;
};

constexpr float kNever = -__builtin_inff();

// Alone, so that the sums stay in registers whatever surrounds the call.
#ifdef __GNUC__
#define LONGGRAFT_ALONE __attribute__((noinline))
#define LONGGRAFT_INSIDE __attribute__((always_inline)) inline
#else
#define LONGGRAFT_ALONE
#define LONGGRAFT_INSIDE inline
#endif

// Rows to fetch while something else is computed: what comes next, spread evenly over `steps` steps.
struct Ahead {
  const char* const* at;
  int rows, lines;

  Ahead part(std::int64_t first, std::int64_t last) const { return {at + first, int(last - first), lines}; }
  // The share of step `index` of `steps`.
  Ahead share(std::int64_t index, std::int64_t steps) const {
    return part(rows * index / steps, rows * (index + 1) / steps);
  }
  LONGGRAFT_INSIDE void fetch(int row) const {
    const char* line = at[row];
    for (int i = 0; i < lines; ++i, line += 64) __builtin_prefetch(line, 0, 2);
  }
  void fetch_all() const {
    for (int row = 0; row < rows; ++row) fetch(row);
  }
};

// Walks the rows of an Ahead: at most one row per step, all of them in `steps` steps.
struct Pace {
  const Ahead& ahead;
  int steps, row = 0, due = 0;

  Pace(const Ahead& rows, int count) : ahead(rows), steps(count) {}
  LONGGRAFT_INSIDE void step() {
    due += ahead.rows;
    if (due >= steps) {
      due -= steps;
      ahead.fetch(row++);
    }
  }
};

// to[r, 16 kCount] = logits of kRows rows q[r, size] against so many of 64 keys, `keys` [size, 64].
template <class Isa, int kRows, int kCount>
LONGGRAFT_ALONE void tile_logits(const float* q, std::int64_t size, const float* keys, float* to, std::int64_t stride,
                                 const Score<Isa>& score, const Ahead& ahead) {
  using Vec = typename Isa::Vec;
  const std::int64_t step = size > kBlockKeys ? size / kBlockKeys : 1;
  Pace pace(ahead, int(ceil_div(size, step)));
  Vec sum[kRows][kCount];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) sum[r][i] = Isa::all(0.0f);
  for (std::int64_t d = 0; d < size;) {
    pace.step();
    for (const std::int64_t end = d + step < size ? d + step : size; d < end; ++d, keys += kBlockKeys) {
      Vec key[kCount];
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) key[i] = Isa::load(keys + i * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec left = Isa::all(q[r * size + d]);
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) sum[r][i] = Isa::fma(left, key[i], sum[r][i]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) Isa::store(to + r * stride + i * kLanes, score(sum[r][i]));
}

// Turn `rows` x 64 logits into weights, in place, and carry `top` and `mass` over; `scale`: what sums so far shrink by.
template <class Isa>
inline void tile_weights(int rows, float* logits, float* top, float* mass, float* scale) {
  using Vec = typename Isa::Vec;
  for (int r = 0; r < rows; ++r, logits += kBlockKeys) {
    Vec x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) x[i] = Isa::load(logits + i * kLanes);
    const float before = top[r], most = Isa::top(Isa::max(Isa::max(x[0], x[1]), Isa::max(x[2], x[3])));
    const float now = most > before ? most : before;
    const Vec peak = Isa::all(now);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      x[i] = exp2<Isa>(Isa::sub(x[i], peak));
      Isa::store(logits + i * kLanes, x[i]);
    }
    const float sum = Isa::total(Isa::add(Isa::add(x[0], x[1]), Isa::add(x[2], x[3])));
    top[r] = now;
    scale[r] = Isa::first(exp2<Isa>(Isa::all(before - now)));
    mass[r] = __builtin_fmaf(mass[r], scale[r], sum);
  }
}

// sum[r, vec ..] = sum * scale[r] + weights[r, j] * value j, for `count` values in order.
template <class Isa, int kRows, int kCount, Dtype dtype>
LONGGRAFT_ALONE void tile_values(const float* weights, const char* const* values, int count, std::int64_t vec,
                                 float* sum, std::int64_t stride, const float* scale, const Ahead& ahead) {
  using Vec = typename Isa::Vec;
  Vec total[kRows][kCount];
  Pace pace(ahead, count);
  sum += vec * kLanes;
  // `vec` is even but for a register alone.
  const std::int64_t offset = kCount == 1 ? 0 : vec * (kLanes * kBytes<dtype>);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i)
      total[r][i] = Isa::mul(Isa::load(sum + r * stride + i * kLanes), Isa::all(scale[r]));
  for (int j = 0; j < count; ++j) {
    Vec value[kCount];
    const char* row = values[j] + offset;
    pace.step();
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) value[i] = Isa::template value<dtype>(row, (kCount == 1 ? vec : 0) + i);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = Isa::all(weights[r * kBlockKeys + j]);
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) total[r][i] = Isa::fma(weight, value[i], total[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) Isa::store(sum + r * stride + i * kLanes, total[r][i]);
}

// The same for a number of rows known at run time only.
template <class Isa, int kCount>
inline void logits(int rows, const float* q, std::int64_t size, const float* keys, float* to, std::int64_t stride,
                   const Score<Isa>& score, const Ahead& ahead) {
  switch (rows) {
    case 1: return tile_logits<Isa, 1, kCount>(q, size, keys, to, stride, score, ahead);
    case 2: return tile_logits<Isa, 2, kCount>(q, size, keys, to, stride, score, ahead);
    case 3: return tile_logits<Isa, 3, kCount>(q, size, keys, to, stride, score, ahead);
    case 4: return tile_logits<Isa, 4, kCount>(q, size, keys, to, stride, score, ahead);
    case 5: return tile_logits<Isa, 5, kCount>(q, size, keys, to, stride, score, ahead);
    default: return tile_logits<Isa, 6, kCount>(q, size, keys, to, stride, score, ahead);
  }
}

template <class Isa, int kCount, Dtype dtype>
inline void values(int rows, const float* weights, const char* const* from, int count, std::int64_t vec, float* sum,
                   std::int64_t stride, const float* scale, const Ahead& ahead) {
  switch (rows) {
    case 1: return tile_values<Isa, 1, kCount, dtype>(weights, from, count, vec, sum, stride, scale, ahead);
    case 2: return tile_values<Isa, 2, kCount, dtype>(weights, from, count, vec, sum, stride, scale, ahead);
    case 3: return tile_values<Isa, 3, kCount, dtype>(weights, from, count, vec, sum, stride, scale, ahead);
    case 4: return tile_values<Isa, 4, kCount, dtype>(weights, from, count, vec, sum, stride, scale, ahead);
    case 5: return tile_values<Isa, 5, kCount, dtype>(weights, from, count, vec, sum, stride, scale, ahead);
    default: return tile_values<Isa, 6, kCount, dtype>(weights, from, count, vec, sum, stride, scale, ahead);
  }
}

// Call function(registers, first) for `count` registers, as many at a time as the instruction set has room for.
template <class Isa, class Function>
inline void by_registers(std::int64_t count, const Function& function) {
  std::int64_t first = 0;
  if constexpr (Isa::kVecs == 4) {
    for (; count - first >= 4; first += 4) function(Registers<4>{}, first);
    if (count - first == 3) return function(Registers<3>{}, first);
    if (count - first == 2) return function(Registers<2>{}, first);
  }
  for (; first < count; ++first) function(Registers<1>{}, first);
}

}  // namespace
}  // namespace longgraft::attention
