// 8-bit weights: their arithmetic and layout, fixed once. packed.hpp says what comes before.
//
// weight[n, k] = (values[n, k] - 128) * scales[n], and values are in [1, 255]. For a row of x, every step rounded,
//     total = total + float(sum of the group) * scale of the group,  one group after the other, from 0
//     y = total * scales[n] (+ bias[n]),  rounded to the dtype of y.
//
// Layout: blocks are steps of 4 inputs: values[panel, step, output, input], 256 bytes a step. Filled up with 128.
#pragma once

#include "packed_kernel.hpp"

namespace longgraft::int8 {

constexpr std::int32_t kOffset = 128;
// Each group of a row has a sum: what its products start with, so that the values' offset is taken off.
constexpr packed::Layout kLayout{packed::kInputs, packed::kStepValues, packed::kGroup};

extern const packed::Kernel plain_kernel;
extern const packed::Kernel avx2_kernel;
extern const packed::Kernel avx512_kernel;
extern const packed::Kernel vnni_kernel;

}  // namespace longgraft::int8
