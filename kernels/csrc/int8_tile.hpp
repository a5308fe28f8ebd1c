// The part of the kernel that 8-bit weights have to themselves. Included as packed_tile.hpp is.
#pragma once

#include "int8.hpp"
#include "packed_tile.hpp"

namespace longgraft::int8 {
namespace {

using namespace longgraft::packed;

struct Form {
  static constexpr Layout kLayout = int8::kLayout;
  using Number = std::int32_t;
  static constexpr std::int32_t kTimes = -kOffset;
  static constexpr int kLines = kStepValues / 64;

  // Add a group's products to totals, all sums in registers; meanwhile `lines` cache lines a step are fetched.
  template <class Isa, int rows, int lines>
  static __attribute__((noinline)) void add_products(const Group<Isa, Form>& g, float* totals) {
    constexpr int kVecs = Isa::kVecs;
    typename Isa::Sum sum[rows * kVecs];
    each<rows * kVecs>([&](auto i) __attribute__((always_inline)) {
      sum[i] = Isa::start(g.sums[i / kVecs * g.sums_per_row]);
    });
    const typename Isa::Element* x = g.x;
    const std::uint8_t *values = g.values + g.column * kInputs, *ahead = g.ahead;
    const std::int64_t width = g.width;
    for (std::int64_t left = g.blocks; left > 0; --left, x += kInputs, values += kStepValues, ahead += kStepValues) {
      fetch<lines>(ahead);
      decltype(Isa::load(values)) loaded[kVecs];
      each<kVecs>([&](auto i) __attribute__((always_inline)) {
        loaded[i] = Isa::load(values + i * (Isa::kVecColumns * kInputs));
      });
      add_step<Isa, rows>(sum, loaded, x, width);
    }
    each<rows * kVecs>([&](auto i) __attribute__((always_inline)) {
      float* const to = totals + i / kVecs * kColumns + i % kVecs * Isa::kVecColumns;
      Isa::add_group(to, Isa::whole(sum[i]), g.scales[i / kVecs * g.groups]);
    });
  }
};

}  // namespace
}  // namespace longgraft::int8
