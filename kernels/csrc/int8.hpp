// Linear layers with 8-bit weights: the problem, its arithmetic and the layout of its weights, fixed once.
// Knows no instruction set, no thread and no Python.
//
// y = x * weight^T + bias, where weight[n, k] = (values[n, k] - 128) * scales[n] and values are in [1, 255].
// A row of x is made whole by itself, in groups of 128 inputs: with top a group's largest magnitude, q[k] = x[k] *
// (127 / top) rounded to nearest even, the group's scale is top / 127. Within a group products are summed in 32 bits,
// exactly, so their order is free; then, every step rounded to fp32,
//     total = total + float(sum of the group) * scale of the group,  one group after the other, from 0
//     y = total * scales[n] (+ bias[n]),  rounded to the dtype of y.
// So a row's bits are a function of that row and the weights, nothing else. Groups, because some inputs of language
// models are hundreds of times larger than the others, which one scale for all would round away.
//   * A group whose top is below 2^-100 counts as zeros.
//   * A row with an infinity or a NaN gives NaN everywhere; other rows do not notice.
//
// Layout: panels of 64 outputs, in each steps of 4 inputs: values[panel, step, output, input], 256 bytes a step, read
// in one stream. Outputs are filled up to whole panels and inputs to whole steps with 128.
#pragma once

#include "order.hpp"

namespace longgraft::int8 {

constexpr int kColumns = 64;  // outputs per panel
constexpr int kInputs = 4;    // inputs per step
constexpr int kStepBytes = kColumns * kInputs;
constexpr std::int64_t kGroup = 128;  // inputs that share a scale
constexpr std::int64_t kGroupSteps = kGroup / kInputs;
constexpr int kOffset = 128;
constexpr float kLeastTop = 0x1p-100f;

// x [rows, in] and y [rows, out] of `dtype`, contiguous; `scales` cover whole panels; `bias` [out] may be null; in and
// out are at least 1.
struct Linear {
  const void* x;
  const std::uint8_t* values;
  const float* scales;
  const float* bias;
  void* y;
  std::int64_t rows, in, out;
  Dtype dtype;

  std::int64_t steps() const { return ceil_div(in, kInputs); }
  std::int64_t groups() const { return ceil_div(in, kGroup); }
  std::int64_t panels() const { return ceil_div(out, kColumns); }
  const std::uint8_t* panel(std::int64_t index) const { return values + index * steps() * kStepBytes; }
};

// Compute `linear` with kernel `name` ("vnni", "avx512", "avx2", "plain") on at most `threads` threads.
// False: there is no such kernel here. Throws std::bad_alloc. Scratch: 2 bytes per element of x (of 512 rows).
bool compute(const char* name, const Linear& linear, int threads);

// Say whether this build and processor have the kernel.
bool has_kernel(const char* name);

}  // namespace longgraft::int8
