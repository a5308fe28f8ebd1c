// The kernel for any width and instruction set. Included by one source file per set, between the pragmas that allow its
// instructions, so that the plain loops here are compiled for it as well. `Isa` says:
//   Element        what a row made whole consists of
//   kRows, kVecs   size of a tile in rows and in vectors of kVecColumns outputs
//   Sum, start(number), load(values), low(values), high(values), spread(elements), add(sum, loaded, spread)
//   Floats [kVecColumns]: floats(address), whole(sum), bfloats(values)
//   add_group(totals, floats, scale): totals [kVecColumns] of fp32, a product and a sum, each rounded
//   add_block(part, sum, d, m, x): part [kVecColumns] of fp32 plus sum * d plus x * m, products that are exact
// `Form`, besides what packed_rows.hpp says: kLines, cache lines to fetch at each of its places for that;
//   add_products<Isa, rows, lines>(group, totals): see `Group`, totals [rows, kColumns] of fp32.
#pragma once

#include <utility>

#include "packed_rows.hpp"

namespace longgraft::packed {
namespace {

// From totals [kColumns] to elements of y.
template <Dtype dtype>
void finish_as(const Plan& plan, std::int64_t row, std::int64_t panel, float* totals) {
  const Linear& linear = plan.linear;
  const std::int64_t column = panel * kColumns, left = linear.out - column, count = left < kColumns ? left : kColumns;
  if (linear.scales)
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

// Where a group's work lies: elements of the first row, values of the first block, what to fetch meanwhile.
template <class Isa, class Form>
struct Group {
  const typename Isa::Element* x;
  std::int64_t width;  // elements between rows
  const std::uint8_t *values, *ahead;
  std::int64_t blocks;
  int column;  // of the panel
  const typename Form::Number* sums;  // of the first row
  std::int64_t sums_per_row;
  const float* scales;
  std::int64_t groups;  // scales between rows
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

template <int lines>
inline __attribute__((always_inline)) void fetch(const std::uint8_t* ahead) {
  each<lines>([&](auto i) __attribute__((always_inline)) { __builtin_prefetch(ahead + i * 64, 0, 2); });
}

// Add one step's products to the sums of a tile; `x`: its elements in the first row.
template <class Isa, int rows, class Loaded>
inline __attribute__((always_inline)) void add_step(typename Isa::Sum* sum, const Loaded& loaded,
                                                    const typename Isa::Element* x, std::int64_t width) {
  each<rows>([&](auto row) __attribute__((always_inline)) {
    const auto spread = Isa::spread(x + row * width);
    each<Isa::kVecs>([&](auto i) __attribute__((always_inline)) {
      sum[row * Isa::kVecs + i] = Isa::add(sum[row * Isa::kVecs + i], loaded[i], spread);
    });
  });
}

// What to fetch during each group of a panel, and during the last.
struct Ahead {
  const std::uint8_t *from, *last;
};

template <class Form>
constexpr std::int64_t kGroupBlocks = kGroup / Form::kLayout.block_inputs;
template <class Form>
constexpr std::int64_t kGroupBytes = kGroupBlocks<Form> * Form::kLayout.block_bytes;

// `rows` rows from `first` on against a panel.
template <class Isa, class Form, int rows, int lines>
void tile_with(const Plan& plan, std::int64_t first, std::int64_t panel, Ahead ahead) {
  const auto* const x = reinterpret_cast<const typename Isa::Element*>(plan.elements) + first * plan.width;
  const auto* const sums = static_cast<const typename Form::Number*>(plan.sums) + first * plan.sums_per_row;
  const float* const scales = plan.scales + first * plan.groups;
  alignas(64) float totals[rows][kColumns] = {};
  for (int column = 0; column < kColumns; column += Isa::kVecs * Isa::kVecColumns)
    for (std::int64_t group = 0; group < plan.groups; ++group) {
      const std::int64_t at = group * kGroupBytes<Form>, left = plan.blocks - group * kGroupBlocks<Form>;
      const Group<Isa, Form> g{x + group * kGroup, plan.width, plan.panel(panel) + at,
                               group + 1 < plan.groups ? ahead.from + at : ahead.last,
                               left < kGroupBlocks<Form> ? left : kGroupBlocks<Form>, column,
                               sums + group * (kGroup / Form::kLayout.sum_inputs), plan.sums_per_row, scales + group,
                               plan.groups};
      Form::template add_products<Isa, rows, lines>(g, totals[0] + column);
    }
  for (int row = 0; row < rows; ++row) finish(plan, first + row, panel, totals[row]);
}

template <class Isa, class Form, int lines, int rows = Isa::kRows>
void tile(const Plan& plan, std::int64_t first, std::int64_t count, std::int64_t panel, Ahead ahead) {
  if (count == rows) return tile_with<Isa, Form, rows, lines>(plan, first, panel, ahead);
  if constexpr (rows > 1) tile<Isa, Form, lines, rows - 1>(plan, first, count, panel, ahead);
}

// A single tile reads the panel as a stream and fetches the next group, at the end that of the next panel. Of several
// tiles the first finds the panel in cache, where the others of the panel before have fetched it, a share each.
template <class Isa, class Form>
void panel(const Plan& plan, std::int64_t now, std::int64_t next) {
  constexpr int kAll = Form::kLines, kHalf = (kAll + 1) / 2;
  const std::int64_t later = plan.tiles - 1, last = (plan.groups - 1) * kGroupBytes<Form>;
  const int lines = later <= 1 ? kAll : later < kAll ? kHalf : 1;
  for (std::int64_t i = 0; i < plan.tiles; ++i) {
    const std::int64_t first = plan.tile_begin(i), count = plan.tile_begin(i + 1) - first;
    const std::uint8_t* const share = plan.panel(next) + (i == 0 ? 0 : i - 1) * lines * 64;
    const Ahead ahead = later == 0 ? Ahead{plan.panel(now) + kGroupBytes<Form>, plan.panel(next)}
                                   : Ahead{share, share + last};
    const bool fetches = later == 0 || (i > 0 && (i - 1) * lines < kAll && next != now);
    if (!fetches) tile<Isa, Form, 0>(plan, first, count, now, ahead);
    else if (lines == kAll) tile<Isa, Form, kAll>(plan, first, count, now, ahead);
    else if (lines == kHalf) tile<Isa, Form, kHalf>(plan, first, count, now, ahead);
    else tile<Isa, Form, 1>(plan, first, count, now, ahead);
  }
}

template <class Isa, class Form>
constexpr Kernel kernel_of(const char* name) {
  return {name,           Form::kLayout, Isa::kRows, int(sizeof(typename Isa::Element)), make_whole<Isa, Form>,
          panel<Isa, Form>};
}

}  // namespace
}  // namespace longgraft::packed
