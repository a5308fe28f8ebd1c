// Linear layers with packed weights: the problem, and what weights of 8 and of 4 bits have in common, fixed once.
// Knows no instruction set, no thread and no Python. int8.hpp and int4.hpp say what their weights stand for.
//
// y = x * weight^T + bias. A row of x is made whole by itself, in groups of 128 inputs: with top a group's largest
// magnitude, q[k] = x[k] * (127 / top) rounded to nearest even, the group's scale is top / 127. Within a group (8 bits)
// or a quarter of it (4 bits) products of whole numbers are summed in 32 bits, exactly, so their order is free; what
// becomes of these sums has one order, every step rounded to fp32. So a row's bits are a function of that row and the
// weights, nothing else. Groups, because some inputs of language models are hundreds of times larger than the others,
// which one scale for all would round away.
//   * A group whose top is below 2^-100 counts as zeros.
//   * A row with an infinity or a NaN gives NaN everywhere; other rows do not notice.
//
// Weights lie in panels of 64 outputs, each a stream of blocks of some inputs; outputs are filled up to whole panels,
// inputs to whole blocks. Both widths read them in steps of 64 outputs by 4 inputs.
#pragma once

#include "order.hpp"

namespace longgraft::packed {

constexpr int kColumns = 64;  // outputs per panel
constexpr int kInputs = 4;    // inputs per step
constexpr int kStepValues = kColumns * kInputs;
constexpr std::int64_t kGroup = 128;  // inputs that share a scale
constexpr float kLeastTop = 0x1p-100f;

// x [rows, in] and y [rows, out] of `dtype`, contiguous; `scales` of 8-bit weights cover whole panels, 4-bit weights
// have theirs among the values and null here; `bias` [out] may be null; in and out are at least 1.
struct Linear {
  const void* x;
  const std::uint8_t* values;
  const float* scales;
  const float* bias;
  void* y;
  std::int64_t rows, in, out;
  Dtype dtype;

  std::int64_t groups() const { return ceil_div(in, kGroup); }
  std::int64_t panels() const { return ceil_div(out, kColumns); }
};

// Compute `linear`, whose weights have 8 or 4 `bits`, with kernel `name` ("vnni", "avx512", "avx2", "plain") on at most
// `threads` threads. False: there is no such kernel here. Throws std::bad_alloc. Scratch: 2 bytes per element of x (of
// 512 rows).
bool compute(int bits, const char* name, const Linear& linear, int threads);

// Say whether this build and processor have the kernel.
bool has_kernel(const char* name);

}  // namespace longgraft::packed
