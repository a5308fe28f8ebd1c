// The 8-bit kernel for any instruction set. Included by one source file per set, between the pragmas that allow its
// instructions, so that the plain loops here are compiled for it as well. `Isa` says:
//   Element, kOffset   what a quantised row consists of: q + kOffset
//   kRows, kVecs       size of a tile in rows and in vectors of kVecColumns outputs
//   Sum, Row, zero(), spread(elements), add(sum, values, row), store(to, sum)
#pragma once

#include "int8_kernel.hpp"

namespace longgraft::int8 {
namespace {

constexpr std::int64_t kAheadSteps = 8;  // fetched so far ahead when a panel is read once (measured: 4 to 32 alike)

template <Dtype dtype>
inline float widened(const void* data, std::int64_t index) {
  return load_element(data, index, dtype);
}

// Adding 1.5 * 2^23 rounds to nearest even and leaves the whole number in the low bits.
inline std::int32_t nearest(float value) { return std::int32_t(float_to_bits(value + 0x1.8p23f) << 9) >> 9; }

template <class Isa, Dtype dtype>
void quantize_as(const Plan& plan, std::int64_t row) {
  using Element = typename Isa::Element;
  const std::int64_t in = plan.linear.in, width = plan.linear.steps() * kInputs;
  const char* const x = static_cast<const char*>(plan.linear.x) + (plan.first + row) * in * element_bytes(dtype);
  Element* const to = reinterpret_cast<Element*>(plan.quantized) + row * width;
  std::int32_t most = 0;  // magnitudes compare like their bits
  for (std::int64_t k = 0; k < in; ++k) {
    const std::int32_t bits = std::int32_t(float_to_bits(widened<dtype>(x, k)) & 0x7fffffffu);
    most = bits > most ? bits : most;
  }
  const float top = bits_to_float(std::uint32_t(most));
  const bool finite = most < 0x7f800000, any = finite && top >= kLeastTop;
  plan.row_scales[row] = any ? top / 127.0f : finite ? 0.0f : __builtin_nanf("");
  const float inverse = any ? 127.0f / top : 0.0f;
  if (any)
    for (std::int64_t k = 0; k < in; ++k) to[k] = Element(nearest(widened<dtype>(x, k) * inverse) + Isa::kOffset);
  for (std::int64_t k = any ? in : 0; k < width; ++k) to[k] = Element(Isa::kOffset);
}

template <class Isa>
void quantize(const Plan& plan, std::int64_t row) {
  switch (plan.linear.dtype) {
    case Dtype::f32: return quantize_as<Isa, Dtype::f32>(plan, row);
    case Dtype::bf16: return quantize_as<Isa, Dtype::bf16>(plan, row);
    case Dtype::f16: return quantize_as<Isa, Dtype::f16>(plan, row);
  }
}

// From sums [kColumns] to elements of y.
template <class Isa, Dtype dtype>
void finish_as(const Plan& plan, std::int64_t row, std::int64_t panel, const std::int32_t* sums) {
  const Linear& linear = plan.linear;
  const std::int64_t column = panel * kColumns, left = linear.out - column, count = left < kColumns ? left : kColumns;
  const float *const scales = linear.scales + column, row_scale = plan.row_scales[row];
  const std::int32_t* const values = linear.sums + column;
  float result[kColumns];
  for (int j = 0; j < kColumns; ++j) {
    const std::uint32_t sum = std::uint32_t(sums[j]) - std::uint32_t(Isa::kOffset) * std::uint32_t(values[j]);
    result[j] = float(std::int32_t(sum)) * scales[j] * row_scale;
  }
  if (linear.bias)
    for (std::int64_t j = 0; j < count; ++j) result[j] += linear.bias[column + j];
  const std::int64_t at = (plan.first + row) * linear.out + column;
  for (std::int64_t j = 0; j < count; ++j) store_element(linear.y, at + j, dtype, result[j]);
}

template <class Isa>
void finish(const Plan& plan, std::int64_t row, std::int64_t panel, const std::int32_t* sums) {
  switch (plan.linear.dtype) {
    case Dtype::f32: return finish_as<Isa, Dtype::f32>(plan, row, panel, sums);
    case Dtype::bf16: return finish_as<Isa, Dtype::bf16>(plan, row, panel, sums);
    case Dtype::f16: return finish_as<Isa, Dtype::f16>(plan, row, panel, sums);
  }
}

// What to fetch meanwhile: `lines` cache lines of each step at `from`.
struct Ahead {
  const std::int8_t* from = nullptr;
  int lines = 0;
};

template <class Isa, int rows, int lines>
inline void add_steps(typename Isa::Sum (&sum)[rows][Isa::kVecs], const typename Isa::Element* x, std::int64_t width,
                      const std::int8_t* values, const std::int8_t* ahead, std::int64_t steps) {
  for (std::int64_t step = 0; step < steps; ++step) {
    for (int line = 0; line < lines; ++line) __builtin_prefetch(ahead + step * kStepBytes + line * 64, 0, 2);
    typename Isa::Values value[Isa::kVecs];
    for (int vec = 0; vec < Isa::kVecs; ++vec)
      value[vec] = Isa::load(values + step * kStepBytes + vec * Isa::kVecColumns * kInputs);
    for (int row = 0; row < rows; ++row) {
      const auto spread = Isa::spread(x + row * width + step * kInputs);
      for (int vec = 0; vec < Isa::kVecs; ++vec) sum[row][vec] = Isa::add(sum[row][vec], value[vec], spread);
    }
  }
}

template <class Isa, int rows, int lines>
void tile_with(const Plan& plan, std::int64_t first, std::int64_t panel, const std::int8_t* ahead) {
  constexpr int kGroup = Isa::kVecs * Isa::kVecColumns;
  const std::int64_t steps = plan.linear.steps(), width = steps * kInputs;
  const auto* const x = reinterpret_cast<const typename Isa::Element*>(plan.quantized) + first * width;
  std::int32_t sums[rows][kColumns];
  for (int column = 0; column < kColumns; column += kGroup) {
    typename Isa::Sum sum[rows][Isa::kVecs];
    for (int row = 0; row < rows; ++row)
      for (int vec = 0; vec < Isa::kVecs; ++vec) sum[row][vec] = Isa::zero();
    const std::int8_t* const values = plan.linear.panel(panel) + column * kInputs;
    add_steps<Isa, rows, lines>(sum, x, width, values, ahead, steps);
    for (int row = 0; row < rows; ++row)
      for (int vec = 0; vec < Isa::kVecs; ++vec)
        Isa::store(sums[row] + column + vec * Isa::kVecColumns, sum[row][vec]);
  }
  for (int row = 0; row < rows; ++row) finish<Isa>(plan, first + row, panel, sums[row]);
}

template <class Isa, int lines, int rows = Isa::kRows>
void tile(const Plan& plan, std::int64_t first, std::int64_t count, std::int64_t panel, const std::int8_t* ahead) {
  if (count == rows) return tile_with<Isa, rows, lines>(plan, first, panel, ahead);
  if constexpr (rows > 1) tile<Isa, lines, rows - 1>(plan, first, count, panel, ahead);
}

// One tile reads the panel as a stream and fetches its own later part; of several, the first finds the panel where
// the others of the panel before have fetched it, a share each.
template <class Isa>
void panel(const Plan& plan, std::int64_t now, std::int64_t next) {
  const std::int64_t later = plan.tiles - 1;
  const int lines = later == 0 || later == 1 ? 4 : later < 4 ? 2 : 1;
  for (std::int64_t i = 0; i < plan.tiles; ++i) {
    const std::int64_t first = plan.tile_begin(i), count = plan.tile_begin(i + 1) - first;
    const std::int8_t* const ahead =
        later == 0 ? plan.linear.panel(now) + kAheadSteps * kStepBytes : plan.linear.panel(next) + (i - 1) * lines * 64;
    const bool fetches = later == 0 || (i > 0 && i * lines <= 4 && next != now);
    if (!fetches) tile<Isa, 0>(plan, first, count, now, ahead);
    else if (lines == 4) tile<Isa, 4>(plan, first, count, now, ahead);
    else if (lines == 2) tile<Isa, 2>(plan, first, count, now, ahead);
    else tile<Isa, 1>(plan, first, count, now, ahead);
  }
}

template <class Isa>
constexpr Kernel kernel_of(const char* name) {
  return {name, Isa::kRows, int(sizeof(typename Isa::Element)), quantize<Isa>, panel<Isa>};
}

}  // namespace
}  // namespace longgraft::int8
