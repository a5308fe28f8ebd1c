// What stands between linear layers, one row at a time: RMS norm and gated activation. Knows no instruction set,
// no thread and no Python. A row's bits are a function of that row and the parameters, nothing else; every step is
// rounded to fp32, products and sums apart.
//
// Norm of a row x of n elements:
//   * squares: lane j of 64 adds x[j]^2, x[j + 64]^2, ... in order, from 0 (an incomplete block: its lanes only);
//   * lanes are added as a tree (i + 32, i + 16, ..., i + 1); inverse = 1 / sqrt(sum / n + eps);
//   * y = x * inverse; style `inner`: y rounded to the dtype, then times weight, rounded again;
//     `outer`: y * weight, rounded once; `shifted`: y * (1 + weight), rounded once.
// Gate: y = round(round(g / (1 + e)) * up) with e = exp(-g * (linear + cubic * min(g * g, 2^100))): silu, and the
// tanh form of gelu, since (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)).
// exp(x) = 2^n * p(r) with x within [-120, 120], n = x * log2(e) rounded to nearest even, r = (x - n * high) - n * low
// with high + low = ln 2 and n * high exact, p the Taylor polynomial of degree 7, by Horner; 2^n in two factors (n / 2
// rounded down, and the rest), so that it runs into 0 or infinity as it should.
#pragma once

#include "order.hpp"

namespace longgraft::rowwise {

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

// gate, up [rows, size] with `gate_row`, `up_row` elements between rows; y contiguous; all of `dtype`.
struct Gate {
  const void *gate, *up;
  void* y;
  std::int64_t rows, size, gate_row, up_row;
  Dtype dtype;
  float linear, cubic;
};

struct Kernel {
  const char* name;
  void (*norm)(const Norm&, std::int64_t row);
  void (*gate)(const Gate&, std::int64_t row);
};

extern const Kernel plain_kernel;
extern const Kernel avx2_kernel;
extern const Kernel avx512_kernel;

// Compute with kernel `name` ("avx512", "avx2", "plain") on at most `threads` threads; false: no such kernel here.
bool norm(const char* name, const Norm& problem, int threads);
bool gate(const char* name, const Gate& problem, int threads);

}  // namespace longgraft::rowwise
