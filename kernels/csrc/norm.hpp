// RMS norm, one row at a time. Knows no instruction set, no thread and no Python. A row's bits are a function of that row and the parameters, nothing else; every step is
// rounded to fp32, products and sums apart.
//
// Norm of a row x of n elements:
//   * squares: lane j of 64 adds x[j]^2, x[j + 64]^2, ... in order, from 0 (an incomplete block: its lanes only);
//   * lanes are added as a tree (i + 32, i + 16, ..., i + 1); inverse = 1 / sqrt(sum / n + eps);
//   * y = x * inverse; style `inner`: y rounded to the dtype, then times weight, rounded again;
//     `outer`: y * weight, rounded once; `shifted`: y * (1 + weight), rounded once.
#pragma once

#include "order.hpp"

namespace longgraft::rms {

enum class Style : int { inner = 0, outer = 1, shifted = 2 };

constexpr std::int64_t kBlockElements = 64;

// x, y [rows, size] contiguous, weight [size], all of `dtype`; size at least 1.
struct Norm {
  const void *x, *weight;
  void* y;
  std::int64_t rows, size;
  Dtype dtype;
  Style style;
  float eps;
};

struct Kernel {
  const char* name;
  void (*norm)(const Norm&, std::int64_t row);
};

extern const Kernel plain_kernel;
extern const Kernel avx2_kernel;
extern const Kernel avx512_kernel;

// Compute with kernel `name` ("avx512", "avx2", "plain") on at most `threads` threads; false: no such kernel here.
bool norm(const char* name, const Norm& problem, int threads);

}  // namespace longgraft::rms
