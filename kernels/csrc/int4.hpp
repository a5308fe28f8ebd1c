// 4-bit weights: their arithmetic and layout, fixed once. packed.hpp says what comes before.
//
// weight[n, k] = d[n, b] * q[n, k] + m[n, b], where b = k / 32 is a block of 32 inputs, q is in [0, 15] and d and m are
// bfloat16. For a group of 128 inputs of a row of x, every step rounded to fp32, with x its whole numbers,
//     part = part + float(sum of q * x) * d;  part = part + float(sum of x) * m,  one block after the other, from 0
//     total = total + part * scale of the group,  one group after the other, from 0
//     y = total (+ bias[n]),  rounded to the dtype of y.
// Sums of a block are at most 32 * 15 * 127 < 2^16, so that their products with 8 bits of d or m are exact: here a fused
// multiply-add gives the bits of a product and a sum. (No overflow: magnitudes of weights are below 2^100.) The product
// with a scale is not exact; it is rounded, then added.
//
// Layout: blocks of 32 inputs and 1,280 bytes. First q, two steps of 4 inputs in each 256 bytes: byte [pair, output,
// input] holds the earlier step in its low half and the later one in its high half. Then 64 d, then 64 m. Outputs are
// filled up with d = m = 0; what fills up inputs meets zeros of x.
#pragma once

#include "packed_kernel.hpp"

namespace longgraft::int4 {

constexpr std::int64_t kBlock = 32;  // inputs that share d and m
constexpr int kPairs = int(kBlock) / (2 * packed::kInputs);
constexpr int kHalves = kPairs * packed::kStepValues;  // bytes of q in a block
constexpr int kFactors = packed::kColumns * 2;         // bytes of d, and of m
// Each block of a row has a sum: that of its whole numbers.
constexpr packed::Layout kLayout{kBlock, kHalves + 2 * kFactors, kBlock};

extern const packed::Kernel plain_kernel;
extern const packed::Kernel avx2_kernel;
extern const packed::Kernel avx512_kernel;
extern const packed::Kernel vnni_kernel;

}  // namespace longgraft::int4
