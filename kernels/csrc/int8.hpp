// Linear layers with 8-bit weights: the problem, its arithmetic and the layout of its weights, fixed once.
// Knows no instruction set, no thread and no Python.
//
// y = x * weight^T + bias, where weight[n, k] = values[n, k] * scales[n] and values are whole numbers in [-127, 127].
// A row of x is made whole by itself: with top its largest magnitude, q[k] = x[k] * (127 / top) rounded to nearest
// even, its scale top / 127. The products are summed in 32 bits, exactly, so their order is free; the sum becomes
//     (float(sum) * scales[n]) * row scale  (+ bias[n]), every step rounded to fp32, then to the dtype of y.
// So a row's bits are a function of that row and the weights, nothing else.
//   * A row whose top is below 2^-100 counts as zeros: no dtype's precision reaches it beside anything else.
//   * A row with an infinity or a NaN gives NaN everywhere; other rows do not notice.
//
// Layout: panels of 64 outputs, in each steps of 4 inputs: values[panel, step, output, input], 256 bytes a step, read
// in one stream. Outputs are filled up to whole panels and inputs to whole steps with zeros.
#pragma once

#include "order.hpp"

namespace longgraft::int8 {

constexpr int kColumns = 64;  // outputs per panel
constexpr int kInputs = 4;    // inputs per step
constexpr int kStepBytes = kColumns * kInputs;
constexpr std::int64_t kMostInputs = 131072;  // 127 * 127 * so many is less than 2^31
constexpr float kLeastTop = 0x1p-100f;

// x [rows, in] and y [rows, out] of `dtype`, contiguous; scales and sums (of a weight row's values) cover whole
// panels; `bias` [out] may be null. 0 < in <= kMostInputs, 0 < out.
struct Linear {
  const void* x;
  const std::int8_t* values;
  const float* scales;
  const std::int32_t* sums;
  const float* bias;
  void* y;
  std::int64_t rows, in, out;
  Dtype dtype;

  std::int64_t steps() const { return ceil_div(in, kInputs); }
  std::int64_t panels() const { return ceil_div(out, kColumns); }
  const std::int8_t* panel(std::int64_t index) const { return values + index * steps() * kStepBytes; }
};

// Compute `linear` with kernel `name` ("vnni", "avx512", "avx2", "plain") on at most `threads` threads.
// False: there is no such kernel here. Throws std::bad_alloc. Scratch: 2 bytes per element of x (of 512 rows).
bool compute(const char* name, const Linear& linear, int threads);

// Say whether this build and processor have the kernel.
bool has_kernel(const char* name);

}  // namespace longgraft::int8
