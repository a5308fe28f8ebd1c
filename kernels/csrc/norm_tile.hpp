// The norm's kernels for any instruction set, as plain loops over blocks. Included by one source file per set,
// between the pragmas that allow its instructions, so that the compiler makes vectors of that set. `Isa` says how
// fp16 is widened and rounded: widen(from, to), narrow(from, to), each of a whole block.
#pragma once

#include <cmath>

#include "norm.hpp"

namespace longgraft::rms {
namespace {

constexpr int kBlockSize = int(kBlockElements);

template <class Isa, Dtype dtype>
inline void load_whole(const void* data, std::int64_t at, float* to) {
  if constexpr (dtype == Dtype::f16) {
    Isa::widen(static_cast<const std::uint16_t*>(data) + at, to);
  } else {
    for (int i = 0; i < kBlockSize; ++i) to[i] = load_element(data, at + i, dtype);
  }
}

template <class Isa, Dtype dtype>
inline void store_whole(void* data, std::int64_t at, const float* from) {
  if constexpr (dtype == Dtype::f16) {
    Isa::narrow(from, static_cast<std::uint16_t*>(data) + at);
  } else {
    for (int i = 0; i < kBlockSize; ++i) store_element(data, at + i, dtype, from[i]);
  }
}

// `count` elements from `at` on, the rest of the block zeros.
template <class Isa, Dtype dtype>
inline void load(const void* data, std::int64_t at, std::int64_t count, float* to) {
  if (count >= kBlockSize) return load_whole<Isa, dtype>(data, at, to);
  for (int i = 0; i < kBlockSize; ++i) to[i] = i < count ? load_element(data, at + i, dtype) : 0.0f;
}

template <class Isa, Dtype dtype>
inline void store(void* data, std::int64_t at, std::int64_t count, const float* from) {
  if (count >= kBlockSize) return store_whole<Isa, dtype>(data, at, from);
  for (int i = 0; i < count; ++i) store_element(data, at + i, dtype, from[i]);
}

template <class Isa, Dtype dtype>
inline void round_block(float* block) {
  if constexpr (dtype == Dtype::bf16) {
    for (int i = 0; i < kBlockSize; ++i) block[i] = bits_to_float(std::uint32_t(round_bf16(block[i])) << 16);
  } else if constexpr (dtype != Dtype::f32) {
    alignas(64) std::uint16_t rounded[kBlockSize];
    store_whole<Isa, dtype>(rounded, 0, block);
    load_whole<Isa, dtype>(rounded, 0, block);
  }
}

template <class Isa, Dtype dtype>
float inverse_size(const Norm& p, std::int64_t start) {
  alignas(64) float lanes[kBlockSize] = {}, x[kBlockSize];
  for (std::int64_t at = 0; at < p.size; at += kBlockSize) {
    load<Isa, dtype>(p.x, start + at, p.size - at, x);
    for (int i = 0; i < kBlockSize; ++i) lanes[i] += x[i] * x[i];
  }
  for (int half = kBlockSize / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return 1.0f / std::sqrt(lanes[0] / float(p.size) + p.eps);
}

template <class Isa, Dtype dtype>
void norm_as(const Norm& p, std::int64_t row) {
  const std::int64_t start = row * p.size;
  const float inverse = inverse_size<Isa, dtype>(p, start), shift = p.style == Style::shifted ? 1.0f : 0.0f;
  alignas(64) float x[kBlockSize], weight[kBlockSize];
  for (std::int64_t at = 0; at < p.size; at += kBlockSize) {
    load<Isa, dtype>(p.x, start + at, p.size - at, x);
    load<Isa, dtype>(p.weight, at, p.size - at, weight);
    for (int i = 0; i < kBlockSize; ++i) x[i] *= inverse;
    if (p.style == Style::inner) round_block<Isa, dtype>(x);
    for (int i = 0; i < kBlockSize; ++i) x[i] *= shift + weight[i];
    store<Isa, dtype>(p.y, start + at, p.size - at, x);
  }
}

template <class Isa>
void norm_row(const Norm& p, std::int64_t row) {
  switch (p.dtype) {
    case Dtype::f32: return norm_as<Isa, Dtype::f32>(p, row);
    case Dtype::bf16: return norm_as<Isa, Dtype::bf16>(p, row);
    case Dtype::f16: return norm_as<Isa, Dtype::f16>(p, row);
  }
}

template <class Isa>
constexpr Kernel kernel_of(const char* name) {
  return {name, norm_row<Isa>};
}

}  // namespace
}  // namespace longgraft::rms
