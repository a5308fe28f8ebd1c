// The sum that every linear kernel here computes, fixed once for all of them. Knows no instruction set.
//
// One output element is a sum over `in` products. Its order depends on `in` and the dtype alone, never on how
// many rows there are, so a row's result is bitwise the same in every batch, tile, thread and instruction set:
//   * the products are cut into panels of equal length (a multiple of 32, at most 1024);
//   * in a panel 16 lanes each add their products by fused multiply-add, 32 products per block: lane j takes
//     products j and j + 16 (fp32, fp16) or 2j and 2j + 1 (bf16: one 32-bit word holds both);
//   * a panel's lanes are added as a tree (i + 8, i + 4, i + 2, i + 1), panels are added in order, then the bias;
//   * the result is rounded once, to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

namespace longgraft {

constexpr int kLanes = 16;
constexpr int kBlock = 2 * kLanes;
constexpr std::int64_t kPanel = 1024;

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2 };

// y[rows, out] = x[rows, in] * weight[out, in]^T + bias; all of one dtype; x and y contiguous, in and out > 0,
// `weight_stride` elements between weight rows; `bias` may be null.
struct Linear {
  const void* x;
  const void* weight;
  const void* bias;
  void* y;
  std::int64_t rows, in, out, weight_stride;
  Dtype dtype;
};

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Products per panel, and how many panels: both follow from `in` alone.
struct Panels {
  std::int64_t in, len, count;
  explicit Panels(std::int64_t products)
      : in(products),
        len(ceil_div(ceil_div(products, kBlock), ceil_div(products, kPanel)) * kBlock),
        count(ceil_div(products, len)) {}
  std::int64_t begin(std::int64_t panel) const { return panel * len; }
  std::int64_t end(std::int64_t panel) const { return panel + 1 < count ? (panel + 1) * len : in; }
  std::int64_t blocks(std::int64_t panel) const { return ceil_div(end(panel) - begin(panel), kBlock); }
};

inline int element_bytes(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// Position inside a block of the product that lane `lane` adds first (half 0) or second (half 1).
inline int lane_element(Dtype dtype, int half, int lane) {
  return dtype == Dtype::bf16 ? 2 * lane + half : half * kLanes + lane;
}

inline float bits_to_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline std::uint32_t float_to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float widen_f16(std::uint16_t half) {
  const std::uint32_t sign = std::uint32_t(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  const float scaled = bits_to_float(magnitude << 13) * 0x1p112f;  // exact, subnormal halves included
  return bits_to_float(sign | float_to_bits(scaled));
}

inline std::uint16_t round_bf16(float value) {
  const std::uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return std::uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline std::uint16_t round_f16(float value) {
  const std::uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return std::uint16_t(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return std::uint16_t(sign | 0x7c00u);  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {                                       // subnormal: let the adder round
    const float shifted = bits_to_float(magnitude) + 0.5f;
    return std::uint16_t(sign | (float_to_bits(shifted) - 0x3f000000u));
  }
  return std::uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
}

// Element `index` of an array of `dtype`, widened exactly.
inline float load_element(const void* data, std::int64_t index, Dtype dtype) {
  if (dtype == Dtype::f32) return static_cast<const float*>(data)[index];
  const std::uint16_t half = static_cast<const std::uint16_t*>(data)[index];
  return dtype == Dtype::bf16 ? bits_to_float(std::uint32_t(half) << 16) : widen_f16(half);
}

inline void store_element(void* data, std::int64_t index, Dtype dtype, float value) {
  if (dtype == Dtype::f32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<std::uint16_t*>(data)[index] = dtype == Dtype::bf16 ? round_bf16(value) : round_f16(value);
  }
}

}  // namespace longgraft
