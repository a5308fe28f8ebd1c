// The 8-bit kernel for any instruction set. Included by one source file per set, between the pragmas that allow its
// instructions, so that the plain loops here are compiled for it as well. `Isa` says:
//   Element        what a quantised row consists of
//   kRows, kVecs   size of a tile in rows and in vectors of kVecColumns outputs
//   Sum, Values, start(number), load(values), spread(elements), add(sum, values, spread)
//   add_group(totals, sum, scale): totals [kVecColumns] of fp32, a product and a sum, each rounded
#pragma once

#include <utility>

#include "int8_kernel.hpp"

namespace longgraft::int8 {
namespace {

constexpr std::int64_t kGroupBytes = kGroupSteps * kStepBytes;

template <Dtype dtype>
inline float widened(const void* data, std::int64_t index) {
  return load_element(data, index, dtype);
}

// Adding 1.5 * 2^23 rounds to nearest even and leaves the whole number in the low bits.
inline std::int32_t nearest(float value) { return std::int32_t(float_to_bits(value + 0x1.8p23f) << 10) >> 10; }

// Largest magnitude of `count` elements; magnitudes compare like their bits.
template <Dtype dtype>
inline std::int32_t top_bits(const char* x, std::int64_t count) {
  std::int32_t most = 0;
  for (std::int64_t k = 0; k < count; ++k) {
    const std::int32_t bits = std::int32_t(float_to_bits(widened<dtype>(x, k)) & 0x7fffffffu);
    most = bits > most ? bits : most;
  }
  return most;
}

template <class Isa, Dtype dtype>
void quantize_as(const Plan& plan, std::int64_t row) {
  using Element = typename Isa::Element;
  const std::int64_t in = plan.linear.in, width = plan.linear.steps() * kInputs, groups = plan.linear.groups();
  const char* const x = static_cast<const char*>(plan.linear.x) + (plan.first + row) * in * element_bytes(dtype);
  Element* const to = reinterpret_cast<Element*>(plan.quantized) + row * width;
  for (std::int64_t group = 0; group < groups; ++group) {
    const std::int64_t begin = group * kGroup, count = in - begin < kGroup ? in - begin : kGroup;
    const char* const from = x + begin * element_bytes(dtype);
    const std::int32_t most = top_bits<dtype>(from, count);
    const float top = bits_to_float(std::uint32_t(most));
    const bool finite = most < 0x7f800000, any = finite && top >= kLeastTop;
    const float inverse = any ? 127.0f / top : 0.0f;
    std::int32_t total = 0;
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int32_t whole = any ? nearest(widened<dtype>(from, k) * inverse) : 0;
      to[begin + k] = Element(whole);
      total += whole;
    }
    plan.row_scales[row * groups + group] = any ? top / 127.0f : finite ? 0.0f : __builtin_nanf("");
    plan.starts[row * groups + group] = -kOffset * total;
  }
  for (std::int64_t k = in; k < width; ++k) to[k] = 0;
}

template <class Isa>
void quantize(const Plan& plan, std::int64_t row) {
  switch (plan.linear.dtype) {
    case Dtype::f32: return quantize_as<Isa, Dtype::f32>(plan, row);
    case Dtype::bf16: return quantize_as<Isa, Dtype::bf16>(plan, row);
    case Dtype::f16: return quantize_as<Isa, Dtype::f16>(plan, row);
  }
}

// From totals [kColumns] to elements of y.
template <Dtype dtype>
void finish_as(const Plan& plan, std::int64_t row, std::int64_t panel, float* totals) {
  const Linear& linear = plan.linear;
  const std::int64_t column = panel * kColumns, left = linear.out - column, count = left < kColumns ? left : kColumns;
  for (int j = 0; j < kColumns; ++j) totals[j] *= linear.scales[column + j];
  if (linear.bias)
    for (std::int64_t j = 0; j < count; ++j) totals[j] += linear.bias[column + j];
  const std::int64_t at = (plan.first + row) * linear.out + column;
  for (std::int64_t j = 0; j < count; ++j) store_element(linear.y, at + j, dtype, totals[j]);
}

inline void finish(const Plan& plan, std::int64_t row, std::int64_t panel, float* totals) {
  switch (plan.linear.dtype) {
    case Dtype::f32: return finish_as<Dtype::f32>(plan, row, panel, totals);
    case Dtype::bf16: return finish_as<Dtype::bf16>(plan, row, panel, totals);
    case Dtype::f16: return finish_as<Dtype::f16>(plan, row, panel, totals);
  }
}

// Where a group's work lies: elements of the first row, values of the first step, what to fetch meanwhile.
template <class Isa>
struct Group {
  const typename Isa::Element* x;
  std::int64_t width;  // elements between rows
  const std::uint8_t *values, *ahead;
  std::int64_t steps;
  const std::int32_t* starts;  // of the first row
  const float* scales;
  std::int64_t groups;  // numbers between rows
};

// Call body(0), ..., body(count - 1), each number a constant: from arrays indexed by anything else GCC makes memory.
template <int... numbers, class Body>
inline __attribute__((always_inline)) void each_of(std::integer_sequence<int, numbers...>, const Body& body) {
  (body(std::integral_constant<int, numbers>{}), ...);
}
template <int count, class Body>
inline __attribute__((always_inline)) void each(const Body& body) {
  each_of(std::make_integer_sequence<int, count>{}, body);
}

// Add a group's products to totals, all sums in registers; meanwhile `lines` cache lines a step are fetched.
template <class Isa, int rows, int lines>
__attribute__((noinline)) void add_products(const Group<Isa>& g, float* totals) {
  constexpr int kVecs = Isa::kVecs;
  typename Isa::Sum sum[rows * kVecs];
  each<rows * kVecs>([&](auto i) __attribute__((always_inline)) {
    sum[i] = Isa::start(g.starts[i / kVecs * g.groups]);
  });
  const typename Isa::Element* x = g.x;
  const std::uint8_t *values = g.values, *ahead = g.ahead;
  const std::int64_t width = g.width;
  for (std::int64_t left = g.steps; left > 0; --left, x += kInputs, values += kStepBytes, ahead += kStepBytes) {
    each<lines>([&](auto i) __attribute__((always_inline)) { __builtin_prefetch(ahead + i * 64, 0, 2); });
    typename Isa::Values value[kVecs];
    each<kVecs>([&](auto i) __attribute__((always_inline)) {
      value[i] = Isa::load(values + i * (Isa::kVecColumns * kInputs));
    });
    each<rows>([&](auto row) __attribute__((always_inline)) {
      const auto spread = Isa::spread(x + row * width);
      each<kVecs>([&](auto i) __attribute__((always_inline)) {
        sum[row * kVecs + i] = Isa::add(sum[row * kVecs + i], value[i], spread);
      });
    });
  }
  each<rows * kVecs>([&](auto i) __attribute__((always_inline)) {
    float* const to = totals + i / kVecs * kColumns + i % kVecs * Isa::kVecColumns;
    Isa::add_group(to, sum[i], g.scales[i / kVecs * g.groups]);
  });
}

// What to fetch during each group of a panel, and during the last.
struct Ahead {
  const std::uint8_t *from, *last;
};

// `rows` rows from `first` on against a panel.
template <class Isa, int rows, int lines>
void tile_with(const Plan& plan, std::int64_t first, std::int64_t panel, Ahead ahead) {
  const std::int64_t steps = plan.linear.steps(), width = steps * kInputs, groups = plan.linear.groups();
  const auto* const x = reinterpret_cast<const typename Isa::Element*>(plan.quantized) + first * width;
  alignas(64) float totals[rows][kColumns] = {};
  for (int column = 0; column < kColumns; column += Isa::kVecs * Isa::kVecColumns)
    for (std::int64_t group = 0, step = 0; group < groups; ++group, step += kGroupSteps) {
      const std::int64_t at = group * kGroupBytes, number = first * groups + group, left = steps - step;
      const Group<Isa> g{x + step * kInputs, width, plan.linear.panel(panel) + at + column * kInputs,
                         group + 1 < groups ? ahead.from + at : ahead.last, left < kGroupSteps ? left : kGroupSteps,
                         plan.starts + number, plan.row_scales + number, groups};
      add_products<Isa, rows, lines>(g, totals[0] + column);
    }
  for (int row = 0; row < rows; ++row) finish(plan, first + row, panel, totals[row]);
}

template <class Isa, int lines, int rows = Isa::kRows>
void tile(const Plan& plan, std::int64_t first, std::int64_t count, std::int64_t panel, Ahead ahead) {
  if (count == rows) return tile_with<Isa, rows, lines>(plan, first, panel, ahead);
  if constexpr (rows > 1) tile<Isa, lines, rows - 1>(plan, first, count, panel, ahead);
}

// A single tile reads the panel as a stream and fetches the next group, at the end that of the next panel. Of several
// tiles the first finds the panel in cache, where the others of the panel before have fetched it, a share each.
template <class Isa>
void panel(const Plan& plan, std::int64_t now, std::int64_t next) {
  const std::int64_t later = plan.tiles - 1, last = (plan.linear.groups() - 1) * kGroupBytes;
  const int lines = later <= 1 ? 4 : later < 4 ? 2 : 1;
  for (std::int64_t i = 0; i < plan.tiles; ++i) {
    const std::int64_t first = plan.tile_begin(i), count = plan.tile_begin(i + 1) - first;
    const std::uint8_t* const share = plan.linear.panel(next) + (i == 0 ? 0 : i - 1) * lines * 64;
    const Ahead ahead = later == 0 ? Ahead{plan.linear.panel(now) + kGroupBytes, plan.linear.panel(next)}
                                   : Ahead{share, share + last};
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
