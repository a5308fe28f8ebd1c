// Packs weights in 4 bits: which d and m each block gets, fixed once. int4.hpp says what they mean.
//
// For a block of 32 values, every step rounded to fp32: with `span` from the least to the greatest, each of some tries
// has d = span * its factor and m = least + span * its offset, both then rounded to bfloat16. Its error is the root of
// the sum of squares of round(clamp(w * (1 / d) - m * (1 / d), 0, 15)) less the same unrounded, times d; the least error
// is kept, of equal ones the first. Then `lines` times the straight line of least squares through the values over
// their q, by its slope and height, is one more try. 32 numbers are added as a tree: i + 16, i + 8, i + 4, i + 2, i + 1.
// At last q = round(clamp((w - m) / d, 0, 15)), or 0 where an input is filled up.
#pragma once

#include <cstdint>

namespace longgraft::int4 {

struct Try {
  float factor, offset;
};

// weight [64 * panels, 32 * blocks] of finite values; `values` [panels, blocks, 1280] is written.
struct Packing {
  const float* weight;
  std::int64_t panels, blocks, inputs;
  const Try* tries;
  std::int64_t count;
  int lines;
  std::uint8_t* values;
};

// Pack on at most `threads` threads.
void pack(const Packing& packing, int threads);

}  // namespace longgraft::int4
